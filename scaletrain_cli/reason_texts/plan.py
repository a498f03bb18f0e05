"""The texts of the planner: why layouts and clusters are rejected, what would fit, warnings, checks and explanations.

The text of a rule follows the key and value that break it: "layout.tensor_parallel = 3: must divide 32 heads".
"""

from __future__ import annotations

from scaletrain_cli.reasons import Text

_USE = ("Use {allowed:or}.",)
_OTHER_NETWORK = "For any other network leave it out and set cluster.inter_node_bandwidth, in bytes/s per GPU."

# Rules of cluster, model and framework that degrees of parallelism and batch sizes must obey.
_RULES = {
    "wrong-product": Text(
        "data {data} x tensor {tensor} x pipeline {pipeline} x sequence {sequence} x context {context} = {ranks} "
        "ranks, but the cluster has {nodes} x {gpus_per_node} = {world_size}",
        ("Use {allowed:or}, or auto.",),
    ),
    "product-does-not-divide": Text(
        "data {data} x tensor {tensor} x pipeline {pipeline} x sequence {sequence} x context {context} = {ranks} "
        "ranks, but the cluster has {nodes} x {gpus_per_node} = {world_size}",
        ("Change the degrees so that their product divides {world_size}.",),
    ),
    "divide-key-value-heads": Text("must divide {heads} key-value heads or be a multiple of them", _USE),
    "divide-heads": Text("must divide {heads} attention heads", _USE),
    "divide-width": Text("must divide {name} = {width}", _USE),
    "divide-local-heads": Text("must divide the {heads} attention heads of a tensor rank", _USE),
    "multiple-of-sequence-ranks": Text("must be a multiple of sequence x context parallel = {ranks}"),
    "more-stages-than-layers": Text("must not exceed {layers} layers", ("Use {layers}.",)),
    "virtual-stages-divide-layers": Text(
        "needs pipeline_parallel > 1 and {layers} layers that divide by pipeline x virtual", _USE
    ),
    "needs-experts": Text("needs a model with experts", ("Use 1 or auto.",)),
    "divide-experts": Text("must divide {experts} experts", _USE),
    "divide-expert-ranks": Text("must divide data x sequence parallel = {ranks}", _USE),
    "leaves-stages-empty": Text(
        "leaves the last stages empty, because stages are balanced by cost", ("Use fewer stages.",)
    ),
    "too-few-micro-batches": Text(
        "needs at least {needed} micro-batches per step", ("Use fewer stages, or a smaller micro-batch.",)
    ),
    "zero-refused-with-pipeline": Text(
        "cannot be combined with pipeline parallelism in DeepSpeed", ("Use 1 or auto.",)
    ),
    "offload-zero-stage": Text("layout.offload = {offload} needs ZeRO-{needed} or higher", ("Use {needed} or auto.",)),
    "batch-multiple-of-ranks": Text("must be a multiple of {ranks} data-parallel ranks", _USE),
    "micro-batch-divides-share": Text(
        "must divide the {per_rank} sequences per data-parallel rank ({batch} / {ranks})", _USE
    ),
}

# Patterns of training.trainable that do not fit the model.
_TRAINABLE = {
    "trainable-invalid": Text("what trains does not fit the model, in {problems:of place}"),
    "trainable-built-in-families": Text(
        "needs the parameter names of a built-in family, and {family} is that of a plug-in", ("Remove it.",)
    ),
    "trainable-matches-nothing": Text("matches no parameter of the model", ("Did you mean {near:or}?",)),
    "trainable-no-such-name": Text(
        "matches no parameter of the model", ("Names are those of Hugging Face, such as {example}.",)
    ),
    "trainable-decays-nothing": Text(
        "has no effect: the group has no matrix that weight decay applies to", ("Remove it, or match a matrix.",)
    ),
    "trains-nothing": Text(
        "no parameter trains in steps {first} to {last}", ("Change start_step or end_step, or add a group.",)
    ),
    "trainable-splits-experts": Text(
        "in step {step} the experts of one layer do not train alike at {name}; they are one tensor, {tensor}",
        ("Match all experts of a layer, such as *.mlp.experts.*.",),
    ),
    "trainable-never-first": Text(
        "has no effect: an earlier group matches the same parameters in all of its steps",
        ("Put it before that group, or remove it.",),
    ),
}

