"""`scaletrain resume`: report why the run ended, its resume point and the lost steps; then submit it again.

Checkpoints are read in full to verify them. A job may start before submit() returns. Therefore the new revision and
the event for a start from scratch are written, and the stop file is removed, before the submission; a refusal undoes
all of it. A crash in between leaves a revision without a job, which the next resume uses.
"""

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import SchedulerError, UsageError
from scaletrain_cli.launch.attempts import AttemptRecord, read_attempts
from scaletrain_cli.launch.backends.base import Backend
from scaletrain_cli.launch.backends.registry import backend_for
from scaletrain_cli.launch.branch import Branch
from scaletrain_cli.launch.code import remove_snapshot, write_snapshot
from scaletrain_cli.launch.hub_fetch import fetch_to_shared_cache, resolve_commits
from scaletrain_cli.launch.job import Job, Submission, scheduler_of_job, undone_if_refused
from scaletrain_cli.launch.replan import SCHEDULE_EVENT, SCHEDULE_KEYS, Resize, continues_after_early_stop
from scaletrain_cli.launch.restart import forget_secrets
from scaletrain_cli.launch.status import has_finished, why_ended
from scaletrain_cli.launch.submit import keep_secrets, submit_lock, submit_prepared
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.rundir.checkpoints import Checkpoint, latest_valid
from scaletrain_cli.rundir.journal import has_committed, last_logged_step, read_events, record_event, withdraw_event
from scaletrain_cli.rundir.mirror_state import read_restored, read_superseded
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import (
    RunRecord,
    add_revision,
    checkpoint_folder,
    is_elsewhere,
    read_record,
    withdraw_revision,
)


@dataclass(frozen=True)
class ResumeReport:
    """The effect of a resume. ``steps_lost``: number of logged steps that would be trained again.

    ``unseen``: attempts and checkpoints are on a volume of the nodes that is not visible here. ``stopped_early``: the
    last attempt ended because the validation did not improve.
    """

    last_attempt: AttemptRecord | None
    why_ended: Reason
    checkpoint: Checkpoint | None
    passed_over: list[str]
    last_step_logged: int | None
    steps_lost: int
    finished: bool
    active: bool
    job: Job
    had_checkpoint: bool  # one was committed at some time, even if it no longer exists
    unseen: bool = False
    stopped_early: bool = False

    def finished_for(self, resize: Resize | None) -> bool:
        """Return whether the run has finished and trains no further step after the resume with ``resize``."""
        if not self.finished or resize is None or resize.schedule is None:
            return self.finished
        trained = resize.before.spec.total_steps if self.checkpoint is None else self.checkpoint.step
        stays = self.stopped_early and not continues_after_early_stop(resize.before.spec, resize.spec)
        return resize.spec.total_steps <= trained or stays


@dataclass(frozen=True)
class Resumption:
    """A resumed run: the report from before the resume, and the new submission."""

    report: ResumeReport
    submission: Submission


def inspect_resume(run: RunDir, scheduler: Backend | None = None, *, take_over: bool = False) -> ResumeReport:
    """Return what a resume would do; changes nothing.

    ``take_over``: a job whose scheduler does not answer, or does not know it, counts as over.
    Raises UsageError for a damaged record, SchedulerError for a scheduler that does not answer.
    """
    record = read_record(run)
    scheduler = scheduler or backend_for(scheduler_of_job(run, record))
    last = next(reversed(read_attempts(run)), None)
    checkpoint, passed_over = latest_valid(checkpoint_folder(run, record.spec))
    logged = last_logged_step(run)
    try:
        job = scheduler.job(run, record)
    except SchedulerError as error:
        if not take_over:
            raise
        job = Job("", "unknown", error.message.rstrip("."), reason=error.reason)
    elsewhere = bool(job.id) and is_elsewhere(run, record)
    if elsewhere and read_restored(run)[0]:  # what was received from the mirror is older than what the pods have
        last, checkpoint, passed_over, logged = None, None, [], None
    reported = last is None and job.exit_code is not None  # the attempts are not visible here
    last_of = (event["event"] for event in reversed(read_events(run)))
    stopped_early = next((e for e in last_of if e in ("started", "resumed", "stopped-early")), "") == "stopped-early"
    newest = [event["event"] for event in read_events(run) if event["event"] in ("submitted", SCHEDULE_EVENT)][-1:]
    is_extended = newest == [SCHEDULE_EVENT]  # by a resume that was interrupted before its submission
    return ResumeReport(
        last_attempt=last,
        why_ended=job.why if reported else why_ended(run, record, last, job),
        checkpoint=checkpoint,
        passed_over=passed_over,
        last_step_logged=logged,
        steps_lost=max(0, (logged or 0) - (checkpoint.step if checkpoint else 0)),
        finished=job.exit_code == 0 if last is None else has_finished(run, last) and not is_extended,
        active=job.is_active if take_over else job.may_be_active and not job.resumable,
        job=job,
        had_checkpoint=bool(checkpoint or passed_over or (has_committed(run) and not elsewhere)),
        unseen=elsewhere and checkpoint is None and not job.resumable,
        stopped_early=stopped_early,
    )


