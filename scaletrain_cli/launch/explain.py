"""Why a run is where it is: from its directory, and from one scheduler that may be silent or have forgotten it.

Changes nothing. What a scheduler knows is asked in slurm_jobs; what an end means is in endings.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from scaletrain_cli.launch.attempts import AttemptRecord, newest_checkpoint_step, read_attempts
from scaletrain_cli.launch.backends.base import Job
from scaletrain_cli.launch.backends.registry import backend_for
from scaletrain_cli.launch.exit_classification import ExitReason
from scaletrain_cli.launch.finding import Evidence, Explanation, Finding
from scaletrain_cli.launch.logs import last_error
from scaletrain_cli.launch.node.record import read_node_records
from scaletrain_cli.launch.status import JOB_WAS, RunStatus, run_status, unreported_end
from scaletrain_cli.rundir.journal import last_logged_step, read_events, read_lines_backwards
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, read_record
from scaletrain_cli.worker.failures import read_failures

# Why the last attempt of a run ended, from what it left in the run directory and what its scheduler has answered.


# What each way to end means for who trains, and what to do about it.


@dataclass(frozen=True)
class Ending:
    """``meaning`` completes "attempt N ended:"; ``actions`` hold ``{run}`` where the run id goes."""

    meaning: str
    actions: tuple[str, ...] = ()


_RESUME_RUN = "scaletrain resume {run}"
_LOOK_AT_LOGS = "scaletrain logs {run} shows what the ranks printed"

ENDINGS: dict[ExitReason, Ending] = {
    "done": Ending("it is done"),
    "cancelled": Ending("the run was cancelled", (f"{_RESUME_RUN} goes on",)),
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
    "crash": Ending("the program failed", (_LOOK_AT_LOGS, "Mend the cause, then " + _RESUME_RUN)),
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
            "A lower learning rate or tighter clipping (training.gradient_clipping), then " + _RESUME_RUN,
        ),
    ),
    "disk-full": Ending(
        "no room was left for a checkpoint; the ones that were committed are whole",
        ("scaletrain checkpoint prune {run} makes room; or move checkpoint.dir to a larger file system", _RESUME_RUN),
    ),
    "unreadable": Ending(
        "no node of the job could read a checkpoint",
        (
            "Check the file system that holds the checkpoints (mounted, answering, owner and rights of the files); "
            "no node is at fault alone, so none is excluded",
            "scaletrain checkpoint verify {run} names the files that cannot be read",
            _RESUME_RUN + " continues the run once they can be",
        ),
    ),
    "data": Ending(
        "the training data are not what was prepared; no step was trained on what differs",
        (
            "Restore the file that the message names from a copy; or delete the dataset's folder and prepare the same "
            "data again: scaletrain data prepare SPEC",
            "If it happens again with other chunks, test the memory and the disks of that node",
            _RESUME_RUN + " then continues the run",
        ),
    ),
    "usage": Ending(
        "it cannot run as it is asked: the spec, the data or the installation; a retry would not help",
        ("Mend what the message says, then submit or resume",),
    ),
}


# These are told by one rank, whose last words are the best evidence there is.
_OF_A_RANK = (
    "crash",
    "killed",
    "oom",
    "host-oom",
    "nan",
    "usage",
    "disk-full",
    "unreadable",
    "communication",
    "hardware",
)
_MOST_FAILURES = 4


def why_it_ended(run: RunDir, record: RunRecord, attempt: AttemptRecord, job: Job) -> Finding:
    """Return the recorded end of ``attempt``, or what is known of an end that was not recorded.

    ``job`` is the scheduler's answer; call it for an attempt that may still run only once that job is over.
    """
    reason, message = attempt.reason, attempt.message
    if reason is None:
        return _unreported(run, record, attempt, job)
    ending, meaning = ENDINGS[reason], ENDINGS[reason].meaning
    left = attempt.decision is not None and attempt.decision.left_to_scheduler
    if left and job.cause is not None and reason in ("preempted", "out-of-grace", "node"):
        # The attempt saw that its job was being ended; why, its scheduler says.
        reason, ending, meaning = job.cause, ENDINGS[job.cause], f"{JOB_WAS[job.cause]} ({job.detail})"
    return Finding(
        cause=reason,
        headline=f"attempt {attempt.number} ended: {meaning}",
        evidence=(
            Evidence(_attempt_file(attempt), message),
            *_failures(run, attempt),
            *_last_words(run, attempt, reason),
            *_memory_report(run, attempt, reason),
            *_stacks(run, attempt, reason),
            *_history(run, attempt),
            *_decision(attempt, job),
        ),
        actions=tuple(action.format(run=run.run_id) for action in _actions(attempt, job, ending.actions)),
    )


def _unreported(run: RunDir, record: RunRecord, attempt: AttemptRecord, job: Job) -> Finding:
    """No agent and no supervisor recorded the end, so nothing is claimed of what was saved but what is there."""
    end = unreported_end(run, record, attempt, job)
    newest, logged = newest_checkpoint_step(run, record.spec), last_logged_step(run) or 0
    saved = "no checkpoint was committed" if newest is None else f"the newest checkpoint is of step {newest}"
    usual = ENDINGS["disk-full"].actions[:1] if end.reason == "disk-full" else ()
    return Finding(
        cause=end.reason or "not-known",
        headline=end.message,
        evidence=(
            Evidence("checkpoints", f"{saved}; {logged} steps were logged"),
            *_failures(run, attempt),
            *(_last_words(run, attempt, end.reason) if end.reason is not None else ()),
            *_history(run, attempt),
        ),
        actions=tuple(action.format(run=run.run_id) for action in (*usual, _LOOK, _RESUME)),
    )


_LOOK = "scaletrain logs {run} shows what the ranks printed last"
_RESUME = "scaletrain resume {run} continues from the newest valid checkpoint"


def _actions(attempt: AttemptRecord, job: Job, usual: tuple[str, ...]) -> Iterator[str]:
    yield from usual
    if attempt.reason == "done" or _goes_on(attempt, job) or (job.state == "unknown" and attempt.may_be_followed):
        return
    if not any("scaletrain resume" in action for action in usual):
        yield _RESUME


def _goes_on(attempt: AttemptRecord, job: Job) -> bool:
    """Return whether another attempt follows by itself: its job is there and nothing was decided against that."""
    return job.is_active and attempt.may_be_followed


def _failures(run: RunDir, attempt: AttemptRecord) -> Iterator[Evidence]:
    """What ranks and nodes said themselves, but for what the attempt's own message repeats."""
    told = [failure for failure in read_failures(run, attempt.number) if failure.message not in attempt.message]
    for failure in told[:_MOST_FAILURES]:
        who = failure.node if failure.rank is None else f"rank {failure.rank}"
        yield Evidence(f"{_folder(attempt)}/failures", f"{who}: {failure.message}")
    if len(told) > _MOST_FAILURES:
        yield Evidence(f"{_folder(attempt)}/failures", f"and {len(told) - _MOST_FAILURES} more")


