"""The end of an attempt, the same under every scheduler: judge it, decide what follows, record both.

Knows no scheduler: who calls it then starts the next attempt, requeues the job, or stops.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.attempts import (
    AttemptRecord,
    Decision,
    attempt_outcome,
    close_unended,
    end_attempt,
    read_attempt,
    read_attempts,
    revise_decision,
    with_outcome,
)
from scaletrain_cli.launch.exit_classification import ExitReason, Outcome, ended_with_its_job
from scaletrain_cli.rundir.bad_nodes import BadNode, remember_bad_nodes
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.spec.sections import RestartsSpec

# After an attempt ends: another one, or not.


ATTEMPTS_WITHOUT_PROGRESS = 3
PREEMPTIONS_WITHOUT_PROGRESS = 10

_BUDGET: dict[ExitReason, str] = {
    "preempted": "preemption",
    "out-of-grace": "preemption",
    "node": "node",
    "wrong-nodes": "node",
    "hardware": "node",
    "hang": "node",
    "communication": "node",
    "oom": "oom",
    "host-oom": "oom",
    "crash": "crash",
    "killed": "crash",
    "unreadable": "crash",
    "nan": "crash",
    "spike": "crash",
}
_TAKEN_AWAY: tuple[ExitReason, ...] = ("preempted", "time-limit")
# Says nothing of the job itself: it was taken off good nodes, or never started on wrong ones.
_NEUTRAL: tuple[ExitReason, ...] = (*_TAKEN_AWAY, "cancelled", "wrong-nodes")


def decide(
    exit_code: int, reason: ExitReason, history: Sequence[AttemptRecord], restarts: RestartsSpec, cancelled: bool
) -> Decision:
    """Whether to try again. ``history`` holds all attempts that share the budgets, the one just ended last."""
    if exit_code == ExitCode.DONE:
        return Decision(False, exit_code, "the run is done")
    if cancelled or reason == "cancelled":
        return Decision(False, exit_code, "the run was cancelled")
    if exit_code in (ExitCode.USAGE, ExitCode.INFEASIBLE, ExitCode.SCHEDULER, ExitCode.DO_NOT_REQUEUE):
        return Decision(False, exit_code, f"exit code {exit_code} means that a retry cannot help")
    free = bool(history) and history[-1].free_of_charge
    stuck = attempts_without_progress(history)
    if stuck >= ATTEMPTS_WITHOUT_PROGRESS and reason not in _NEUTRAL and not free:
        why = f"{stuck} failed attempts in a row committed no checkpoint newer than the one before them"
        return Decision(False, ExitCode.DO_NOT_REQUEUE, why)
    idle = preemptions_without_progress(history)
    if idle >= PREEMPTIONS_WITHOUT_PROGRESS and (reason in _TAKEN_AWAY or free):
        why = (
            f"{idle} preempted attempts in a row committed no step: cluster.grace_seconds, the time limit or the time "
            "between preemptions is too short to start up. Ask for longer ones, then `scaletrain resume`"
        )
        return Decision(False, ExitCode.DO_NOT_REQUEUE, why)
    if reason == "time-limit":
        return Decision(True, exit_code, "time-limit: free of charge")
    name = "preemption" if free else _BUDGET.get(reason, "crash")
    allowed: int | str = getattr(restarts, name)
    used = sum(_budget_of(attempt) == name for attempt in history)
    if allowed == "unlimited" or used <= int(allowed):
        count = f"restart {used}" if allowed == "unlimited" else f"restart {used} of {allowed}"
        return Decision(True, exit_code, f"{reason}: {count} (restarts.{name})")
    # The state of a preempted run is saved, which 75 says, whoever starts it again.
    code = exit_code if exit_code == ExitCode.PREEMPTED else ExitCode.CRASHED
    return Decision(False, code, f"{reason}: restarts.{name} = {allowed} is used up")


def _budget_of(attempt: AttemptRecord) -> str | None:
    return "preemption" if attempt.free_of_charge else _BUDGET.get(attempt.reason or "node")


def is_taken_away(reason: ExitReason) -> bool:
    """Whether the restart after such an end costs the run nothing: its nodes were wanted for something else."""
    return reason == "time-limit" or _BUDGET.get(reason) == "preemption"


def attempts_without_progress(history: Sequence[AttemptRecord]) -> int:
    """How many of the latest attempts failed without a newer checkpoint; preempted ones neither count nor excuse."""
    counted = (attempt for attempt in _since_progress(history) if not attempt.free_of_charge)
    return sum(attempt.reason not in _NEUTRAL for attempt in counted)


def preemptions_without_progress(history: Sequence[AttemptRecord]) -> int:
    """How many of the latest attempts were taken off their nodes before they had committed a newer step."""
    return sum(attempt.reason in _TAKEN_AWAY or attempt.free_of_charge for attempt in _since_progress(history))


def _since_progress(history: Sequence[AttemptRecord]) -> Iterator[AttemptRecord]:
    return itertools.takewhile(lambda attempt: not attempt.made_progress, reversed(history))


# Whether a job may begin another attempt of its run, by what came of its earlier ones.


def why_not_begin(run: RunDir, record: RunRecord, job_id: str) -> Decision | None:
    """Why no attempt must begin: cancelled, done, or out of budget. None where one may."""
    if run.is_told_to_stop:
        return Decision(False, ExitCode.PREEMPTED, "cancelled before the attempt began")
    history = attempts_of_job(run, job_id)
    last = history[-1] if history else None
    if last is None or last.exit_code is None or last.reason is None:
        return None
    if last.decision is not None and last.decision.requeue:
        return None
    decision = decide(last.exit_code, last.reason, history, record.spec.restarts, cancelled=False)
    return None if decision.requeue else decision


def attempts_of_job(run: RunDir, job_id: str) -> list[AttemptRecord]:
    """Those that share budgets: a job keeps its id when it is brought back, and each submission makes a new job."""
    return [attempt for attempt in read_attempts(run) if attempt.job_id == job_id]


def first_attempt_of_job(run: RunDir, job_id: str, number: int) -> int:
    """The attempt from which on budgets count for attempt ``number``."""
    return min((attempt.number for attempt in attempts_of_job(run, job_id)), default=number)


_HOUR = 3600.0
# How long a node is kept away from, by what speaks against it: a broken device waits for a technician, a wrong one for
# an administrator, and a node that was lost or hung is often well after its next restart.
_KEPT_SECONDS: dict[ExitReason, float] = {
    "hardware": 7 * 24 * _HOUR,
    "wrong-nodes": 24 * _HOUR,
    "hang": 6 * _HOUR,
    "node": 6 * _HOUR,
}


def conclude_attempt(
    run: RunDir,
    record: RunRecord,
    number: int,
    *,
    first_attempt: int,
    launcher_exit_code: int | None = None,
    told_to_stop: str | None = None,
    time_is_up: Callable[[], bool] = lambda: False,
    down: frozenset[str] | None = None,
) -> Decision:
    """End attempt ``number``. Budgets count from ``first_attempt`` on: who submits anew grants new ones.

    ``launcher_exit_code`` is what the agent or srun itself ended with, for an attempt that left no evidence;
    ``told_to_stop`` is why no attempt can follow from here, for reasons that are not the run's. ``time_is_up`` tells a
    preemption from the end of the job's time. ``down`` are the nodes that the scheduler holds to be lost, where a
    silent node may as well be one whose job was ended.
    """
    spec, cancelled = record.spec, run.is_told_to_stop
    outcome = attempt_outcome(run, spec, number, cancelled=cancelled, launcher_exit_code=launcher_exit_code)
    if told_to_stop is not None and outcome.lost and not down:
        outcome = ended_with_its_job(outcome)
    if outcome.reason in ("preempted", "out-of-grace") and time_is_up():
        outcome = dataclasses.replace(outcome, reason="time-limit", message=f"out of time; {outcome.message}")
    if told_to_stop is not None and not cancelled and outcome.exit_code != ExitCode.DONE:
        decision = Decision(False, outcome.exit_code, told_to_stop, left_to_scheduler=True)
    else:
        began = read_attempt(run, number)
        assert began is not None, f"attempt {number} was never begun"
        earlier = [attempt for attempt in read_attempts(run) if first_attempt <= attempt.number < number]
        history = [*earlier, with_outcome(run, spec, began, outcome)]
        decision = decide(outcome.exit_code, outcome.reason, history, spec.restarts, cancelled)
    _record(run, end_attempt(run, spec, number, outcome, decision))
    _remember_bad_nodes(run, number, outcome, down)
    return decision


def conclude_abandoned(run: RunDir, record: RunRecord) -> None:
    """End attempts whose watcher vanished, by their evidence. Only for who knows that none of them still runs.

    No node is held to be bad for that: who was to watch the attempt may have been ended with the rest of it.
    """
    for attempt in close_unended(run, record.spec):
        _record(run, attempt)


def withdraw_restart(run: RunDir, number: int, why: str, *, left_to_scheduler: bool = False) -> Decision:
    """Correct the decision on attempt ``number``: the restart that it promised does not come, or is the scheduler's."""
    attempt = read_attempt(run, number)
    assert attempt is not None, f"attempt {number} was never begun"
    assert attempt.exit_code is not None, f"attempt {number} has not ended"
    decision = Decision(False, attempt.exit_code, why, left_to_scheduler)
    revise_decision(run, attempt, decision)
    return decision