# What this engine cannot run, although it can be planned.
_ENGINE = {
    "layout-does-not-fit": Text(
        "does not fit: one rank needs {peak:bytes} of {capacity:bytes}", ("See `scaletrain plan`.",)
    ),
    "engine-axis": Text("this engine supports only {axes} parallelism", ("Use 1 or auto.",)),
    "engine-divide-key-value-heads": Text(
        "must divide {heads} key-value heads, which this engine does not repeat", _USE
    ),
    "engine-divide-vocabulary": Text(
        "must divide model.vocab_size = {vocab_size}, because embedding and head are sharded over it",
        ("Pad model.vocab_size to {padded}, or use 1.",),
    ),
    "engine-expert-tensor-parallel": Text(
        "this engine shards experts over the same tensor ranks as other matrices", ("Use auto.",)
    ),
    "engine-liger-whole-vocabulary": Text(
        "needs the full vocabulary on each rank, but tensor_parallel = {tensor_parallel} shards it",
        ("Use chunked or auto.",),
    ),
    "engine-expert-rows": Text("must be a multiple of {multiple} with experts in {precision}", ("Use {padded}.",)),
    "engine-expert-columns": Text(
        "must be a multiple of {multiple} on each of {ranks} tensor ranks, in {precision}", ("Use {padded}.",)
    ),
    "engine-text-only": Text("this engine trains only language models", ("Use llama or gpt.",)),
    "engine-family-no-experts": Text("this engine's {family} models have no experts", ("Use 0, or family: llama.",)),
    "engine-family-differs": Text("this engine's {family} models have {built}", ("Remove the key.",)),
    "engine-no-grouped-queries": Text(
        "this engine's {family} models have one key-value head per attention head", ("Use {heads}, or family: llama.",)
    ),
    "engine-llama-only": Text("this engine's {family} models do not have this setting", ("Remove the key.",)),
    "engine-activation": Text("this engine computes {activation} in these models", ("Use {activation}.",)),
    "engine-fused-experts": Text("this engine's experts have separate matrices", ("Use false.",)),
    "engine-all-biases": Text("this engine's {family} models always have all biases", ("Use false.",)),
    "engine-no-qk-norm": Text("this engine's {family} models do not normalize queries and keys", ("Use false.",)),
    "engine-no-latent-attention": Text("this engine has no latent attention", ("Use 0.",)),
    "tf32-gpu": Text("needs an NVIDIA GPU", ("Use fp32 or bf16 with cluster.gpu: cpu.",)),
    "fp8-device": Text("needs an NVIDIA GPU of compute capability 8.9 or higher, and this is {device}", ("Use bf16.",)),
    "fp8-capability": Text(
        "needs an NVIDIA GPU of compute capability 8.9 or higher, and {device} has {compute_capability}", ("Use bf16.",)
    ),
    "grad-dtype": Text("{precision} gradients accumulate in fp32 or {own}", ("Use fp32.",)),
    "engine-fp8-zero-3": Text(
        "not with fp8, whose matrix products keep the weights that stage 3 gathers", ("Use 1, 2 or auto.",)
    ),
    "engine-muon": Text(
        "orthogonalizes full matrices, which ZeRO and tensor parallelism shard", ("Use adamw or lion.",)
    ),
    "engine-nvme-frozen": Text(
        "offload to NVMe does not support frozen parameters", ("Use offload_device: cpu, or layout.offload: none.",)
    ),
    "framework-trains-everything": Text(
        "is modeled for training of all weights only, without adapters and frozen weights", ("Use deepspeed.",)
    ),
    "engine-stages-quantized": Text(
        "quantized weights cannot be carried over when the set of trained parameters changes",
        ("Use none, or train the same parameters in all steps.",),
    ),
    "engine-stages-8-bit": Text(
        "8-bit optimizer states cannot be carried over when the set of trained parameters changes",
        ("Use adamw, or train the same parameters in all steps.",),
    ),
    "engine-stages-averaging": Text(
        "averaging does not support parameters that train in only some of the steps",
        ("Use none, or train the same parameters in all steps.",),
    ),
    "engine-offload": Text("this engine does not support this offload mode", _USE),
    "engine-offload-optimizer": Text(
        "cannot be offloaded, because it updates its states on the device",
        ("Use adamw, adam, momentum or sgd, or layout.offload: none.",),
    ),
    "engine-nvme-optimizer": Text(
        "offload to NVMe supports only Adam's two moments", ("Use adamw, or offload_device: cpu.",)
    ),
    "engine-nvme-averaging": Text("averaging does not support offload to NVMe", ("Use none, or offload_device: cpu.",)),
    "engine-liger-gpu": Text("the kernel of liger needs a GPU", ("Use chunked or auto.",)),
    "engine-whole-norms": Text("this engine does not shard norms over tensor ranks", ("Use false or auto.",)),
    "engine-attention": Text("in this engine PyTorch chooses the attention kernel", ("Use auto to submit.",)),
    "framework-for-comparison": Text("is for comparison only", ("Use deepspeed to submit.",)),
    "relative-checkpoint-dir": Text("must be an absolute path, because nodes start in another folder"),
}