def _last_words(run: RunDir, attempt: AttemptRecord, reason: str) -> Iterator[Evidence]:
    """The error in the log of the rank that failed first."""
    if reason not in _OF_A_RANK:
        return
    nodes = [node for node in read_node_records(run, attempt.number) if node.first_failure is not None]
    for node in sorted(nodes, key=lambda node: node.ended or 0.0)[:1]:
        for path in (run.attempt(attempt.number) / "logs").glob(f"*-{node.first_failure:05d}.log"):
            if words := last_error(path):
                yield Evidence(f"{_folder(attempt)}/logs/{path.name}", words)


def _memory_report(run: RunDir, attempt: AttemptRecord, reason: str) -> Iterator[Evidence]:
    if reason == "oom":
        for path in sorted((run.attempt(attempt.number) / "memory").glob("rank-*.json"))[:1]:
            yield Evidence(f"{_folder(attempt)}/memory/{path.name}", "what each part held, beside the plan")


def _stacks(run: RunDir, attempt: AttemptRecord, reason: str) -> Iterator[Evidence]:
    folder = run.attempt(attempt.number) / "stacks"
    if reason == "hang" and folder.is_dir():
        yield Evidence(f"{_folder(attempt)}/stacks", f"{len(list(folder.iterdir()))} files, one for each rank")


def _history(run: RunDir, attempt: AttemptRecord) -> Iterator[Evidence]:
    """How the attempts before it ended, and whether the run comes forward at all."""
    earlier = [other for other in read_attempts(run) if other.number < attempt.number]
    if earlier:
        shown = ", ".join(
            f"{other.number} {other.reason or 'unfinished'} at step {other.last_step or 0}" for other in earlier[-5:]
        )
        lost = sum(event.get("lost_steps", 0) for event in read_events(run))
        yield Evidence("attempts before it", f"{shown}; {lost} steps were trained twice so far")


