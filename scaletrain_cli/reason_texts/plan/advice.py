"""Warnings, assumptions, checks of the recipe, and explanations."""

from __future__ import annotations

from scaletrain_cli.reasons import Text

# Warnings of a plan.
_WARNINGS = {
    "cannot-run": Text("this engine version cannot run {key} = {given}: {what}"),
    "zero-0-runs-as-1": Text(
        "layout.zero_stage = 0 with {precision} runs as ZeRO-1: DeepSpeed's stage 0 cannot accumulate gradients in "
        "fp32 there, or cannot run a pipeline correctly"
    ),
    "nearly-full": Text("the plan fills {share:percent} of the device; the memory model errs by a few percent"),
    "compile-under-zero-3": Text(
        "training.compile gains little under ZeRO-3: DeepSpeed gathers weights in hooks, which break the graph at each "
        "layer. The times here ignore that"
    ),
    "accumulation-changes-loss": Text(
        "accumulating {accumulation} micro-batches changes a contrastive loss: each pair is compared with the "
        "negatives of {seen:whole} pairs, not of {batch:whole}. Use more GPUs, or OpenCLIP's accumulation over "
        "cached features, which computes each forward pass twice"
    ),
    "caches-gradients": Text(
        "the contrastive loss is of the whole batch, accumulated over {accumulation} micro-batches by a second forward "
        "pass (GradCache, arXiv:2101.06983): {share:.0%} of the step. More GPUs or larger micro-batches avoid it"
    ),
    "few-images-per-rank": Text(
        "BatchNorm computes its statistics from the {images:of image} of a rank: with 2 images, ResNet-50 has 34.7 % "
        "errors on ImageNet in place of 23.6 % with 32, and with GroupNorm 24.1 % (arXiv:1803.08494). Set "
        "training.sync_batch_norm: true, whose statistics are of all {ranks} ranks, or model.norm: group"
    ),
    "few-images-of-all-ranks": Text(
        "BatchNorm computes its statistics from {images:of image}: with 2 images, ResNet-50 has 34.7 % errors on "
        "ImageNet in place of 23.6 % with 32, and with GroupNorm 24.1 % (arXiv:1803.08494). Set a larger "
        "training.micro_batch_size, or model.norm: group"
    ),
    "accumulates-with-batch-norm": Text(
        "with {accumulation} accumulated micro-batches, BatchNorm's statistics are of {images:of image} each and not "
        "of the batch, and the running statistics are updated {accumulation} times a step. Use more GPUs, a larger "
        "micro-batch, or model.norm: group"
    ),
    "too-few-image-workers": Text(
        "data.loader.workers = {given}: a rank needs {rate:,.0f} images/s, and a core decodes and augments about "
        "{core_rate:,.0f}; a step waits {wait:seconds} ({share:.0%} of it) for images. Set data.loader.workers to "
        "{needed}"
    ),
    "image-workers-beyond-limit": Text(
        "a rank needs {rate:,.0f} images/s, which takes {needed} processes that decode and augment about "
        "{core_rate:,.0f} each, more than the {most} that data.loader.workers allows; a step waits {wait:seconds} "
        "({share:.0%} of it) with {given}. Prepare smaller images, or set fewer augmentations in data.images.augment"
    ),
    "too-few-cores-for-images": Text(
        "cluster.cpus_per_gpu = {cores}: a rank needs {rate:,.0f} images/s, which takes {needed} cores that decode and "
        "augment about {core_rate:,.0f} each. Set it to {needed} or more, or prepare smaller images"
    ),
    "images-need-cores": Text(
        "cluster.cpus_per_gpu: auto counts as {cores} cores for each GPU: a rank needs {rate:,.0f} images/s, and a "
        "core decodes and augments about {core_rate:,.0f}; a step waits {wait:seconds} ({share:.0%} of it) for images, "
        "unless the nodes give more cores. Set cluster.cpus_per_gpu to {needed}"
    ),
    "images-exceed-storage": Text(
        "each node reads {images:,.0f} images/s of about {image_bytes:bytes}: {needed:bytes}/s, more than "
        "cluster.storage_bandwidth = {given:bytes}/s; a step waits {wait:seconds}. Copy the data to local disks, or "
        "prepare smaller images"
    ),
    "tensor-parallel-across-nodes": Text(
        "layout.tensor_parallel = {tensor_parallel} crosses nodes of {gpus_per_node} GPUs; its traffic then runs at "
        "network speed"
    ),
    "launches-block": Text(
        "env sets CUDA_LAUNCH_BLOCKING: the host waits for each kernel, so communication does not overlap compute"
    ),
    "too-little-host-memory": Text(
        "offload needs {offloaded:bytes} of each node's memory, and the copy of the state from which checkpoints are "
        "written {copied:bytes}: more than {key} = {given:bytes}. The kernel would kill the job"
    ),
    "host-memory-unchecked": Text(
        "offload needs {offloaded:bytes} of each node's memory, and the copy of the state from which checkpoints are "
        "written {copied:bytes}; whether the nodes have so much is not checked"
    ),
    "emulated-precision": Text(
        "{device} has no {precision} units: {precision} is emulated, slowly. Times assume fp32 speed"
    ),
    "large-heads": Text(
        "model.head_dim = {head_dim}: fused attention supports at most {largest}; memory grows with seq_len squared"
    ),
    "local-sgd-saves": Text(
        "local SGD with {groups:of group}: a step takes {step:seconds}, {times:.2f} times as fast as with one group "
        "in the same layout ({together:seconds}); an outer step takes {outer:seconds}, which pays from "
        "{least:of inner step} on. A larger inner_steps trains less like one group"
    ),
    "local-sgd-too-often": Text(
        "local SGD with {groups:of group}: an outer step of {outer:seconds} every {inner_steps:of inner step} costs "
        "more than one group in the same layout ({together:seconds} per step). Use inner_steps: {least} or more"
    ),
    "local-sgd-saves-nothing": Text(
        "local SGD with {groups:of group} saves no time: between outer steps a step is not faster than the "
        "{together:seconds} with one group, because the reduction of gradients is hidden or fast. Use groups: 1"
    ),
    "capped-attention": Text(
        "model.attn_logit_softcapping: PyTorch has no fused kernel with a cap of scores, so attention stores them; "
        "with sequences of {seq_len} tokens a step takes {times:.2f} times as long as without the cap, and a rank "
        "needs {bytes:bytes} more"
    ),
    "text-part": Text(
        "the plan is that of the language model of a {model_type} config.json; its image tower is neither planned nor "
        "trained"
    ),
    "attention-dropout": Text(
        "model.attention_dropout = {attention_dropout:g}: no fused attention kernel draws the same dropout masks in "
        "every layout, so the scores are stored and memory grows with seq_len squared. Current models have no "
        "attention dropout"
    ),
    "too-few-readers": Text(
        "data.loader.workers = {given}: the batches of a step take about {seconds:seconds} to read, of a step of "
        "{step:seconds}; set it to {needed}"
    ),
    "assumed-preemptions": Text(
        "cluster.mean_time_between_interruptions is not set: a preemption every {hours:g} hours is assumed, as on AWS "
        "in 2022 and 2023; set it for your cluster, or use plan --trace"
    ),
    "grace-too-short": Text(
        "one step and a checkpoint take {needed:seconds}, more than cluster.grace_seconds = {grace_seconds:g}: a "
        "preemption can lose up to {steps:whole} steps"
    ),
}

