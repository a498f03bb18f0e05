"""The status of a run, from its directory and one request to its scheduler. Changes nothing."""

import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from scaletrain_cli.errors import ExitCode, SchedulerError, UsageError
from scaletrain_cli.full_disk import why_unwritable
from scaletrain_cli.launch.attempts import (
    AttemptRecord,
    attempt_outcome,
    newest_checkpoint_step,
    read_attempt,
    read_attempts,
)
from scaletrain_cli.launch.backends.base import Backend
from scaletrain_cli.launch.backends.registry import backend_for, failures_of_plugin
from scaletrain_cli.launch.exit_classification import ExitReason
from scaletrain_cli.launch.job import Job, job_from, open_request, read_submission
from scaletrain_cli.launch.node.record import read_node_records
from scaletrain_cli.launch.run_status import DAMAGED, OVER, RunState, RunStatus
from scaletrain_cli.reasons import Reason, reason_from
from scaletrain_cli.rundir.documents import reporting_damage
from scaletrain_cli.rundir.evaluations import measures_in
from scaletrain_cli.rundir.goodput import (
    newest_steps,
    remaining_seconds,
    run_goodput,
    steps_lost,
    typical_seconds,
    without_first_steps,
)
from scaletrain_cli.rundir.journal import read_events, read_lines_backwards
from scaletrain_cli.rundir.measured import read_measured
from scaletrain_cli.rundir.mirror_state import read_mirror_state
from scaletrain_cli.rundir.paths import RunDir, read_sweep_place
from scaletrain_cli.rundir.preparation import why_not_prepared
from scaletrain_cli.rundir.record import RunRecord, is_elsewhere, read_record
from scaletrain_cli.sent_run import sent_run
from scaletrain_cli.spec.backend_traits import display_name


@dataclass(frozen=True)
class UnreportedEnd:
    """The end of an attempt that recorded none, as far as it is known.

    ``state``: ``open`` while the job may not be over; ``known`` if records or the scheduler give the ``exit_reason``;
    else ``not-known``.
    """

    state: Literal["open", "known", "not-known"]
    why: Reason
    exit_reason: ExitReason | None = None


def unreported_end(run: RunDir, record: RunRecord, attempt: AttemptRecord, job: Job) -> UnreportedEnd:
    """Return the end of an attempt that recorded none. ``job`` is the scheduler's latest answer."""
    number = {"attempt": attempt.number, "run": run.run_id}
    reports = {"scheduler": display_name(attempt.scheduler), "detail": job.why}
    if job.state == "unknown":
        return UnreportedEnd("open", Reason("launch.attempt-unknown", number | {"detail": job.why}))
    if job.state == "running":
        return UnreportedEnd("open", Reason("launch.attempt-running", number | reports))
    if job.state != "ended":
        return UnreportedEnd("open", Reason("launch.attempt-not-over", number | reports))
    outcome = attempt_outcome(run, record.spec, attempt.number, cancelled=False)
    reported = any(node.ended is not None for node in read_node_records(run, attempt.number))
    if outcome.reason != "node" or (reported and job.cause is None and not run.is_cancelled):
        why = Reason("launch.unreported-end", number | {"cause": outcome.why})
        return UnreportedEnd("known", why, outcome.reason)
    cause: ExitReason | None = "cancelled" if run.is_cancelled else job.cause
    if cause is not None:
        why = Reason("launch.unreported-end-of-job", number | reports | {"cause": Reason(f"launch.job-{cause}")})
        return UnreportedEnd("known", why, cause)
    # The job script ends with this exit code without a record only if it could not write one.
    unwritable = why_unwritable(run.path)
    if unwritable == "read-only":
        return UnreportedEnd(
            "known", Reason("launch.unreported-read-only", number | reports | {"folder": str(run.path)})
        )
    if unwritable == "full" or job.exit_code == ExitCode.DO_NOT_REQUEUE:
        disk = Reason("launch.disk-is-full" if unwritable else "launch.disk-was-full", {"folder": str(run.path)})
        why = Reason("launch.unreported-disk-full", number | reports | {"cause": disk})
        return UnreportedEnd("known", why, "disk-full")
    return UnreportedEnd("not-known", Reason("launch.unreported-unknown", number | reports))


