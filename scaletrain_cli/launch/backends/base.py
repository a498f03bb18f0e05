"""What a back end can do: the interface through which the launcher talks to a scheduler, and the data it exchanges."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.rundir.code import CodeRecord
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.spec import RunSpec

# What a scheduler says of a job before it gets it, and what the job means: its size, its cost from here on, its start.


@dataclass(frozen=True)
class Start:
    """When a job could start: ``at`` in seconds since the epoch, None where that is not known.

    ``why`` says whose estimate it is, or why there is none.
    """

    at: float | None
    why: str


@dataclass(frozen=True)
class PreflightResult:
    """Of a job that can run: ``notes`` are worth telling, and none of them keeps it from running."""

    start: Start
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SubmissionSummary:
    """A job that is about to be queued. ``step`` is the one that it goes on after; 0 begins at the beginning."""

    spec: RunSpec
    plan: RunPlan
    start: Start
    step: int = 0
    notes: tuple[str, ...] = ()
    code: CodeRecord | None = None  # the user's own, where there is any

    @property
    def steps_left(self) -> int:
        return max(0, self.spec.total_steps - self.step)

    @property
    def usd_per_hour(self) -> float | None:
        """Of all its devices; None where no price is known."""
        price = self.plan.cost.price_per_gpu_hour
        return None if price is None else price * self.plan.layout.world_size

    @property
    def expected_usd(self) -> float | None:
        """Of the steps that are left, with interruptions: each step costs the same. None where it is not known."""
        whole = self.plan.cost.expected_usd
        return None if whole is None else whole * self.steps_left / max(1, self.spec.total_steps)

    def to_json(self) -> dict[str, Any]:
        """The stable part of the answers of submit and resume."""
        cost = {"expected_usd": self.expected_usd, "usd_per_hour": self.usd_per_hour, "steps": self.steps_left}
        return {"start": dataclasses.asdict(self.start), "cost": cost, "notes": list(self.notes)}


# "suspended" keeps its nodes and does not run; "ending" waits for its last processes. Neither is over.
JobState = Literal["queued", "running", "suspended", "ending", "ended", "unknown"]
# What a scheduler can name as the cause of the end of a whole job.
JobCause = Literal["cancelled", "preempted", "time-limit", "host-oom", "node"]


@dataclass(frozen=True)
class Job:
    """A run's job as its scheduler sees it; ``detail`` is the scheduler's own word for the state.

    ``exit_code`` and ``progress`` (a line of metrics.jsonl) are for a run whose directory is not seen from here.
    ``cause`` is set for an ended job where the scheduler itself names one; ``unsettled``: its scheduler was asked for
    it, gave no answer, and may still take it; ``forgotten``: it ended, and the scheduler no longer knows how.
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

    @property
    def is_active(self) -> bool:
        """Whether it is not over, as the scheduler says. Unknown counts as not: who asks decides what that means."""
        return self.state in ("queued", "running", "suspended", "ending")

    @property
    def may_be_active(self) -> bool:
        """Also true of one that cannot be asked, as a local one of another host: two gangs must never meet."""
        return self.is_active or (self.state == "unknown" and (self.id != "" or self.unsettled))


class Backend(Protocol):
    """Every method raises SchedulerError when the scheduler refuses or cannot be reached."""

    def preflight(
        self, spec: RunSpec, plan: RunPlan, run: RunDir | None = None, code: CodeRecord | None = None
    ) -> PreflightResult:
        """Ask whether the job could run at all, and when; returns what is worth telling. Leaves nothing behind.

        ``run``: the one that is to go on, with what is kept of it; None for one that is yet to be made.
        """

    def render(self, run: RunDir, record: RunRecord) -> str:
        """The exact text that submit() would hand over. Holds no secret and touches no file."""

    def submit(self, run: RunDir, record: RunRecord) -> str:
        """Hand the job over; returns its id. Call through submission.submit_run, which holds the lock."""

    def job(self, run: RunDir, record: RunRecord) -> Job:
        """The run's latest job."""

    def cancel(self, run: RunDir, record: RunRecord) -> None:
        """End the job with its state saved; no further attempt starts."""
