"""`scaletrain recover`: resume runs whose jobs were lost, where their spec asks for it (``restarts.lost``).

No process stays for this: a person, cron or `status --wait --resume` calls it. A run is resumed under its lock, and
only if it is still lost then, so that two callers start one job. Each resume waits longer than the one before.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from scaletrain_cli.errors import ExitCode, ScaletrainError, SchedulerError, SchedulerSilentError, UsageError
from scaletrain_cli.launch.attempts import AttemptRecord, read_attempts, read_stop_request
from scaletrain_cli.launch.backends.base import Backend
from scaletrain_cli.launch.backends.registry import backend_for
from scaletrain_cli.launch.exit_classification import ExitReason
from scaletrain_cli.launch.job import Job, read_submission
from scaletrain_cli.launch.restart import automatic_submissions
from scaletrain_cli.launch.resume import resume
from scaletrain_cli.launch.status import exit_code_of, newest_event, run_status, unreported_end, why_ended
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.rundir.journal import read_events, record_event
from scaletrain_cli.rundir.mirror_state import read_superseded
from scaletrain_cli.rundir.paths import RunDir, list_runs
from scaletrain_cli.rundir.record import RunRecord, read_record
from scaletrain_cli.unexpected import known_error

# From the loss to the resume: a scheduler may be requeueing the job, and the cause may last. It doubles each time.
FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 60.0, 3600.0
# The causes of an end without a report that another start can cure.
_TAKEN_AWAY: tuple[ExitReason, ...] = ("node", "preempted", "time-limit", "out-of-grace", "killed", "wrong-nodes")
_NOT_REQUEUED = "slurm.job-not-requeued"
RecoveryState = Literal["resumed", "waiting", "used-up", "refused"]


@dataclass(frozen=True)
class Recovery:
    """The result of recover() for a lost run.

    ``number``: which automatic resume this is, of ``allowed``; ``why``: why the run was lost, or for ``refused`` why it
    cannot be resumed; ``after``: Unix time before which a ``waiting`` run is not resumed.
    """

    run: RunDir
    state: RecoveryState
    why: Reason
    number: int
    allowed: int
    job_id: str = ""
    after: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the stable JSON object."""
        place = {"run_id": self.run.run_id, "run_dir": str(self.run.path), "state": self.state}
        counts = {"number": self.number, "allowed": self.allowed, "job_id": self.job_id, "after": self.after}
        return place | counts | {"why": str(self.why), **self.why.to_document()}


def why_lost(run: RunDir, record: RunRecord, job: Job, scheduler: Backend) -> Reason | None:
    """Return why the job of a run was lost; None if it may be active, or its end was that of the run or of a person.

    Lost are a job that ended although an attempt was to follow, or without reporting an end, and a run whose nodes did
    not match the plan (code 5) as often as ``restarts.node`` allows.
    """
    if run.is_cancelled or read_superseded(run) is not None or job.may_be_active or job.begins_no_attempt:
        return None
    attempts, submission = read_attempts(run), read_submission(run)
    first = 1 if submission is None else submission.first_attempt
    last = attempts[-1] if attempts and attempts[-1].number >= first else None
    if not _is_lost(run, record, job, last, scheduler):
        return None
    if last is None:
        return Reason("launch.lost-before-attempt", {"detail": job.why})
    return why_ended(run, record, last, job)


def _is_lost(run: RunDir, record: RunRecord, job: Job, last: AttemptRecord | None, scheduler: Backend) -> bool:
    if last is None:
        if job.exit_code is not None:
            return job.exit_code == ExitCode.WRONG_NODES
        return bool(job.id) and not job.forgotten and scheduler.was_taken_away(run, job, None)
    if last.ended is None:
        if read_stop_request(run, last.number, "idle") is not None:
            return False
        end = unreported_end(run, record, last, job).exit_reason
        # Also of a job that its owner deleted, the ranks report an end as in a preemption.
        return end in (None, "cancelled", *_TAKEN_AWAY) and scheduler.was_taken_away(run, job, last)
    if last.reason in ("done", "cancelled", "idle"):
        return False
    decision = last.decision
    if decision is None or decision.requeue or decision.left_to_scheduler:
        return scheduler.was_taken_away(run, job, last)
    nodes_used_up = last.reason == "wrong-nodes" and decision.code == "launch.stop-budget-used-up"
    return nodes_used_up or decision.code == _NOT_REQUEUED or scheduler.was_shut_down(run, last)


def delay_seconds(earlier: int) -> float:
    """Return the time from a loss to the resume after ``earlier`` resumes without a person."""
    return float(min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2 ** min(earlier, 30)))