def why_ended(run: RunDir, record: RunRecord, attempt: AttemptRecord | None, job: Job) -> Reason:
    """Return why the last attempt ended; if no end was recorded, as far as ``job`` shows it."""
    if attempt is None:
        return Reason("launch.no-attempt")
    return attempt.end if attempt.ended is not None else unreported_end(run, record, attempt, job).why


SETTLED_SECONDS = 3600.0  # since the recorded end of a run: its job has ended, too
SENT_JOB_SECONDS = 60.0  # since the machine that shows a view has sent the job: after that, it is not known
# The number of latest lines that are searched for a validation loss.
_LINES_SEARCHED = 10_000


def run_status(run: RunDir, scheduler: Backend | None = None, *, job: Job | None = None) -> RunStatus:
    """Return the status of the run. Raises UsageError when run.json is damaged.

    ``job``: a recent answer of the scheduler, which is then not asked. Where it does not answer, the state is that of
    the run directory, or unknown.
    """
    record = read_record(run)
    attempts = read_attempts(run)
    last = attempts[-1] if attempts else None
    submission = read_submission(run)
    job = _ask(run, record, last, scheduler) if job is None else job
    measured = {**job.progress, **_newest_measures(run, evaluates=record.spec.evaluation.every > 0)}
    state = _state(run, record, job, last)
    saved, events = newest_checkpoint_step(run, record.spec), read_events(run)
    unsaved = 0 if state == "finished" or record.spec.code.own_program else measured.get("step", 0) - (saved or 0)
    start = newest_event(events, "start-waits", "started", "resumed", "attempt-ended", "submitted", "stopped")
    is_between = bool(newest_event(events, "attempt-ended", "started", "resumed"))  # the next records its steps lost
    files_seen = not is_elsewhere(run, record)
    nodes = read_node_records(run, last.number) if last is not None and last.ended is None else ()
    event = newest_event(events, "stragglers", "started", "resumed")
    params = {name: event.get(name) for name in ("rank", "seconds", "others_seconds")}
    return RunStatus(
        run_id=record.run_id,
        name=record.spec.name,
        state=state,
        scheduler=record.spec.cluster.scheduler,
        job_id=job.id or (submission.job_id if submission else ""),
        attempt=last.number if last else 0,
        step=measured.get("step", 0),
        total_steps=record.spec.total_steps,
        loss=measured.get("loss"),
        validation_loss=measured.get("validation_loss"),
        tokens_per_second=measured.get("tokens_per_second"),
        last_checkpoint_step=saved,
        steps_lost_total=steps_lost(events) + (max(0, unsaved) if is_between else 0),
        restarts=max(0, len(attempts) - 1),
        nodes=job.nodes or (last.nodes if last else ()),
        agent_pids=tuple(node.agent_pid for node in nodes if node.ended is None),
        run_dir=str(run.path),
        reason=_why(run, record, job, last),
        job=job,
        measured=read_measured(run),
        goodput=run_goodput(run),
        straggler=Reason("launch.straggler", params) if event and None not in params.values() else None,
        idle=idle_notice(run, time.time()) if job.may_be_active else None,
        starting=reason_from(start) if start and job.may_be_active else None,
        sweep=read_sweep_place(run),
        source_losses=_by_source(measured, "loss/"),
        source_validation_losses=_by_source(measured, "validation_loss/"),
        unit=record.spec.unit,
        samples_per_second=measured.get("samples_per_second"),
        validation_measures=measures_in(measured),
        learning_rate=measured.get("learning_rate"),
        grad_norm=measured.get("grad_norm"),
        mfu=measured.get("mfu"),
        mirror=None if record.spec.checkpoint.mirror.to is None else read_mirror_state(run),
        planned_nodes=record.spec.cluster.nodes,
        sizes=record.sizes,
        step_seen=files_seen or "step" in measured,
        files_seen=files_seen,
        branch_of=record.branch_of,
    )


def newest_event(events: Sequence[Mapping[str, Any]], name: str, *others: str) -> Mapping[str, Any]:
    """Return the newest event of this name, if none of the others is newer; else an empty one."""
    matches = (event for event in reversed(events) if event["event"] in (name, *others))
    newest: Mapping[str, Any] = next(matches, {})
    return newest if newest.get("event") == name else {}


