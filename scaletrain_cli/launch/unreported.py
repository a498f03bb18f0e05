"""The end of an attempt that recorded none: what may be said of it, given what its scheduler says of the job.

One rule for every scheduler. While the scheduler does not answer, or the job is queued, suspended or ending, nothing
has been lost that is known of. Of a job that is over, the scheduler's own reason counts; without one, and without
evidence in the run directory, the cause is not known, and that is what is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scaletrain_cli.launch.attempts import AttemptRecord, attempt_outcome
from scaletrain_cli.launch.full_disk import has_no_space
from scaletrain_cli.launch.judgement import Reason
from scaletrain_cli.launch.node_record import read_node_records
from scaletrain_cli.launch.scheduler import Job
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord

SCHEDULERS = {"slurm": "Slurm", "kubernetes": "Kubernetes", "local": "this machine"}
# Every cause that a scheduler names for the end of a whole job (Job.cause).
JOB_WAS: dict[Reason, str] = {
    "cancelled": "its job was cancelled",
    "preempted": "its job was preempted",
    "time-limit": "its job reached its time limit",
    "host-oom": "its job exceeded its memory limit",
    "node": "its job lost a node",
}


@dataclass(frozen=True)
class UnreportedEnd:
    """``state``: ``open`` while the job is not over as far as is known, ``known`` where evidence or the scheduler names
    a ``reason``, else ``not-known``. ``message`` is a sentence without its full stop.
    """

    state: Literal["open", "known", "not-known"]
    message: str
    reason: Reason | None = None


def unreported_end(run: RunDir, record: RunRecord, attempt: AttemptRecord, job: Job) -> UnreportedEnd:
    """Return what is known of an attempt without a recorded end. ``job`` is the scheduler's latest answer."""
    says = f"{SCHEDULERS.get(attempt.scheduler, attempt.scheduler)} says: {job.detail}"
    if job.state == "unknown":
        return UnreportedEnd("open", f"whether attempt {attempt.number} still runs is not known: {job.detail}")
    if job.state == "running":
        return UnreportedEnd("open", f"attempt {attempt.number} runs; {says}")
    if job.state != "ended":
        return UnreportedEnd("open", f"attempt {attempt.number} has reported no end, and its job is not over; {says}")
    silent = f"attempt {attempt.number} ended without reporting an exit status"
    outcome = attempt_outcome(run, record.spec, attempt.number, cancelled=False)
    reported = any(node.ended is not None for node in read_node_records(run, attempt.number))
    if outcome.reason != "node" or (reported and job.cause is None and not run.is_told_to_stop):
        return UnreportedEnd("known", f"{silent}: {outcome.message}", outcome.reason)
    cause: Reason | None = "cancelled" if run.is_told_to_stop else job.cause
    if cause is not None:
        return UnreportedEnd("known", f"{silent}: {JOB_WAS[cause]}; {says}", cause)
    if has_no_space(run.path):
        return UnreportedEnd("known", f"{silent}: the file system of {run.path} is full; {says}", "disk-full")
    return UnreportedEnd("not-known", f"{silent}, and the cause is not known; {says}")