# Where the numbers of a plan come from.
_ASSUMPTIONS = {
    "assumes-device": Text("device {device}: {source}"),
    "calibrated-same": Text(
        "times are scaled by {factor:.3g} ({low:.3g} to {high:.3g}): measured in {runs:of run} of this model in this "
        "layout on this hardware"
    ),
    "calibrated-similar": Text(
        "times are scaled by {factor:.3g} ({low:.3g} to {high:.3g}): measured in {runs:of run} of similar size on this "
        "hardware, not of this model in this layout"
    ),
    "calibrated-other-nodes": Text(
        "communication is as planned without a measurement: the measured run had {nodes:of node}, this one has "
        "{planned_nodes}"
    ),
    "assumes-kernels": Text(
        "kernels: shares of the device's peak rates by size and GPU generation, in kernel_rates.json; host work and "
        "overlap of {framework}, in plan/frameworks/; `make bench-planner` prints the errors"
    ),
    "assumes-compiled": Text(
        "compiled blocks: one kernel for each chain of element-wise operations; compared with the published figures "
        "of torchtitan and build-nanogpt, not with GPU runs of this engine; graph breaks in ZeRO-3's hooks are not "
        "counted. With training.compile: auto, memory is that of eager blocks"
    ),
    "assumes-network": Text(
        "network between nodes: {network}; bus bandwidths by number of nodes, measured or estimated, in networks.json"
    ),
    "assumes-deepspeed-states": Text(
        "model states and buffers: what DeepSpeed 0.19 allocates, from its source; ZeRO, arXiv:1910.02054"
    ),
    "assumes-reduced-type": Text(
        "gradients are reduced between ranks in the dtype of the weights, also if grad_dtype is another one"
    ),
    "assumes-counted-states": Text("model states and buffers: what {framework} allocates, from its source"),
    "assumes-fragmentation": Text("fragmentation: {share:percent} of what is allocated and freed in a step"),
    "assumes-cpu-process": Text("outside the allocator: 0.5 GB for the process"),
    "assumes-outside-allocator": Text(
        "outside the allocator: CUDA context 0.7 GB, NCCL 0.4 GB per axis and 0.5 GB per peer of an all-to-all"
    ),
    "assumes-out-of-memory": Text(
        "probability of running out of memory: log-normal errors of the estimate, calibrated on runs that ran "
        "out of memory in nanotron's Ultra-Scale sweep; nothing comparable is published for other frameworks"
    ),
    "assumes-text-activations": Text(
        "activations: operation by operation, {element_bytes} bytes per element, with the attention kernel of the "
        "device or planner.attention; Korthikanti et al., arXiv:2205.05198"
    ),
    "assumes-logits": Text("logits and loss: {bytes_per_entry} bytes per token and vocabulary entry"),
    "assumes-text-flops": Text(
        "FLOPs per token: 6 N + 12 l s a d, attention counted unmasked; PaLM, arXiv:2204.02311, appendix B"
    ),
    "assumes-hybrid-blocks": Text(
        "hybrid model: parameters by block; time and activations of a block are the mean over the model's blocks"
    ),
    "assumes-text-data": Text("data: {tokens:.3g} tokens, {per_parameter:.3g} per parameter, read while training"),
    "assumes-counted-pairs": Text("reference: the pairs of both splits, as the prepared data have them"),
    "assumes-estimated-pairs": Text("reference: as many pairs as the size of the files and their first rows suggest"),
    "assumes-pairs-of-steps": Text(
        "reference: as many pairs as the steps read, because those of data.source are unknown"
    ),
    "assumes-vision-activations": Text(
        "activations: what autograd saves for each operation, {element_bytes} bytes per element; no dropout"
    ),
    "assumes-vision-time": Text(
        "time of each operation: its arithmetic or its memory traffic, whichever is longer; mean error 6 to 8 % "
        "against the published results of timm, NVIDIA's examples and MLPerf"
    ),
    "assumes-vision-flops": Text(
        "FLOPs: 6 per multiply-accumulate of the forward pass; tokens_per_second counts {unit}"
    ),
    "assumes-data-rate": Text(
        "reading: {rank:bytes}/s by each rank and {node:bytes}/s by each node, and up to {first:bytes}/s by a node "
        "while the chunks of prepared files are compared with their hashes for the first time"
    ),
    "assumes-remote-data": Text(
        "reading, if the source is a prepared dataset in a remote store: up to {first:bytes}/s by each node at first, "
        "in blocks of {block:bytes}, each once as long as data.cache.size ({cache:bytes}) holds all of them"
    ),
    "assumes-data-thread": Text(
        "readers: the batches of a step of {step:seconds} take a rank about {seconds:seconds} to read, so its thread "
        "is enough (data.loader.workers: 0); measured on one x86 core"
    ),
    "assumes-data-workers": Text(
        "readers: the batches of a step of {step:seconds} take a rank about {seconds:seconds} to read, so it needs "
        "{workers} data.loader.workers; measured on one x86 core"
    ),
    "assumes-llava": Text(
        "each sample is one image and a sequence of {seq_len:whole} tokens, those of the image included; shorter ones "
        "take less"
    ),
    "assumes-samples": Text("data: {samples:.3g} {unit}"),
    "assumes-image-rate": Text(
        "image loader: {rank:,.0f} images/s by each rank and {node:,.0f} by each node, decoded and augmented by "
        "{cores} cores of a node at {core_rate:,.0f} images/s each; sources may be larger or smaller than ImageNet's"
    ),
    "assumes-image-readers": Text(
        "image readers: with data.loader.workers: auto, {workers:of process} of each rank, which has {cores:of core}; "
        "a rank with more cores has one process for each but one, up to 15"
    ),
    "assumes-image-bytes": Text(
        "reading: {read:bytes}/s by each node from storage or network, at {image_bytes:bytes} per image as in ImageNet"
    ),
    "ask-loader": Text("does the image loader keep up with the step"),
    "images-by-core": Text("{core_rate:,.0f} images/s"),
    "images-by-node": Text("{node_rate:,.0f} images/s and node, {cores} cores"),
    "loader-keeps-up": Text("yes: data.loader.workers = {workers} of each rank, and {needed} would do"),
    "workers-are-too-few": Text("no: data.loader.workers = {workers}; {needed} would do"),
    "cores-are-too-few": Text(
        "no: a rank needs {rate:,.0f} images/s, which takes {needed} cores that decode and augment about "
        "{core_rate:,.0f} each"
    ),
    "storage-is-too-slow": Text("no: each node has to read {needed:bytes}/s"),
    "assumes-vision-data": Text("data: {samples:.3g} {unit}; reading and decoding are assumed to keep up"),
    "assumes-storage": Text(
        "checkpoints: 1.2 GB/s per node to shared storage, as BLOOM's chronicle reports, unless the spec sets "
        "cluster.storage_bandwidth; restarts: 180 s and loading; interval by Young 1974, goodput by Daly 2006"
    ),
    "assumes-stated-interruptions": Text("interruptions: as in the spec, of the whole job and for any cause"),
    "assumes-failures": Text("failures: one per {gpu_hours:,.0f} GPU hours, as {reporter}"),
    "assumes-stated-preemptions": Text("preemptions: as in the spec, of the whole job; hardware failures add to them"),
    "assumes-traced-preemptions": Text(
        "preemptions: one per {hours:g} hours of the job, as in 21 traces of AWS instances from 2022 and 2023 "
        "(skypilot-org/spot-traces); waiting for capacity is not counted"
    ),
    "assumes-comparison": Text("planner.framework = {framework}: for comparison; it cannot be submitted"),
}

