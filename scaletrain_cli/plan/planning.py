"""From a run spec to a run plan: resolve, search, size, advise. The only file that knows all the parts."""

from __future__ import annotations

from scaletrain_cli.plan.advice import assumptions, warnings
from scaletrain_cli.plan.architecture import active_parameter_count, parameter_count, training_flops_per_token
from scaletrain_cli.plan.cost import plan_cost
from scaletrain_cli.plan.durability import plan_durability
from scaletrain_cli.plan.hardware import Accelerator, find_accelerator
from scaletrain_cli.plan.infeasible import does_not_divide, does_not_fit
from scaletrain_cli.plan.layouts import division_problems, resolve_axes
from scaletrain_cli.plan.result import ModelSize, RunPlan
from scaletrain_cli.plan.search import Candidate, alternatives, candidates, choose, smallest
from scaletrain_cli.spec import RunSpec


def make_plan(spec: RunSpec) -> RunPlan:
    """The plan of a run: the fastest layout that divides and fits, sized.

    Raises UsageError for an unknown accelerator, and PlanInfeasibleError when nothing divides or fits, with what would;
    the error then carries the smallest layout as a plan. Deterministic: the same spec gives the same plan.
    """
    device = find_accelerator(spec.cluster)
    axes = resolve_axes(spec)
    problems = division_problems(spec, axes)
    if problems:
        raise does_not_divide(spec, problems)
    found = candidates(spec, axes, device)
    chosen = choose(found)
    if chosen is None:
        raise does_not_fit(spec, device, _assemble(spec, device, smallest(found), found))
    return _assemble(spec, device, chosen, found)


def _assemble(spec: RunSpec, device: Accelerator, chosen: Candidate, found: list[Candidate]) -> RunPlan:
    parameters = parameter_count(spec.transformer)
    durability = plan_durability(spec, chosen.layout, chosen.time, device)
    return RunPlan(
        model=ModelSize(
            parameters=parameters,
            active_parameters=active_parameter_count(spec.transformer),
            flops_per_token=float(training_flops_per_token(spec.transformer)),
        ),
        layout=chosen.layout,
        memory=chosen.memory,
        time=chosen.time,
        network=chosen.network,
        durability=durability,
        cost=plan_cost(spec, chosen.layout, chosen.time, durability),
        alternatives=alternatives(found, chosen),
        warnings=warnings(spec, chosen.layout, chosen.memory, chosen.time, durability, device),
        assumptions=assumptions(spec, chosen.layout, device, parameters),
    )