def resume(
    run: RunDir,
    *,
    from_scratch: bool = False,
    take_over: bool = False,
    resize: Resize | None = None,
    scheduler: Backend | None = None,
    preparation_tasks: int = 0,
    say: Callable[[str], None] = lambda line: None,
    automatic: int = 0,
    check: Callable[[], None] = lambda: None,
) -> Resumption:
    """Submit the run again, with new restart budgets. Raises UsageError where ``refuse`` does.

    With ``resize`` the run continues in that layout; where that changes nothing, no revision is written.
    ``take_over``: as in inspect_resume(). ``preparation_tasks`` and ``say``: as in submit_run().
    ``automatic``: number of the resume without a person, which grants no new budgets; 0: of a person.
    ``check``: called with the lock of the run, before anything changes; raises if the run must not be resumed any more.
    """
    with submit_lock(run):
        check()
        record, report = read_record(run), inspect_resume(run, scheduler, take_over=take_over)
        refuse(run, report, from_scratch=from_scratch, resize=resize)
        if resize is not None and resize.before.revision != record.revision:
            raise UsageError(Reason("launch.resume-resized-meanwhile", {"run": run.run_id}))
        spec = record.spec if resize is None else resize.spec
        scheduler = scheduler or backend_for(spec.cluster.scheduler)
        with contextlib.ExitStack() as changes:

            def undone(undo: Callable[[], object]) -> None:
                changes.enter_context(undone_if_refused(undo))

            def recorded_event(event: str, details: Mapping[str, Any] | None) -> None:
                """Record an event about the next attempt, unless ``details`` is None."""
                if details is not None:
                    record_event(run, event, **details)
                    undone(lambda: withdraw_event(run, event))

            had_secrets = run.secrets.exists()
            keep_secrets(run, spec)  # the end of a run removes them
            if not had_secrets:
                undone(lambda: forget_secrets(run))
            recorded_event(SCHEDULE_EVENT, None if resize is None else _schedule_details(resize))
            revised = record if resize is None or not resize.changes else _revise(run, record, resize, undone)
            recorded_event("from-scratch", {} if from_scratch else None)
            # Moved aside: they would end the job at once.
            aside = {file: file.with_name(f"{file.name}.lifted") for file in (run.stop_file, run.manual_stop_file)}
            for lifted in aside.values():
                lifted.unlink(missing_ok=True)  # left by a resume that crashed
            _rename(aside)
            undone(lambda: _rename({lifted: file for file, lifted in aside.items()}))
            fetch_to_shared_cache(revised.spec, revised.hub, os.environ)
            submission = submit_prepared(run, revised, scheduler, preparation_tasks, say, automatic)
            for lifted in aside.values():
                lifted.unlink(missing_ok=True)
            return Resumption(report, submission)


def _rename(names: Mapping[Path, Path]) -> None:
    """Rename those of the files that exist."""
    for file, name in names.items():
        with contextlib.suppress(FileNotFoundError):
            file.rename(name)


def refuse(run: RunDir, report: ResumeReport, *, from_scratch: bool = False, resize: Resize | None = None) -> None:
    """Raise UsageError when the run is active or finished, or its checkpoints are damaged or gone."""
    refusal = _refusal(run, report, from_scratch=from_scratch, resize=resize)
    if refusal is not None:
        raise UsageError(refusal)


