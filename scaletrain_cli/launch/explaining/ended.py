"""Why the last attempt of a run ended, from what it left in the run directory and what its scheduler has answered."""

from __future__ import annotations

from collections.abc import Iterator

from scaletrain_cli.launch.attempts import AttemptRecord, newest_checkpoint_step, read_attempts
from scaletrain_cli.launch.explaining.endings import ENDINGS
from scaletrain_cli.launch.explaining.finding import Evidence, Finding
from scaletrain_cli.launch.explaining.log_tails import last_error
from scaletrain_cli.launch.node_record import read_node_records
from scaletrain_cli.launch.scheduler import Job
from scaletrain_cli.launch.unreported import JOB_WAS, unreported_end
from scaletrain_cli.rundir.failures import read_failures
from scaletrain_cli.rundir.journal import last_logged_step, read_events
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord

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