# Checks of the training recipe. The texts follow a topic and its value.
_RECIPE = {
    "effective-batch": Text("micro-batch {micro_batch} x accumulation {accumulation} x {data} data-parallel ranks"),
    "critical-batch": Text(
        "with {tokens:.3g} tokens per step, training needs about {times:.2g} times the tokens that small batches need "
        "(arXiv:1812.06162, arXiv:2001.08361; an order of magnitude)"
    ),
    "no-recipe-linear": Text(
        "no published recipe for {model} to compare with; if you multiply the batch size by k, multiply the learning "
        "rate by k too, which is shown for k up to 32 (arXiv:1706.02677)"
    ),
    "no-recipe-square-root": Text(
        "no published recipe for {model} to compare with; if you multiply the batch size by k, multiply the learning "
        "rate by the square root of k (arXiv:2205.10287)"
    ),
    "recipe-of-another-optimizer": Text("the recipe uses {optimizer}, with {lr:g} at {batch:whole} {unit} ({source})"),
    "beyond-linear-scaling": Text(
        "linear scaling is shown up to a batch {limit:.0f} times as large (arXiv:1706.02677); this one is {ratio:.3g} "
        "times the recipe's, {lr:g} at {batch:whole} {unit} ({source}). Try lower rates first"
    ),
    "recipe-rate": Text("the recipe scales to {suggested:.2g}: {lr:g} at {batch:whole} {unit} ({source})"),
    "recipe-rate-linear": Text(
        "the recipe scales to {suggested:.2g}: linearly with a batch {ratio:.3g} times as large (arXiv:1706.02677), "
        "from {lr:g} at {batch:whole} {unit} ({source})"
    ),
    "recipe-rate-square-root": Text(
        "the recipe scales to {suggested:.2g}: with the square root of a batch {ratio:.3g} times as large "
        "(arXiv:2205.10287, which also scales 1 - beta by {ratio:.3g} and eps by {eps_ratio:.2g}), from {lr:g} at "
        "{batch:whole} {unit} ({source})"
    ),
    "fine-tuning-sgd": Text(
        "fine-tuning from given weights usually takes about {usual:g} with Adam (TRL's default); for SGD there is no "
        "usual value"
    ),
    "fine-tuning-rate": Text(
        "fine-tuning from given weights usually takes about {usual:g} with Adam at this size (2e-5: TRL's default and "
        "Zephyr; 5e-6 for 8 B parameters and 2e-6 for 70 B: Tulu 3, arXiv:2411.15124)"
    ),
    "fine-tuning-rate-high": Text(
        "fine-tuning from given weights usually takes about {usual:g} with Adam at this size (2e-5: TRL's default and "
        "Zephyr; 5e-6 for 8 B parameters and 2e-6 for 70 B: Tulu 3, arXiv:2411.15124); this one is of the order of "
        "pre-training, and may undo what the weights have learned"
    ),
    "adapter-rate": Text(
        "published LoRA runs of this size used about {usual:g} (QLoRA, arXiv:2305.14314); the best rate is about ten "
        "times that of full fine-tuning (LoRA Without Regret, Thinking Machines Lab, 2025)"
    ),
    "adapter-rate-low": Text(
        "published LoRA runs of this size used about {usual:g} (QLoRA, arXiv:2305.14314); the best rate is about ten "
        "times that of full fine-tuning (LoRA Without Regret, Thinking Machines Lab, 2025), and this one is probably "
        "too low for an adapter"
    ),
    "adapter-rate-high": Text(
        "published LoRA runs of this size used about {usual:g} (QLoRA, arXiv:2305.14314); this one may diverge"
    ),
    "preference-rate": Text(
        "DPO usually uses about {usual:g} at this size: published runs without adapters 5e-7 for 7 B and 8 B "
        "parameters (Zephyr, arXiv:2310.16944; Tulu 3, arXiv:2411.15124), 2e-7 for 70 B (Tulu 3); with an adapter "
        "about ten times as much"
    ),
    "preference-rate-high": Text(
        "DPO usually uses about {usual:g} at this size: published runs without adapters 5e-7 for 7 B and 8 B "
        "parameters (Zephyr, arXiv:2310.16944; Tulu 3, arXiv:2411.15124), 2e-7 for 70 B (Tulu 3); with an adapter "
        "about ten times as much. At this one the model may degenerate, because preferences alone do not keep it near "
        "its start"
    ),
    "trained-parameters": Text("the others are frozen, and have no gradients and no optimizer states"),
    "adapter-without-mlp": Text(
        "adapters on attention alone learn less than on all linear layers, also with a higher rank (QLoRA, "
        "arXiv:2305.14314, figure 2; LoRA Without Regret, Thinking Machines Lab, 2025)"
    ),
    "usual-epochs": Text(
        "published recipes read instructions 1 to 4 times (alignment-handbook's recipe for Zephyr 1, Tulu 3 2, TRL and "
        "LLaMA-Factory 3, Axolotl 4)"
    ),
    "part-of-the-data": Text("the run reads a part of the data"),
    "epochs-many": Text(
        "published recipes read instructions 1 to 4 times (alignment-handbook's recipe for Zephyr 1, Tulu 3 2, TRL and "
        "LLaMA-Factory 3, Axolotl 4); more epochs memorize the rows. Watch the validation loss, or set "
        "checkpoint.keep_best"
    ),
    "preference-epochs": Text(
        "published DPO runs read the pairs once (alignment-handbook's recipe for Zephyr, Tulu 3) to three times (OLMo "
        "7B Instruct)"
    ),
    "preference-epochs-many": Text(
        "published DPO runs read the pairs once (alignment-handbook's recipe for Zephyr, Tulu 3) to three times (OLMo "
        "7B Instruct); more epochs overfit. Watch the validation loss, or set checkpoint.keep_best"
    ),
    "repeated-text": Text("repeated text is almost as good as new text up to 4 epochs (arXiv:2305.16264)"),
    "repeated-text-many": Text(
        "repeated text is almost as good as new text up to 4 epochs, and much less beyond (arXiv:2305.16264)"
    ),
    "fine-tuning-batch": Text(
        "published runs of full fine-tuning have about 128 samples (Tulu 3, alignment-handbook's recipe for Zephyr)"
    ),
    "fine-tuning-batch-large": Text(
        "published runs of full fine-tuning have about 128 samples (Tulu 3, alignment-handbook's recipe for Zephyr); "
        "so large a batch leaves few updates"
    ),
    "fine-tuning-batch-small": Text(
        "published runs of full fine-tuning have about 128 samples (Tulu 3, alignment-handbook's recipe for Zephyr); "
        "the gradient of so small a batch is noisy, and needs a lower learning rate"
    ),
    "preference-batch": Text(
        "published runs of DPO have about 128 pairs (Tulu 3, alignment-handbook's recipe for Zephyr)"
    ),
    "preference-batch-large": Text(
        "published runs of DPO have about 128 pairs (Tulu 3, alignment-handbook's recipe for Zephyr); "
        "so large a batch leaves few updates"
    ),
    "preference-batch-small": Text(
        "published runs of DPO have about 128 pairs (Tulu 3, alignment-handbook's recipe for Zephyr); "
        "the gradient of so small a batch is noisy, and needs a lower learning rate"
    ),
    "adapter-batch": Text("published LoRA runs have 8 to 32 samples (QLoRA 16, Axolotl and LLaMA-Factory 8)"),
    "adapter-batch-large": Text(
        "published LoRA runs have 8 to 32 samples (QLoRA 16, Axolotl and LLaMA-Factory 8); large batches hurt an "
        "adapter more than full fine-tuning, whatever its rank (LoRA Without Regret, Thinking Machines Lab, 2025)"
    ),
    "fine-tuning-decay-high": Text(
        "published fine-tuning takes 0 (Tulu 3, Zephyr, QLoRA, Axolotl) to 0.1 (Llama 2 chat, arXiv:2307.09288)"
    ),
    "adapter-scale": Text(
        "published runs have 0.06 to 2 (QLoRA 16 / 64, Axolotl 16 / 32, PEFT 8 / 8, LLaMA-Factory 16 / 8); it "
        "multiplies the learning rate of the adapter"
    ),
    "adapter-scale-unusual": Text(
        "published runs have 0.06 to 2 (QLoRA 16 / 64, Axolotl 16 / 32, PEFT 8 / 8, LLaMA-Factory 16 / 8); it "
        "multiplies the learning rate of the adapter, so this one is probably a mistake"
    ),
    "adapter-rank": Text(
        "{parameters:count} parameters for {tokens:count} tokens: enough, at about 2 bits per parameter "
        "(arXiv:2404.05405) and one bit per token"
    ),
    "adapter-rank-highest": Text(
        "{parameters:count} parameters for {tokens:count} tokens: at about 2 bits per parameter (arXiv:2404.05405) and "
        "one bit per token the adapter cannot hold the data, and falls behind full fine-tuning (LoRA Without Regret, "
        "Thinking Machines Lab, 2025)"
    ),
    "adapter-rank-low": Text(
        "{parameters:count} parameters for {tokens:count} tokens: at about 2 bits per parameter (arXiv:2404.05405) and "
        "one bit per token the adapter cannot hold the data, and falls behind full fine-tuning (LoRA Without Regret, "
        "Thinking Machines Lab, 2025); a rank of {enough} can hold more"
    ),
    "no-warm-up": Text("large batches and Adam's first steps need a warm-up (arXiv:1706.02677, arXiv:1908.03265)"),
    "warm-up-most-of-the-run": Text("the learning rate rises for most of the run"),
    "long-warm-up": Text("long: published recipes take from 0.1 % to 11 % of the steps"),
    "usual-warm-up": Text("as in published recipes, which take from 0.1 % to 11 % of the steps"),
    "tokens-per-parameter": Text(
        "{tokens:count} tokens for {parameters:count} active parameters; about {optimal} is compute-optimal "
        "(arXiv:2203.15556)"
    ),
    "large-validation-split": Text(
        "reserves about {held:count} tokens of a corpus that is read once; one evaluation reads {read:count}. "
        "data.validation_split: {enough:g} is enough"
    ),
    "total-flops": Text("{petaflop_days:.3g} PFLOP/s-days, forward and backward, without recomputation"),
    "precision-emulated": Text("{device} has no {precision} units and emulates it slowly. It has {known}"),
    "loss-scaling": Text("needs loss scaling (arXiv:1710.03740); steps whose gradients overflow are skipped"),
    "loss-scaling-or-bf16": Text(
        "needs loss scaling (arXiv:1710.03740); steps whose gradients overflow are skipped. {device} has bf16, which "
        "needs none"
    ),
    "bf16-is-faster": Text("bf16 has {ratio:.3g} times the peak rate on {device}"),
    "precision-supported": Text("{device} has units for it"),
    "whole-tiles": Text("tensor cores compute only full tiles"),
    "padded-tiles": Text("not a multiple of {tile}, so tensor cores also compute padding: {widths}"),
    "padded-tiles-and-vocabulary": Text(
        "not a multiple of {tile}, so tensor cores also compute padding: {widths}. A vocab_size of {padded:whole} "
        "would be a multiple"
    ),
}

