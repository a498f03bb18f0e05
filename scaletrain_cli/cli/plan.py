"""`scaletrain plan`: does the run fit, how fast is it, what does it cost? Starts nothing."""

from __future__ import annotations

from typing import Annotated

import typer

from scaletrain_cli.cli.options import AsJson, Overrides, SpecPath
from scaletrain_cli.errors import ExitCode, InfeasibleError

EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE, ExitCode.INFEASIBLE)
_SHOWN = ("needed", "smallest")  # what the table has just shown, part by part


def command(
    spec: SpecPath,
    overrides: Overrides = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Show every layout considered, and what the numbers assume.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Size a run: layout, memory, time, network, durability, cost. Starts nothing.

    A run that cannot fit exits with 3, the reason and what would make it fit; the smallest layout is shown all the
    same. The keys of --json (scaletrain.plan/v1) are stable.
    """
    from scaletrain_cli.plan import PlanInfeasibleError, RunPlan, make_plan
    from scaletrain_cli.spec import load_spec

    run = load_spec(spec, overrides or ())

    def show(plan: RunPlan) -> None:
        if as_json:
            from scaletrain_cli.ui.json import print_json

            print_json(plan.to_json())
            return
        from scaletrain_cli.ui.plan_view import show_plan

        show_plan(run, plan, everything=everything)

    try:
        plan = make_plan(run)
    except PlanInfeasibleError as error:
        if error.plan is None:
            raise
        show(error.plan)
        if as_json:
            raise
        told = tuple(problem for problem in error.problems if problem.where not in _SHOWN)
        raise InfeasibleError(error.message, told) from error
    show(plan)
