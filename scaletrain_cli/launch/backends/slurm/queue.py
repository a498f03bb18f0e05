"""The jobs of runs in squeue, by job id or by run directory, and their states in sacct.

The comment of a job has the mark of its run directory, so that a job whose id was never received can be found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.backends.base import Job, JobCause, JobState
from scaletrain_cli.launch.backends.slurm.commands import call_slurm, node_names
from scaletrain_cli.rundir.paths import RunDir

LOOK_SECONDS = 15.0  # squeue retries for a minute if the controller is down
_COLUMNS = "%A|%T|%r|%N|%u|%k"  # the comment is last: it may contain any character
_STATES: dict[str, JobState] = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"), "queued"),
    **dict.fromkeys(("RUNNING", "RESIZING", "SIGNALING"), "running"),
    **dict.fromkeys(("SUSPENDED", "STOPPED"), "suspended"),
    **dict.fromkeys(("COMPLETING", "STAGE_OUT"), "ending"),
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
        detail = self.slurm_state if self.reason in ("None", "") else f"{self.slurm_state} ({self.reason})"
        return Job(self.job_id, self.state, detail, node_names(self.nodes), cause=job_cause(self.slurm_state))


def job_state(slurm_state: str) -> JobState:
    """Return the job state, common to all schedulers, for Slurm's state."""
    return _STATES.get(slurm_state, "ended")


def job_cause(slurm_state: str) -> JobCause | None:
    """Return why the job ended, if its Slurm state shows that; sacct writes ``CANCELLED by 1000``."""
    return _CAUSES.get(slurm_state.partition(" ")[0])


def mark_of(run: RunDir) -> str:
    """Return the prefix of the comments of a run's jobs. The run id alone is not unique across runs roots."""
    return hashlib.sha256(str(run.path).encode()).hexdigest()[:16]


def rows_by_id(job_ids: Iterable[str], without: Sequence[str] = ()) -> dict[str, JobRow]:
    """Return the rows of these jobs by id, from one call; jobs that Slurm has forgotten are missing."""
    wanted = sorted(set(job_ids))
    if not wanted:
        return {}
    return {row.job_id: row for row in _rows([f"--jobs={','.join(wanted)}"], without)}


def rows_of_run(run: RunDir, without: Sequence[str] = ()) -> list[JobRow]:
    """Return the rows of all jobs that were submitted for this run directory, ended ones included, oldest first."""
    mark = f"{mark_of(run)}-"
    found = [row for row in _rows([f"--name={run.run_id}"], without) if row.comment.startswith(mark)]
    return sorted(found, key=lambda row: int(row.job_id))


def accounted_states(job_ids: Iterable[str]) -> dict[str, str]:
    """Return the last state of jobs that the controller has forgotten; empty without accounting."""
    wanted = sorted(set(job_ids))
    if not wanted:
        return {}
    command = ["sacct", "-n", "-P", "-X", "-j", ",".join(wanted), "-o", "JobIDRaw,State"]
    try:
        text = call_slurm(command, seconds=LOOK_SECONDS).stdout
    except SchedulerError:
        return {}
    return {job_id: state for job_id, _, state in (line.partition("|") for line in text.splitlines()) if state}


def forgotten_job(job_id: str, accounted: str) -> Job:
    """Return the job that the controller no longer knows; ``accounted`` is its state in the accounting, or empty."""
    if accounted and job_state(accounted.partition(" ")[0]) == "ended":
        return Job(job_id, "ended", f"{accounted} (from the accounting)", cause=job_cause(accounted))
    return Job(job_id, "ended", "Slurm no longer knows the job", forgotten=True)


def _rows(which: list[str], without: Sequence[str]) -> list[JobRow]:
    command = ["squeue", "--noheader", "--states=all", *which, f"--format={_COLUMNS}"]
    answer = call_slurm(command, accept=("Invalid job id",), without=without, seconds=LOOK_SECONDS)
    fields = (line.strip().split("|", 5) for line in answer.stdout.splitlines())
    return [JobRow(*row) for row in fields if len(row) == 6]
