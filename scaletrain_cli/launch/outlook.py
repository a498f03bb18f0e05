"""What a scheduler says of a job before it gets it, and what the job means: its size, its cost from here on, its start.

Pure. Who asks the scheduler is its own module; who shows it is ui.queueing_view.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.rundir.code import CodeRecord
from scaletrain_cli.spec import RunSpec


@dataclass(frozen=True)
class Start:
    """When a job could start: ``at`` in seconds since the epoch, None where that is not known.

    ``why`` says whose estimate it is, or why there is none.
    """

    at: float | None
    why: str


@dataclass(frozen=True)
class Outlook:
    """Of a job that can run: ``notes`` are worth telling, and none of them keeps it from running."""

    start: Start
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prospect:
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
