"""What each way to end means for who trains, and what to do about it. Pure: a reason in, words out."""

from __future__ import annotations

from dataclasses import dataclass

from scaletrain_cli.launch.judgement import Reason


@dataclass(frozen=True)
class Ending:
    """``meaning`` completes "attempt N ended:"; ``actions`` hold ``{run}`` where the run id goes."""

    meaning: str
    actions: tuple[str, ...] = ()


_RESUME = "scaletrain resume {run}"
_LOOK = "scaletrain logs {run} shows what the ranks printed"

ENDINGS: dict[Reason, Ending] = {
    "done": Ending("it is done"),
    "cancelled": Ending("the run was cancelled", (f"{_RESUME} goes on",)),
    "preempted": Ending("it was preempted; the ranks saved their state and exited"),
    "time-limit": Ending(
        "its time was up; the ranks saved their state before that",
        (
            "A longer limit costs fewer restarts: `scaletrain resume {run} --set cluster.slurm.time=...`, after "
            "`scaletrain cancel {run}` where it is queued again",
        ),
    ),
    "out-of-grace": Ending(
        "it was told to leave and could not save in time: the last committed checkpoint is what is left",
        (
            "Raise cluster.grace_seconds to more than a step and a save take, and the site's own limit with it "
            "(Slurm: GraceTime, KillWait; Kubernetes: terminationGracePeriodSeconds)",
            "Save more often (checkpoint.every), so that less is lost where no grace helps",
        ),
    ),
    "node": Ending(
        "a node was lost: its agent ended without reporting an exit status",
        ("scaletrain nodes list shows what is kept away from, and why", "Ask the administrator about that node"),
    ),
    "wrong-nodes": Ending(
        "a node is not what was planned",
        (
            "Ask for the right ones: cluster.gpu, cluster.gpus_per_node, or the scheduler's constraints",
            "scaletrain nodes list shows which are kept away from now",
        ),
    ),
    "hardware": Ending(
        "a device broke: nothing in the program can cause this",
        ("Have the node drained and the device tested; runs keep away from it for a week (scaletrain nodes list)",),
    ),
    "hang": Ending(
        "it came to a stand: some rank made no progress and the others waited for it in a collective",
        (
            "Read the stacks: what the named rank does there is the cause, what the others do is waiting",
            "A step that is really that long needs guard.hang in the spec",
        ),
    ),
    "communication": Ending(
        "ranks lost their connections and no rank says why it went: the network, or a node that died without a trace",
        (
            "If it comes again on the same nodes, it is theirs: scaletrain nodes list, and the administrator",
            "`--set env.NCCL_DEBUG=INFO` on resume makes NCCL say which interface and peer it loses",
        ),
    ),
    "crash": Ending("the program failed", (_LOOK, "Mend the cause, then " + _RESUME)),
    "killed": Ending(
        "something outside killed a rank: no memory limit of the kernel, no agent and no signal of the scheduler did",
        ("Look for who may: an administrator, a clean-up job, a limit on processes of the login session",),
    ),
    "oom": Ending(
        "a device ran out of memory",
        (
            "scaletrain status {run} compares what was measured with the plan; the attempt's memory folder says who "
            "held what",
            "Need less: `scaletrain resume {run} --set training.micro_batch_size=1`, or "
            "layout.activation_checkpointing, layout.zero_stage; `scaletrain plan SPEC` sizes it first",
        ),
    ),
    "host-oom": Ending(
        "the node, or the job's share of it, ran out of memory, and the kernel killed a rank",
        (
            "Ask for more (Slurm: cluster.slurm.memory_per_node; Kubernetes: cluster.kubernetes.memory_per_node). "
            "`scaletrain plan` says what checkpoints and offloading take of it",
        ),
    ),
    "nan": Ending(
        "the loss or a gradient was not finite; no optimizer step was taken with it",
        (
            "guard.nan: rollback goes back to the last clean checkpoint and skips that data",
            "A lower learning rate, a longer warmup or bf16 in place of fp16 are the usual cures",
        ),
    ),
    "spike": Ending(
        "the loss left its range again after every roll-back that was allowed",
        (
            "The events name the windows of data that were skipped: look at these",
            "A lower learning rate or tighter clipping (training.gradient_clipping), then " + _RESUME,
        ),
    ),
    "disk-full": Ending(
        "no room was left for a checkpoint; the ones that were committed are whole",
        ("scaletrain checkpoint prune {run} makes room; or move checkpoint.dir to a larger file system", _RESUME),
    ),
    "unreadable": Ending(
        "no node of the job could read a checkpoint",
        (
            "Check the file system that holds the checkpoints (mounted, answering, owner and rights of the files); "
            "no node is at fault alone, so none is excluded",
            "scaletrain checkpoint verify {run} names the files that cannot be read",
            _RESUME + " continues the run once they can be",
        ),
    ),
    "data": Ending(
        "the training data are not what was prepared; no step was trained on what differs",
        (
            "Restore the file that the message names from a copy; or delete the dataset's folder and prepare the same "
            "data again: scaletrain data prepare SPEC",
            "If it happens again with other chunks, test the memory and the disks of that node",
            _RESUME + " then continues the run",
        ),
    ),
    "usage": Ending(
        "it cannot run as it is asked: the spec, the data or the installation; a retry would not help",
        ("Mend what the message says, then submit or resume",),
    ),
}
