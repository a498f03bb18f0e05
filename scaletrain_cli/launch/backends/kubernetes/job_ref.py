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
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import SchedulerError, SchedulerSilentError
from scaletrain_cli.launch.attempts import read_attempts
from scaletrain_cli.launch.backends.base import Job
from scaletrain_cli.launch.backends.kubernetes.names import parse_id, submission_number
from scaletrain_cli.launch.submit import read_submission
from scaletrain_cli.rundir.documents import damage_told, from_document, read_document, write_document
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.safe_files import locked

# An API server ends a request after 60 s (--request-timeout), whatever became of the connection.
_SETTLED_SECONDS = 75.0
_LOCK_SECONDS = 10.0


@dataclass(frozen=True)
class JobRef:
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


def job_ref_of(run: RunDir, record: RunRecord) -> JobRef | None:
    """Return where the latest job is, or would be if the API server took it; None before the first."""
    place, submission = read_job_ref(run), read_submission(run)
    recorded = "" if submission is None else submission.job_id
    if place is not None and submission_number(place.job_id) >= submission_number(recorded):
        return place
    if submission is None:
        return None
    cluster = record.spec.cluster.kubernetes
    return JobRef(submission.job_id, cluster.namespace, cluster.context)


def read_job_ref(run: RunDir) -> JobRef | None:
    """Return what kubernetes.json says; None where there is none. Raises UsageError where it is damaged."""
    path = run.path / "kubernetes.json"
    data = read_document(path)
    return None if data is None else _from_document(data, path)


def previous_job_ref(run: RunDir, place: JobRef) -> JobRef | None:
    """Return the place of the job before an intent. Raises UsageError where it is damaged."""
    return None if place.before is None else _from_document(place.before, run.path / "kubernetes.json")


def _from_document(data: dict[str, Any], path: Path) -> JobRef:
    place = from_document(JobRef, data, path)
    with damage_told(path):
        parse_id(place.job_id)
        if not isinstance(place.before, dict | None) or not isinstance(place.progress, dict):
            raise TypeError("before and progress must be objects")
    return place


@contextlib.contextmanager
def submission_recorded(run: RunDir, place: JobRef) -> Iterator[None]:
    """Write the intent before the job is handed over. A refusal puts back what was there.

    For holders of submit_lock(): what they know counts, whatever somebody who looked at the run has written meanwhile.
    """
    there = read_job_ref(run)
    if there is not None and not there.confirmed:
        there = previous_job_ref(run, there)  # of a request that is made again
    before = None if there is None else dataclasses.asdict(there)
    intent = dataclasses.replace(place, confirmed=False, asked=time.time(), before=before)
    _write(run, intent)
    try:
        yield
    except SchedulerSilentError:
        _write(run, dataclasses.replace(intent, asked=time.time()))
        raise
    except SchedulerError:
        _write(run, there)
        raise
    _write(run, confirmed(intent))


def confirmed(intent: JobRef) -> JobRef:
    """Return the place of a job that the API server has."""
    return dataclasses.replace(intent, confirmed=True, before=None)


def withdraw_intent(run: RunDir, intent: JobRef) -> None:
    """Put back what was known before a request of which nothing came, unless another was made meanwhile."""
    with _writing(run):
        if _is_still(run, intent):
            _put(run, previous_job_ref(run, intent))


def update(run: RunDir, old: JobRef, new: JobRef) -> None:
    """Replace what is known of a job, unless another one was sent meanwhile. Raises OSError."""
    with _writing(run):
        if _is_still(run, old):
            _put(run, new)


def _write(run: RunDir, place: JobRef | None) -> None:
    with _writing(run):
        _put(run, place)


def _put(run: RunDir, place: JobRef | None) -> None:
    path = run.path / "kubernetes.json"
    if place is None:
        path.unlink(missing_ok=True)
    else:
        write_document(path, dataclasses.asdict(place))


def _writing(run: RunDir) -> contextlib.AbstractContextManager[bool]:
    """Who looks at a run and who submits it again may write at the same time."""
    return locked(run.path / "kubernetes.lock", wait_seconds=_LOCK_SECONDS)


def _is_still(run: RunDir, place: JobRef) -> bool:
    """Return whether the document is of this job and this request, or there is none."""
    there = read_document(run.path / "kubernetes.json")
    return there is None or (there.get("job_id"), there.get("asked", 0.0)) == (place.job_id, place.asked)


def record_end(run: RunDir, place: JobRef, job: Job) -> None:
    """Keep the end of a job: its object is deleted some time after it."""
    progress = {**place.progress, **job.progress}
    ended = dataclasses.replace(
        place, ended=True, detail=job.detail, exit_code=job.exit_code, progress=progress, forgotten=job.forgotten
    )
    if ended != place:
        update(run, place, ended)


def record_progress(run: RunDir, place: JobRef, progress: Mapping[str, float]) -> None:
    """Keep how far the pods were: their output goes with them."""
    if progress and dict(progress) != dict(place.progress):
        update(run, place, dataclasses.replace(place, progress=dict(progress)))


def shares_volume(run: RunDir) -> bool:
    """Whether the pods write to this very run directory: they alone begin attempts."""
    return any(attempt.scheduler == "kubernetes" for attempt in read_attempts(run))
