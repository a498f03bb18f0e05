"""The texts of the node agent: why it ended an attempt, from its own observation of ranks and node."""

from __future__ import annotations

from scaletrain_cli.reasons import Text

TEXTS: dict[str, Text] = {
    # How a rank ended that could not state it itself.
    "killed-for-memory": Text(
        "rank {rank} was killed by the kernel: the host, or the job's memory limit, was out of memory"
    ),
    "aborted": Text("rank {rank} ended with {signal}; the end of {log} has the cause"),
    "disk-full": Text("rank {rank} failed and {folder} has no space left: {error}"),
    # A hang, and which rank it is due to.
    "hung": Text("no progress for {silent_seconds:seconds}: {suspect}. Stacks: {stacks}"),
    "hung-elsewhere": Text("another node reports a hang: {suspect}. Stacks: {stacks}"),
    "rank-stopped": Text("rank {rank} did not respond: stopped by a signal (state T), since step {step} ({phase})"),
    "rank-traced": Text("rank {rank} did not respond: stopped by a debugger (state t), since step {step} ({phase})"),
    "rank-in-kernel": Text(
        "rank {rank} did not respond: waiting in the kernel for a disk, network file system or driver (state D), since "
        "step {step} ({phase})"
    ),
    "rank-busy": Text(
        "rank {rank} did not respond: running code outside Python (state R), since step {step} ({phase})"
    ),
    "rank-unresponsive": Text("rank {rank} did not respond: state {state}, since step {step} ({phase})"),
    "rank-behind": Text(
        "rank {rank} is behind: in step {step} ({phase}) while rank {ahead} is in step {ahead_step} ({ahead_phase})"
    ),
    "other-node": Text("all ranks wait in step {step} ({phase}) for another node"),
    "no-suspect": Text("no rank stands out: all responded from step {step} ({phase})"),
    # Why no rank was started.
    "unfit": Text("{problems}"),
    "start-failed": Text("{error}"),
}
