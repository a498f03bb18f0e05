"""A run's job, as its scheduler reports it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from scaletrain_cli.reasons import Reason, reason_from, recorded

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
