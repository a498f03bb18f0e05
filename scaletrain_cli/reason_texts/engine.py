"""The texts of the engine and the node agent: why a rank or a node failed."""

from __future__ import annotations

from scaletrain_cli.reasons import Text

TEXTS: dict[str, Text] = {
    # Training: the loss and the gradient.
    "gradient-not-finite": Text(
        "step {step}: loss {loss}, gradient norm {grad_norm}; the update was not applied and the latest checkpoint is "
        "valid",
        ("Lower the learning rate, lengthen the warm-up, or inspect batch {batch}.",),
    ),
    "gradient-not-finite-again": Text(
        "step {step}: gradient not finite again, after {rollbacks:of rollback} to step {to_step} "
        "(guard.spike.retries) and no newer "
        "clean checkpoint: {evidence}; skipping batches {skipped} did not help, so the data is not the cause",
        ("Lower the learning rate, or resume with other settings.",),
    ),
    "loss-spike": Text(
        "step {step}: the loss spiked again, after {rollbacks:of rollback} to step {to_step} "
        "(guard.spike.retries) and no newer "
        "clean checkpoint: {evidence}; skipping batches {skipped} did not help, so the data is not the cause",
        ("Lower the learning rate, or resume with other settings.",),
    ),
    "loss-scale-at-floor": Text(
        "the gradient is not finite at loss scale {loss_scale:g}, the smallest that "
        "training.loss_scale.minimum allows; "
        "the weights are unchanged",
        ("Lower the learning rate or inspect the batch; bf16 needs no loss scale.",),
    ),
    # Data.
    "data-corrupt": Text(
        "{file}: {problem}; no step was trained on it",
        (
            "Restore the file from a copy, or delete the folder {folder} and prepare the same data again with "
            "`scaletrain data prepare`; then `scaletrain resume`.",
        ),
    ),
    "data-of-checkpoint-differs": Text(
        "{checkpoint} was trained on dataset {saved} and this one is {found}: resuming would train on other data",
        ("Restore the data, or start a new run.",),
    ),
    "data-was-edited": Text(
        "{checkpoint} was trained on data with other hashes than those of this dataset, which has the same "
        "fingerprint: "
        "one of them was edited",
        ("Restore the dataset's folder from a copy, or start a new run.",),
    ),
    "data-too-small-to-validate": Text(
        "data.source is too small to validate on: it has {train} sequences of {length} tokens to train on and "
        "{validation} to validate on, and one round of validation takes {width}",
        ("Add text, or submit the run with a shorter model.seq_len or with evaluation.every: 0.",),
    ),
    "vocabulary-too-large": Text(
        "{folder} has {token_ids} token ids and model.vocab_size is {vocab_size}",
        ("Set model.vocab_size to at least {token_ids}.",),
    ),
    # Checkpoints.
    "disk-too-small": Text(
        "{folder} has {free_bytes:bytes} free and checkpoints will need {checkpoints} x {checkpoint_bytes:bytes} more: "
        "checkpoint.keep = {keep}, a clean one and the next",
        ("Free space, lower checkpoint.keep, or set checkpoint.dir to a larger disk.",),
    ),
    "too-few-inodes": Text(
        "{folder} has {free_files:whole} free inodes and checkpoints of {ranks:of rank} will need {files:whole}",
        ("Delete files, or set checkpoint.dir to another disk.",),
    ),
    "no-valid-checkpoint": Text(
        "no valid checkpoint in {folder}: {problems}", ("`scaletrain resume --from-scratch` starts over.",)
    ),
    "checkpoints-unreadable": Text(
        "no node of the job can read a checkpoint in {folder}: {problems}",
        (
            "Check that file system, the owner and the permissions of the files; `scaletrain resume` then "
            "continues the "
            "run.",
        ),
    ),
    "checkpoint-folder-unreadable": Text(
        "{folder} cannot be read: {error}", ("Check the file system and the permissions.",)
    ),
    "checkpoint-unreadable-here": Text(
        "{path} cannot be read on {node}, while other nodes can read it: {problem}",
    ),
    "checkpoint-unreadable-elsewhere": Text("{path} cannot be read on {nodes:list}"),
    "layout-bound-states": Text(
        "{checkpoint} has optimizer states that are quantized in blocks, which only the layout that saved "
        "them can read",
        ("Resume with the same number of ranks, parallel degrees and zero_stage.",),
    ),
    # The job.
    "world-size-differs": Text("planned for {planned:of rank}, started with {found}"),
    "gpu-missing": Text("the rank needs GPU {local_rank} and torch finds {found:of GPU} on this node"),
    "preflight-failed": Text("rank {rank}: {problems}", ("`guard.preflight: never` skips this check.",)),
    "preempted-in-set-up": Text("preempted before the first step; the latest checkpoint is unchanged"),
    # Findings of the preflight about a rank or a node, beside the others.
    "device-memory-short": Text(
        "{device} has {free_bytes:bytes} free of {total_bytes:bytes} and the plan needs {peak_bytes:bytes}"
    ),
    "device-slow": Text("{device} computes {tflops:.3g} TFLOP/s, the others {usual_tflops:.3g}"),
    "network-slow": Text("the network transfers {gbps:.3g} GB/s, that of the other nodes {usual_gbps:.3g}"),
    "version-differs": Text("{library} {version}, the others have {usual}"),
    "clock-ahead": Text("the clock is {seconds:.0f} s ahead of the others"),
    "clock-behind": Text("the clock is {seconds:.0f} s behind the others"),
    "all-reduce-slow": Text(
        "an all-reduce over all ranks takes {measured:seconds} and the plan expects {planned:seconds}",
        ("Check with NCCL_DEBUG=INFO that NCCL uses the intended network.",),
    ),
    # Errors of libraries and the system; ``error`` is their own message.
    "out-of-memory": Text("GPU out of memory: {error}"),
    "host-out-of-memory": Text("host out of memory: {error}"),
    "disk-full": Text("disk full: {error}"),
    "connection-lost": Text("communication between ranks failed: {error}"),
    "device-failed": Text("hardware failure: {error}"),
    "failed": Text("{type}: {error}"),
}