# Degrees and ZeRO stages that the search excludes. The texts follow the name of the axis.
_SEARCH_SPACE = {
    "leaves-the-node": Text("more ranks than the {gpus} GPUs of a node"),
    "too-many-stages": Text("more stages than layers, or than any published run"),
    "more-chunks-than-layers": Text("more virtual stages than layers"),
    "more-ranks-than-heads": Text("more ranks than {heads} heads"),
    "too-few-tokens": Text("fewer than {tokens} tokens of a sequence per rank"),
    "more-ranks-than-experts": Text("more ranks than experts"),
    "chunks-do-not-divide": Text("stages x virtual stages do not divide the layers"),
    "more-degrees-than-tried": Text("more degrees than the search tries"),
    "engine-lacks-axis": Text("this engine version supports only 1"),
    "framework-lacks-axis": Text("{framework} supports only 1"),
    "zero-with-pipeline": Text("zero_stage above 1: {framework} does not support it with a pipeline"),
    "no-zero-0": Text("zero_stage 0: {framework} does not support it with {precision}"),
    "no-zero-3": Text("zero_stage 3: {precision} matrix products keep the weights that it gathers"),
}

# Why a layout was not chosen: for one layout with its numbers, and "counted-" for many layouts.
_CHOICE = {
    "needs-memory": Text("does not fit: needs {peak:bytes} of {capacity:bytes}"),
    "does-not-fit": Text("does not fit"),
    "never-fits": Text("does not fit with any micro-batch"),
    "little-memory-left": Text("leaves little memory free: takes {share:percent} of the device"),
    "counted-little-memory-left": Text("leaves little memory free"),
    "fewer-negatives": Text("gradient accumulation reduces in-batch negatives"),
    "slower": Text("{ratio:.2f} times as slow"),
    "counted-slower": Text("slower"),
    "riskier": Text("{probability:percent} likely to run out of memory"),
    "counted-riskier": Text("more likely to run out of memory"),
    "faster-within-error": Text("{gain:percent} faster, within the error of the model, and more complex"),
    "counted-faster-within-error": Text("faster by less than the error of the model, and more complex"),
    "not-faster": Text("not faster, and more complex"),
    "offloads-needlessly": Text("uses offload, although it fits without"),
    "cannot-be-faster": Text("cannot be faster, by a lower bound on the step time"),
    "search-ended": Text("not evaluated: the search ends after {layouts} layouts, lowest bounds first"),
}

