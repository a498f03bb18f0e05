"""Whether a job may begin another attempt of its run, by what came of its earlier ones. Knows no scheduler.

A scheduler brings a job back by itself, after a lost node or a preemption, also one that is done or beyond its budget.
"""

from __future__ import annotations

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.attempts import AttemptRecord, Decision, read_attempts
from scaletrain_cli.launch.restart_policy import decide
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord


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
