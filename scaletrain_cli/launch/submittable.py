"""The plan of a run that this engine can really run, or the reasons why it cannot (exit 3)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from scaletrain_cli.errors import InfeasibleError, Problem

if TYPE_CHECKING:
    from scaletrain_cli.plan import RunPlan
    from scaletrain_cli.spec import RunSpec


def plan_for_engine(spec: RunSpec, file: Path | str) -> RunPlan:
    """Plan, and refuse what can be planned but not run. Raises InfeasibleError."""
    from scaletrain_cli.plan import make_plan, submittable

    plan = make_plan(spec)
    reasons = submittable(spec, plan)
    if reasons:
        keys = (reason.partition(":")[0].partition(" = ")[0] for reason in reasons)  # each begins with its key
        problems = tuple(Problem(spec.where(key), "", reason) for key, reason in zip(keys, reasons, strict=True))
        raise InfeasibleError(f"{file} can be planned, but not run by this version", problems)
    return plan
