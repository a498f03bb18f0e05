"""The jobs of runs in Slurm's queue: submit, find and cancel them, also where Slurm's answer was lost.

The comment of a job identifies its run directory, so that a job whose id was never received can be found.
"""

import contextlib
import hashlib
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.errors import SchedulerError, SchedulerSilentError, UsageError
from scaletrain_cli.launch.attempts import read_attempts
from scaletrain_cli.launch.backends.slurm.array import is_of_array, job_order, tasks_of
from scaletrain_cli.launch.backends.slurm.commands import call_slurm, cause_of, lost_job, queue_script
from scaletrain_cli.launch.backends.slurm.preparation import cancel_preparation
from scaletrain_cli.launch.backends.slurm.site import user_name
from scaletrain_cli.launch.backends.slurm.tables import node_names
from scaletrain_cli.launch.job import Job, JobCause, JobState, open_request, read_submission
from scaletrain_cli.launch.restart import forget_secrets
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir, read_sweep_place
from scaletrain_cli.rundir.preparation import is_done, preparation_folder, preparation_name, read_job
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.safe_files import replace_file, touch

_QUERY_SECONDS = 15.0  # squeue retries for a minute if the controller is down
# How long after an unanswered sbatch its job may still appear: the controller works through a backlog.
_SETTLED_SECONDS = 300.0
_NEVER_SATISFIED = "DependencyNeverSatisfied"  # the reason of a job whose dependency has failed
_COLUMNS = "%i|%T|%r|%N|%u|%k"  # %i: ARRAY_TASK for a task; the comment is last: it may contain any character
# RESV_DEL_HOLD: held since its reservation was deleted; EXPEDITING: requeued with priority, since Slurm 25.11.
_QUEUED = "PENDING CONFIGURING REQUEUED REQUEUE_HOLD REQUEUE_FED SPECIAL_EXIT RESV_DEL_HOLD EXPEDITING".split()
_ENDED = (
    *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE"),
    *("OUT_OF_MEMORY", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"),
)
_STATES: dict[str, JobState] = {
    **dict.fromkeys(_QUEUED, "queued"),
    **dict.fromkeys(("RUNNING", "RESIZING", "SIGNALING"), "running"),
    **dict.fromkeys(("SUSPENDED", "STOPPED"), "suspended"),
    **dict.fromkeys(("COMPLETING", "STAGE_OUT"), "ending"),
    **dict.fromkeys(_ENDED, "ended"),
}
_CAUSES: dict[str, JobCause] = {
    "CANCELLED": "cancelled",
    "PREEMPTED": "preempted",
    "TIMEOUT": "time-limit",
    "DEADLINE": "time-limit",
    "OUT_OF_MEMORY": "host-oom",
    "NODE_FAIL": "node",
    "BOOT_FAIL": "node",
}


@dataclass(frozen=True)
class JobRow:
    """One job as squeue prints it; ``nodes`` is Slurm's hostlist."""

    job_id: str
    slurm_state: str
    reason: str
    nodes: str
    user: str
    comment: str

    @property
    def state(self) -> JobState:
        return job_state(self.slurm_state)

    @property
    def job(self) -> Job:
        why = Reason("slurm.job-state", {"state": self.slurm_state})
        if self.reason not in ("None", ""):
            why = Reason("slurm.job-state-because", {"state": self.slurm_state, "reason": self.reason})
        return Job.because(self.job_id, self.state, why, node_names(self.nodes), cause=job_cause(self.slurm_state))


def job_state(slurm_state: str) -> JobState:
    """Return the job state, common to all schedulers, for Slurm's state; ``unknown`` for one of a later version.

    A job in an unknown state is not taken to be over: no second job of its run is submitted.
    """
    return _STATES.get(slurm_state, "unknown")


def job_cause(slurm_state: str) -> JobCause | None:
    """Return why the job ended, if its Slurm state shows that; sacct writes ``CANCELLED by 1000``."""
    return _CAUSES.get(slurm_state.partition(" ")[0])


# ---- the job of a run ------------------------------------------------------------------------------------------------


def job_of_run(run: RunDir) -> Job:
    """Return the run's latest job as Slurm reports it. Raises SchedulerError without an answer."""
    request, job_id = open_request(run), latest_job_id(run)
    if request is not None:
        rows = _rows_of_run(run)
        active = [row for row in rows if row.state != "ended"]
        if rows:
            return (active or rows)[-1].job
        if job_id == "":
            params = {"time": time.strftime("%H:%M:%S", time.localtime(request.asked))}
            if time.time() - request.asked < _SETTLED_SECONDS:
                return Job.because("", "unknown", Reason("slurm.request-pending", params), unsettled=True)
            return Job.because("", "ended", Reason("slurm.request-not-accepted", params))
    if job_id == "":
        return Job.because("", "unknown", Reason("slurm.never-submitted"))
    row = _rows_by_id([job_id]).get(job_id)
    if row is not None:
        return row.job
    return _forgotten_job(job_id, _accounted_states([job_id]).get(job_id, "") if _end_is_open(run) else "")


def jobs_of_runs(runs: Sequence[RunDir]) -> dict[Path, Job | SchedulerError]:
    """Return the jobs by run directory, from one squeue and at most one sacct call, or the error in their place.

    A run whose job needs more requests, or whose directory is damaged, is missing.
    """
    ids: dict[RunDir, str] = {}
    for run in runs:
        with contextlib.suppress(UsageError):  # the row of the run reports the damage
            if open_request(run) is None and (job_id := latest_job_id(run)):
                ids[run] = job_id
    try:
        rows = _rows_by_id(ids.values())
    except SchedulerError as error:
        return {run.path: error for run in ids}
    accounted = _accounted_states(ids[run] for run in ids if ids[run] not in rows and _end_is_open(run))
    return {
        run.path: rows[job_id].job if job_id in rows else _forgotten_job(job_id, accounted.get(job_id, ""))
        for run, job_id in ids.items()
    }


def failed_preparation(run: RunDir, gang: Job) -> Reason | None:
    """Return that the preparation job of a run has failed, if this ended the gang; see Backend.preparation_failure."""
    folder = preparation_folder(run)
    job = read_job(folder)
    if job is None or is_done(folder):
        return None
    failed = Reason("preparation.job-failed", {"job": job.job_id, "folder": str(folder), "run": run.run_id})
    if gang.reason is not None and gang.reason.code == "slurm.job-state-because":
        return failed if gang.reason.params["reason"] == _NEVER_SATISFIED else None
    if gang.reason is not None and gang.reason.code == "slurm.job-state":
        return None  # the gang was free to start
    with contextlib.suppress(SchedulerError):
        row = _rows_by_id([job.job_id]).get(job.job_id)
        state = row.slurm_state if row is not None else _accounted_states([job.job_id]).get(job.job_id, "")
        word = state.partition(" ")[0]
        # Where Slurm has forgotten both jobs, the first one has ended without writing that it was done.
        if (word and job_state(word) == "ended" and word != "COMPLETED") or (not word and gang.forgotten):
            return failed
    return None


def latest_job_id(run: RunDir) -> str:
    """Return the id of the newest known job, from its submission or from an attempt that it began."""
    request, submission = open_request(run), read_submission(run)
    if request is not None:  # the answer of sbatch was lost; if the job exists and has begun, its attempt has the id
        attempts = [attempt for attempt in read_attempts(run) if attempt.number >= request.first_attempt]
        return attempts[-1].job_id if attempts else ""
    return submission.job_id if submission is not None else ""


def _end_is_open(run: RunDir) -> bool:
    """Return whether the run directory does not show how the run ended: only then is the accounting queried."""
    attempts = read_attempts(run)
    return not attempts or attempts[-1].ended is None or attempts[-1].may_be_followed


def _forgotten_job(job_id: str, accounted: str) -> Job:
    """Return the job that squeue no longer lists; ``accounted`` is its state in the accounting, or empty."""
    if accounted and job_state(accounted.partition(" ")[0]) == "ended":
        state, _, code = accounted.partition(" ")
        if state == "FAILED" and code.isdigit():
            why = Reason("slurm.job-accounted-failed", {"state": state, "exit_code": int(code)})
            return Job.because(job_id, "ended", why, exit_code=int(code))
        why = Reason("slurm.job-accounted", {"state": accounted})
        return Job.because(job_id, "ended", why, cause=job_cause(accounted))
    return Job.because(job_id, "ended", Reason("slurm.job-not-listed"), forgotten=True)


def cancelled_by_another(job_id: str) -> bool:
    """Return whether the accounting names another user than this one as the one who cancelled the job."""
    state, _, user = _accounted_states([job_id]).get(job_id, "").partition(" by ")
    return state == "CANCELLED" and user.strip().isdigit() and int(user) != os.geteuid()


# ---- submit ----------------------------------------------------------------------------------------------------------


def submitted_job(run: RunDir, record: RunRecord) -> str | None:
    """Return the id of the job of this revision, which a submitter that died after sbatch has queued; None for none.

    Raises SchedulerError if a job of another revision is active, or one of an unanswered sbatch may still appear.
    """
    try:
        rows = _rows_of_run(run, record.spec.secret_env)
    except SchedulerSilentError as error:  # nothing was submitted yet
        raise SchedulerError(Reason("slurm.nothing-queued", {"failure": cause_of(error)})) from error
    for row in rows:
        if row.state == "ended":
            continue
        of_array = record.revision == 0 and is_of_array(run, read_sweep_place(run), row.job_id, row.comment)
        if of_array or row.comment == _comment(run, record):
            return row.job_id
        raise SchedulerError(Reason("slurm.older-job", {"job": row.job_id, "run": record.run_id}))
    request = open_request(run)
    left = 0.0 if request is None or request.earlier is None else request.earlier + _SETTLED_SECONDS - time.time()
    if left > 0:
        params = {"run": run.run_id, "minutes": math.ceil(left / 60)}
        raise SchedulerError(Reason("slurm.earlier-submission-open", params))
    return None


def submit_job(run: RunDir, record: RunRecord, script: str) -> str:
    """Queue the job with this batch script and return its id. Raises SchedulerError."""
    path = run.path / "job.sh"
    replace_file(path, script)
    secrets, comment = record.spec.secret_env, _comment(run, record)

    def find() -> str | None:
        rows = [row for row in _rows_of_run(run, secrets) if row.comment == comment and row.state != "ended"]
        return rows[-1].job_id if rows else None

    # On the preparation of the data (Slurm deletes the job if that fails), and of a sweep's run on the job before it in
    # its lane; a resumed run does not wait for another one.
    preparation, place = read_job(preparation_folder(run)), read_sweep_place(run)
    after = [] if preparation is None else [f"afterok:{preparation.job_id}"]
    options = ["--kill-on-invalid-dep=yes"] if after else []
    if place is not None and place.after is not None and read_submission(run) is None:
        before = read_submission(RunDir(run.path.parent / place.after))
        after += [f"afterany:{before.job_id}"] if before is not None else []
    depends = [f"--dependency={','.join(after)}", *options] if after else []
    try:
        return queue_script(path, comment, *depends, without=secrets)
    except SchedulerSilentError as error:
        return lost_job(run.run_id, error, find)


# ---- cancel ----------------------------------------------------------------------------------------------------------


def cancel_jobs(run: RunDir) -> None:
    """Signal the ranks to save and exit; ``slurm/job.py`` then ends the job. A queued or requeued job is deleted.

    This applies to every job of the run, also one whose id was never received. Slurm's permission is checked first: if
    it refuses, no stop file is written. Raises SchedulerError.
    """
    # By the mark in their comments, and the latest by id: sites may rewrite comments.
    rows, job_id = _rows_of_run(run), latest_job_id(run)
    if job_id and all(row.job_id != job_id for row in rows):
        rows += _rows_by_id([job_id]).values()
    active = [row for row in rows if row.state != "ended"]
    if read_job(preparation_folder(run)) is not None:
        cancel_preparation(preparation_name(run))
    running = [row for row in active if row.state in ("running", "suspended", "unknown")]
    for row in running:
        if row.user != user_name():
            # Running processes ignore SIGCONT.
            _call_for(row, run, ["scancel", "--signal=CONT"], "slurm.job-of-other-user", user=row.user)
    for row in running:
        if row.state == "suspended":  # a stopped process cannot save, and Slurm would kill it without continuing it
            # `scontrol resume` refuses a job that SIGSTOP has stopped.
            resume = ["scancel", "--signal=CONT"] if row.slurm_state == "STOPPED" else ["scontrol", "resume"]
            _call_for(row, run, resume, "slurm.cannot-resume-suspended")
    for row in active:
        # A requeued job is first completing; then Slurm does not start it again. A job that has ended stays as it is.
        if row.state == "queued" or row.slurm_state == "COMPLETING":
            call_slurm(["scancel", row.job_id], accept=("already completing",))
    was_cancelled = run.is_cancelled
    touch(run.stop_file)
    try:
        for row in running:
            # A plain scancel would grant KillWait instead of the grace period before SIGKILL.
            call_slurm(["scancel", "--signal=TERM", row.job_id])
    except SchedulerSilentError as error:
        raise SchedulerSilentError(Reason("slurm.cancel-unanswered", {"failure": cause_of(error)})) from error
    except SchedulerError:
        if not was_cancelled:
            run.stop_file.unlink(missing_ok=True)
        raise
    last = next(reversed(read_attempts(run)), None)
    is_requeued = last is not None and last.decision is not None and last.decision.requeue
    if not running and (is_requeued or all(row.state != "ending" for row in active)):
        record_event(run, "cancelled")
        forget_secrets(run)


def _call_for(row: JobRow, run: RunDir, command: Sequence[str], code: str, **params: object) -> None:
    """Run the command for a job. Raises SchedulerError with this reason if Slurm refuses."""
    try:
        call_slurm([*command, row.job_id])
    except SchedulerError as error:
        params |= {"job": row.job_id, "run": run.run_id, "failure": cause_of(error)}
        raise SchedulerError(Reason(code, params)) from error


# ---- squeue and sacct ------------------------------------------------------------------------------------------------


def _mark_of(run: RunDir) -> str:
    """Return the prefix of the comments of a run's jobs. The run id alone is not unique across runs roots."""
    return hashlib.sha256(str(run.path).encode()).hexdigest()[:16]


def _comment(run: RunDir, record: RunRecord) -> str:
    return f"{_mark_of(run)}-{record.revision}"


def preparation_comment(run: RunDir, record: RunRecord) -> str:
    """Return the beginning of the comments of the preparation jobs of a run."""
    return f"{_mark_of(run)}-{record.revision}-preparation"


def _rows_by_id(job_ids: Iterable[str]) -> dict[str, JobRow]:
    """Return the rows of these jobs by id, from one call; jobs that Slurm has forgotten are missing."""
    ids = sorted(set(job_ids))
    return {row.job_id: row for row in _squeue(f"--jobs={','.join(ids)}")} if ids else {}


def _rows_of_run(run: RunDir, without: Sequence[str] = ()) -> list[JobRow]:
    """Return the rows of all jobs that were submitted for this run directory, ended ones included, oldest first."""
    mark, place = f"{_mark_of(run)}-", read_sweep_place(run)
    names = run.run_id if place is None or not place.array else f"{run.run_id},{place.sweep}"
    rows = [
        row
        for row in _squeue(f"--name={names}", without)
        if row.comment.startswith(mark) or is_of_array(run, place, row.job_id, row.comment)
    ]
    return sorted(rows, key=lambda row: job_order(row.job_id))


def _squeue(which: str, without: Sequence[str] = ()) -> list[JobRow]:
    # --all: by their name, jobs of a hidden partition are listed only with it.
    command = ["squeue", "--noheader", "--all", "--states=all", "--array", which, f"--format={_COLUMNS}"]
    answer = call_slurm(command, accept=("Invalid job id",), without=without, seconds=_QUERY_SECONDS)
    fields = (line.strip().split("|", 5) for line in answer.stdout.splitlines())
    return [JobRow(*row) for row in fields if len(row) == 6]


def _accounted_states(job_ids: Iterable[str]) -> dict[str, str]:
    """Return the last state of jobs that squeue no longer lists, ``FAILED 93`` with its exit code; empty without
    accounting.
    """
    ids = sorted({job_id.partition("_")[0] for job_id in job_ids})  # of arrays: by a task, others are not listed
    if not ids:
        return {}
    command = ["sacct", "-n", "-P", "-X", "-j", ",".join(ids), "-o", "JobID,State,ExitCode"]
    try:
        text = call_slurm(command, seconds=_QUERY_SECONDS).stdout
    except SchedulerError:
        return {}
    states: dict[str, str] = {}
    for line in text.splitlines():
        listed, state, code, *_ = (*line.split("|"), "", "")
        if state:
            state += f" {code.partition(':')[0]}" if state == "FAILED" and code else ""
            states |= dict.fromkeys(tasks_of(listed), state)
    return states