# The explanation of a layout (--explain): questions, notes on a row of numbers, answers, and what they lead to.
_EXPLANATION = {
    "ask-training": Text("What trains"),
    "trains-share": Text("{trained:count} of {parameters:count} parameters ({share:percent})"),
    "group-trains": Text("{parameters:count} parameters, steps {first_step} to {last_step}"),
    "stage-trains": Text("{parameters:count} parameters train"),
    "backward-to-embedding": Text("The backward pass goes through all blocks to the embeddings"),
    "backward-to-block": Text(
        "The backward pass ends in block {block} of 0 to {last}, the lowest with a trained parameter; those below "
        "keep nothing for it"
    ),
    "backward-to-first-block": Text("The backward pass goes through all blocks"),
    "backward-in-head": Text("The backward pass ends before the blocks, which keep nothing for it"),
    "ask-reference": Text("What does the reference of dpo cost"),
    "reference-once": Text(
        "Its log-probabilities of {pairs:count} pairs are computed once, before step 1: {share:percent} of the run"
    ),
    "ask-states": Text("How much memory do weights, gradients and optimizer states need"),
    "ask-one-rank": Text("Does the run fit on one {device}, with a micro-batch of 1"),
    "ask-sharding": Text("Does it fit with data parallelism over all {ranks:whole} ranks, with states sharded by ZeRO"),
    "ask-tensor": Text(
        "Does it fit if the GPUs of a node share every layer (tensor parallelism, with ZeRO-{zero_stage})"
    ),
    "ask-pipeline": Text("Does it fit in pipeline stages, with tensor parallelism {tensor} in each stage"),
    "ask-axes": Text("What does each axis of the layout gain"),
    "ask-recomputation": Text("Must activations be recomputed"),
    "ask-compile": Text("Are the blocks compiled"),
    "ask-micro-batch": Text("How are the {batch:whole} {samples} of a step divided"),
    "ask-bubble": Text("How long do pipeline stages wait for each other"),
    "ask-communication": Text("What does communication cost"),
    "ask-winner": Text("Why this layout and not the next best"),
    "chosen": Text("chosen"),
    "bytes-per-parameter": Text("{bytes_per_parameter:.3g} bytes per parameter"),
    "recomputation-saves-nothing": Text("recomputation saves nothing"),
    "ranks-do-not-divide": Text("the batch or the ranks do not divide"),
    "the-spec-asks": Text("but the spec sets it"),
    "bubble-formula": Text("({stages} - 1) / ({micro_batches} x {chunks})"),
    "yes": Text("Yes"),
    "no": Text("No"),
    "states-total": Text("{bytes_per_parameter:.3g} bytes for each of {parameters:whole} parameters"),
    "states-of-device": Text("These states alone take {share:percent} of the memory of one {device}"),
    "one-rank-too-small": Text("No: even with recomputation it needs {times:.2f} times the memory of one"),
    "spread-states": Text("The states must be sharded over several ranks"),
    "yes-recomputing": Text("Yes, with recompute {mode}"),
    "data-parallel-is-enough": Text(
        "Data parallelism over {ranks:whole} ranks is enough; the model need not be split to fit"
    ),
    "batch-does-not-divide": Text(
        "No: a batch of {batch:whole} {samples} does not divide over {ranks:whole} data-parallel ranks"
    ),
    "share-sequences": Text("Some ranks must work on the same sequence"),
    "sharding-too-small": Text("No: what one {device} still holds is mostly {what}"),
    "cut-layers": Text("The layers themselves must be split"),
    "sharding-fits": Text("Yes: ZeRO-{zero_stage} with recompute {mode} takes {share:percent} of the memory"),
    "no-cut-needed": Text("Layers need not be split"),
    "cut-for-speed": Text("Layers need not be split to fit, but splitting may be faster"),
    "node-too-small": Text("No: even over all {gpus} GPUs of a node it does not fit"),
    "cut-into-stages": Text("The layers must be divided into pipeline stages across nodes"),
    "tensor-degree": Text(
        "The plan uses tensor parallelism {degree}; the fast link inside the node carries its traffic"
    ),
    "yes-from-stages": Text("Yes, with {stages} stages or more"),
    "stages-cost-a-bubble": Text(
        "Stages send only activations, which the network between nodes can carry; the cost is the pipeline bubble"
    ),
    "sequences-are-cut": Text("Sequences are split too: sequence {sequence}, context {context}"),
    "not-in-this-engine": Text("This engine version cannot run it yet"),
    "axis-needed-to-fit": Text("Without {axis} it does not fit"),
    "slower-without-axis": Text("Without {axis} a step is {share:percent} longer"),
    "faster-without-axis": Text("Without {axis} a step is {share:percent} shorter"),
    "axes-divide": Text("Each is needed for the ranks and the batch to divide"),
    "no-recomputation": Text("No: all activations fit"),
    "recomputation-to-fit": Text("Yes: without it they do not fit, so {mode} recomputation costs time"),
    "recomputation-chosen": Text("Yes: {mode}; less would leave too little memory free, or gain nothing"),
    "compiled": Text(
        "Yes: an eager step is modeled to take {gain:percent} longer. training.compile: false disables it"
    ),
    "not-compiled-as-asked": Text(
        "No, as the spec asks; compiled blocks are modeled to make a step {gain:percent} faster"
    ),
    "not-compiled": Text(
        "No: auto is off for experts, fp8, short runs and older GPUs. training.compile: true enables it"
    ),
    "batch-parts": Text("{batch:whole} = micro-batch {micro_batch} x accumulation {accumulation} x data {data}"),
    "micro-batch-takes-all": Text("A micro-batch is already the full share of a rank"),
    "larger-micro-batch-does-not-fit": Text("A larger micro-batch does not fit"),
    "larger-micro-batch-not-faster": Text("A larger micro-batch is no faster"),
    "larger-micro-batch-too-risky": Text(
        "A larger micro-batch leaves too little memory free for the error of the memory model"
    ),
    "bubble-share": Text("{share:percent} of the step, while the pipeline fills and drains"),
    "shrink-the-bubble": Text("More micro-batches, or virtual stages, would shrink it"),
    "no-communication": Text("Nothing: there is one rank"),
    "communication-share": Text("{share:percent} of the step is exposed communication"),
    "most-traffic": Text("Most bytes are sent for {axis} parallelism"),
    "only-layout": Text("It is the only layout that the spec allows"),
    "fastest-layout": Text(
        "Of {considered:whole} layouts it is the fastest that fits with a margin, or a simpler one that is as fast"
    ),
    "pinned-by-spec": Text("The spec sets {settings}"),
}


TEXTS: dict[str, Text] = _WARNINGS | _ASSUMPTIONS | _RECIPE | _EXPLANATION
