"""Warnings of a plan, the sources of its numbers, and the explanation of its layout."""

from scaletrain_cli.reasons import Texts

TEXTS: Texts = {
    # Warnings of a plan.
    "cannot-run": "this engine version cannot run {key} = {given}: {what}",
    "config-keys-ignored": "config.json has keys that transformers does not read for this architecture, so that they "
    "do not change the model; ignored: {keys:every}",
    "zero-0-runs-as-1": "layout.zero_stage = 0 with {precision} runs as ZeRO-1: DeepSpeed's stage 0 cannot accumulate "
    "gradients in fp32 there, or cannot run a pipeline correctly",
    "nearly-full": "the plan fills {share:percent} of the device; the memory model errs by a few percent",
    "compile-under-zero-3": "training.compile gains little under ZeRO-3: DeepSpeed gathers weights in hooks, which "
    "break the graph at each layer. The times here ignore that",
    "accumulation-changes-loss": "accumulating {accumulation} micro-batches changes a contrastive loss: each pair is "
    "compared with the negatives of {seen:whole} pairs, not of {batch:whole}. Use more GPUs, or OpenCLIP's "
    "accumulation over cached features, which computes each forward pass twice",
    "caches-gradients": "the contrastive loss is of the whole batch, accumulated over {accumulation} micro-batches by "
    "a second forward pass (GradCache, arXiv:2101.06983): {share:.0%} of the step. More GPUs or larger micro-batches "
    "avoid it",
    "few-images-per-rank": "BatchNorm computes its statistics from the {images:of image} of a rank: with 2 images, "
    "ResNet-50 has 34.7 % errors on ImageNet in place of 23.6 % with 32, and with GroupNorm 24.1 % "
    "(arXiv:1803.08494). Set training.sync_batch_norm: true, whose statistics are of all {ranks} ranks, or "
    "model.norm: group",
    "few-images-of-all-ranks": "BatchNorm computes its statistics from {images:of image}: with 2 images, ResNet-50 "
    "has 34.7 % errors on ImageNet in place of 23.6 % with 32, and with GroupNorm 24.1 % (arXiv:1803.08494). Set a "
    "larger training.micro_batch_size, or model.norm: group",
    "accumulates-with-batch-norm": "with {accumulation} accumulated micro-batches, BatchNorm's statistics are of "
    "{images:of image} each and not of the batch, and the running statistics are updated {accumulation} times a step. "
    "Use more GPUs, a larger micro-batch, or model.norm: group",
    "too-few-image-workers": "data.loader.workers = {given}: a rank needs {rate:,.0f} images/s, and a core decodes "
    "and augments about {core_rate:,.0f}; a step waits {wait:seconds} ({share:.0%} of it) for images. Set "
    "data.loader.workers to {needed}",
    "image-workers-beyond-limit": "a rank needs {rate:,.0f} images/s, which takes {needed} processes that decode and "
    "augment about {core_rate:,.0f} each, more than the {most} that data.loader.workers allows; a step waits "
    "{wait:seconds} ({share:.0%} of it) with {given}. Prepare smaller images, or set fewer augmentations in "
    "data.images.augment",
    "too-few-cores-for-images": "cluster.cpus_per_gpu = {cores}: a rank needs {rate:,.0f} images/s, which takes "
    "{needed} cores that decode and augment about {core_rate:,.0f} each. Set it to {needed} or more, or prepare "
    "smaller images",
    "images-need-cores": "cluster.cpus_per_gpu: auto counts as {cores} cores for each GPU: a rank needs {rate:,.0f} "
    "images/s, and a core decodes and augments about {core_rate:,.0f}; a step waits {wait:seconds} ({share:.0%} of "
    "it) for images, unless the nodes give more cores. Set cluster.cpus_per_gpu to {needed}",
    "job-requests-few-cores": "cluster.cpus_per_gpu: auto: the images of a rank need {needed} cores, and the plan "
    "counts on the {cores} of a usual server; from Kubernetes, and from Slurm where it is not known what a node has, "
    "the job requests {requested} for each GPU. Set cluster.cpus_per_gpu to {needed}",
    "images-exceed-storage": "each node reads {images:,.0f} images/s of about {image_bytes:bytes}: {needed:bytes}/s, "
    "more than cluster.storage_bandwidth = {given:bytes}/s; a step waits {wait:seconds}. Copy the data to local "
    "disks, or prepare smaller images",
    "tensor-parallel-across-nodes": "layout.tensor_parallel = {tensor_parallel} crosses the {gpus_per_node} GPUs that "
    "the links of a node connect; its traffic then runs at network speed",
    "launches-block": "env sets CUDA_LAUNCH_BLOCKING: the host waits for each kernel, so communication does not "
    "overlap compute",
    "too-little-host-memory": "offload needs {offloaded:bytes} of each node's memory, and the copy of the state from "
    "which checkpoints are written {copied:bytes}: more than {key} = {given:bytes}. The kernel would kill the job",
    "host-memory-unchecked": "offload needs {offloaded:bytes} of each node's memory, and the copy of the state from "
    "which checkpoints are written {copied:bytes}; whether the nodes have so much is not checked",
    "memory-copies-too-large": "checkpoint.in_memory is off: copies of the state would take {needed:bytes} of each "
    "node's memory, more than {share:percent} of what the job requests",
    "memory-copies-on-one-node": "copies in host memory stay on their own node, because with those of another node "
    "they would take more than {share:percent} of what the job requests: a lost node resumes from disk",
    "memory-copies-slow": "checkpoint.in_memory: training waits for a copy every {every:of step}, which adds "
    "{cost:percent} to the time. Use auto",
    "memory-copies-too-rare": "checkpoint.in_memory is off: copies in host memory would be no more frequent than "
    "checkpoints, every {every:of step}",
    "emulated-precision": "{device} has no {precision} units: {precision} is emulated, slowly. Times assume fp32 speed",
    "large-heads": "model.head_dim = {head_dim}: fused attention supports at most {largest}; memory grows with "
    "seq_len squared",
    "local-sgd-saves": "local SGD with {groups:of group}: a step takes {step:seconds}, {times:.2f} times as fast as "
    "with one group in its fastest layout ({together:seconds}); an outer step takes {outer:seconds}, which pays from "
    "{least:of inner step} on. A larger inner_steps trains less like one group",
    "local-sgd-too-often": "local SGD with {groups:of group}: an outer step of {outer:seconds} every {inner_steps:of "
    "inner step} costs more than one group in its fastest layout ({together:seconds} per step). Use inner_steps: "
    "{least} or more",
    "local-sgd-saves-nothing": "local SGD with {groups:of group} saves no time: between outer steps a step is not "
    "faster than the {together:seconds} with one group in its fastest layout, because the reduction of gradients is "
    "hidden or fast. Use groups: 1",
    "capped-attention": "model.attn_logit_softcapping: PyTorch has no fused kernel with a cap of scores, so attention "
    "stores them; with sequences of {seq_len} tokens a step takes {times:.2f} times as long as without the cap, and a "
    "rank needs {bytes:bytes} more",
    "text-part": "the plan is that of the language model of a {model_type} config.json; its image tower is neither "
    "planned nor trained",
    "attention-dropout": "model.attention_dropout = {attention_dropout:g}: no fused attention kernel draws the same "
    "dropout masks in every layout, so the scores are stored and memory grows with seq_len squared. Current models "
    "have no attention dropout",
    "too-few-readers": "data.loader.workers = {given}: the batches of a step take about {seconds:seconds} to read, of "
    "a step of {step:seconds}; set it to {needed}",
    "assumed-preemptions": "cluster.mean_time_between_interruptions is not set: a preemption every {hours:g} hours is "
    "assumed, as on AWS in 2022 and 2023; set it for your cluster, or use plan --trace",
    "grace-too-short": "one step and a checkpoint take {needed:seconds}, more than cluster.grace_seconds = "
    "{grace_seconds:g}: a preemption can lose up to {steps:whole} steps",
    # Sources of the numbers of a plan.
    "assumes-device": "device {device}: {source}",
    "calibrated-same": "times are scaled by {factor:.3g} ({low:.3g} to {high:.3g}): measured in {runs:of run} of this "
    "model in this layout on this hardware",
    "calibrated-similar": "times are scaled by {factor:.3g} ({low:.3g} to {high:.3g}): measured in {runs:of run} of "
    "similar size on this hardware, not of this model in this layout",
    "calibrated-other-nodes": "communication is as planned without a measurement: the measured run had {nodes:of "
    "node}, this one has {planned_nodes}",
    "assumes-kernels": "kernels: shares of the device's peak rates by size and GPU generation, in kernel_rates.json; "
    "host work and overlap of {framework}, in plan/frameworks/; `make bench-planner` prints the errors",
    "assumes-compiled": "compiled blocks: one kernel for each chain of element-wise operations; compared with the "
    "published figures of torchtitan and build-nanogpt, not with GPU runs of this engine; graph breaks in ZeRO-3's "
    "hooks are not counted. With training.compile: auto, memory is that of eager blocks",
    "assumes-network": "network between nodes: {network}; bus bandwidths by number of nodes, measured or estimated, "
    "in networks.json",
    "assumes-deepspeed-states": "model states and buffers: what DeepSpeed 0.19 allocates, from its source; ZeRO, "
    "arXiv:1910.02054",
    "assumes-reduced-type": "gradients are reduced between ranks in the dtype of the weights, also if grad_dtype is "
    "another one",
    "assumes-counted-states": "model states and buffers: what {framework} allocates, from its source",
    "assumes-fragmentation": "fragmentation: {share:percent} of what is allocated and freed in a step",
    "assumes-cpu-process": "outside the allocator: 0.5 GB for the process",
    "assumes-outside-allocator": "outside the allocator: CUDA context 0.7 GB, NCCL 0.4 GB per axis and 0.5 GB per "
    "peer of an all-to-all",
    "assumes-out-of-memory": "probability of running out of memory: log-normal errors of the estimate, calibrated on "
    "runs that ran out of memory in nanotron's Ultra-Scale sweep; nothing comparable is published for other frameworks",
    "assumes-text-activations": "activations: operation by operation, {element_bytes} bytes per element, with the "
    "attention kernel of the device or planner.attention; Korthikanti et al., arXiv:2205.05198",
    "assumes-logits": "logits and loss: {bytes_per_entry} bytes per token and vocabulary entry",
    "assumes-text-flops": "FLOPs per token: 6 N + 12 l s a d, attention counted unmasked; PaLM, arXiv:2204.02311, "
    "appendix B",
    "assumes-hybrid-blocks": "hybrid model: parameters by block; time and activations of a block are the mean over "
    "the model's blocks",
    "assumes-text-data": "data: {tokens:.3g} tokens, {per_parameter:.3g} per parameter, read while training",
    "assumes-counted-pairs": "reference: the pairs of both splits, as the prepared data have them",
    "assumes-estimated-pairs": "reference: as many pairs as the size of the files and their first rows suggest",
    "assumes-pairs-of-steps": "reference: as many pairs as the steps read, because those of data.source are unknown",
    "assumes-vision-activations": "activations: what autograd saves for each operation, {element_bytes} bytes per "
    "element; no dropout",
    "assumes-vision-time": "time of each operation: its arithmetic or its memory traffic, whichever is longer; mean "
    "error 6 to 8 % against the published results of timm, NVIDIA's examples and MLPerf",
    "assumes-vision-flops": "FLOPs: 6 per multiply-accumulate of the forward pass; tokens_per_second counts {unit}",
    "assumes-data-rate": "reading: {rank:bytes}/s by each rank and {node:bytes}/s by each node, and up to "
    "{first:bytes}/s by a node while the chunks of prepared files are compared with their hashes for the first time",
    "assumes-remote-data": "reading, if the source is a prepared dataset in a remote store: up to {first:bytes}/s by "
    "each node at first, in blocks of {block:bytes}, each once as long as data.cache.size ({cache:bytes}) holds all "
    "of them",
    "assumes-data-thread": "readers: the batches of a step of {step:seconds} take a rank about {seconds:seconds} to "
    "read, so its thread is enough (data.loader.workers: 0); measured on one x86 core",
    "assumes-data-workers": "readers: the batches of a step of {step:seconds} take a rank about {seconds:seconds} to "
    "read, so it needs {workers} data.loader.workers; measured on one x86 core",
    "assumes-llava": "each sample is one image and a sequence of {seq_len:whole} tokens, those of the image included; "
    "shorter ones take less",
    "assumes-samples": "data: {samples:.3g} {unit}",
    "assumes-image-rate": "image loader: {rank:,.0f} images/s by each rank and {node:,.0f} by each node, decoded and "
    "augmented by {cores} cores of a node at {core_rate:,.0f} images/s each; sources may be larger or smaller than "
    "ImageNet's",
    "assumes-image-readers": "image readers: with data.loader.workers: auto, {workers:of process} of each rank, which "
    "has {cores:of core}; a rank with more cores has one process for each but one, up to 15",
    "assumes-image-bytes": "reading: {read:bytes}/s by each node from storage or network, at {image_bytes:bytes} per "
    "image as in ImageNet",
    "ask-loader": "does the image loader keep up with the step",
    "images-by-core": "{core_rate:,.0f} images/s",
    "images-by-node": "{node_rate:,.0f} images/s and node, {cores} cores",
    "loader-keeps-up": "yes: data.loader.workers = {workers} of each rank, and {needed} would do",
    "workers-are-too-few": "no: data.loader.workers = {workers}; {needed} would do",
    "cores-are-too-few": "no: a rank needs {rate:,.0f} images/s, which takes {needed} cores that decode and augment "
    "about {core_rate:,.0f} each",
    "storage-is-too-slow": "no: each node has to read {needed:bytes}/s",
    "assumes-vision-data": "data: {samples:.3g} {unit}; reading and decoding are assumed to keep up",
    "assumes-storage": "checkpoints: 1.2 GB/s per node to shared storage, as BLOOM's chronicle reports, unless the "
    "spec sets cluster.storage_bandwidth; restarts: 180 s and loading; interval by Young 1974, goodput by Daly 2006",
    "assumes-spare-nodes": "{spare:of spare node}: {share:percent} of the cost; worth it if a job would wait for more "
    "than {seconds:seconds} in the queue after a failure",
    "assumes-stated-interruptions": "interruptions: as in the spec, of the whole job and for any cause",
    "assumes-failures": "failures: one per {gpu_hours:,.0f} GPU hours, as {reporter}",
    "assumes-stated-preemptions": "preemptions: as in the spec, of the whole job; hardware failures add to them",
    "assumes-traced-preemptions": "preemptions: one per {hours:g} hours of the job, as in 21 traces of AWS instances "
    "from 2022 and 2023 (skypilot-org/spot-traces); waiting for capacity is not counted",
    "assumes-comparison": "planner.framework = {framework}: for comparison; it cannot be submitted",
    # The explanation of a layout (--explain): questions, notes on rows of numbers, answers, and conclusions.
    "ask-training": "What trains",
    "trains-share": "{trained:count} of {parameters:count} parameters ({share:percent})",
    "group-trains": "{parameters:count} parameters, steps {first_step} to {last_step}",
    "stage-trains": "{parameters:count} parameters train",
    "backward-to-embedding": "The backward pass goes through all blocks to the embeddings",
    "backward-to-block": "The backward pass ends in block {block} of 0 to {last}, the lowest with a trained "
    "parameter; those below keep nothing for it",
    "backward-to-first-block": "The backward pass goes through all blocks",
    "backward-in-head": "The backward pass ends before the blocks, which keep nothing for it",
    "ask-reference": "What does the reference of dpo cost",
    "reference-once": "Its log-probabilities of {pairs:count} pairs are computed once, before step 1: {share:percent} "
    "of the run",
    "ask-states": "How much memory do weights, gradients and optimizer states need",
    "ask-one-rank": "Does the run fit on one {device}, with a micro-batch of 1",
    "ask-sharding": "Does it fit with data parallelism over all {ranks:whole} ranks, with states sharded by ZeRO",
    "ask-tensor": "Does it fit if the GPUs of a node share every layer (tensor parallelism, with ZeRO-{zero_stage})",
    "ask-pipeline": "Does it fit in pipeline stages, with tensor parallelism {tensor} in each stage",
    "ask-axes": "What does each axis of the layout gain",
    "ask-recomputation": "Must activations be recomputed",
    "ask-compile": "Are the blocks compiled",
    "ask-micro-batch": "How are the {batch:whole} {samples} of a step divided",
    "ask-bubble": "How long do pipeline stages wait for each other",
    "ask-communication": "What does communication cost",
    "ask-winner": "Why this layout and not the next best",
    "chosen": "chosen",
    "bytes-per-parameter": "{bytes_per_parameter:.3g} bytes per parameter",
    "recomputation-saves-nothing": "recomputation saves nothing",
    "ranks-do-not-divide": "the batch or the ranks do not divide",
    "the-spec-asks": "but the spec sets it",
    "bubble-formula": "({stages} - 1) / ({micro_batches} x {chunks})",
    "yes": "Yes",
    "no": "No",
    "states-total": "{bytes_per_parameter:.3g} bytes for each of {parameters:whole} parameters",
    "states-of-device": "These states alone take {share:percent} of the memory of one {device}",
    "one-rank-too-small": "No: even with recomputation it needs {times:.2f} times the memory of one",
    "spread-states": "The states must be sharded over several ranks",
    "yes-recomputing": "Yes, with recompute {mode}",
    "data-parallel-is-enough": "Data parallelism over {ranks:whole} ranks is enough; the model need not be split to "
    "fit",
    "batch-does-not-divide": "No: a batch of {batch:whole} {samples} does not divide over {ranks:whole} data-parallel "
    "ranks",
    "share-sequences": "Some ranks must work on the same sequence",
    "sharding-too-small": "No: what one {device} still holds is mostly {what}",
    "cut-layers": "The layers themselves must be split",
    "sharding-fits": "Yes: ZeRO-{zero_stage} with recompute {mode} takes {share:percent} of the memory",
    "no-cut-needed": "Layers need not be split",
    "cut-for-speed": "Layers need not be split to fit, but splitting may be faster",
    "node-too-small": "No: even over all {gpus} GPUs of a node it does not fit",
    "cut-into-stages": "The layers must be divided into pipeline stages across nodes",
    "tensor-degree": "The plan uses tensor parallelism {degree}; the fast link inside the node carries its traffic",
    "yes-from-stages": "Yes, with {stages} stages or more",
    "stages-cost-a-bubble": "Stages send only activations, which the network between nodes can carry; the cost is the "
    "pipeline bubble",
    "sequences-are-cut": "Sequences are split too: sequence {sequence}, context {context}",
    "axis-needed-to-fit": "Without {axis} it does not fit",
    "slower-without-axis": "Without {axis} a step is {share:percent} longer",
    "faster-without-axis": "Without {axis} a step is {share:percent} shorter",
    "axes-divide": "Each is needed for the ranks and the batch to divide",
    "no-recomputation": "No: all activations fit",
    "recomputation-to-fit": "Yes: without it they do not fit, so {mode} recomputation costs time",
    "recomputation-chosen": "Yes: {mode}; less would leave too little memory free, or gain nothing",
    "compiled": "Yes: an eager step is modeled to take {gain:percent} longer. training.compile: false disables it",
    "not-compiled-as-asked": "No, as the spec asks; compiled blocks are modeled to make a step {gain:percent} faster",
    "not-compiled": "No: auto is off for experts, fp8, short runs and older GPUs. training.compile: true enables it",
    "batch-parts": "{batch:whole} = micro-batch {micro_batch} x accumulation {accumulation} x data {data}",
    "micro-batch-takes-all": "A micro-batch is already the full share of a rank",
    "larger-micro-batch-does-not-fit": "A larger micro-batch does not fit",
    "larger-micro-batch-not-faster": "A larger micro-batch is no faster",
    "larger-micro-batch-too-risky": "A larger micro-batch leaves too little memory free for the error of the memory "
    "model",
    "bubble-share": "{share:percent} of the step, while the pipeline fills and drains",
    "shrink-the-bubble": "More micro-batches, or virtual stages, would shrink it",
    "no-communication": "Nothing: there is one rank",
    "communication-share": "{share:percent} of the step is exposed communication",
    "most-traffic": "Most bytes are sent for {axis} parallelism",
    "only-layout": "It is the only layout that the spec allows",
    "fastest-layout": "Of {considered:whole} layouts it is the fastest that fits with a margin, or a simpler one that "
    "is as fast",
    "pinned-by-spec": "The spec sets {settings}",
}
