"""What clusters are compared by: days, dollars and GPUs, against limits. Plans nothing."""

from __future__ import annotations

from dataclasses import dataclass

from scaletrain_cli.plan.result import Layout

OBJECTIVES = ("time", "cost", "gpus")
_DAY = 86400.0


@dataclass(frozen=True)
class Considered:
    """One cluster: wall-clock seconds and US dollars to the end, interruptions included; None where unknown."""

    gpu: str
    nodes: int
    gpus: int
    seconds: float | None
    dollars: float | None
    goodput: float | None
    step_seconds: float | None
    layout: Layout | None
    chosen: bool
    why: str


@dataclass(frozen=True)
class ClusterLimits:
    """An objective, and what a cluster may have and a run may take at most; None sets no limit."""

    objective: str
    max_gpus: int
    deadline_seconds: float | None
    budget_usd: float | None

    def broken_by(self, row: Considered) -> str:
        """Why a cluster will not do; empty if it will."""
        if row.seconds is None:
            return row.why
        if self.deadline_seconds is not None and row.seconds > self.deadline_seconds:
            return f"takes {days(row.seconds)}"
        if self.budget_usd is not None and row.dollars is not None and row.dollars > self.budget_usd:
            return f"costs {dollars(row.dollars)}"
        if row.dollars is None and (self.budget_usd is not None or self.objective == "cost"):
            return "no price is known: set cluster.price_per_gpu_hour"
        return ""

    def rank(self, row: Considered) -> tuple[float, ...]:
        """Smaller is better; what the objective leaves open is settled by the other two."""
        time = float("inf") if row.seconds is None else row.seconds
        money = float("inf") if row.dollars is None else row.dollars
        order = {"time": (time, money, row.gpus), "cost": (money, time, row.gpus), "gpus": (row.gpus, time, money)}
        return order[self.objective]

    def worse(self, row: Considered) -> str:
        """Why a cluster that would do was not taken."""
        if self.objective == "time":
            return f"slower: {days(row.seconds)}"
        return f"dearer: {dollars(row.dollars)}" if self.objective == "cost" else "more GPUs than needed, or slower"

    def miss(self, row: Considered) -> float:
        """How far a cluster is from the limits: 0.5 is half as much again as allowed."""
        time = 0.0 if self.deadline_seconds is None else (row.seconds or 0.0) / self.deadline_seconds - 1
        money = 0.0 if self.budget_usd is None else (row.dollars or 0.0) / self.budget_usd - 1
        return max(time, money)


def days(seconds: float | None) -> str:
    if seconds is None:
        return "no end"
    return f"{seconds / _DAY:,.1f} days" if seconds >= _DAY else f"{seconds / 3600:,.1f} hours"


def dollars(amount: float | None) -> str:
    return "an unknown price" if amount is None else f"${amount:,.0f}"