# A run that fits no layout, and the changes that would make it fit.
_INFEASIBLE = {
    "needed-memory": Text("{parts} = {peak:bytes}; {device} has {capacity:bytes}"),
    "smallest-layout": Text("{layout}"),
    "would-fit": Text("needs {peak:bytes} of {capacity:bytes} and {step:seconds} per step ({layout})"),
    "would-fit-unsupported": Text(
        "needs {peak:bytes} of {capacity:bytes} and {step:seconds} per step ({layout})",
        ("This engine version cannot run it yet.",),
    ),
    "no-layout-divides": Text("no layout of {name} divides over {gpus}"),
    "run-does-not-fit": Text(
        "{name} does not fit on {gpus}: the smallest layout needs {peak:bytes} per rank and a rank has {capacity:bytes}"
    ),
    "none-feasible": Text(
        "none of the {runs} runs fits; `scaletrain plan` of one run shows every change that would make it fit"
    ),
    "nothing-fits": Text("more or larger GPUs do not make it fit", ("Use a smaller model or a shorter seq_len.",)),
}

# Why a cluster was not chosen, and the time and cost of one that meets the limits.
_CLUSTERS = {
    "cluster-does-not-fit": Text("does not fit: {what}"),
    "cluster-does-not-divide": Text("does not divide: {what}"),
    "no-progress": Text("interruptions leave no progress"),
    "no-price": Text("no price is known: set cluster.price_per_gpu_hour"),
    "too-late": Text("{by:seconds} too late"),
    "over-budget": Text("{by:usd} over budget"),
    "more-gpus": Text("more GPUs than needed"),
    "slower-on-as-many": Text("slower with the same number of GPUs"),
    "slower-by": Text("{by:seconds} slower"),
    "costs-more": Text("costs {by:usd} more"),
    "no-cheaper": Text("no cheaper, and slower"),
    "closest-cluster": Text("{takes}; {missed}"),
    "sufficient-cluster": Text("{takes}"),
    "scheduler-is-one-node": Text("cluster.scheduler = {scheduler} has only one node: use slurm to consider more"),
    "one-node-limit": Text("has only one node", ("Use slurm for more nodes.",)),
    "more-than-the-spec": Text("more than the {gpus} GPUs of the spec; to submit it, use --set cluster.nodes={nodes}"),
}

# No cluster within the limits, and limits that cannot be used.
_SIZING = {
    "no-cluster-fits": Text("the run fits on no cluster of at most {max_gpus:whole} GPUs"),
    "no-cluster-meets-limits": Text(
        "no cluster of at most {max_gpus:whole} GPUs meets {limits}; the closest one: {missed}"
    ),
    "larger-cluster-suffices": Text("{cause}; {gpus:whole} x {gpu} would do"),
    "needs-price": Text("an objective of cost, or a budget, needs a price", ("Set cluster.price_per_gpu_hour.",)),
    "less-than-one-node": Text(
        "at most {max_gpus} GPUs are less than one node of {gpus_per_node}",
        ("Use --max-gpus {gpus_per_node} or more, or fewer cluster.gpus_per_node.",),
    ),
    "unknown-objective": Text("unknown objective {given}", ("Use {allowed:or}.",)),
    "invalid-limit": Text("{option} is invalid"),
    "limit-not-parsed": Text("{detail}"),
    "limit-not-positive": Text("must be above 0"),
}

# Names that the catalogues lack.
_CATALOGUE = {
    "unknown-accelerator": Text("unknown accelerator {given}"),
    "unknown-device": Text(
        "is not in the hardware catalogue",
        ("Known: {known:or}.", "Describe any other device by a table of its memory and rates."),
    ),
    "unknown-device-similar": Text(
        "is not in the hardware catalogue",
        (
            "Did you mean {similar:or}?",
            "Known: {known:or}.",
            "Describe any other device by a table of its memory and rates.",
        ),
    ),
    "ambiguous-device": Text("matches several devices of the hardware catalogue", ("Did you mean {similar:or}?",)),
    "unknown-network": Text("unknown network {given}"),
    "unknown-link": Text("is not in the network catalogue", ("Known: {known:or}.", _OTHER_NETWORK)),
    "unknown-link-similar": Text(
        "is not in the network catalogue", ("Did you mean {similar}?", "Known: {known:or}.", _OTHER_NETWORK)
    ),
}

