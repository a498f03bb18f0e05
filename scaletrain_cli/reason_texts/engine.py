"""The texts of the engine and of ``worker``: why a rank failed."""

from scaletrain_cli.reasons import Texts

TEXTS: Texts = {
    # Training: the loss and the gradient.
    "gradient-not-finite": (
        "step {step}: loss {loss:number}, gradient norm {grad_norm:number}; the update was not applied, so no "
        "checkpoint contains it",
        "Lower the learning rate, lengthen the warm-up, or inspect batch {batch}.",
    ),
    "gradient-not-finite-again": (
        "step {step}: loss {evidence[loss]:number}, gradient norm {evidence[grad_norm]:number}, again after "
        "{rollbacks:of rollback} to step {to_step} (guard.spike.retries) and without a newer clean checkpoint; "
        "skipping batches {skipped} did not help, so the data is not the cause",
        "Lower the learning rate, or resume with other settings.",
    ),
    "loss-not-finite": (
        "step {step}: the loss is NaN or infinite; no checkpoint was saved since it was last finite",
        "Lower the learning rate, lengthen the warm-up, or inspect the data of these steps.",
    ),
    "norm-not-finite": (
        "step {step}: the gradient norm is NaN or infinite; no checkpoint was saved since it was last finite",
        "Lower the learning rate, lengthen the warm-up, or inspect the data of these steps.",
    ),
    "trainer-setting": ("{key} = {value}: {problem}", "{remedy}"),
    "loss-spike": (
        "step {step}: another spike at steps {evidence[steps]:list} with losses {losses:list}, after {rollbacks:of "
        "rollback} to step {to_step} (guard.spike.retries) and without a newer clean checkpoint; skipping batches "
        "{skipped} did not help, so the data is not the cause",
        "Lower the learning rate, or resume with other settings.",
    ),
    "state-changed": (
        "the {parts:list} of rank {ranks:list} changed between two updates, found in step {step}, where nothing may "
        "change them: the memory or the device of its node is at fault. The state after step {clean_step} was clean; "
        "later checkpoints are set aside",
        "Have the node drained and tested; runs exclude it for a week (scaletrain nodes list)",
    ),
    "state-changed-on-several": (
        "the {parts:list} of ranks {ranks:list} changed between two updates, found in step {step}. The state after "
        "step {clean_step} was clean; later checkpoints are set aside",
        "Memory seldom fails on several ranks at once: if something other than the optimizer changes weights, set "
        "guard.checksum: 0",
    ),
    "replica-differs": (
        "after step {step} rank {ranks:list} has another state than its replicas, which agree with each other: its "
        "memory or its device is at fault. The state after step {clean_step} was clean; later checkpoints are set "
        "aside",
        "Have the node drained and tested; runs exclude it for a week (scaletrain nodes list)",
    ),
    "replicas-differ": (
        "after step {step} the states of ranks {ranks:list} differ, which should be equal to the bit; it cannot be "
        "determined which of them is corrupt. The state after step {clean_step} was clean; later checkpoints are set "
        "aside",
        "Run scaletrain preflight on the nodes of these ranks; with three or more replicas the corrupt one is named",
        "GPUs of different types may round differently in ZeRO-0: then set guard.checksum: 0",
    ),
    "output-differs": (
        "in step {step} rank {ranks:list} has other outputs for a micro-batch than its replicas, which agree with "
        "each other: its device is at fault. The last comparison without a difference was after step {clean_step}; "
        "later checkpoints are set aside",
        "Have the node drained and tested; runs exclude it for a week (scaletrain nodes list)",
    ),
    "outputs-differ": (
        "in step {step} the outputs of ranks {ranks:list} for one micro-batch differ, which should be equal to the "
        "bit; it cannot be determined which rank computes wrongly. The last comparison without a difference was after "
        "step {clean_step}; later checkpoints are set aside",
        "Run scaletrain preflight on the nodes of these ranks; with three or more replicas the wrong one is named",
        "GPUs of different types may round differently: then set guard.replay: 0",
    ),
    "loss-scale-at-floor": (
        "the gradient is not finite at loss scale {loss_scale:g}, the smallest that training.loss_scale.minimum "
        "allows; the weights are unchanged",
        "Lower the learning rate or inspect the batch; bf16 needs no loss scale.",
    ),
    # Profiles.
    "profile-request-invalid": "the file profile of the run directory is not a request: {message}",
    "profile-step-passed": (
        "step {step} is too early: the run is about to train step {next}, and one step before the trace warms the "
        "profiler up",
        "Name step {earliest} or a later one, or none.",
    ),
    "profile-beyond-end": "step {last} would be profiled, and the run has {total} steps",
    "profile-unknown-rank": "there is no rank {rank}: the run has {ranks:of rank}",
    "profile-nvtx-on-cpu": "NVTX ranges need GPUs, and the run trains on CPUs",
    # Validation.
    "metric-not-measured": (
        "{key}: {metric} is not a measure of the validation of these data, which has {names:list}",
        "Use one of them. With training.loss: bce, top1 and top5 need data with exactly one class per image.",
    ),
    # Preference pairs.
    "reference-missing": (
        "{path}: the reference log-probabilities are missing or damaged, and after {step:of step} the weights are no "
        "longer those of the reference",
        "Restore the file from a copy of the run directory, or submit a new run.",
    ),
    "reference-differs": (
        "{folder}: the reference log-probabilities differ from those of the model at step 0 by {difference:.2g} of "
        "their size, and {allowed:g} is allowed",
        "Delete the folder, so that they are computed again.",
        "Check that model.weights was not changed.",
    ),
    "objective-needs-pairs": (
        "training.objective: dpo needs preference pairs, and the dataset has none",
        "Set data.format: preference.",
    ),
    "pairs-need-dpo": (
        "the dataset has preference pairs, and training.objective is {objective}",
        "Set training.objective: dpo.",
    ),
    "liger-without-weights": (
        "training.cross_entropy: liger has no weights of labels, which the rows of the dataset have",
        "Use chunked.",
    ),
    # The text to train on.
    "reader-killed": (
        "a process of data.loader.workers ended with {status}, after {restarts} others were started again",
        "Set fewer data.loader.workers if the kernel of the node reports that it ran out of memory.",
    ),
    "data-source-unreadable": "{key} = {source}: {problem}",
    "file-unreadable": "{path} cannot be read: {error}",
    "file-not-utf-8": (
        "{path} is not UTF-8 text: {replaced} of {characters} characters cannot be decoded",
        "Convert it with iconv, or leave it out of data.source.",
    ),
    # The tokenizer.
    "tokenizer-unreadable": (
        "data.tokenizer.path = {path}: {error}",
        "Give the path of a Hugging Face tokenizer.json.",
    ),
    "tokenizer-invalid": "data.tokenizer.path = {path}: cannot be used: {error}",
    "tokenizer-without-end-of-text": "{path} has no end-of-text token; it needs one of {tokens:list}",
    # The prepared dataset.
    "dataset-unwritable": "{folder} cannot be prepared: {path}: {error}",
    "not-a-dataset": "{folder} is not a prepared dataset: {error}",
    "dataset-schema-unknown": (
        "{folder} has schema {schema!r}; this version reads {expected}",
        "Prepare the data again.",
    ),
    "dataset-too-small": "{folder} holds {tokens:whole} training tokens, fewer than one sequence of {length}",
    "data-corrupt": (
        "{file}: {problem}; no step was trained on it",
        "Restore the file from a copy, or delete the folder {folder} and prepare the same data again with `scaletrain "
        "data prepare`; then `scaletrain resume`.",
    ),
    "data-of-ranks-differ": (
        "the nodes of ranks {ranks:list} have other data in {folders:list} than the first node",
        "Delete the folders there, so that the data are prepared again from the same files",
    ),
    "data-of-checkpoint-differs": (
        "{checkpoint} was trained on dataset {saved} and this one is {found}: resuming would train on other data",
        "Restore the data, or start a new run.",
    ),
    "checkpoint-without-data": (
        "{checkpoint} does not state the data that it was trained on: its state.json cannot be read",
        "Move its folder aside, so that an earlier checkpoint is used.",
    ),
    "data-was-edited": (
        "{checkpoint} was trained on data with other hashes than those of this dataset, which has the same "
        "fingerprint: one of them was edited",
        "Restore the dataset's folder from a copy, or start a new run.",
    ),
    "data-too-small-to-validate": (
        "{source} is too small to validate on: it has {train} sequences of {length} tokens to train on and "
        "{validation} to validate on, and one round of validation takes {width}",
        "Add text, or submit the run with a shorter model.seq_len or with evaluation.every: 0.",
    ),
    "images-too-few-to-validate": (
        "{source} is too small to validate on: it has {train} {unit} to train on and {validation} to validate on, and "
        "one round of validation takes {width}",
        "Add images, or submit the run with a smaller batch or with evaluation.every: 0.",
    ),
    "vocabulary-too-large": (
        "{folder} has {token_ids} token ids and model.vocab_size is {vocab_size}",
        "Set model.vocab_size to at least {token_ids}.",
    ),
    # The weights in model.weights, or in those of a part of the model.
    "weights-invalid": "{key}: {problem}",
    "weights-unreadable": "{key}: {path} cannot be read: {error}",
    "peft-without-adapter": ("--format peft: the run has no model.adapter", "Use --format merged."),
    "peft-dora-beside-experts": (
        "--format peft: PEFT does not load DoRA on {module} of this architecture, because it takes the layer for one "
        "of the stacked experts",
        "Use --format merged.",
    ),
    "peft-without-base": (
        "--format peft: the run has no model.weights, and an adapter is of no use without the model that it is for",
        "Use --format merged.",
    ),
    "peft-module-trained": (
        "--format peft: {module} was trained itself, and PEFT cannot keep it whole beside an adapter",
        "Use --format merged.",
    ),
    "quantization-missing": ("model.quantization needs bitsandbytes: {error}", "Run {command}."),
    "adapter-unreadable": "model.adapter.weights: {path} cannot be read: {error}",
    "adapter-differs": "model.adapter.weights: {folder} does not hold this adapter; {shown} of {differences:of "
    "difference}",
    "weights-missing": "{key}: {folder} has no {name}",
    "weights-not-loaded": "{key}: {tensors:of tensor} in {folder} are not loaded, of {layers:of layer} that predict "
    "tokens after the next one",
    "weights-differ": "{key}: {folder} does not hold this model; {shown} of {differences:of difference}",
    # Libraries and devices that a setting needs.
    "local-sgd-groups-differ": (
        "{checkpoint} has the states of {saved:of group} of local SGD, and the run has {groups}",
        "Keep training.local_sgd.groups.",
    ),
    "bitsandbytes-missing": (
        "training.optimizer.name = {name} needs bitsandbytes, which cannot be imported ({error})",
        "Run {command}, or use adamw.",
    ),
    "fp8-needs-nvidia-gpu": ("training.precision = fp8 needs an NVIDIA GPU, not {device}", "Use bf16."),
    "fp8-needs-compute-capability": (
        "training.precision = fp8 needs compute capability {needed}, and {device} has {found}",
        "Use bf16.",
    ),
    "torchao-missing": ("training.precision = fp8 needs torchao, which cannot be imported ({error})", "Run {command}."),
    "liger-needs-whole-vocabulary": (
        "training.cross_entropy: liger needs the whole vocabulary on each rank",
        "Use chunked.",
    ),
    "liger-needs-cuda": ("training.cross_entropy: liger needs a CUDA device, not {device}", "Use chunked."),
    "liger-missing": ("training.cross_entropy: liger cannot be imported ({error})", "Run {command}, or use chunked."),
    "async-io-unavailable": (
        "layout.offload_device = nvme: DeepSpeed's async_io operator needs libaio with its headers and a C++ compiler "
        "on every node",
        "Install them (Debian: apt-get install libaio-dev g++), or offload to cpu.",
    ),
    # Checkpoints.
    "not-a-checkpoint": "{path} is not a valid checkpoint: {problem}",
    "not-a-shard": "{path} is not a shard of a checkpoint: {error}",
    "checkpoint-incomplete": "{checkpoint} has {found} of {needed} values of {key}",
    "later-attempt": "attempt {attempt} begins after attempt {later}",
    "memory-copies-no-room": "checkpoint.in_memory needs {needed_bytes:bytes} on this node, more than {share:percent} "
    "of the {free_bytes:bytes} that are free in /dev/shm and for the job",
    "memory-copies-on-one-node": "copies in host memory stay on their own node, and a lost node resumes from disk: "
    "with those of another node they take {needed_bytes:bytes}, more than {share:percent} of the {free_bytes:bytes} "
    "that are free in /dev/shm and for the job",
    "memory-copies-failed": "a copy in host memory failed: {error}",
    "attempt-superseded": "attempt {attempt} was superseded by a later one; its checkpoint was not committed",
    "random-state-unknown": (
        "the checkpoint's random state is not {schema}: another version of scaletrain wrote it, in a format that this "
        "version does not load because it can run code",
        "Resume with the version that wrote it, or export the weights with `scaletrain checkpoint export` and start a "
        "run with model.weights.",
    ),
    "evaluation-preempted": "the evaluation was stopped by a signal; its finished tasks are kept",
    "evaluation-without-tokenizer": "the weights were exported without a tokenizer, because this node has neither the "
    "prepared data nor the spec's tokenizer",
    "sample-without-tokenizer": (
        "the weights were exported without a tokenizer, because this machine has neither the prepared data nor the "
        "spec's tokenizer",
        "Sample where the data are.",
    ),
    "sample-without-template": (
        "the tokenizer has no chat template to write the prompt with",
        "Use --raw, and write the prompts as the rows of the run begin.",
    ),
    "sample-prompt-too-long": ("the prompt has {tokens} tokens, of {longest} positions of the model", "Shorten it."),
    "lm-eval-not-started": (
        "{program} cannot be started: {error}",
        "Install lm_eval[hf] on the nodes, or set `command` of the task",
    ),
    "lm-eval-failed": ("{program} ended with exit code {exit_code}: {end}", "Its whole output is in {log}"),
    "lm-eval-without-results": "{program} wrote no results_*.json into {folder}",
    "no-averaged-weights": (
        "{checkpoint} has no averaged weights",
        "A run has them with training.averaging, of name: checkpoints in the last quarter of its steps.",
    ),
    "weight-too-large": (
        "{name} has values up to {largest:.6g}, too large for {dtype}",
        "Export with --dtype fp32, or with bf16, which holds values up to 3.39e38.",
    ),
    "output-exists": ("{path} exists and is not overwritten", "Give another folder with --output."),
    "disk-too-small": (
        "{folder} has {free_bytes:bytes} free and checkpoints will need {checkpoints} x {checkpoint_bytes:bytes} "
        "more: checkpoint.keep = {keep}, a clean one and the next",
        "Free space, lower checkpoint.keep, or set checkpoint.dir to a larger disk.",
    ),
    "too-few-inodes": (
        "{folder} has {free_files:whole} free inodes and checkpoints of {ranks:of rank} will need {files:whole}",
        "Delete files, or set checkpoint.dir to another disk.",
    ),
    "beyond-last-step": (
        "the latest checkpoint is of step {step}, and the run has {steps} steps",
        "Set more: `scaletrain resume RUN --set training.steps=...`",
    ),
    "no-valid-checkpoint": (
        "no valid checkpoint in {folder}: {problems}",
        "`scaletrain resume --from-scratch` starts over.",
    ),
    "checkpoints-unreadable": (
        "no node of the job can read a checkpoint in {folder}: {problems}",
        "Check that file system, the owner and the permissions of the files; `scaletrain resume` then continues the "
        "run.",
    ),
    "checkpoint-folder-unreadable": ("{folder} cannot be read: {error}", "Check the file system and the permissions."),
    "checkpoint-unreadable-here": "{path} cannot be read on {node}, while other nodes can read it: {problem}",
    "checkpoint-unreadable-elsewhere": "{path} cannot be read on {nodes:list}",
    "base-weights-unreadable": (
        "{folder}: cannot read the weights that the run starts from, and that its checkpoints do not store: {error}",
        "Restore the folder, which model.weights names.",
    ),
    "base-weights-differ": (
        "{checkpoint} was trained on other weights than those in {folder}: {file} is not the file that was in "
        "{saved}, from which parameters that never train are read",
        "Restore the files that the run started from.",
    ),
    "states-bound-to-stage": (
        "the optimizer's states are quantized in blocks, and cannot be kept where other parameters begin to train",
        "Train the same parameters in all steps, or use adamw.",
    ),
    "state-not-held": "no rank holds {kind} of {name}; the state in memory is incomplete",
    "layout-bound-states": (
        "{checkpoint} has optimizer states that are quantized in blocks, which only the layout that saved them can "
        "read",
        "Resume with the same number of ranks, parallel degrees and zero_stage.",
    ),
    # The job.
    "no-node-agent": "{missing:list} not set: this program must be started by a ScaleTrain node agent",
    "record-unreadable": "{path} cannot be read",
    "fault-invalid": "{variable}: {text!r} cannot be parsed: {error}",
    "fault-unknown": "{variable}: {text!r} is of no known kind; kinds are {kinds:every}",
    "fault-part-unknown": "{variable}: {text!r} has the part {part!r}; parts are {parts:every}",
    "fault-key-unknown": "{variable}: {text!r} has unknown keys ({unknown:every}); keys of {kind} are {keys:every}",
    "world-size-differs": "planned for {planned:of rank}, started with {found}",
    "gpu-missing": "the rank needs GPU {local_rank} and torch finds {found:of GPU} on this node",
    "preflight-failed": ("rank {rank}: {problems}", "`guard.preflight: never` skips this check."),
    "preempted-in-set-up": "preempted before the first step; the latest checkpoint is unchanged",
    # Findings of the preflight about a rank or a node, beside the others.
    "device-memory-short": "{device} has {free_bytes:bytes} free of {total_bytes:bytes} and the plan needs "
    "{peak_bytes:bytes}",
    "device-slow": "{device} computes {tflops:.3g} TFLOP/s, the others {usual_tflops:.3g}",
    "network-slow": "the network transfers {gbps:.3g} GB/s, that of the other nodes {usual_gbps:.3g}",
    "version-differs": "{library} {version}, the others have {usual}",
    "clock-ahead": "the clock is {seconds:.0f} s ahead of the others",
    "clock-behind": "the clock is {seconds:.0f} s behind the others",
    "all-reduce-slow": (
        "an all-reduce over all ranks takes {measured:seconds} and the plan expects {planned:seconds}",
        "Check with NCCL_DEBUG=INFO that NCCL uses the intended network.",
    ),
    # Errors of libraries and the system; ``error`` is their own message.
    "out-of-memory": "GPU out of memory: {error}",
    "host-out-of-memory": "host out of memory: {error}",
    "disk-full": "disk full: {error}",
    "connection-lost": "communication between ranks failed: {error}",
    "device-failed": "hardware failure: {error}",
    "failed": "{type}: {error}",
    "with-problems": "{cause}: {problems}",
}