def _refusal(run: RunDir, report: ResumeReport, *, from_scratch: bool, resize: Resize | None) -> Reason | None:
    name = {"run": run.run_id}
    if (owner := read_superseded(run)) is not None:
        place = {"run_dir": owner.get("run_dir", "another folder"), "host": owner.get("host", "another host")}
        return Reason("mirror.continues-elsewhere", name | place | {"place": owner.get("to", "MIRROR")})
    if report.finished_for(resize):
        early = report.stopped_early and resize is not None and resize.schedule is not None
        return Reason("launch.resume-stopped-early" if early else "launch.resume-finished", name)
    if report.active:
        known = report.job.state != "unknown"
        detail = report.job.why if report.job.detail else recorded(report.job.state)
        return Reason("launch.resume-active" if known else "launch.resume-unknown", name | {"detail": detail})
    if report.unseen and not from_scratch and resize is not None and resize.spec.cluster.traits.shared_run_directory:
        mirror = resize.before.spec.checkpoint.mirror.to
        to = {"scheduler": resize.spec.cluster.traits.display_name, "place": mirror}
        return Reason("launch.resume-unseen" if mirror is None else "launch.resume-unseen-mirrored", name | to)
    if report.checkpoint is not None and from_scratch:
        return Reason("launch.resume-has-checkpoint", name | {"checkpoint": report.checkpoint.path.name})
    step = report.last_step_logged or 0
    if report.checkpoint is None and report.passed_over and not from_scratch:
        params = {"step": step, "passed_over": "; ".join(report.passed_over)}
        return Reason("launch.resume-checkpoints-invalid", name | params)
    if report.checkpoint is None and report.had_checkpoint and not from_scratch:
        return Reason("launch.resume-checkpoints-gone", name | {"step": step})
    return None if report.checkpoint is None or resize is None else _unshardable(run, resize)


def _unshardable(run: RunDir, resize: Resize) -> Reason | None:
    """Return why the states of the optimizer cannot be sharded as the new layout wants; None if they can."""
    optimizer = resize.spec.training.optimizer.name
    if resize.reshards_states and optimizer == "adamw_8bit":
        return Reason("launch.resume-layout-fixed", {"run": run.run_id, "optimizer": optimizer})
    return None


def refuse_branch(branch: Branch, resize: Resize) -> None:
    """Raise UsageError if a new run from the checkpoint would have nothing to train, or could not load it."""
    step, name = branch.checkpoint.step, {"run": branch.run.run_id}
    if (refusal := _unshardable(branch.run, resize)) is not None:
        raise UsageError(refusal)
    if resize.spec.total_steps <= step:
        raise UsageError(Reason("launch.branch-complete", name | {"step": step, "steps": resize.spec.total_steps}))
    stopped = any(event["event"] == "stopped-early" and event["step"] == step for event in read_events(branch.run))
    if stopped and not continues_after_early_stop(resize.before.spec, resize.spec):
        raise UsageError(Reason("launch.resume-stopped-early", name))


def _schedule_details(resize: Resize) -> dict[str, Any] | None:
    """Return the event about another length or schedule; None if both stay. Other keys are in the revision."""
    if (schedule := resize.schedule) is None:
        return None
    changes = {
        key: {"was": json.loads(was), "now": json.loads(now)}
        for key, (was, now) in resize.changes.items()
        if key in SCHEDULE_KEYS
    }
    return {"revision": resize.after.revision, "changes": changes, **schedule.to_json()}


def _revise(
    run: RunDir, record: RunRecord, resize: Resize, undone: Callable[[Callable[[], object]], None]
) -> RunRecord:
    """Write a new revision and return the record that the job will read; ``undone`` takes how to remove it."""
    hub = resolve_commits(resize.spec, os.environ, record.hub)
    made: list[Path] = []
    try:
        made = [] if resize.snapshot is None else write_snapshot(run, resize.snapshot)
        revised = add_revision(
            run,
            record,
            resize.spec,
            resize.plan,
            resize.overrides,
            code=resize.after.code,
            hub=hub,
            size_plans=resize.size_plans,
        )
    except BaseException:
        remove_snapshot(made)
        raise

    def withdraw() -> None:
        withdraw_revision(run, revised.revision)
        remove_snapshot(made)

    undone(withdraw)
    return revised
