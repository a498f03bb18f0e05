"""The plan of a run that this engine can really run, or the reasons why it cannot (exit 3)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from scaletrain_cli.errors import InfeasibleError, Problem

if TYPE_CHECKING:
    from scaletrain_cli.plan import RunPlan
    from scaletrain_cli.spec import RunSpec


def plan_for_engine(spec: RunSpec, file: Path) -> RunPlan:
    """Plan, and refuse what can be planned but not run. Raises InfeasibleError."""
    from scaletrain_cli.plan import make_plan, submittable

    plan = make_plan(spec)
    reasons = submittable(spec, plan)
    if reasons:
        problems = tuple(Problem(str(file), "", reason) for reason in reasons)
        raise InfeasibleError(f"{file} can be planned, but not run by this version", problems)
    return plan