def _by_source(measured: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Return the values of the measures with this prefix, by the source in the rest of their names."""
    return {key.removeprefix(prefix): value for key, value in measured.items() if key.startswith(prefix)}


def run_statuses(runs: Sequence[RunDir]) -> list[RunStatus | UsageError]:
    """Return the status of each run, or the error of its damaged record. Sends one request to each scheduler."""
    return [_status_or_error(run, scheduler) for run, scheduler in zip(runs, _schedulers(runs), strict=True)]


def runs_in_states(runs: Sequence[RunDir], states: Collection[str]) -> list[RunDir]:
    """Return the runs in one of the states, in their order. Their whole status is read only for damaged ones."""
    if DAMAGED in states:
        current = [DAMAGED if isinstance(status, UsageError) else status.state for status in run_statuses(runs)]
        return [run for run, state in zip(runs, current, strict=True) if state in states]
    settled = {run: _settled_state(run) for run in runs}
    others = [run for run in runs if settled[run] is None]
    for run, scheduler in zip(others, _schedulers(others), strict=True):
        with contextlib.suppress(UsageError, OSError), reporting_damage(run.path):
            record, last = read_record(run), read_attempt(run, max(run.attempts(), default=0))
            settled[run] = _state(run, record, _ask(run, record, last, scheduler), last)
    return [run for run in runs if settled[run] in states]


def _settled_state(run: RunDir) -> RunState | None:
    """Return the state by the recorded end of the last attempt, if nothing can have followed it; else None."""
    with contextlib.suppress(UsageError):
        last = read_attempt(run, max(run.attempts(), default=0))
        if last is None or sent_run(run.path) is not None:
            return None
        if has_finished(run, last):
            return "finished"
        is_settled = last.ended is not None and time.time() - last.ended > SETTLED_SECONDS and not last.may_be_followed
        if is_settled and not _is_submitted_after(run, last):
            return "cancelled" if run.is_cancelled else _of_cause(last.reason)
    return None


def _schedulers(runs: Sequence[RunDir]) -> list[Backend | None]:
    """Return for each run the back end that already holds the answer about its job; None where there is none."""
    open_runs: dict[str, list[RunDir]] = {}
    for run in runs:
        with contextlib.suppress(UsageError, OSError):  # its own row reports the damage
            if not has_finished(run, read_attempt(run, max(run.attempts(), default=0))):
                open_runs.setdefault(read_record(run).spec.cluster.scheduler, []).append(run)
    by_run: dict[RunDir, Backend] = {}
    for name, group in open_runs.items():
        if len(group) > 1:
            # Each row says that the back end is not installed here, or failed.
            with contextlib.suppress(SchedulerError), failures_of_plugin(name):
                by_run |= dict.fromkeys(group, backend_for(name).prefetched(group))
    return [by_run.get(run) for run in runs]


def _status_or_error(run: RunDir, scheduler: Backend | None) -> RunStatus | UsageError:
    try:
        with reporting_damage(run.path):
            return run_status(run, scheduler)
    except UsageError as error:
        return error
    except OSError as error:  # such as too many open files
        return UsageError(f"{run.path} could not be read: {error.strerror or error}.")


def has_finished(run: RunDir, last: AttemptRecord | None) -> bool:
    """Return whether the last attempt has finished the run, and no job was submitted since to train more steps."""
    if last is None or last.reason != "done":
        return False
    return not _is_submitted_after(run, last)


def _is_submitted_after(run: RunDir, last: AttemptRecord) -> bool:
    submitted = (open_request(run), read_submission(run))
    return any(request is not None and request.first_attempt > last.number for request in submitted)


def is_over(run: RunDir, status: RunStatus) -> bool:
    """Return whether only a resume continues the run. A preempted run may be waiting for its next attempt."""
    if status.state == "unknown":
        return status.job.forgotten
    if status.state != "preempted":
        return status.state in OVER
    return not status.job.may_be_active


def eta_seconds(run: RunDir, status: RunStatus) -> float | None:
    """Return the seconds until the last step at the present rate, as `status` shows them, by the newest steps alone.

    0 after the last step; None if the run does not train, or has measured fewer than five steps.
    """
    if not status.step_seen:
        return None
    left = status.total_steps - status.step
    if left > 0 and is_over(run, status):
        return None
    return remaining_seconds(run, left, typical_seconds(without_first_steps(newest_steps(run))) if left > 0 else None)


def exit_code_of(run: RunDir, status: RunStatus) -> int:
    """Return the exit code of a run that has ended: that of its last decision, or else of its last attempt."""
    if status.state == "finished":
        return ExitCode.DONE
    last = next(reversed(read_attempts(run)), None)
    if last is None:  # no attempt began, or none is visible here
        return ExitCode.SCHEDULER if status.job.forgotten else status.job.exit_code or ExitCode.CRASHED
    if last.decision is not None and not last.decision.requeue:
        return last.decision.exit_code or ExitCode.CRASHED
    unrecorded = ExitCode.PREEMPTED if status.state == "preempted" else ExitCode.CRASHED  # its supervisor has ended
    return last.exit_code or unrecorded


def _ask(run: RunDir, record: RunRecord, last: AttemptRecord | None, scheduler: Backend | None) -> Job:
    if (known := sent_run(run.path)) is not None:  # the scheduler is asked where the view is shown
        job, silent = job_from(known.job), time.time() - known.received
        if silent <= SENT_JOB_SECONDS:
            return job
        return Job.because(job.id, "unknown", Reason("launch.sent-job-old", {"seconds": round(silent)}), job.nodes)
    if has_finished(run, last):  # final: saves a request to the scheduler
        return Job("", "ended", "finished")
    try:
        with failures_of_plugin(record.spec.cluster.scheduler):
            return (scheduler or backend_for(record.spec.cluster.scheduler)).job(run, record)
    except SchedulerError as error:  # the run directory still has most of it
        unsettled = open_request(run) is not None
        detail = error.message.rstrip(".")
        return Job(_sent_as(run, record, last), "unknown", detail, unsettled=unsettled, reason=error.reason)


def _sent_as(run: RunDir, record: RunRecord, last: AttemptRecord | None) -> str:
    """Return the id of the job that was submitted, or may have been if the scheduler's answer was lost."""
    submission = read_submission(run)
    submitted = submission.job_id if submission is not None else last.job_id if last is not None else ""
    with contextlib.suppress(SchedulerError):  # a back end that is not installed here
        return backend_for(record.spec.cluster.scheduler).latest_job_id(run, record, submitted)
    return submitted


def _state(run: RunDir, record: RunRecord, job: Job, last: AttemptRecord | None) -> RunState:
    """Return the state. An attempt without a recorded end has failed only if its job is over."""
    if has_finished(run, last):
        return "finished"
    if job.state == "suspended" or job.state == "ending":
        return job.state
    if job.forgotten and last is None:
        gone: RunState = "unknown" if failed_preparation(run, record, job) is None else "failed"
        return "cancelled" if run.is_cancelled else gone
    if job.is_active:
        waiting = last is not None and last.ended is not None and last.reason == "preempted"
        if waiting:
            return "preempted"
        return "queued" if job.state == "queued" else "running"
    if job.state == "unknown" and (last is None or last.ended is None or last.may_be_followed):
        return "unknown"
    if run.is_cancelled and not (last is None and job.exit_code == ExitCode.DONE):
        return "cancelled"
    if last is None and failed_preparation(run, record, job) is not None:
        return "failed"
    if last is None:
        if job.reason is not None and job.reason.contains("launch.stop-idle"):  # on a volume that is not visible here
            return "ended-idle"
        known: dict[int | None, RunState] = {ExitCode.DONE: "finished", ExitCode.PREEMPTED: "preempted"}
        return known.get(job.exit_code, _of_cause(job.cause))
    if last.ended is None:
        return _of_cause(unreported_end(run, record, last, job).exit_reason)
    ended_by_scheduler = last.decision is not None and last.decision.left_to_scheduler and job.cause is not None
    return _of_cause(job.cause if ended_by_scheduler else last.reason)


def failed_preparation(run: RunDir, record: RunRecord, job: Job) -> Reason | None:
    """Return why the data of a run whose gang has ended without an attempt were not prepared; None if they were.

    ``job``: of the gang. Where another cause has ended it, its job tells that.
    """
    if job.may_be_active:
        return None
    if (failed := why_not_prepared(run)) is not None:
        return failed
    with contextlib.suppress(SchedulerError), failures_of_plugin(record.spec.cluster.scheduler):
        return backend_for(record.spec.cluster.scheduler).preparation_failure(run, job)
    return None


def _of_cause(reason: ExitReason | None) -> RunState:
    """Return the state of a run that is over, by its exit reason."""
    states: dict[ExitReason | None, RunState] = {"idle": "ended-idle", "done": "finished"}
    states |= {"cancelled": "cancelled", "preempted": "preempted"}
    return states.get(reason, "failed")


def _why(run: RunDir, record: RunRecord, job: Job, last: AttemptRecord | None) -> Reason:
    """Return the scheduler's reason while the job is active, and how the last attempt ended once it is over."""
    if job.is_active and (last is None or last.ended is None):
        return job.why
    if last is None:
        if not run.is_cancelled and (failed := failed_preparation(run, record, job)) is not None:
            return failed
        # If the nodes write to a volume that is not visible here, there may have been attempts.
        if not record.spec.cluster.traits.shared_run_directory or job.state != "ended":
            return job.why
        log = backend_for(record.spec.cluster.scheduler).job_log(run, job.id)
        if log is None:
            return Reason("launch.job-without-attempt", {"detail": job.why})
        return Reason("launch.job-without-attempt-see-log", {"detail": job.why, "log": log.name})
    end = why_ended(run, record, last, job)
    if last.ended is None:
        return end
    if job.begins_no_attempt:
        return Reason("launch.attempt-ended-job-failed", {"end": end, "detail": job.why})
    if job.state == "unknown" and last.may_be_followed:
        return Reason("launch.attempt-ended-maybe-followed", {"end": end, "detail": job.why})
    if job.state in ("suspended", "ending"):
        reports = {"scheduler": display_name(last.scheduler), "detail": job.why}
        return Reason("launch.attempt-ended-job-active", {"end": end} | reports)
    if job.state == "ended" and last.decision is not None and last.decision.requeue:
        return Reason("launch.attempt-ended-job-gone", {"end": end})
    if job.state == "ended" and last.decision is not None and last.decision.left_to_scheduler:
        return Reason("launch.attempt-ended-with-job", {"end": end})
    return end


def _newest_measures(run: RunDir, *, evaluates: bool) -> dict[str, Any]:
    """Return the newest training line of metrics.jsonl, merged with the newest validation (on separate lines).

    Only numbers are returned: another program may have written the file, or damaged it. A loss that is not finite is
    null there, and absent here.
    """
    newest: dict[str, Any] = {}
    validation: dict[str, Any] | None = None
    for count, document in enumerate(read_lines_backwards(run.metrics)):
        line = {key: value for key, value in document.items() if type(value) in (int, float)}
        if type(document.get("step", 0)) is not int:
            continue
        if "loss" in line or document.get("loss", "") is None:
            newest = newest or line
        if validation is None and ("validation_loss" in line or document.get("validation_loss", "") is None):
            validation = {key: value for key, value in line.items() if key.startswith("validation_")}
        if (newest and (validation is not None or not evaluates)) or count > _LINES_SEARCHED:
            break
    return {**newest, **(validation or {})}


def idle_notice(run: RunDir, now: float) -> Reason | None:
    """Return that the running attempt does nothing, if that was announced and still holds. ``now``: Unix seconds."""
    event = newest_event(read_events(run), "idle", "idle-over", "attempt-ended", "submitted", "stopped")
    with contextlib.suppress(KeyError, TypeError, ValueError):  # there is none, or it has another form
        passed = max(0.0, now - float(event["time"]))
        left = max(0.0, float(event["ends_in_seconds"]) - passed)
        params = {"seconds": float(event["seconds"]) + passed, "left": left, "what": event["measured"]}
        return Reason("launch.idle", params | {"run": run.run_id, "timeout": float(event["timeout"])})
    return None
