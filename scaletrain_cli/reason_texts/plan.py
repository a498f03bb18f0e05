"""The texts of the planner: why layouts and clusters are rejected, what would fit, and what a plan warns of.

A rule text follows the key and the value that break it: "layout.tensor_parallel = 3: must divide 32 attention heads".
"""

from __future__ import annotations

from scaletrain_cli.reasons import Text

_USE = ("Use {allowed:or}.",)
_OTHER_NETWORK = "For any other network leave it out and set cluster.inter_node_bandwidth, in bytes/s per GPU."

# Rules that degrees of parallelism and batches must keep, of the cluster, the model and the framework.
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
    "leaves-stages-empty": Text("leaves the last stages empty, because stages are balanced by cost", ("Use fewer.",)),
    "too-few-micro-batches": Text(
        "needs at least {needed} micro-batches a step", ("Use fewer, or a smaller micro-batch.",)
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

# What this engine cannot run, although it can be planned.
_ENGINE = {
    "layout-does-not-fit": Text(
        "does not fit: one rank needs {peak:bytes} of {capacity:bytes}", ("See `scaletrain plan`.",)
    ),
    "engine-axis": Text("this engine runs {axes} parallelism with ZeRO", ("Use 1 or auto.",)),
    "engine-divide-key-value-heads": Text(
        "must divide {heads} key-value heads, which this engine does not repeat", _USE
    ),
    "engine-divide-vocabulary": Text(
        "must divide model.vocab_size = {vocab_size}, because embedding and head are cut over it",
        ("Pad model.vocab_size to {padded}, or use 1.",),
    ),
    "engine-expert-tensor-parallel": Text(
        "this engine cuts experts over the same ranks as other matrices", ("Use auto.",)
    ),
    "engine-liger-whole-vocabulary": Text(
        "needs the whole vocabulary on each rank, and tensor_parallel = {tensor_parallel} cuts it",
        ("Use chunked or auto.",),
    ),
    "engine-expert-rows": Text("must be a multiple of {multiple} with experts in {precision}", ("Use {padded}.",)),
    "engine-expert-columns": Text(
        "must be a multiple of {multiple} on each of {ranks} tensor ranks, in {precision}", ("Use {padded}.",)
    ),
    "engine-text-only": Text("this engine trains transformers of text only", ("Use llama or gpt.",)),
    "engine-family-no-experts": Text("this engine's {family} has no experts", ("Use 0, or family: llama.",)),
    "engine-family-differs": Text("this engine's {family} has {built}", ("Leave it out.",)),
    "engine-no-grouped-queries": Text(
        "this engine's {family} has one for each attention head", ("Use {heads}, or family: llama.",)
    ),
    "engine-all-biases": Text("this engine's {family} has all biases", ("Use false.",)),
    "engine-no-qk-norm": Text("this engine's {family} does not normalize queries and keys", ("Use false.",)),
    "engine-no-latent-attention": Text("this engine has no latent attention", ("Use 0.",)),
    "tf32-gpu": Text("needs an NVIDIA GPU", ("Use fp32 or bf16 with cluster.gpu: cpu.",)),
    "fp8-device": Text("needs an NVIDIA GPU of compute capability 8.9 or higher, and this is {device}", ("Use bf16.",)),
    "fp8-capability": Text(
        "needs an NVIDIA GPU of compute capability 8.9 or higher, and {device} has {compute_capability}", ("Use bf16.",)
    ),
    "grad-dtype": Text("{precision} gradients accumulate in fp32 or {own}", ("Use fp32.",)),
    "engine-fp8-zero-3": Text("fp8 products keep the weights that stage 3 gathers", ("Use 1, 2 or auto.",)),
    "engine-muon": Text(
        "orthogonalizes whole matrices, which ZeRO and tensor parallelism cut", ("Use adamw or lion.",)
    ),
    "engine-offload": Text("not in this engine", _USE),
    "engine-offload-optimizer": Text(
        "updates its states on the device", ("Use adamw, adam, momentum or sgd, or layout.offload: none.",)
    ),
    "engine-nvme-optimizer": Text(
        "DeepSpeed fetches only Adam's two moments from NVMe", ("Use adamw, or offload_device: cpu.",)
    ),
    "engine-nvme-averaging": Text("weights on NVMe are not averaged", ("Use none, or offload to cpu.",)),
    "engine-liger-gpu": Text("its kernel needs a GPU", ("Use chunked or auto.",)),
    "engine-whole-norms": Text("this engine does not cut norms over tensor ranks", ("Use false or auto.",)),
    "engine-attention": Text(
        "plans for a kernel that this engine leaves to PyTorch to choose", ("Use auto to submit.",)
    ),
    "framework-for-comparison": Text("is for comparison only", ("Use deepspeed to submit.",)),
    "relative-checkpoint-dir": Text("must be absolute, because nodes start in another folder"),
}

# Degrees and ZeRO stages that the search leaves out. They follow the axis.
_SEARCH_SPACE = {
    "leaves-the-node": Text("crosses a node of {gpus} GPUs"),
    "too-many-stages": Text("more stages than layers, or than any published run"),
    "more-chunks-than-layers": Text("more chunks than layers"),
    "more-ranks-than-heads": Text("more ranks than {heads} heads"),
    "too-few-tokens": Text("leaves a rank fewer than {tokens} tokens of a sequence"),
    "more-ranks-than-experts": Text("more ranks than experts"),
    "chunks-do-not-divide": Text("chunks do not divide the layers"),
    "more-degrees-than-tried": Text("more degrees than are tried"),
    "engine-lacks-axis": Text("above 1 cannot be run by this engine version"),
    "framework-lacks-axis": Text("above 1 cannot be run by {framework}"),
    "zero-with-pipeline": Text("zero_stage above 1: {framework} does not combine it with a pipeline"),
    "no-zero-0": Text("zero_stage 0: {framework} has no usable one for {precision}"),
    "no-zero-3": Text("zero_stage 3: {precision} products keep the weights that it gathers"),
}

# Why a layout was not chosen: one layout with its numbers, and "counted-" for all of a kind.
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
    "offloads-needlessly": Text("offloads, although it fits without"),
    "cannot-be-faster": Text("cannot be faster, by a lower bound on the step time"),
    "search-ended": Text("not evaluated: the search ends after {layouts} layouts, best bounds first"),
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

# Why a cluster was not chosen, and what one takes that keeps the limits.
_CLUSTERS = {
    "cluster-does-not-fit": Text("does not fit: {what}"),
    "cluster-does-not-divide": Text("does not divide: {what}"),
    "no-progress": Text("interruptions leave no progress"),
    "no-price": Text("no price is known: set cluster.price_per_gpu_hour"),
    "too-late": Text("{by:seconds} too late"),
    "over-budget": Text("{by:usd} over budget"),
    "more-gpus": Text("more GPUs than needed"),
    "slower-on-as-many": Text("slower with as many GPUs"),
    "slower-by": Text("{by:seconds} slower"),
    "costs-more": Text("costs {by:usd} more"),
    "no-cheaper": Text("no cheaper, and slower"),
    "closest-cluster": Text("{takes}; {missed}"),
    "sufficient-cluster": Text("{takes}"),
    "scheduler-is-one-node": Text("cluster.scheduler = {scheduler} is one node: use slurm to consider more"),
    "one-node-limit": Text("is one node", ("Use slurm for more.",)),
    "more-than-the-spec": Text("more than the {gpus} GPUs of the spec; to submit it: --set cluster.nodes={nodes}"),
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
    "invalid-limit": Text("{option} is not understood"),
    "limit-not-parsed": Text("{detail}"),
    "limit-not-positive": Text("must be above 0"),
}

# Names that the catalogues lack.
_CATALOGUE = {
    "unknown-accelerator": Text("unknown accelerator {given}"),
    "unknown-device": Text(
        "is not in the hardware catalogue", ("Known: {known}.", "A table describes any other device.")
    ),
    "unknown-device-similar": Text(
        "is not in the hardware catalogue",
        ("Did you mean {similar:or}?", "Known: {known}.", "A table describes any other device."),
    ),
    "ambiguous-device": Text("matches several devices of the hardware catalogue", ("Did you mean {similar:or}?",)),
    "unknown-network": Text("unknown network {given}"),
    "unknown-link": Text("is not in the network catalogue", ("Known: {known}.", _OTHER_NETWORK)),
    "unknown-link-similar": Text(
        "is not in the network catalogue", ("Did you mean {similar}?", "Known: {known}.", _OTHER_NETWORK)
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
        "offloading takes {offloaded:bytes} of each node's memory and the copy that checkpoints are written from "
        "{copied:bytes}: more than {key} = {given:bytes}. The kernel would kill the job"
    ),
    "host-memory-unchecked": Text(
        "offloading takes {offloaded:bytes} of each node's memory and the copy that checkpoints are written from "
        "{copied:bytes}; whether the nodes have it is not checked"
    ),
    "emulated-precision": Text(
        "{device} has no {precision} units: {precision} is emulated, slowly. Times assume fp32 speed"
    ),
    "large-heads": Text(
        "model.head_dim = {head_dim}: no fused attention above {largest}; memory grows with seq_len squared"
    ),
    "attention-dropout": Text(
        "model.attention_dropout = {attention_dropout:g}: no fused attention draws the same masks in every layout, so "
        "the scores are kept; memory grows with seq_len squared. Current models leave it out"
    ),
    "assumed-preemptions": Text(
        "spot without cluster.mean_time_between_interruptions: a preemption every {hours:g} hours is assumed, as on "
        "AWS in 2022 and 2023; set it for your cluster, or plan with --trace"
    ),
    "grace-too-short": Text(
        "one step and a checkpoint take {needed:seconds}, more than cluster.grace_seconds = {grace_seconds:g}: a "
        "preemption can lose up to {steps:whole} steps"
    ),
}

# What the numbers of a plan rest on.
_ASSUMPTIONS = {
    "assumes-device": Text("device {device}: {source}"),
    "assumes-kernels": Text(
        "kernels: shares of the device's rates by size and GPU generation, in kernel_rates.json; host work and overlap "
        "of {framework}, in frameworks/; `make bench-planner` prints the errors"
    ),
    "assumes-compiled": Text(
        "compiled blocks: one kernel for each chain of element-wise operations, compared with torchtitan's and "
        "build-nanogpt's figures, not with a GPU run of this engine; graph breaks of ZeRO-3's hooks are not counted. "
        "Memory is that of eager blocks where training.compile is auto"
    ),
    "assumes-network": Text(
        "network between nodes: {network}; bus bandwidths by number of nodes, measured or estimated, in networks.json"
    ),
    "assumes-deepspeed-states": Text(
        "model states and buffers: what DeepSpeed 0.19 allocates, from its source; ZeRO, arXiv:1910.02054"
    ),
    "assumes-reduced-type": Text(
        "gradients are reduced between ranks in the weights' type, whatever grad_dtype they are accumulated in"
    ),
    "assumes-counted-states": Text("model states and buffers: as {framework} keeps them, counted in its source"),
    "assumes-fragmentation": Text("fragmentation: {share:percent} of what is allocated and freed in a step"),
    "assumes-cpu-process": Text("outside the allocator: 0.5 GB of process"),
    "assumes-outside-allocator": Text(
        "outside the allocator: CUDA context 0.7 GB, NCCL 0.4 GB per axis and 0.5 GB per peer of an all-to-all"
    ),
    "assumes-out-of-memory": Text(
        "probability of running out of memory: log-normal errors of the estimate, calibrated on the crashes of "
        "nanotron's Ultra-Scale sweep; nothing comparable is published for other frameworks"
    ),
    "assumes-text-activations": Text(
        "activations: operation by operation, {element_bytes} bytes per element, with attention as the device and "
        "planner.attention have it; Korthikanti et al., arXiv:2205.05198"
    ),
    "assumes-logits": Text("logits and loss: {bytes_per_entry} bytes per token and vocabulary entry"),
    "assumes-text-flops": Text(
        "FLOPs per token: 6 N + 12 l s a d, attention counted unmasked; PaLM, arXiv:2204.02311, appendix B"
    ),
    "assumes-text-data": Text("data: {tokens:.3g} tokens, {per_parameter:.3g} per parameter, read while training"),
    "assumes-vision-activations": Text(
        "activations: what autograd keeps of each operation, {element_bytes} bytes per element; no dropout"
    ),
    "assumes-vision-time": Text(
        "time of each operation: its products or its memory traffic, whichever is longer; off by 6 to 8 % on average "
        "against the results of timm, NVIDIA's examples and MLPerf"
    ),
    "assumes-vision-flops": Text(
        "FLOPs of one of the {unit}: 6 per multiplication with addition of a forward pass; tokens_per_second counts "
        "{unit}"
    ),
    "assumes-vision-data": Text("data: {samples:.3g} {unit}; reading and decoding are assumed to keep up"),
    "assumes-storage": Text(
        "checkpoints: 1.2 GB/s per node to shared storage unless the spec says, as BLOOM's chronicle reports; "
        "restarts: 180 s and loading; interval by Young 1974, goodput by Daly 2006"
    ),
    "assumes-stated-interruptions": Text("interruptions: as the spec says, of the whole job and for any cause"),
    "assumes-failures": Text("failures: one per {gpu_hours:,.0f} GPU hours, as {reporter}"),
    "assumes-stated-preemptions": Text(
        "preemptions: as the spec says, of the whole job; hardware failures add to them"
    ),
    "assumes-traced-preemptions": Text(
        "preemptions: one per {hours:g} hours of the job, as 21 traces of AWS instances in 2022 and 2023 show "
        "(skypilot-org/spot-traces); waiting for capacity is not counted"
    ),
    "assumes-comparison": Text("planner.framework = {framework}: for comparison; it cannot be submitted"),
}

# Checks of the training recipe. They follow a topic and its value.
_RECIPE = {
    "effective-batch": Text("{micro_batch} per GPU x {accumulation} accumulated x {data} data-parallel ranks"),
    "critical-batch": Text(
        "{tokens:.3g} tokens per step need about {times:.2g} times the tokens that small batches would "
        "(arXiv:1812.06162, arXiv:2001.08361; an order of magnitude)"
    ),
    "no-recipe-linear": Text(
        "no published recipe for {model} to compare with; when the batch size changes by k, scale the learning rate by "
        "k, shown for k up to 32 (arXiv:1706.02677)"
    ),
    "no-recipe-square-root": Text(
        "no published recipe for {model} to compare with; when the batch size changes by k, scale the learning rate by "
        "the square root of k (arXiv:2205.10287)"
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
    "no-warm-up": Text("large batches and Adam's first steps need one (arXiv:1706.02677, arXiv:1908.03265)"),
    "warm-up-most-of-the-run": Text("the learning rate rises for most of the run"),
    "long-warm-up": Text("long: published recipes take from 0.1 % to 11 % of the steps"),
    "usual-warm-up": Text("within what published recipes take, 0.1 % to 11 % of the steps"),
    "tokens-per-parameter": Text(
        "{tokens:count} tokens for {parameters:count} active parameters; about {optimal} is compute-optimal "
        "(arXiv:2203.15556)"
    ),
    "large-validation-split": Text(
        "holds back about {held:count} tokens of a corpus that is read once; one evaluation reads {read:count}. "
        "data.validation_split: {enough:g} is enough"
    ),
    "total-flops": Text("{petaflop_days:.3g} PFLOP/s-days, forward and backward, without recomputation"),
    "precision-emulated": Text("{device} has no {precision} units: it is emulated, slowly. It has {known}"),
    "loss-scaling": Text("needs loss scaling (arXiv:1710.03740); steps whose gradients overflow are skipped"),
    "loss-scaling-or-bf16": Text(
        "needs loss scaling (arXiv:1710.03740); steps whose gradients overflow are skipped. {device} has bf16, which "
        "needs none"
    ),
    "bf16-is-faster": Text("bf16 has {ratio:.3g} times the peak rate on {device}"),
    "precision-supported": Text("{device} has units for it"),
    "whole-tiles": Text("tensor cores work on whole tiles"),
    "padded-tiles": Text("not a multiple of {tile}, so tensor cores work on padding: {widths}"),
    "padded-tiles-and-vocabulary": Text(
        "not a multiple of {tile}, so tensor cores work on padding: {widths}. A vocab_size of {padded:whole} would be "
        "a multiple"
    ),
}

# The walk through the decision (--explain): questions, remarks on a line of arithmetic, answers, and what follows.
_EXPLANATION = {
    "ask-states": Text("What must be kept for every parameter, before any activation"),
    "ask-one-rank": Text("Does the run fit on one {device}, with a micro-batch of 1"),
    "ask-sharding": Text("Is data parallelism over all {ranks:whole} ranks enough, with states sharded by ZeRO"),
    "ask-tensor": Text(
        "Does it fit when the GPUs of a node share every layer (tensor parallelism, with ZeRO-{zero_stage})"
    ),
    "ask-pipeline": Text("Does it fit in pipeline stages, with tensor parallelism {tensor} in each"),
    "ask-axes": Text("What does each axis of the layout gain"),
    "ask-recomputation": Text("Must activations be recomputed"),
    "ask-compile": Text("Are the blocks compiled"),
    "ask-micro-batch": Text("How are the {batch:whole} {samples} of a step divided"),
    "ask-bubble": Text("How long do pipeline stages wait"),
    "ask-communication": Text("What does communication cost"),
    "ask-winner": Text("Why this layout and not the next best"),
    "chosen": Text("chosen"),
    "bytes-per-parameter": Text("{bytes_per_parameter:.3g} bytes per parameter"),
    "recomputation-saves-nothing": Text("recomputation saves nothing"),
    "ranks-do-not-divide": Text("the batch or the ranks do not divide"),
    "the-spec-asks": Text("but the spec asks for it"),
    "bubble-formula": Text("({stages} - 1) / ({micro_batches} x {chunks})"),
    "yes": Text("Yes"),
    "no": Text("No"),
    "states-total": Text("{bytes_per_parameter:.3g} bytes, for {parameters:whole} parameters"),
    "states-of-device": Text("These states alone take {share:percent} of the memory of one {device}"),
    "one-rank-too-small": Text("No: even with every activation recomputed it takes {times:.2f} times what one has"),
    "spread-states": Text("The states have to be sharded over several"),
    "yes-recomputing": Text("Yes, with recompute {mode}"),
    "data-parallel-is-enough": Text(
        "Data parallelism over the {ranks:whole} is enough; nothing has to be split to fit"
    ),
    "batch-does-not-divide": Text(
        "No: a batch of {batch:whole} {samples} does not divide over {ranks:whole} data-parallel ranks"
    ),
    "share-sequences": Text("Some ranks must share a sequence"),
    "sharding-too-small": Text("No: what remains on one {device} is mostly {what}"),
    "cut-layers": Text("The layers themselves must be split"),
    "sharding-fits": Text("Yes: ZeRO-{zero_stage} with recompute {mode} takes {share:percent} of the memory"),
    "no-cut-needed": Text("No layer has to be split"),
    "cut-for-speed": Text("Layers need not be split to fit, but splitting may be faster"),
    "node-too-small": Text("No: even over all {gpus} GPUs of a node it does not fit"),
    "cut-into-stages": Text("Stages across nodes must share the layers"),
    "tensor-degree": Text(
        "The plan uses tensor parallelism {degree}; the fast link inside the node carries its traffic"
    ),
    "yes-from-stages": Text("Yes, from {stages} stages on"),
    "stages-cost-a-bubble": Text(
        "Stages send only activations, which a network between nodes can carry; the cost is a bubble"
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
    "micro-batch-takes-all": Text("A rank has no more of the batch"),
    "larger-micro-batch-does-not-fit": Text("A larger micro-batch does not fit"),
    "larger-micro-batch-not-faster": Text("A larger micro-batch is no faster"),
    "larger-micro-batch-too-risky": Text(
        "A larger micro-batch leaves too little memory free for the error of the memory model"
    ),
    "bubble-share": Text("{share:percent} of the step: stages wait while the pipeline fills and drains"),
    "shrink-the-bubble": Text("More micro-batches, or virtual stages, would shrink it"),
    "no-communication": Text("Nothing: there is one rank"),
    "communication-share": Text("{share:percent} of the step is exposed communication"),
    "most-traffic": Text("{axis} parallelism sends the most bytes"),
    "only-layout": Text("It is the only layout that the spec allows"),
    "fastest-layout": Text(
        "Of {considered:whole} layouts it is the fastest that fits with memory to spare, or as fast and simpler"
    ),
    "pinned-by-spec": Text("The spec sets {settings}"),
}

TEXTS: dict[str, Text] = (
    _RULES
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