def _decision(attempt: AttemptRecord, job: Job) -> Iterator[Evidence]:
    if attempt.reason == "done":
        return
    decided = f"{attempt.decision.why}; " if attempt.decision is not None else ""
    if _goes_on(attempt, job):
        follows = "another attempt follows by itself"
    elif not attempt.may_be_followed:
        follows = "no attempt follows by itself"
    elif job.state == "unknown":
        follows = f"whether another attempt follows is not known: {job.detail}"
    else:
        follows = f"no attempt follows by itself, since the job is over: {job.detail}"
    yield Evidence("decided", f"{decided}{follows}")


def _folder(attempt: AttemptRecord) -> str:
    return f"attempts/{attempt.number:04d}"


def _attempt_file(attempt: AttemptRecord) -> str:
    return f"{_folder(attempt)}/attempt.json"


def explain(run: RunDir) -> Explanation:
    """Raises UsageError when run.json is damaged."""
    record, status = read_record(run), run_status(run)
    attempts = read_attempts(run)
    last = attempts[-1] if attempts else None
    return Explanation(run.run_id, status.state, tuple(_findings(run, record, status, last)))


def _findings(run: RunDir, record: RunRecord, status: RunStatus, last: AttemptRecord | None) -> Iterator[Finding]:
    stuck = _stuck(run, record, status)
    yield from stuck
    job, unended = status.job, last is not None and last.ended is None
    may_go_on = last is None or unended or last.may_be_followed
    if job.state == "unknown" and job.may_be_active and may_go_on:
        yield _not_known(status)
    elif job.state == "queued" and not stuck:
        yield backend_for(status.scheduler).explain_waiting(run, record, status)
    elif job.state in ("suspended", "ending") and not stuck:
        yield _HELD_UP[job.state](run, status)
    elif job.state == "running" and (last is None or unended) and not stuck:
        yield _running(run, status)
    over = not job.may_be_active
    if last is not None and (last.ended is not None or over):
        yield why_it_ended(run, record, last, job)
    elif last is None and over:
        yield backend_for(status.scheduler).explain_never_began(run, record, status)


def _not_known(status: RunStatus) -> Finding:
    """The scheduler is silent, which says nothing about the run: nothing is concluded from it."""
    what = f"attempt {status.attempt}" if status.attempt else "the job"
    return Finding(
        "unknown",
        f"whether {what} of {status.run_id} is queued, runs or has ended is not known",
        (Evidence("the scheduler", status.job.detail),),
        (f"scaletrain explain {status.run_id}, again, once the scheduler answers", "scaletrain doctor"),
    )


def _suspended(run: RunDir, status: RunStatus) -> Finding:
    evidence = (Evidence("the scheduler", status.job.detail), *_how_far(run, status))
    actions = ["It continues when its scheduler, or who suspended it, resumes it"]
    actions += backend_for(status.scheduler).actions_if_suspended(status.job_id)
    headline = f"job {status.job_id} is suspended: its processes are stopped"
    return Finding("suspended", headline, evidence, tuple(actions))


def _ending(run: RunDir, status: RunStatus) -> Finding:
    evidence = (Evidence("the scheduler", status.job.detail), *_how_far(run, status))
    actions = (f"scaletrain status {status.run_id}, again: how it ended is known once its last process is gone",)
    return Finding("ending", f"job {status.job_id} is ending; some of its processes are still there", evidence, actions)


_HELD_UP = {"suspended": _suspended, "ending": _ending}


def _stuck(run: RunDir, record: RunRecord, status: RunStatus) -> list[Finding]:
    """What keeps a job there that nothing but a person can end."""
    if status.state not in ("queued", "running", "ending", "preempted"):
        return []
    return list(backend_for(status.scheduler).explain_stuck(run, record, status))


def _running(run: RunDir, status: RunStatus) -> Finding:
    """How it comes forward, by the last line that was logged."""
    evidence = [Evidence("the scheduler", status.job.detail), *_how_far(run, status)]
    if status.straggler:
        evidence.append(Evidence("events.jsonl", status.straggler))
    actions = (f"scaletrain logs {run.run_id} --follow",)
    what = f"attempt {status.attempt} runs" if status.attempt else "its job runs"
    return Finding("running", what, tuple(evidence), actions)


def _how_far(run: RunDir, status: RunStatus) -> Iterator[Evidence]:
    newest = next(read_lines_backwards(run.metrics), {})
    yield Evidence("metrics.jsonl", f"step {status.step} of {status.total_steps}")
    if "time" in newest:
        age = max(0.0, time.time() - float(newest["time"]))
        yield Evidence("metrics.jsonl", f"the last line is {age:.0f} s old")
