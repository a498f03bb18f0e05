"""The texts of rules that a layout, trained parameters, an adapter or the limits of this engine break.

The text of a rule follows the key and value that break it: "layout.tensor_parallel = 3: must divide 32 heads".
"""

from scaletrain_cli.reasons import Texts

_USE = ("Use {allowed:or}.",)

TEXTS: Texts = {
    # Rules of cluster, model and framework that degrees of parallelism and batch sizes must obey.
    "wrong-product": (
        "data {data} x tensor {tensor} x pipeline {pipeline} x sequence {sequence} x context {context} = {ranks} "
        "ranks, but the cluster has {nodes} x {gpus_per_node} = {world_size}",
        "Use {allowed:or}, or auto.",
    ),
    "product-does-not-divide": (
        "data {data} x tensor {tensor} x pipeline {pipeline} x sequence {sequence} x context {context} = {ranks} "
        "ranks, but the cluster has {nodes} x {gpus_per_node} = {world_size}",
        "Change the degrees so that their product divides {world_size}.",
    ),
    "divide-key-value-heads": ("must divide {heads} key-value heads or be a multiple of them", *_USE),
    "divide-heads": ("must divide {heads} attention heads", *_USE),
    "divide-width": ("must divide {name} = {width}", *_USE),
    "divide-local-heads": ("must divide the {heads} attention heads of a tensor rank", *_USE),
    "multiple-of-sequence-ranks": "must be a multiple of sequence parallel = {ranks}",
    "multiple-of-chunks": "must be a multiple of {ranks}, because each context rank has two equal chunks of a sequence",
    "more-stages-than-layers": ("must not exceed {layers} layers", "Use {layers}."),
    "virtual-stages-divide-layers": (
        "needs pipeline_parallel > 1 and {layers} layers that divide by pipeline x virtual",
        *_USE,
    ),
    "needs-experts": ("needs a model with experts", "Use 1 or auto."),
    "divide-experts": ("must divide {experts} experts", *_USE),
    "divide-expert-ranks": ("must divide data x context x sequence parallel = {ranks}", *_USE),
    "leaves-stages-empty": ("leaves the last stages empty, because stages are balanced by cost", "Use fewer stages."),
    "too-few-micro-batches": (
        "needs at least {needed} micro-batches per step",
        "Use fewer stages, or a smaller micro-batch.",
    ),
    "zero-refused-with-pipeline": ("cannot be combined with pipeline parallelism in DeepSpeed", "Use 1 or auto."),
    "offload-zero-stage": ("layout.offload = {offload} needs ZeRO-{needed} or higher", "Use {needed} or auto."),
    "batch-multiple-of-ranks": ("must be a multiple of {ranks} data-parallel ranks", *_USE),
    "micro-batch-divides-share": (
        "must divide the {per_rank} sequences per data-parallel rank ({batch} / {ranks})",
        *_USE,
    ),
    # Patterns of training.trainable that do not fit the model.
    "trainable-invalid": "what trains does not fit the model, in {problems:of place}",
    "trainable-built-in-families": (
        "needs the parameter names of a built-in family, and {family} is that of a plug-in",
        "Remove it.",
    ),
    "trainable-matches-nothing": ("matches no parameter of the model", "Did you mean {near:or}?"),
    "trainable-no-such-name": (
        "matches no parameter of the model",
        "Names are those of Hugging Face, such as {example}.",
    ),
    "trainable-decays-nothing": (
        "has no effect: the group has no matrix that weight decay applies to",
        "Remove it, or match a matrix.",
    ),
    "trains-nothing": (
        "no parameter trains in steps {first} to {last}",
        "Change start_step or end_step, or add a group.",
    ),
    "trainable-splits-experts": (
        "in step {step} the experts of one layer do not train alike at {name}; they are one tensor, {tensor}",
        "Match all experts of a layer, such as *.mlp.experts.*.",
    ),
    "trainable-never-first": (
        "has no effect: an earlier group matches the same parameters in all of its steps",
        "Put it before that group, or remove it.",
    ),
    # The adapter and the quantization of a model.
    "adapter-invalid": "the adapter does not fit the model, in {problems:of place}",
    "adapter-built-in-families": (
        "needs the layers of a built-in family, and {family} is that of a plug-in",
        "Remove it.",
    ),
    "adapter-matches-nothing": (
        "matches no module that can have an adapter",
        "This model has {names:list}, and all-linear.",
    ),
    "quantization-needs-cuda": (
        "needs GPUs with CUDA, because bitsandbytes computes the products; this cluster has cluster.gpu: cpu",
        "Set it to none.",
    ),
    "quantization-needs-weights": (
        "needs model.weights, which are quantized when they are loaded",
        "Set model.weights, or set it to none.",
    ),
    "quantization-without-dora": (
        "must be false with model.quantization, because it needs the norms of the weights",
        "Set it to false.",
    ),
    "quantization-without-fp8": ("must not be fp8 with model.quantization", "Set it to bf16."),
    "quantization-needs-frozen-linears": (
        "needs all linear layers frozen, and {example} trains",
        "Add model.adapter, or match no linear layer in training.trainable.",
    ),
    "quantization-layout": (
        "must be {allowed} with model.quantization, whose blocks cannot be sharded",
        "Change it, or set model.quantization: none.",
    ),
    "dora-on-embeddings": (
        "must be false with an adapter on an embedding or the head",
        "Remove them from model.adapter.targets.",
    ),
    "adapter-on-experts": (
        "must be {allowed} with an adapter on stacked experts, as in PEFT",
        "Change it, or remove the experts from model.adapter.targets.",
    ),
    "adapter-rank-on-experts": "must be a multiple of {multiple} with an adapter on stacked experts, whose grouped "
    "products need rows of 16 bytes",
    # What this engine cannot run, although it can be planned.
    "layout-does-not-fit": ("does not fit: one rank needs {peak:bytes} of {capacity:bytes}", "See `scaletrain plan`."),
    "engine-axis": ("this engine supports only {axes} parallelism", "Use 1 or auto."),
    "shard-group-divides": (
        "must be 2 or more and divide {ranks} replicas",
        "Use a divisor of {ranks}, or null for all of them.",
    ),
    "engine-shard-group-axis": (
        "DeepSpeed shards over all replicas with {axis}",
        "Use null, or leave {axis} at its default.",
    ),
    "secondary-divides-ranks": ("must divide the number of ranks", *_USE),
    "engine-secondary-axis": (
        "a second copy of the weights needs the same weights on all ranks, which {axis} divides",
        "Use 1.",
    ),
    "engine-secondary-offload": (
        "the second copy of weights would be in host memory with layout.offload: optimizer+params",
        "Use 1.",
    ),
    "engine-context-attention": (
        "ring attention is causal attention to the whole sequence, which {setting} changes",
        "Use 1; layout.sequence_parallel supports {setting}.",
    ),
    "engine-context-capacity": (
        "context ranks do not have the tokens in the order in which model.capacity_factor drops some",
        "Use 1; layout.sequence_parallel supports model.capacity_factor.",
    ),
    "engine-divide-key-value-heads": ("must divide {heads} key-value heads, which this engine does not repeat", *_USE),
    "engine-ranks-without-tokens": (
        "leaves ranks without a token of model.vocab_size = {vocab_size}, over which embedding and head are sharded",
        "Use fewer tensor ranks.",
    ),
    "engine-expert-tensor-parallel": (
        "this engine shards experts over the same tensor ranks as other matrices",
        "Use auto.",
    ),
    "engine-liger-whole-vocabulary": (
        "needs the full vocabulary on each rank, but tensor_parallel = {tensor_parallel} shards it",
        "Use chunked or auto.",
    ),
    "engine-expert-rows": ("must be a multiple of {multiple} with experts in {precision}", "Use {padded}."),
    "engine-expert-columns": (
        "must be a multiple of {multiple} on each of {ranks} tensor ranks, in {precision}",
        "Use {padded}.",
    ),
    "family-unknown": "this model cannot be planned",
    "family-not-planned": ("its memory and time are modeled for planner.framework: deepspeed only", "Use deepspeed."),
    "engine-vision-fp8": ("this engine has no fp8 products of images", "Use bf16."),
    "engine-autocast": ("this engine trains 16-bit weights with fp32 master weights", "Remove the key."),
    "engine-mixed-pairs": "must be even, because mixup and CutMix mix the images of a pair with each other",
    "engine-cached-batch-norm": (
        "must be all {per_rank} samples of a rank: a contrastive loss accumulates by repeated forward passes "
        "(GradCache), which BatchNorm makes inexact",
        "Use {per_rank}, or model.norm: group.",
    ),
    "engine-captions-tokenizer": (
        "captions need the tokenizer of the text tower",
        "Use {{kind: file, path: tokenizer.json}}.",
    ),
    "engine-family-no-experts": ("this engine's {family} models have no experts", "Use 0, or family: llama."),
    "engine-family-differs": ("this engine's {family} models have {built}", "Remove the key."),
    "engine-planned-architecture": (
        "has blocks that this engine does not build; it is planned only",
        "Use code.command with a program that trains it, or another model.",
    ),
    "engine-planned-only": ("is planned, but this engine's blocks do not have it", "Remove the key."),
    "engine-no-grouped-queries": (
        "this engine's {family} models have one key-value head per attention head",
        "Use {heads}, or family: llama.",
    ),
    "engine-llama-only": ("this engine's {family} models do not have this setting", "Remove the key."),
    "engine-activation": ("{layers} of this engine have only the activation {activation}", "Use {activation}."),
    "engine-fused-experts": ("this engine's experts have separate matrices", "Use false."),
    "engine-all-biases": ("this engine's {family} models always have all biases", "Use false."),
    "engine-no-qk-norm": ("this engine's {family} models do not normalize queries and keys", "Use false."),
    "engine-latent-setting": ("this engine's latent attention does not have this setting", "Remove the key."),
    "engine-latent-key-heads": ("latent attention has one key-value head per attention head", "Use {heads}."),
    "tf32-gpu": ("needs an NVIDIA GPU", "Use fp32 or bf16 with cluster.gpu: cpu."),
    "fp8-device": ("needs an NVIDIA GPU of compute capability 8.9 or higher, and this is {device}", "Use bf16."),
    "fp4-device": (
        "needs tensor cores for fp4, which {device} does not have; its products are planned at the rate of fp32",
        "Use bf16 or fp8.",
    ),
    "engine-no-fp4": ("is planned, but this engine has no products in fp4", "Use fp8 or bf16 to submit."),
    "engine-weight-dtype": (
        "is planned, but this engine stores weights in the dtype of the precision",
        "Use auto to submit.",
    ),
    "engine-state-dtype": ("is planned, but this engine has fp32 moments", "Use fp32, or name: adamw_8bit, to submit."),
    "engine-no-master": (
        "is planned, but this engine updates fp32 master weights, which its checkpoints hold",
        "Use true to submit.",
    ),
    "fp8-capability": (
        "needs an NVIDIA GPU of compute capability 8.9 or higher, and {device} has {compute_capability}",
        "Use bf16.",
    ),
    "grad-dtype": ("{precision} gradients accumulate in fp32 or {own}", "Use fp32."),
    "engine-fp8-zero-3": (
        "not with fp8, whose matrix products keep the weights that stage 3 gathers",
        "Use 1, 2 or auto.",
    ),
    "local-sgd-divides-data": ("must divide layout.data_parallel = {data_parallel}", "Use a divisor, or 1."),
    "local-sgd-axis": (
        "not with {groups:of group} of local SGD, each with data, tensor, sequence and context parallelism only",
        "Use 1, or training.local_sgd.groups: 1.",
    ),
    "local-sgd-objective": ("local SGD trains text models with causal_lm only", "Use one group."),
    "local-sgd-early-stopping": (
        "the outer weights would lack the steps since the last of each {inner_steps}, as evaluation.every is {every}",
        "Use an evaluation.every that is a multiple of training.local_sgd.inner_steps, or 0.",
    ),
    "local-sgd-fp16": ("each of {groups:of group} would have a loss scale of its own", "Use bf16."),
    "local-sgd-averaging": ("the outer weights of local SGD are an average already", "Use none."),
    "local-sgd-8-bit": ("its blocks of 8-bit states cannot be stored once per group", "Use adamw."),
    "local-sgd-trains-everything": ("needs all weights to train in all steps, without adapters", "Use 1."),
    "local-sgd-adaptive-clipping": ("each of {groups:of group} would have a history of its own", "Use norm."),
    "local-sgd-nvme": (
        "the outer step of {groups:of group} updates weights in memory",
        "Use offload_device: cpu, or one group.",
    ),
    "local-sgd-all-tokens": (
        "groups would have different numbers of tokens that count, and equal weights in the outer step",
        "Remove the key, or use training.local_sgd.groups: 1.",
    ),
    "local-sgd-router-bias": ("would have to count the loads of experts over all groups", "Use 0."),
    "engine-muon-family": (
        "orthogonalizes the matrices of transformer blocks of text models, which {family} does not have",
        "Use adamw or lion.",
    ),
    "engine-muon-adapter": ("is not defined for the factors of adapters", "Use adamw."),
    "engine-muon-without-matrices": ("no matrix of a block trains, which it could orthogonalize", "Use adamw."),
    "engine-nvme-frozen": (
        "offload to NVMe does not support frozen parameters",
        "Use offload_device: cpu, or layout.offload: none.",
    ),
    "framework-trains-everything": (
        "is modeled for training of all weights only, without adapters and frozen weights",
        "Use deepspeed.",
    ),
    "engine-stages-quantized": (
        "quantized weights cannot be carried over when the set of trained parameters changes",
        "Use none, or train the same parameters in all steps.",
    ),
    "engine-stages-8-bit": (
        "8-bit optimizer states cannot be carried over when the set of trained parameters changes",
        "Use adamw, or train the same parameters in all steps.",
    ),
    "engine-stages-averaging": (
        "averaging does not support parameters that train in only some of the steps",
        "Use none, or train the same parameters in all steps.",
    ),
    "engine-offload-optimizer": (
        "cannot be offloaded, because it updates its states on the device",
        "Use adamw, adam, momentum or sgd, or layout.offload: none.",
    ),
    "engine-nvme-optimizer": ("offload to NVMe supports only Adam's two moments", "Use adamw, or offload_device: cpu."),
    "engine-nvme-averaging": ("averaging does not support offload to NVMe", "Use none, or offload_device: cpu."),
    "engine-liger-gpu": ("the kernel of liger needs a GPU", "Use chunked or auto."),
    "engine-whole-norms": ("this engine does not shard norms over tensor ranks", "Use false or auto."),
    "engine-replay-alone": ("compares replicas with the same weights, and there is one", "Use 0."),
    "engine-replay-nvme": ("nothing is checked with offload to NVMe", "Use 0."),
    "engine-attention": ("in this engine PyTorch chooses the attention kernel", "Use auto to submit."),
    "framework-for-comparison": ("is for comparison only", "Use deepspeed to submit."),
    "relative-checkpoint-dir": "must be an absolute path, because nodes start in another folder",
}