def conclude_run(run: RunDir, decision: Decision) -> int:
    """Record that no attempt follows; returns the run's exit code. Of a run that is done the engine has recorded it.

    The values of its secrets go, unless it was only preempted: whoever resumes it later gives them anew.
    """
    if decision.exit_code != ExitCode.PREEMPTED or run.is_told_to_stop:
        forget_secrets(run)
    if decision.exit_code != ExitCode.DONE:
        if run.is_told_to_stop:
            record_event(run, "cancelled")
        record_event(run, "stopped", exit_code=decision.exit_code, why=decision.why)
    return decision.exit_code


def forget_secrets(run: RunDir) -> None:
    """Remove the values of ``secret_env`` from the run directory."""
    with contextlib.suppress(OSError):  # the run's verdict does not depend on it
        run.secrets.unlink(missing_ok=True)


def _remember_bad_nodes(run: RunDir, number: int, outcome: Outcome, down: frozenset[str] | None) -> None:
    now, kept = time.time(), _KEPT_SECONDS.get(outcome.reason)
    if kept is None:
        return
    found = [
        BadNode(name, outcome.reason, outcome.message, run.run_id, number, now, now + kept)
        for name in outcome.against
        if outcome.reason != "node" or down is None or name in down
    ]
    if found:
        with contextlib.suppress(OSError):  # advice to later attempts, which must not cost this one its verdict
            remember_bad_nodes(run.path.parent, found, now)


def _record(run: RunDir, attempt: AttemptRecord) -> None:
    decision = attempt.decision
    record_event(
        run,
        "attempt-ended",
        attempt=attempt.number,
        exit_code=attempt.exit_code,
        reason=attempt.reason,
        message=attempt.message,
        requeue=decision is not None and decision.requeue,
        why=decision.why if decision is not None else "whoever watched it is gone",
    )
