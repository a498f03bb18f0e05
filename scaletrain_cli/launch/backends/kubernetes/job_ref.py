"""The reference to the run's job (kubernetes.json): its id, context, namespace and end.

The spec is not sufficient: a later revision may name another namespace, and the cluster deletes jobs that have ended.
The file is written before the request is sent, so that a job is found even if the server's answer was lost.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import SchedulerError, SchedulerSilentError
from scaletrain_cli.launch.attempts import read_attempts
from scaletrain_cli.launch.backends.kubernetes.names import parse_id, submission_number
from scaletrain_cli.launch.job import Job, read_submission
from scaletrain_cli.rundir.documents import from_document, read_document, reporting_damage, write_document
from scaletrain_cli.rundir.mirror_state import begun_here
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.safe_files import locked

# An API server ends a request after 60 s (--request-timeout), even if the connection was lost.
_SETTLED_SECONDS = 75.0
_LOCK_SECONDS = 10.0


@dataclass(frozen=True)
class JobRef:
    """The latest job. ``detail`` and ``exit_code`` are set once it has ended; ``forgotten``: its object was deleted.

    ``confirmed`` is False from before the request until the job is known to exist; ``asked`` is the Unix time of the
    request, ``before`` the document that it replaced. ``progress``: the newest known progress of pod 0 (Job.progress).
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
    reason: dict[str, Any] | None = None  # of a job that has ended: Reason.to_document()

    @property
    def name(self) -> str:
        return self.job_id.partition("/")[2]

    def unsettled_seconds(self, now: float) -> float:
        """Return the seconds during which the API server may still create the job of an unanswered request."""
        return 0.0 if self.confirmed else max(0.0, self.asked + _SETTLED_SECONDS - now)


def job_ref_of(run: RunDir, record: RunRecord) -> JobRef | None:
    """Return the reference to the latest job, or to that of an unanswered request; None before the first."""
    ref, submission = read_job_ref(run), read_submission(run)
    recorded = "" if submission is None else submission.job_id
    if ref is not None and submission_number(ref.job_id) >= submission_number(recorded):
        return ref
    if submission is None:
        return None
    cluster = record.spec.cluster.kubernetes
    return JobRef(submission.job_id, cluster.used_namespace, cluster.context)


def read_job_ref(run: RunDir) -> JobRef | None:
    """Return the contents of kubernetes.json; None without the file. Raises UsageError if it is damaged."""
    path = run.path / "kubernetes.json"
    data = read_document(path)
    return None if data is None else _from_document(data, path)


def previous_job_ref(run: RunDir, ref: JobRef) -> JobRef | None:
    """Return the reference that an unanswered request replaced. Raises UsageError if it is damaged."""
    return None if ref.before is None else _from_document(ref.before, run.path / "kubernetes.json")


def _from_document(data: dict[str, Any], path: Path) -> JobRef:
    ref = from_document(JobRef, data, path)
    with reporting_damage(path):
        parse_id(ref.job_id)
    return ref


@contextlib.contextmanager
def submission_recorded(run: RunDir, ref: JobRef) -> Iterator[None]:
    """Write the reference before the job is submitted, unconfirmed. A refusal restores the previous document.

    Requires submit_lock(): this overwrites updates that another command has written meanwhile.
    """
    there = read_job_ref(run)
    if there is not None and not there.confirmed:
        there = previous_job_ref(run, there)  # for a repeated request
    before = None if there is None else dataclasses.asdict(there)
    intent = dataclasses.replace(ref, confirmed=False, asked=time.time(), before=before)
    update(run, None, intent)
    try:
        yield
    except SchedulerSilentError:
        update(run, None, dataclasses.replace(intent, asked=time.time()))
        raise
    except SchedulerError:
        update(run, None, there)
        raise
    update(run, None, confirmed(intent))


def confirmed(intent: JobRef) -> JobRef:
    """Return the reference with the job confirmed: the API server has it."""
    return dataclasses.replace(intent, confirmed=True, before=None)


def update(run: RunDir, old: JobRef | None, new: JobRef | None) -> None:
    """Replace the document of ``old``, unless another job was submitted meanwhile; None: any. Raises OSError.

    With None as ``new`` the document is removed.
    """
    path = run.path / "kubernetes.json"
    # Concurrent commands, such as status and resume, may both write it.
    with locked(run.path / "kubernetes.lock", wait_seconds=_LOCK_SECONDS):
        there = None if old is None else read_document(path)
        known = None if there is None else (there.get("job_id"), there.get("asked", 0.0))
        if old is not None and known not in (None, (old.job_id, old.asked)):
            return
        if new is None:
            path.unlink(missing_ok=True)
        else:
            write_document(path, dataclasses.asdict(new))


def record_end(run: RunDir, ref: JobRef, job: Job) -> None:
    """Record the end of a job, since its object is deleted later."""
    ended = dataclasses.replace(
        ref,
        ended=True,
        detail=job.detail,
        exit_code=job.exit_code,
        progress={**ref.progress, **job.progress},
        forgotten=job.forgotten,
        reason=None if job.reason is None else job.reason.to_document(),
    )
    if ended != ref:
        update(run, ref, ended)


def record_progress(run: RunDir, ref: JobRef, progress: Mapping[str, float]) -> None:
    """Record the progress of the pods, since their output is deleted with them."""
    if progress and dict(progress) != dict(ref.progress):
        update(run, ref, dataclasses.replace(ref, progress=dict(progress)))


def shares_volume(run: RunDir) -> bool:
    """Return whether the pods write to this run directory: True if it has attempts of theirs.

    Those that were received from a mirror show nothing: other pods began them.
    """
    here = begun_here(run)
    return any(attempt.scheduler == "kubernetes" and attempt.number in here for attempt in read_attempts(run))


def next_submission_number(run: RunDir) -> int:
    """Return the number of the next submission; that of an unanswered request is reused."""
    submission, ref = read_submission(run), read_job_ref(run)
    here = begun_here(run)  # of attempts that were received from a mirror, objects may still exist
    received = [one for one in read_attempts(run) if one.number not in here and one.scheduler == "kubernetes"]
    jobs = [one.job_id for one in received] + ([] if submission is None else [submission.job_id])
    recorded = max(map(submission_number, jobs), default=0)
    if ref is None:
        return recorded + 1
    if not ref.confirmed:
        before = previous_job_ref(run, ref)
        return max(recorded, 0 if before is None else submission_number(before.job_id)) + 1
    known = submission_number(ref.job_id)
    if known > recorded and not ref.ended:  # found after its answer was lost
        return known
    return max(recorded, known) + 1