class _ChangedError(Exception):
    """The run is no longer lost: another process has resumed it."""


def recover(run: RunDir, scheduler: Backend | None = None, now: float | None = None) -> Recovery | None:
    """Resume the run if it is lost, its spec asks for it, and its time has come; None if there is nothing to do.

    Raises UsageError for a damaged record, and SchedulerError if the scheduler does not answer.
    """
    record = read_record(run)
    if not record.spec.restarts.lost:
        return None
    recovery = _due(run, record, scheduler, time.time() if now is None else now)
    if recovery is None or recovery.state != "waiting" or recovery.after is not None:
        return recovery

    is_still_lost = False

    def still_lost() -> None:
        nonlocal is_still_lost
        again = _due(run, read_record(run), scheduler, time.time() if now is None else now)
        if again is None or again.state != "waiting" or again.after is not None or again.number != recovery.number:
            raise _ChangedError
        is_still_lost = True

    try:
        resumed = resume(run, scheduler=scheduler, automatic=recovery.number, check=still_lost)
    except _ChangedError:
        return None
    except SchedulerSilentError:  # it may have the job; the next call finds it
        raise
    except (ScaletrainError, OSError) as error:
        if isinstance(error, SchedulerError) and not is_still_lost:  # which the scheduler does not tell
            raise
        why = (error.reason if isinstance(error, ScaletrainError) else None) or recorded(str(error).rstrip("."))
        return Recovery(run, "refused", why, recovery.number, recovery.allowed)
    return Recovery(run, "resumed", recovery.why, recovery.number, recovery.allowed, resumed.submission.job_id)


def _due(run: RunDir, record: RunRecord, scheduler: Backend | None, now: float) -> Recovery | None:
    """Return that the run is lost, and when it may be resumed; ``after`` is None once it may."""
    submission = read_submission(run)
    if submission is None:  # never submitted, or the answer of the scheduler was lost
        return None
    backend = scheduler or backend_for(submission.scheduler)
    if (why := why_lost(run, record, backend.job(run, record), backend)) is None:
        return None
    earlier, allowed = automatic_submissions(run), record.spec.restarts.lost
    if earlier >= allowed:
        return Recovery(run, "used-up", why, earlier, allowed)
    # A node may have recorded an event by a clock that is ahead of this one: it would delay the resume by as much.
    times = (submission.submitted, *(event.get("time") or 0.0 for event in read_events(run)))
    after = max((at for at in times if at <= now), default=0.0) + delay_seconds(earlier)
    return Recovery(run, "waiting", why, earlier + 1, allowed, after=after if now < after else None)


def record_lost_end(run: RunDir) -> None:
    """Record that the run has ended, if nothing of its job could do so; a resume finds all else as it was."""
    status = run_status(run)
    is_over = status.files_seen and status.job.state == "ended" and status.state != "finished"
    if is_over and newest_event(read_events(run), "submitted", "finished", "cancelled", "stopped"):
        code = exit_code_of(run, status)
        record_event(run, "stopped", exit_code=code, why=status.why, **status.reason.to_document())


@dataclass(frozen=True)
class Recoveries:
    """The results of recover() for several runs; ``errors``: those of runs whose state is not known, by run id."""

    found: tuple[Recovery, ...] = ()
    errors: dict[str, ScaletrainError] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the stable JSON object."""
        errors = [{"run_id": name, "error": error.to_json()} for name, error in self.errors.items()]
        return {"schema": "scaletrain.recover/v1", "runs": [one.to_json() for one in self.found], "errors": errors}


def recover_runs(runs: Sequence[RunDir], on_found: Callable[[Recovery], None] = lambda recovery: None) -> Recoveries:
    """Resume those of the runs that are lost, as recover() does. Goes on after a run whose state is not known."""
    recoveries, errors = [], {}
    for run in runs:
        try:
            one = recover(run)
        except (ScaletrainError, OSError) as error:  # such as a stale directory of a network file system
            errors[run.run_id] = known_error(error, "recover")
            continue
        if one is not None:
            on_found(one)
            recoveries.append(one)
    return Recoveries(tuple(recoveries), errors)


def own_runs() -> list[RunDir]:
    """Return the runs of this user under the runs root; damaged ones and those of other users are left out."""
    runs = []
    for run in list_runs():
        with contextlib.suppress(UsageError, OSError):
            if run.record.stat().st_uid == os.geteuid() and read_record(run).spec.restarts.lost:
                runs.append(run)
    return runs
