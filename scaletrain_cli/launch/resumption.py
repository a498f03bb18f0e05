"""Resuming a run by hand: why it ended, what it would go on from and at what loss; then a new submission.

Reads checkpoints in full, since only one that verifies is worth starting ranks for.
"""

from __future__ import annotations

from dataclasses import dataclass

from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.attempts import AttemptRecord, attempt_outcome, read_attempts
from scaletrain_cli.launch.scheduler import Job, Scheduler, scheduler_for
from scaletrain_cli.launch.submission import Submission, hand_over, submit_lock
from scaletrain_cli.rundir.checkpoints import Checkpoint, newest_that_verifies
from scaletrain_cli.rundir.journal import has_committed, last_logged_step, record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, checkpoint_folder, read_record


@dataclass(frozen=True)
class ResumeReport:
    """What resuming would do. ``steps_lost`` counts logged steps that would be trained again."""

    last_attempt: AttemptRecord | None
    why_ended: str
    checkpoint: Checkpoint | None
    passed_over: list[str]
    last_step_logged: int | None
    steps_lost: int
    finished: bool
    active: bool
    had_checkpoint: bool  # one was committed at some time, whether it is still there or not


@dataclass(frozen=True)
class Resumption:
    """A run that was resumed: how it stood, and the new submission."""

    report: ResumeReport
    submission: Submission


def inspect_resume(run: RunDir, scheduler: Scheduler | None = None) -> ResumeReport:
    """Look without changing anything. Raises UsageError for a damaged record, SchedulerError for a silent scheduler."""
    record = read_record(run)
    scheduler = scheduler or scheduler_for(record.spec.cluster.scheduler)
    attempts = read_attempts(run)
    last = attempts[-1] if attempts else None
    checkpoint, passed_over = newest_that_verifies(checkpoint_folder(run, record.spec))
    logged = last_logged_step(run)
    return ResumeReport(
        last_attempt=last,
        why_ended=why_ended(run, record, last),
        checkpoint=checkpoint,
        passed_over=passed_over,
        last_step_logged=logged,
        steps_lost=max(0, (logged or 0) - (checkpoint.step if checkpoint else 0)),
        finished=last is not None and last.reason == "done",
        active=_may_be_active(scheduler.job(run, record)),
        had_checkpoint=bool(checkpoint or passed_over or has_committed(run)),
    )


def resume(run: RunDir, *, from_scratch: bool = False, scheduler: Scheduler | None = None) -> Resumption:
    """Submit the run again, with fresh restart budgets. Raises UsageError when there is no sense in that."""
    record = read_record(run)
    scheduler = scheduler or scheduler_for(record.spec.cluster.scheduler)
    with submit_lock(run):
        report = inspect_resume(run, scheduler)
        _refuse(run, report, from_scratch)
        if from_scratch:
            record_event(run, "from-scratch")
        run.stop_file.unlink(missing_ok=True)
        return Resumption(report, hand_over(run, record, scheduler))


def why_ended(run: RunDir, record: RunRecord, attempt: AttemptRecord | None) -> str:
    """The last attempt's end in words; judged by its evidence where whoever watched it vanished."""
    if attempt is None:
        return "no attempt began"
    if attempt.ended is None:
        outcome = attempt_outcome(run, record.spec, attempt.number, cancelled=run.stop_file.exists())
        return f"attempt {attempt.number} was left without its supervisor: {outcome.message}"
    decided = f"; {attempt.decision.why}" if attempt.decision is not None else ""
    return f"attempt {attempt.number} ended with exit code {attempt.exit_code}: {attempt.message}{decided}"


def _may_be_active(job: Job) -> bool:
    """A job that cannot be asked, such as a local one of another host, may be training: two gangs must never meet."""
    return job.is_active or (job.state == "unknown" and job.id != "")


def _refuse(run: RunDir, report: ResumeReport, from_scratch: bool) -> None:
    if report.finished:
        raise UsageError(f"{run.run_id} has finished; there is nothing to resume.")
    if report.active:
        raise UsageError(
            f"{run.run_id} is still active, or was started on a host that must be asked. "
            f"Wait for it, or `scaletrain cancel {run.run_id}` there first."
        )
    if report.checkpoint is not None and from_scratch:
        raise UsageError(
            f"{report.checkpoint.path.name} is sound, so there is no need to start from scratch. "
            f"Resume without that option, or submit a new run."
        )
    trained = report.had_checkpoint or (report.last_step_logged or 0) > 0
    if report.checkpoint is None and trained and not from_scratch:
        gone = "its checkpoints are gone" if report.had_checkpoint else "it ended before its first checkpoint"
        raise UsageError(
            f"{run.run_id} trained up to step {report.last_step_logged or 0} and nothing of it can be loaded: "
            f"{'; '.join(report.passed_over) or gone}. Restore the files, or train anew with --from-scratch."
        )
