"""Several runs planned side by side; one that cannot be laid out is a column with its reason, and no error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import InfeasibleError, Problem
from scaletrain_cli.plan.planning import make_plan
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.plan.search.infeasible import PlanInfeasibleError
from scaletrain_cli.spec import RunSpec

# Problems that say how large a run is, and not what would make it fit.
_SIZES = ("needed", "smallest")


@dataclass(frozen=True)
class Compared:
    """One column. ``plan`` is the smallest layout where none fits, and None where none divides."""

    name: str
    spec: RunSpec
    plan: RunPlan | None
    reason: str | None
    problems: tuple[Problem, ...] = ()

    @property
    def feasible(self) -> bool:
        return self.reason is None

    def to_json(self) -> dict[str, Any]:
        """``name``, ``feasible``, ``reason``, ``problems`` and the plan as ``make_plan`` gives it."""
        plan = None if self.plan is None else self.plan.to_json()
        problems = [problem.to_json() for problem in self.problems]
        said = {"name": self.name, "feasible": self.feasible, "reason": self.reason, "problems": problems}
        return said | {"plan": plan}


def compare(runs: Sequence[tuple[str, RunSpec]]) -> tuple[Compared, ...]:
    """Each named run planned, in the order given. Raises UsageError as ``make_plan`` does."""
    return tuple(_compared(name, spec) for name, spec in runs)


def name_runs(runs: Sequence[tuple[Path, tuple[str, ...], RunSpec]]) -> list[tuple[str, RunSpec]]:
    """Short names for runs from (file, overrides, spec): what tells them apart, and no more."""
    files, names = {path for path, _, _ in runs}, {spec.name for _, _, spec in runs}
    stems = {path.stem for path in files}
    named = []
    for path, overrides, spec in runs:
        varied = " ".join(override.partition(".")[2] or override for override in overrides)
        run = spec.name if len(names) == len(files) else path.stem if len(stems) == len(files) else str(path)
        named.append((" ".join(part for part in (run if len(files) > 1 else "", varied) if part) or run, spec))
    return named


def none_feasible(compared: Sequence[Compared]) -> InfeasibleError | None:
    """The error to end with where no column can run."""
    if any(column.feasible for column in compared):
        return None
    ways_out = (
        replace(problem, where=f"{column.name}: {problem.where}")
        for column in compared
        for problem in [each for each in column.problems if each.where not in _SIZES][:1]
    )
    message = f"none of the {len(compared)} can run as asked; `scaletrain plan` of one says all that would fit"
    return InfeasibleError(message, tuple(ways_out))


def _compared(name: str, spec: RunSpec) -> Compared:
    try:
        return Compared(name, spec, make_plan(spec), None)
    except PlanInfeasibleError as error:
        reason = error.message
        if error.plan is None and error.problems:
            first = error.problems[0]
            reason = f"{first.subject}: {first.message.rstrip('.')}"
        return Compared(name, spec, error.plan, reason, error.problems)