# Where a price per GPU hour comes from.
_PRICES = {
    "price-stated": Text("the run spec"),
    "price-unknown": Text("unknown: set cluster.price_per_gpu_hour, and cluster.spot_price_per_gpu_hour for spot"),
    "price-single": Text("the only {market} list price in the catalogue, {lowest}, {dates}"),
    "price-median": Text("median of {offers} {market} list prices, {lowest} to {highest}, {dates}"),
    "price-spot-share": Text(
        "{share:.2f} of the on-demand median {on_demand_usd:.2f}: the median ratio of the {offers} of {listed} offers "
        "that list both prices, {dates}"
    ),
    "price-live": Text("gpuhunt today, median over the providers {providers:list}"),
}

# A recorded spot market: files that cannot be used, and what a simulation assumes.
_TRACE = {
    "unusable-trace": Text("the spot trace {path} cannot be used"),
    "trace-unreadable": Text("cannot be read: {detail}", ("Give a JSON or CSV file, plain or gzipped.",)),
    "trace-without-nodes": Text(
        "no node is available at any point, so nothing can run on it", ("Use a trace with capacity.",)
    ),
    "trace-not-json": Text("is not JSON: {detail}", ("Check that the file is complete.",)),
    "several-traces": Text("holds {count} traces", ("Write one of them to a file, such as {names:list}.",)),
    "trace-without-gap": Text(
        "lacks metadata.gap_seconds, the seconds between two points", ('Add "metadata": {{"gap_seconds": 600}}.',)
    ),
    "trace-without-data": Text(
        "lacks data, the list of available nodes at each point", ("Add it, or give CSV lines seconds,nodes.",)
    ),
    "trace-line-not-numbers": Text("line {line} is not seconds,nodes", ("Write two numbers, such as 600,4.",)),
    "trace-not-ascending": Text("line {line} is not later than the line before it", ("Sort the lines by time.",)),
    "trace-too-few-points": Text("has fewer than two points", ("Write at least two lines seconds,nodes.",)),
    "trace-not-nodes": Text("{where} is not a number of nodes", ("Give whole numbers from 0.",)),
    "never-finishes-on-trace": Text("the run never finishes on {trace}"),
    "trace-intervals-too-short": Text(
        "the trace has {nodes} nodes for at most {longest:seconds} at a time, which leaves no time for a checkpoint: "
        "loading takes {restart:seconds}, and a checkpoint is due every {interval:seconds}",
        ("Lower checkpoint.every, or use fewer nodes.",),
    ),
    "trace-as-recorded": Text("as recorded"),
    "trace-of-fewer-nodes": Text(
        "the trace has at most {most}: the run has its {needed} nodes whenever all {most} are available"
    ),
    "trace-optimistic": Text(
        "{nodes} nodes are rarely all available when {most} are: expect more days than shown here"
    ),
    "trace-repeats": Text("the trace of {seconds:seconds} repeats until the run finishes"),
    "trace-with-notice": Text("each preemption is assumed to come with {grace_seconds:g} s of notice"),
    "trace-leaves-out": Text(
        "nodes that are available while others are missing cost nothing here; hardware failures are not simulated"
    ),
}

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
    "tensor-parallel-across-nodes": Text(
        "layout.tensor_parallel = {tensor_parallel} crosses nodes of {gpus_per_node} GPUs; its traffic then runs at "
        "network speed"
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
    "attention-dropout": Text(
        "model.attention_dropout = {attention_dropout:g}: no fused attention kernel draws the same dropout masks in "
        "every layout, so the scores are stored and memory grows with seq_len squared. Current models have no "
        "attention dropout"
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
    "assumes-text-data": Text("data: {tokens:.3g} tokens, {per_parameter:.3g} per parameter, read while training"),
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
    "fine-tuning-rate": Text("fine-tuning from given weights usually takes about {usual:g} with Adam (TRL's default)"),
    "fine-tuning-rate-high": Text(
        "fine-tuning from given weights usually takes about {usual:g} with Adam (TRL's default); this one is of the "
        "order of pre-training, and may undo what the weights have learned"
    ),
    "adapter-rate": Text(
        "published LoRA runs of this size used about {usual:g}, several times the rate of full fine-tuning (QLoRA, "
        "arXiv:2305.14314)"
    ),
    "adapter-rate-low": Text(
        "published LoRA runs of this size used about {usual:g}, several times the rate of full fine-tuning (QLoRA, "
        "arXiv:2305.14314); this rate is probably too low for an adapter"
    ),
    "adapter-rate-high": Text(
        "published LoRA runs of this size used about {usual:g} (QLoRA, arXiv:2305.14314); this one may diverge"
    ),
    "preference-rate": Text(
        "DPO usually uses about {usual:g}: published runs without adapters 5e-7 (Zephyr, arXiv:2310.16944; Tulu 3, "
        "arXiv:2411.15124), with an adapter about ten times as much"
    ),
    "preference-rate-high": Text(
        "DPO usually uses about {usual:g}: published runs without adapters 5e-7 (Zephyr, arXiv:2310.16944; Tulu 3, "
        "arXiv:2411.15124), with an adapter about ten times as much; at this one the model may degenerate, because "
        "preferences alone do not keep it near its start"
    ),
    "trained-parameters": Text("the others are frozen, and have no gradients and no optimizer states"),
    "adapter-without-mlp": Text(
        "adapters on attention alone learn less than on all linear layers (QLoRA, arXiv:2305.14314, figure 2)"
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

# The adapter and the quantization of a model.
_ADAPTER = {
    "adapter-invalid": Text("the adapter does not fit the model, in {problems:of place}"),
    "adapter-built-in-families": Text(
        "needs the layers of a built-in family, and {family} is that of a plug-in", ("Remove it.",)
    ),
    "adapter-matches-nothing": Text(
        "matches no module that can have an adapter", ("This model has {names:list}, and all-linear.",)
    ),
    "quantization-needs-cuda": Text(
        "needs GPUs with CUDA, because bitsandbytes computes the products; this cluster has cluster.gpu: cpu",
        ("Set it to none.",),
    ),
    "quantization-needs-weights": Text(
        "needs model.weights, which are quantized when they are loaded", ("Set model.weights, or set it to none.",)
    ),
    "quantization-without-dora": Text(
        "must be false with model.quantization, because it needs the norms of the weights", ("Set it to false.",)
    ),
    "quantization-without-fp8": Text("must not be fp8 with model.quantization", ("Set it to bf16.",)),
    "quantization-needs-frozen-linears": Text(
        "needs all linear layers frozen, and {example} trains",
        ("Add model.adapter, or match no linear layer in training.trainable.",),
    ),
    "quantization-layout": Text(
        "must be {allowed} with model.quantization, whose blocks cannot be sharded",
        ("Change it, or set model.quantization: none.",),
    ),
    "dora-on-embeddings": Text(
        "must be false with an adapter on an embedding or the head", ("Remove them from model.adapter.targets.",)
    ),
    "adapter-on-experts": Text(
        "must be {allowed} with an adapter on stacked experts, as in PEFT",
        ("Change it, or remove the experts from model.adapter.targets.",),
    ),
    "adapter-rank-on-experts": Text(
        "must be a multiple of {multiple} with an adapter on stacked experts, whose grouped products need rows of 16 "
        "bytes",
    ),
}


TEXTS: dict[str, Text] = (
    _RULES
    | _TRAINABLE
    | _ADAPTER
    | _ENGINE
    | _SEARCH_SPACE
    | _CHOICE
    | _INFEASIBLE
    | _CLUSTERS
    | _SIZING
    | _CATALOGUE
    | _PRICES
    | _TRACE
    | _WARNINGS
    | _ASSUMPTIONS
    | _RECIPE
    | _EXPLANATION
)
