"""kubernetes.json in the run directory: where the run's job was sent, and how it ended, which the cluster forgets.

The spec alone would not do: a later revision may name another namespace than the one that the job is in.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from scaletrain_cli.errors import SchedulerError, SchedulerSilentError
from scaletrain_cli.launch.attempts import read_attempts
from scaletrain_cli.launch.scheduler import Job
from scaletrain_cli.launch.submission import read_submission
from scaletrain_cli.rundir.documents import read_document, write_document
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord


@dataclass(frozen=True)
class Whereabouts:
    """The latest job. ``detail`` and ``exit_code`` are of one that was seen to have ended."""

    job_id: str
    namespace: str
    context: str | None
    ended: bool = False
    detail: str = ""
    exit_code: int | None = None

    @property
    def name(self) -> str:
        return self.job_id.partition("/")[2]


def whereabouts_of(run: RunDir, record: RunRecord) -> Whereabouts | None:
    """Where the latest job is; None before the first."""
    submission, data = read_submission(run), read_document(run.path / "kubernetes.json")
    if submission is None:
        return None
    if data is not None and data["job_id"] == submission.job_id:
        return Whereabouts(**data)
    cluster = record.spec.cluster.kubernetes
    return Whereabouts(submission.job_id, cluster.namespace, cluster.context)


@contextlib.contextmanager
def heading_for(run: RunDir, place: Whereabouts) -> Iterator[None]:
    """Written before the job is handed over: afterwards might be too late. A refusal puts back what was there."""
    path = run.path / "kubernetes.json"
    before = read_document(path)
    write_whereabouts(run, place)
    try:
        yield
    except SchedulerSilentError:
        raise
    except SchedulerError:
        if before is None:
            path.unlink()
        else:
            write_document(path, before)
        raise


def write_whereabouts(run: RunDir, place: Whereabouts) -> None:
    """Replace what is known of it."""
    write_document(run.path / "kubernetes.json", dataclasses.asdict(place))


def remember_end(run: RunDir, place: Whereabouts, job: Job) -> None:
    """Keep the end of a job: its object is deleted some time after it."""
    ended = dataclasses.replace(place, ended=True, detail=job.detail, exit_code=job.exit_code)
    if ended != place:
        write_whereabouts(run, ended)


def shares_volume(run: RunDir) -> bool:
    """Whether the pods write to this very run directory: they alone begin attempts."""
    return any(attempt.scheduler == "kubernetes" for attempt in read_attempts(run))
