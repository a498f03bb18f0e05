"""The end of an attempt, the same under every scheduler: judge it, decide what follows, record both.

Knows no scheduler: who calls it then starts the next attempt, requeues the job, or stops.
"""

from __future__ import annotations

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.attempts import (
    Decision,
    attempt_outcome,
    end_attempt,
    read_attempt,
    read_attempts,
    with_outcome,
)
from scaletrain_cli.launch.restart_policy import decide
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord


def conclude_attempt(
    run: RunDir,
    record: RunRecord,
    number: int,
    *,
    first_attempt: int,
    launcher_exit_code: int | None = None,
    told_to_stop: bool = False,
) -> Decision:
    """End attempt ``number``. Budgets count from ``first_attempt`` on: who submits anew grants new ones.

    ``launcher_exit_code`` is what the agent or srun itself ended with, for an attempt that left no evidence;
    ``told_to_stop``: no attempt can follow here, for reasons that are not the run's.
    """
    spec, cancelled = record.spec, run.stop_file.exists()
    outcome = attempt_outcome(run, spec, number, cancelled=cancelled, launcher_exit_code=launcher_exit_code)
    if told_to_stop and not cancelled and outcome.exit_code != ExitCode.DONE:
        decision = Decision(False, outcome.exit_code, "the supervisor was told to stop; `scaletrain resume` goes on")
    else:
        began = read_attempt(run, number)
        assert began is not None, f"attempt {number} was never begun"
        earlier = [attempt for attempt in read_attempts(run) if first_attempt <= attempt.number < number]
        history = [*earlier, with_outcome(run, spec, began, outcome)]
        decision = decide(outcome.exit_code, outcome.reason, history, spec.restarts, cancelled)
    end_attempt(run, spec, number, outcome, decision)
    record_event(
        run,
        "attempt-ended",
        attempt=number,
        exit_code=outcome.exit_code,
        reason=outcome.reason,
        message=outcome.message,
        requeue=decision.requeue,
        why=decision.why,
    )
    return decision


def conclude_run(run: RunDir, decision: Decision) -> int:
    """Record that no attempt follows; returns the run's exit code. Of a run that is done the engine has recorded it."""
    if decision.exit_code != ExitCode.DONE:
        if run.stop_file.exists():
            record_event(run, "cancelled")
        record_event(run, "stopped", exit_code=decision.exit_code, why=decision.why)
    return decision.exit_code
