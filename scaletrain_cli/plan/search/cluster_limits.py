"""What clusters are compared by: days, dollars and GPUs, against limits. Plans nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scaletrain_cli.errors import Problem, UsageError
from scaletrain_cli.plan.catalogue.hardware import full_name
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.spec.quantities import parse_count, parse_seconds

# What a cluster may cost at most, from words: an objective, GPUs, days and dollars.


@dataclass(frozen=True)
class Limits:
    """``objective``: time, cost or gpus. None sets no limit; ``gpus`` are names to compare, none for the spec's."""

    objective: str
    max_gpus: int | None
    deadline_seconds: float | None
    budget_usd: float | None
    gpus: tuple[str, ...]


def parse_limits(
    objective: str | None, *, max_gpus: int | None, deadline: str | None, budget: str | None, gpus: Sequence[str]
) -> Limits | None:
    """The limits, or None where nothing was asked for. Raises UsageError.

    Without an objective, a deadline asks for the fewest GPUs that keep it, and all else for the soonest end.
    """
    if objective is None and max_gpus is None and deadline is None and budget is None and not gpus:
        return None
    return Limits(
        objective=objective or ("gpus" if deadline is not None else "time"),
        max_gpus=max_gpus,
        deadline_seconds=_parsed("--deadline", deadline, parse_seconds),
        budget_usd=_parsed("--budget", budget, _parse_dollars),
        gpus=tuple(dict.fromkeys(map(_known, gpus))),
    )


def _known(gpu: str) -> str:
    try:
        return full_name(gpu)
    except UsageError as error:
        problems = tuple(replace(problem, where="--gpu", key="") for problem in error.problems)
        raise UsageError(error.message, problems) from None


def _parse_dollars(text: str) -> float:
    try:
        return parse_count(text.removeprefix("$"))
    except ValueError as error:
        raise ValueError("must be dollars, such as 50000 or 50k") from error


def _parsed(option: str, text: str | None, parse: Callable[[Any], float]) -> float | None:
    if text is None:
        return None
    try:
        value = float(parse(text))
    except ValueError as error:
        raise UsageError(f"{option} is not understood", (Problem(option, "", f"{error}.", text),)) from error
    if value <= 0:
        raise UsageError(f"{option} is not understood", (Problem(option, "", "must be above 0.", text),))
    return value


OBJECTIVES = ("time", "cost", "gpus")
_MINUTES_BEFORE_DAYS = 2880


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
            return f"{span(row.seconds - self.deadline_seconds)} too late"
        if self.budget_usd is not None and row.dollars is not None and row.dollars > self.budget_usd:
            return f"{dollars(row.dollars - self.budget_usd)} too dear"
        if row.dollars is None and (self.budget_usd is not None or self.objective == "cost"):
            return "no price is known: set cluster.price_per_gpu_hour"
        return ""

    def rank(self, row: Considered) -> tuple[float, ...]:
        """Smaller is better; what the objective leaves open is settled by the other two."""
        time = float("inf") if row.seconds is None else row.seconds
        money = float("inf") if row.dollars is None else row.dollars
        order = {"time": (time, money, row.gpus), "cost": (money, time, row.gpus), "gpus": (row.gpus, time, money)}
        return order[self.objective]

    def worse(self, row: Considered, best: Considered) -> str:
        """Why a cluster that would do was not taken."""
        if self.objective == "gpus":
            return "more GPUs than needed" if row.gpus > best.gpus else "slower with as many GPUs"
        if self.objective == "time":
            return f"{span((row.seconds or 0.0) - (best.seconds or 0.0))} slower"
        more = (row.dollars or 0.0) - (best.dollars or 0.0)
        return f"{dollars(more)} dearer" if more >= 0.5 else "no cheaper, and slower"

    def miss(self, row: Considered) -> float:
        """How far a cluster is from the limits: 0.5 is half as much again as allowed."""
        time = 0.0 if self.deadline_seconds is None else (row.seconds or 0.0) / self.deadline_seconds - 1
        money = 0.0 if self.budget_usd is None else (row.dollars or 0.0) / self.budget_usd - 1
        return max(time, money)


def span(seconds: float) -> str:
    """A difference of two times in words, never rounded to nothing: ``2 min``, ``5 h 20 min``, ``12 d 4 h``."""
    minutes = max(1, math.ceil(seconds / 60))
    if minutes < 60:
        return f"{minutes} min"
    larger, smaller, size = ("h", "min", 60) if minutes < _MINUTES_BEFORE_DAYS else ("d", "h", 24)
    whole, rest = divmod(minutes if larger == "h" else round(minutes / 60), size)
    return f"{whole:,} {larger} {rest} {smaller}" if rest else f"{whole:,} {larger}"


def days(seconds: float | None) -> str:
    """A time as a person would plan with it: ``11 d 12 h``, ``160 h``; to the minute below two days."""
    if seconds is None:
        return "no end"
    return span(seconds)


def dollars(amount: float | None) -> str:
    if amount is None:
        return "an unknown price"
    return f"${amount:,.0f}" if amount >= 10 else f"${max(amount, 0.01):,.2f}"
