"""Make a run plan from a run spec: list the layouts, search them, size the best, add advice. The planner's entry."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan.adapters import check_adapter
from scaletrain_cli.plan.advice.data_feed import feed_assumptions, feed_warnings
from scaletrain_cli.plan.advice.recipe_checks import check_recipe
from scaletrain_cli.plan.advice.warnings import assumptions, warnings
from scaletrain_cli.plan.axes import Rule, resolve_axes
from scaletrain_cli.plan.calibration import Measurement, calibrated, find_calibration
from scaletrain_cli.plan.catalogue.hardware import Accelerator, find_accelerator
from scaletrain_cli.plan.data_size import pair_count
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.ranges import plan_ranges
from scaletrain_cli.plan.reliability.cost import plan_cost
from scaletrain_cli.plan.reliability.durability import plan_durability
from scaletrain_cli.plan.result import Calibration, Layout, RunPlan, Time
from scaletrain_cli.plan.search.bounds import Bounds
from scaletrain_cli.plan.search.infeasible import PlanInfeasibleError, does_not_divide, does_not_fit, suggestions
from scaletrain_cli.plan.search.layout_search import (
    Candidate,
    Found,
    alternatives,
    evaluate,
    search,
    search_near,
)
from scaletrain_cli.plan.search.layouts import checkpointing_modes, describe, division_problems
from scaletrain_cli.plan.search.least_memory import search_splits
from scaletrain_cli.plan.search.search_space import RejectionCounts, axes_to_try
from scaletrain_cli.plan.trained_parameters import check_what_trains, names_what_trains
from scaletrain_cli.plan.workloads.registry import workload_of
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import LlavaSpec, RunSpec
from scaletrain_cli.spec.problems import placed


@dataclass(frozen=True)
class Measurements:
    """Measured step times, and the ``machine`` on which the planned run will train (see plan/calibration.py)."""

    measured: Sequence[Measurement] = ()
    machine: str = ""


def make_plan(spec: RunSpec, measurements: Measurements | None = None) -> RunPlan:
    """Return the plan of a run, with the fastest layout that divides and fits. Deterministic.

    ``measurements`` correct its times, and with them durability and cost; they do not change the choice of the layout.

    Raises UsageError for an unknown accelerator or network, and for patterns of ``training.trainable`` that do not fit
    the model. Raises PlanInfeasibleError if no layout divides, or none
    fits; the error lists changes that would make the run fit, and its ``plan`` is that of the smallest layout.
    """
    try:
        return plan_or_raise(spec, measurements)
    except PlanInfeasibleError as error:
        if error.plan is None:
            raise
        changes = suggestions(spec, error.plan.layout)
        raise does_not_fit(spec, find_accelerator(spec.cluster), error.plan, changes) from None
    except UsageError as error:
        error.problems = placed(spec, error.problems)
        raise


def plan_or_raise(spec: RunSpec, measurements: Measurements | None = None, *, compared: bool = True) -> RunPlan:
    """Return the same plan as ``make_plan``; if no layout fits, the error has no suggested changes.

    ``compared=False`` leaves out the alternatives, which takes about half the time and chooses the same layout.
    """
    plan = plan_within(spec, math.inf, measurements, compared=compared)
    assert plan is not None
    return plan


def plan_within(
    spec: RunSpec,
    most_seconds: float,
    measurements: Measurements | None = None,
    *,
    compared: bool = False,
    bounds: Bounds | None = None,
    counted: bool = True,
) -> RunPlan | None:
    """Return the same plan as ``plan_or_raise``; None if its step is known to exceed ``most_seconds``.

    ``bounds``: lower bounds for the layouts of this spec, which may be known from another number of nodes.
    ``counted``: count the degrees that break a rule.
    """
    # There is a model of its memory and time for our engine alone.
    if isinstance(spec.model, LlavaSpec) and not framework_of(spec).is_engine:
        rule = Rule("model.family", spec.model.family, "family-not-planned")
        raise UsageError(Reason("plan.family-unknown"), (rule.problem(spec.where(rule.key)),))
    check_adapter(spec)
    check_what_trains(spec)
    if not framework_of(spec).is_engine and names_what_trains(spec):  # others are modeled for all weights only
        rule = Rule("planner.framework", spec.planner.framework, "framework-trains-everything")
        raise UsageError(Reason("plan.trainable-invalid", {"problems": 1}), (rule.problem(spec.where(rule.key)),))
    device = find_accelerator(spec.cluster)
    bounds = bounds or Bounds(spec, device, checkpointing_modes(spec)[0])
    outcome = None if compared else search_near(spec, device, bounds, most_seconds)
    if outcome is None:
        counts = RejectionCounts()
        if not (all_axes := axes_to_try(spec, counts if counted else None)):
            raise does_not_divide(spec, division_problems(spec, resolve_axes(spec)))
        outcome = search(spec, device, all_axes, counts, compared=compared, bounds=bounds, most_seconds=most_seconds)
        if outcome.chosen is None and not outcome.too_slow:
            outcome = search_splits(spec, device, counts, outcome, compared=compared, most_seconds=most_seconds)
    if outcome.too_slow:
        return None
    if outcome.chosen is None:
        smallest = min(outcome.too_large, key=lambda sized: (sized.memory.peak, describe(sized.layout)))
        least = evaluate(spec, smallest.layout, device)
        raise does_not_fit(spec, device, _assemble(spec, device, least, outcome, compared, measurements))
    return _assemble(spec, device, outcome.chosen, outcome, compared, measurements)


def _assemble(
    spec: RunSpec,
    device: Accelerator,
    chosen: Candidate,
    outcome: Found,
    compared: bool,
    measurements: Measurements | None,
) -> RunPlan:
    size = workload_of(spec.model).training_size(spec)
    time = _with_reference_pass(spec, chosen.layout, chosen.time)
    known = measurements or Measurements()
    calibration = find_calibration(spec, size, chosen.layout, known.measured, known.machine)
    others = alternatives(spec, device, outcome, chosen) if compared else ()
    stages = workload_of(spec.model).training_stages(spec, chosen.layout, device)
    if calibration is not None:
        slower = time.step
        time = calibrated(time, calibration, nodes=spec.cluster.nodes)
        slower = time.step / slower
        others = tuple(replace(other, step_seconds=slower * other.step_seconds) for other in others)
        stages = tuple(replace(stage, step_seconds=slower * stage.step_seconds) for stage in stages)
    durability = plan_durability(spec, chosen.layout, time, device)
    cost = plan_cost(spec, chosen.layout, time, durability)
    return RunPlan(
        model=size,
        layout=chosen.layout,
        memory=chosen.memory,
        time=time,
        network=chosen.network,
        durability=durability,
        cost=cost,
        alternatives=others,
        rejected=outcome.rejected,
        considered=outcome.considered,
        warnings=(
            *warnings(spec, chosen.layout, chosen.memory, time, durability, device),
            *_about_local_sgd(spec, chosen, device),
            *feed_warnings(spec, chosen.layout, time),
        ),
        assumptions=(
            *_calibrated_assumption(spec, calibration),
            *assumptions(spec, chosen.layout, device, size.parameters),
            *feed_assumptions(spec, chosen.layout, time),
            *workload_of(spec.model).feed_assumptions(spec, chosen.layout, time),
        ),
        sanity=check_recipe(spec, chosen.layout, size, device),
        training_stages=stages,
        calibration=calibration,
        ranges=plan_ranges(spec, device, chosen.layout, chosen.memory, time, durability, cost, calibration),
    )


def _with_reference_pass(spec: RunSpec, layout: Layout, time: Time) -> Time:
    """Return the time of a run with that of its reference pass; unchanged for objectives without a reference.

    The pass, before step 1, computes the log-probabilities of the reference for all pairs of ``dpo``. It is the forward
    pass of a step, repeated for as many batches as the pairs of both splits fill (engine/objectives/reference.py
    ``ReferencePass``).
    """
    if spec.training.objective != "dpo":
        return time
    known = pair_count(spec)
    # Else those of all steps, as in one epoch, and the validation split.
    pairs_of_steps = spec.total_steps * spec.training.global_batch_size / (1 - spec.data.validation_split)
    pairs = round(pairs_of_steps) if known is None else known[0]
    forward = max((stage.forward for stage in time.by_stage), default=0.0)
    filling = (layout.pipeline_parallel - 1) / layout.virtual_pipeline
    seconds = pairs / layout.global_batch_size * (layout.gradient_accumulation_steps + filling) * forward
    return replace(time, reference=seconds, reference_pairs=pairs, to_train=time.to_train + seconds)


def _about_local_sgd(spec: RunSpec, chosen: Candidate, device: Accelerator) -> Iterator[Reason]:
    """Yield whether groups of local SGD train faster than one group in its own fastest layout, and from which interval.

    Neither time is corrected by measurements.
    """
    groups, settings, time = chosen.layout.local_sgd_groups, spec.training.local_sgd, chosen.time

    def changed(**changes: int) -> RunSpec:
        return spec.with_changes("training", local_sgd=settings.model_copy(update=changes))

    if groups == 1:
        return
    try:
        alone = plan_within(changed(groups=1), math.inf)
    except (PlanInfeasibleError, UsageError):  # one group needs less memory, but perhaps other degrees
        return
    assert alone is not None
    together = alone.time.step
    # The time of an outer step follows from a second interval: the mean step has 1 / interval of it.
    every = min(settings.inner_steps, spec.total_steps)
    other = spec.total_steps if every < spec.total_steps else 1
    step = workload_of(spec.model).time(changed(inner_steps=other), chosen.layout, device)[0].step
    outer = 0.0 if other == every else max(0.0, (step - time.step) / (1 / other - 1 / every))
    inner = time.step - outer / every
    params = {"groups": groups, "step": time.step, "together": together, "outer": outer, "inner_steps": every}
    if inner >= together:
        yield Reason("plan.local-sgd-saves-nothing", params)
    else:
        params |= {"least": max(1, math.ceil(outer / (together - inner))), "times": together / time.step}
        yield Reason("plan.local-sgd-saves" if time.step < together else "plan.local-sgd-too-often", params)


def _calibrated_assumption(spec: RunSpec, calibration: Calibration | None) -> Iterator[Reason]:
    """Yield where the times come from, if they were measured."""
    if calibration is None:
        return
    params = {name: getattr(calibration, name) for name in ("factor", "low", "high", "runs", "newest")}
    yield Reason("plan.calibrated-same" if calibration.same_workload else "plan.calibrated-similar", params)
    if calibration.nodes != spec.cluster.nodes:
        yield Reason("plan.calibrated-other-nodes", {"nodes": calibration.nodes, "planned_nodes": spec.cluster.nodes})
