"""The records of the submission of a run's job: what was asked of the scheduler, and what it answered."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scaletrain_cli.errors import ScaletrainError, SchedulerSilentError
from scaletrain_cli.rundir.documents import from_document, read_document
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord


@dataclass(frozen=True)
class Submission:
    """The latest submission. Restart budgets count from ``first_attempt`` on; its attempts run ``revision``."""

    scheduler: str
    job_id: str
    submitted: float
    first_attempt: int
    revision: int = 0


@dataclass(frozen=True)
class Request:
    """A submission without an answer so far: its request was sent, or was about to be sent, at ``asked`` (Unix time).

    ``before``: the submission that it replaces; ``earlier``: the time of the previous request, if that was not answered
    either.
    """

    scheduler: str
    asked: float
    first_attempt: int
    revision: int
    before: Submission | None
    earlier: float | None = None


def read_submission(run: RunDir) -> Submission | None:
    """Return the latest submission that the scheduler has confirmed, None before the first."""
    data = read_document(run.submission)
    if data is not None and data.get("state") == "asked":
        data = data.get("before")
    return None if data is None else from_document(Submission, _without_state(data), run.submission)


def submitted_before(run: RunDir) -> Submission | None:
    """Return the submission of a run directory; None if it does not exist, or was not submitted with an answer."""
    # os.path, unlike Path, returns False for a name that no file can have.
    if not os.path.isfile(run.record) or open_request(run) is not None:
        return None
    return read_submission(run)


def open_request(run: RunDir) -> Request | None:
    """Return the submission that was not answered; None if the latest one was."""
    data = read_document(run.submission)
    if data is None or data.get("state") != "asked":
        return None
    return from_document(Request, _without_state(data), run.submission)


def scheduler_of_job(run: RunDir, record: RunRecord) -> str:
    """Return the scheduler that the job was submitted to, even if a later revision names another one."""
    submission = read_submission(run)
    return submission.scheduler if submission else record.spec.cluster.scheduler


@contextlib.contextmanager
def undone_if_refused(undo: Callable[[], object], refusal: type[ScaletrainError] = ScaletrainError) -> Iterator[None]:
    """Call ``undo`` if the block raises ``refusal``, unless the scheduler did not answer: it may have the job."""
    try:
        yield
    except SchedulerSilentError:
        raise
    except refusal:
        undo()
        raise


def _without_state(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key != "state"}
