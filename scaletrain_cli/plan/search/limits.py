"""What a cluster may cost at most, from words: an objective, GPUs, days and dollars. Sizes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scaletrain_cli.errors import Problem, UsageError
from scaletrain_cli.plan.catalogue.hardware import full_name
from scaletrain_cli.spec.quantities import parse_count, parse_seconds


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
