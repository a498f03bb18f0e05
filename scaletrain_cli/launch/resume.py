"""Resuming a run by hand: why it ended, what it would go on from and at what loss; then a new submission.

Reads checkpoints in full, since only one that verifies is worth starting ranks for. A job may start before submit()
has returned, so a new revision stands, the decision to start over is written and the stop file is gone before the
hand-over; a scheduler that refuses finds all of it put back. A crash in between leaves a revision without a job, with
which the next resume goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from scaletrain_cli.errors import ScaletrainError, SchedulerSilentError, UsageError
from scaletrain_cli.launch.attempts import AttemptRecord, read_attempts
from scaletrain_cli.launch.backends.base import Backend, Job
from scaletrain_cli.launch.backends.registry import backend_for
from scaletrain_cli.launch.code.snapshot import write_snapshot
from scaletrain_cli.launch.replan import Resize
from scaletrain_cli.launch.restart import forget_secrets
from scaletrain_cli.launch.status import why_ended
from scaletrain_cli.launch.submit import Submission, hand_over, keep_secrets, read_submission, submit_lock
from scaletrain_cli.rundir.checkpoints import Checkpoint, latest_valid
from scaletrain_cli.rundir.journal import has_committed, last_logged_step, record_event, withdraw_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, add_revision, checkpoint_folder, read_record, withdraw_revision
from scaletrain_cli.spec import RunSpec


@dataclass(frozen=True)
class ResumeReport:
    """What resuming would do. ``steps_lost`` counts logged steps that would be trained again.

    ``unseen``: attempts and checkpoints are where the pods wrote them, on a volume that is not seen here.
    """

    last_attempt: AttemptRecord | None
    why_ended: str
    checkpoint: Checkpoint | None
    passed_over: list[str]
    last_step_logged: int | None
    steps_lost: int
    finished: bool
    active: bool
    job: Job
    had_checkpoint: bool  # one was committed at some time, whether it is still there or not
    unseen: bool = False


@dataclass(frozen=True)
class Resumption:
    """A run that was resumed: how it stood, and the new submission."""

    report: ResumeReport
    submission: Submission


def inspect_resume(run: RunDir, scheduler: Backend | None = None) -> ResumeReport:
    """Look without changing anything. Raises UsageError for a damaged record, SchedulerError for a silent scheduler."""
    record, submission = read_record(run), read_submission(run)
    # The job, if there is one, is where it was submitted, whatever a revision says since.
    scheduler = scheduler or backend_for(submission.scheduler if submission else record.spec.cluster.scheduler)
    attempts = read_attempts(run)
    last = attempts[-1] if attempts else None
    checkpoint, passed_over = latest_valid(checkpoint_folder(run, record.spec))
    logged = last_logged_step(run)
    job = scheduler.job(run, record)
    told = last is None and job.exit_code is not None  # by the scheduler, of a run whose attempts are not seen here
    return ResumeReport(
        last_attempt=last,
        why_ended=job.detail if told else why_ended(run, record, last, job),
        checkpoint=checkpoint,
        passed_over=passed_over,
        last_step_logged=logged,
        steps_lost=max(0, (logged or 0) - (checkpoint.step if checkpoint else 0)),
        finished=job.exit_code == 0 if last is None else last.reason == "done",
        active=job.may_be_active,
        job=job,
        had_checkpoint=bool(checkpoint or passed_over or has_committed(run)),
        unseen=not record.spec.cluster.traits.shared_run_directory
        and last is None
        and checkpoint is None
        and bool(job.id),
    )


def resume(
    run: RunDir, *, from_scratch: bool = False, resize: Resize | None = None, scheduler: Backend | None = None
) -> Resumption:
    """Submit the run again, with fresh restart budgets. Raises UsageError when there is no sense in that.

    With ``resize`` it goes on in that layout; without changes in it, no revision is written.
    """
    with submit_lock(run):
        record, report = read_record(run), inspect_resume(run, scheduler)
        refuse(run, report, from_scratch=from_scratch, resize=resize)
        if resize is not None and resize.before.revision != record.revision:
            raise UsageError(f"{run.run_id} was resized by someone else meanwhile. Look again, and resume it then.")
        spec = record.spec if resize is None else resize.spec
        scheduler = scheduler or backend_for(spec.cluster.scheduler)
        with (
            _secrets_at_hand(run, spec),
            _revised(run, record, resize) as revised,
            _started_over(run, from_scratch),
            _stop_lifted(run),
        ):
            return Resumption(report, hand_over(run, revised, scheduler))


def refuse(run: RunDir, report: ResumeReport, *, from_scratch: bool = False, resize: Resize | None = None) -> None:
    """Raise UsageError when the run is active or finished, or nothing sound is left of it to go on from."""
    if report.finished:
        raise UsageError(f"{run.run_id} has finished; there is nothing to resume.")
    if report.active:
        if report.job.state == "unknown":
            raise UsageError(
                f"whether {run.run_id} still runs is not known: {report.job.detail}. Resume it once that is known."
            )
        raise UsageError(
            f"{run.run_id} is still active: {report.job.detail or report.job.state}. "
            f"Wait for it, or `scaletrain cancel {run.run_id}` first."
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
    if report.checkpoint is not None and resize is not None and resize.cuts_states_anew:
        _refuse_to_cut_blocks(run, resize)


def _refuse_to_cut_blocks(run: RunDir, resize: Resize) -> None:
    name = resize.spec.training.optimizer.name
    if name == "adamw_8bit":
        raise UsageError(
            f"{run.run_id} cannot go on in another layout: {name} keeps its states quantised in blocks that follow the "
            "layout, and cutting them anew would change them. Resume it on as many GPUs and in the layout it had."
        )


@contextlib.contextmanager
def _secrets_at_hand(run: RunDir, spec: RunSpec) -> Iterator[None]:
    """With the values of ``secret_env``, which an ended run has no more; gone again if the scheduler refuses."""
    had = run.secrets.exists()
    keep_secrets(run, spec)
    try:
        yield
    except SchedulerSilentError:
        raise
    except ScaletrainError:
        if not had:
            forget_secrets(run)
        raise


@contextlib.contextmanager
def _started_over(run: RunDir, from_scratch: bool) -> Iterator[None]:
    """With the event that lets ranks train without a checkpoint; gone again if the scheduler refuses."""
    if not from_scratch:
        yield
        return
    record_event(run, "from-scratch")
    try:
        yield
    except SchedulerSilentError:
        raise
    except ScaletrainError:
        withdraw_event(run, "from-scratch")
        raise


@contextlib.contextmanager
def _stop_lifted(run: RunDir) -> Iterator[None]:
    """Without the stop files, which would end the job at once; back in their places if the scheduler refuses."""
    aside = {file: file.with_name(f"{file.name}.lifted") for file in (run.stop_file, run.stop_file_by_hand)}
    for file, lifted in aside.items():
        lifted.unlink(missing_ok=True)  # of a resume that a crash cut short
        with contextlib.suppress(FileNotFoundError):
            file.rename(lifted)
    try:
        yield
    except SchedulerSilentError:
        raise
    except ScaletrainError:
        for file, lifted in aside.items():
            with contextlib.suppress(FileNotFoundError):
                lifted.rename(file)
        raise
    for lifted in aside.values():
        lifted.unlink(missing_ok=True)


@contextlib.contextmanager
def _revised(run: RunDir, record: RunRecord, resize: Resize | None) -> Iterator[RunRecord]:
    """The record that the job will read; a revision that is new goes if the scheduler refuses."""
    if resize is None or not resize.changes:
        yield record
        return
    made = [] if resize.snapshot is None else write_snapshot(run, resize.snapshot)
    revised = add_revision(run, record, resize.spec, resize.plan, resize.overrides, code=resize.after.code)
    try:
        yield revised
    except SchedulerSilentError:  # it may have the job, which would read this
        raise
    except ScaletrainError:
        withdraw_revision(run, revised.revision)
        for path in made:
            path.unlink()
        raise
