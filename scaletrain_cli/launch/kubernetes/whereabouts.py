"""kubernetes.json in the run directory: where the run's job was sent, and how it ended, which the cluster forgets.

The spec alone would not do: a later revision may name another namespace than the one that the job is in. The file is
written before the API server is asked, so that a job is found even where the server's answer was lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from scaletrain_cli.errors import SchedulerError, SchedulerSilentError
from scaletrain_cli.launch.attempts import read_attempts
from scaletrain_cli.launch.scheduler import Job
from scaletrain_cli.launch.submission import read_submission
from scaletrain_cli.rundir.documents import read_document, write_document
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord

# An API server ends a request after 60 s (--request-timeout), whatever became of the connection.
_SETTLED_SECONDS = 75.0


@dataclass(frozen=True)
class Whereabouts:
    """The latest job. ``detail`` and ``exit_code`` are of one that has ended; ``forgotten``: it was gone by then.

    ``confirmed`` is False from before the API server is asked until the job is known to be there; ``asked`` is the Unix
    time of that request, ``before`` the document that it replaced. ``progress`` is the newest line of pod 0 that was
    seen, as Job.progress.
    """

    job_id: str
    namespace: str
    context: str | None
    ended: bool = False
    detail: str = ""
    exit_code: int | None = None
    confirmed: bool = True
    asked: float = 0.0
    before: dict[str, Any] | None = None
    progress: Mapping[str, float] = field(default_factory=dict)
    forgotten: bool = False

    @property
    def name(self) -> str:
        return self.job_id.partition("/")[2]

    def unsettled_seconds(self, now: float) -> float:
        """Return for how long the API server may still make the job of a request that it has not answered."""
        return 0.0 if self.confirmed else max(0.0, self.asked + _SETTLED_SECONDS - now)


def whereabouts_of(run: RunDir, record: RunRecord) -> Whereabouts | None:
    """Return where the latest job is, or would be if the API server took it; None before the first."""
    data = read_document(run.path / "kubernetes.json")
    if data is not None:
        return Whereabouts(**data)
    submission = read_submission(run)
    if submission is None:
        return None
    cluster = record.spec.cluster.kubernetes
    return Whereabouts(submission.job_id, cluster.namespace, cluster.context)


@contextlib.contextmanager
def heading_for(run: RunDir, place: Whereabouts) -> Iterator[None]:
    """Write the intent before the job is handed over. A refusal puts back what was there."""
    path = run.path / "kubernetes.json"
    before = read_document(path)
    if before is not None and not before.get("confirmed", True):
        before = before["before"]  # of a request that is made again
    intent = dataclasses.replace(place, confirmed=False, asked=time.time(), before=before)
    write_whereabouts(run, intent)
    try:
        yield
    except SchedulerSilentError:
        write_whereabouts(run, dataclasses.replace(intent, asked=time.time()))
        raise
    except SchedulerError:
        withdraw_intent(run, intent)
        raise
    confirm(run, intent)


def confirm(run: RunDir, intent: Whereabouts) -> None:
    """Remember that the API server has the job."""
    write_whereabouts(run, dataclasses.replace(intent, confirmed=True, before=None))


def withdraw_intent(run: RunDir, intent: Whereabouts) -> None:
    """Put back what was known before a request of which nothing came."""
    path = run.path / "kubernetes.json"
    if intent.before is None:
        path.unlink(missing_ok=True)
    else:
        write_document(path, intent.before)


def write_whereabouts(run: RunDir, place: Whereabouts) -> None:
    """Replace what is known of it."""
    write_document(run.path / "kubernetes.json", dataclasses.asdict(place))


def remember_end(run: RunDir, place: Whereabouts, job: Job) -> None:
    """Keep the end of a job: its object is deleted some time after it."""
    progress = {**place.progress, **job.progress}
    ended = dataclasses.replace(
        place, ended=True, detail=job.detail, exit_code=job.exit_code, progress=progress, forgotten=job.forgotten
    )
    if ended != place:
        write_whereabouts(run, ended)


def remember_progress(run: RunDir, place: Whereabouts, progress: Mapping[str, float]) -> None:
    """Keep how far the pods were: their output goes with them."""
    if progress and dict(progress) != dict(place.progress):
        write_whereabouts(run, dataclasses.replace(place, progress=dict(progress)))


def shares_volume(run: RunDir) -> bool:
    """Whether the pods write to this very run directory: they alone begin attempts."""
    return any(attempt.scheduler == "kubernetes" for attempt in read_attempts(run))
