"""A run's job: the records of its submission, what its scheduler reports, and the findings of `scaletrain explain`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from scaletrain_cli.errors import ScaletrainError, SchedulerSilentError
from scaletrain_cli.reasons import Reason, reason_from, recorded
from scaletrain_cli.rundir.documents import from_document, read_document
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord

# A "suspended" job keeps its nodes but does not run; an "ending" one waits for its last processes. Both are active.
JobState = Literal["queued", "running", "suspended", "ending", "ended", "unknown"]
# Causes of the end of a job that a scheduler reports.
JobCause = Literal["cancelled", "preempted", "time-limit", "host-oom", "node"]


@dataclass(frozen=True)
class Job:
    """A run's job as its scheduler reports it; ``detail`` is the text for the state. See ``because``.

    ``resumable``: the job is active, but the run may be resumed: its gang does not exist, and its data are prepared.
    ``exit_code`` and ``progress`` (a line of metrics.jsonl) are for a run whose directory is not visible here.
    ``cause`` is set for an ended job if the scheduler names one; ``unsettled``: the submission was not answered, and
    the scheduler may still accept it; ``forgotten``: it ended, and the scheduler no longer has a record of it.
    ``begins_no_attempt``: it ended by an error of its own after the last attempt of the run; ``reason`` has the error.
    """

    id: str
    state: JobState
    detail: str = ""
    nodes: tuple[str, ...] = ()
    exit_code: int | None = None
    cause: JobCause | None = None
    unsettled: bool = False
    progress: Mapping[str, float] = field(default_factory=dict)
    forgotten: bool = False
    reason: Reason | None = None  # why it is in this state; ``detail`` contains its text
    resumable: bool = False
    begins_no_attempt: bool = False

    @classmethod
    def because(cls, job_id: str, state: JobState, reason: Reason, nodes: tuple[str, ...] = (), **more: Any) -> Job:
        """Return the job with the text of ``reason`` as its detail; ``more``: further fields."""
        return cls(job_id, state, str(reason), nodes, reason=reason, **more)

    def to_document(self) -> dict[str, Any]:
        """Return the JSON object from which job_from() makes an equal job."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain |= {"nodes": list(self.nodes), "progress": dict(self.progress)}
        return plain | {"reason": None if self.reason is None else self.reason.to_document()}

    @property
    def why(self) -> Reason:
        """Return ``reason`` if ``detail`` is its text; else a Reason with the text ``detail`` that nests ``reason``."""
        if self.reason is None:
            return recorded(self.detail)
        whole = str(self.reason) == self.detail
        return self.reason if whole else Reason("launch.job-detail", {"detail": self.detail, "reason": self.reason})

    @property
    def is_active(self) -> bool:
        """Return whether the scheduler reports that the job has not ended. False for an unknown state."""
        return self.state in ("queued", "running", "suspended", "ending")

    @property
    def may_be_active(self) -> bool:
        """Return whether the job may still run. True for an unknown state, so that no second gang starts."""
        return self.is_active or (self.state == "unknown" and (self.id != "" or self.unsettled))


def job_from(document: Mapping[str, Any]) -> Job:
    """Return the job in a document of Job.to_document()."""
    why = document["reason"]
    known = {**document, "nodes": tuple(document["nodes"]), "reason": None if why is None else reason_from(why)}
    return Job(**known)


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
def undone_if_refused(undo: Callable[[], object], refusal: type[BaseException] = ScaletrainError) -> Iterator[None]:
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
