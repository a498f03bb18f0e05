"""The end of an attempt, the same under every scheduler: judge it, decide what follows, record both.

Knows no scheduler: who calls it then starts the next attempt, requeues the job, or stops.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable

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
from scaletrain_cli.launch.judgement import Outcome, Reason, ended_with_its_job
from scaletrain_cli.launch.restart_policy import decide
from scaletrain_cli.rundir.bad_nodes import BadNode, remember_bad_nodes
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord

_HOUR = 3600.0
# How long a node is kept away from, by what speaks against it: a broken device waits for a technician, a wrong one for
# an administrator, and a node that was lost or hung is often well after its next restart.
_KEPT_SECONDS: dict[Reason, float] = {
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
