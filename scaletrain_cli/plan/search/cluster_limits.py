"""Objective and limits for the choice of a cluster (GPUs, time, dollars): parsing, and comparison of clusters."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from scaletrain_cli.errors import Problem, UsageError
from scaletrain_cli.plan.catalogue.hardware import full_name
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec.quantities import parse_count, parse_seconds


@dataclass(frozen=True)
class Limits:
    """The options of a command, which are arguments of ``size_cluster``; None sets no limit.

    ``objective`` is time, cost or gpus. ``gpus``: names of GPUs to compare; empty for the spec's.
    """

    objective: str
    max_gpus: int | None
    deadline_seconds: float | None
    budget_usd: float | None
    gpus: tuple[str, ...]


def parse_limits(
    objective: str | None, *, max_gpus: int | None, deadline: str | None, budget: str | None, gpus: Sequence[str]
) -> Limits | None:
    """Return the limits, or None if no option is given. Raises UsageError.

    The default objective is ``gpus`` (fewest) with a deadline, and ``time`` otherwise.
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
        raise _invalid_limit(option, Reason("plan.limit-not-parsed", {"detail": str(error)}), text) from error
    if value <= 0:
        raise _invalid_limit(option, Reason("plan.limit-not-positive"), text)
    return value


def _invalid_limit(option: str, reason: Reason, text: str) -> UsageError:
    return UsageError(Reason("plan.invalid-limit", {"option": option}), (Problem.because(option, "", reason, text),))


OBJECTIVES = ("time", "cost", "gpus")


@dataclass(frozen=True)
class Considered:
    """One cluster: wall-clock seconds and US dollars of the run, including interruptions; None if unknown.

    ``gpus``: with those of spare nodes. ``least_seconds`` and ``least_dollars``: lower bounds of a cluster that was not
    planned, because these exclude it.
    """

    gpu: str
    nodes: int
    gpus: int
    seconds: float | None
    dollars: float | None
    goodput: float | None
    step_seconds: float | None
    layout: Layout | None
    chosen: bool
    why: Reason | None
    least_seconds: float | None = None
    least_dollars: float | None = None

    @property
    def at_least(self) -> "Considered":
        """The row of a cluster without a plan, with its lower bounds as time and dollars."""
        return replace(self, seconds=self.least_seconds, dollars=self.least_dollars)

    def to_json(self) -> dict[str, Any]:
        """Return the fields; ``why`` as text with its code beside it, empty for the chosen cluster."""
        row = {field.name: getattr(self, field.name) for field in fields(self)}
        row["layout"] = None if self.layout is None else asdict(self.layout)
        row["why"] = "" if self.why is None else str(self.why)
        return row | ({} if self.why is None else self.why.to_document())


@dataclass(frozen=True)
class ClusterLimits:
    """An objective, and the maximum of GPUs, time and dollars; None sets no limit."""

    objective: str
    max_gpus: int
    deadline_seconds: float | None
    budget_usd: float | None

    def broken_by(self, row: Considered) -> Reason | None:
        """Return the limit that a cluster misses, or why it has no plan; None if it meets all limits."""
        if row.seconds is None:
            return row.why
        if self.deadline_seconds is not None and row.seconds > self.deadline_seconds:
            return Reason("plan.too-late", {"by": row.seconds - self.deadline_seconds})
        if self.budget_usd is not None and row.dollars is not None and row.dollars > self.budget_usd:
            return Reason("plan.over-budget", {"by": row.dollars - self.budget_usd})
        if row.dollars is None and (self.budget_usd is not None or self.objective == "cost"):
            return Reason("plan.no-price")
        return None

    def rank(self, row: Considered) -> tuple[float, ...]:
        """Return a sort key, smallest for the best: the objective first, then the other two quantities."""
        time = float("inf") if row.seconds is None else row.seconds
        money = float("inf") if row.dollars is None else row.dollars
        order = {"time": (time, money, row.gpus), "cost": (money, time, row.gpus), "gpus": (row.gpus, time, money)}
        return order[self.objective]

    def seconds_within(self, row: Considered, miss: float) -> float:
        """Return the most seconds on a cluster that exceed no limit by more than ``miss``, a share.

        ``row``: a lower bound on the time and dollars of the cluster, whose ratio is its price.
        """
        seconds = math.inf if self.deadline_seconds is None else (1 + miss) * self.deadline_seconds
        if self.budget_usd is not None and (price := _price(row)):
            seconds = min(seconds, (1 + miss) * self.budget_usd / price)
        return seconds

    def most_seconds(self, row: Considered, best: Considered | None) -> float:
        """Return the most seconds of a run on a cluster that meets the limits and is no worse than ``best``.

        ``row``: see ``seconds_within``. Negative if the cluster is worse whatever its time.
        """
        seconds = self.seconds_within(row, 0.0)
        if best is None:
            return seconds
        if self.objective == "gpus" and row.gpus != best.gpus:
            return seconds if row.gpus < best.gpus else -1.0
        if self.objective == "cost":
            price = _price(row)
            return min(seconds, (best.dollars or 0.0) / price) if price else seconds
        return min(seconds, best.seconds or 0.0)

    def excluded(self, row: Considered, best: Considered | None) -> Reason:
        """Return why a cluster was not planned, from the lower bounds in its row."""
        least = row.at_least
        broken = self.broken_by(least)
        if broken is None and (best is None or self.rank(least) < self.rank(best)):
            return Reason("plan.cluster-cannot-win")  # its layouts are worse than the bound on the cluster
        reason = broken or self.worse(least, best or least)
        return reason if reason.code == "plan.more-gpus" else Reason("plan.at-least", {"cause": reason})

    def worse(self, row: Considered, best: Considered) -> Reason:
        """Return why a cluster that meets the limits was not chosen."""
        if self.objective == "gpus":
            return Reason("plan.more-gpus" if row.gpus > best.gpus else "plan.slower-on-as-many")
        if self.objective == "time":
            return Reason("plan.slower-by", {"by": (row.seconds or 0.0) - (best.seconds or 0.0)})
        more = (row.dollars or 0.0) - (best.dollars or 0.0)
        return Reason("plan.costs-more", {"by": more}) if more >= 0.5 else Reason("plan.no-cheaper")

    def miss(self, row: Considered) -> float:
        """Return the largest relative excess over a limit: 0.5 is 50 % more than allowed."""
        time = 0.0 if self.deadline_seconds is None else (row.seconds or 0.0) / self.deadline_seconds - 1
        money = 0.0 if self.budget_usd is None else (row.dollars or 0.0) / self.budget_usd - 1
        return max(time, money)


def _price(row: Considered) -> float:
    """Return the dollars per second of a cluster, 0 if unknown."""
    seconds, dollars = row.seconds or row.least_seconds, row.dollars or row.least_dollars
    return 0.0 if not seconds or not dollars else dollars / seconds
