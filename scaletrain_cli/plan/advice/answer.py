"""The answer of `scaletrain plan`: the plan of one run with the requested parts, or the plans of several runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaletrain_cli.errors import InfeasibleError, Problem
from scaletrain_cli.plan.planning import Measurements, make_plan
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.plan.search.infeasible import PlanInfeasibleError, why_no_plan
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec

if TYPE_CHECKING:  # the command loads these only if it needs them
    from scaletrain_cli.plan.advice.explanation import Question
    from scaletrain_cli.plan.reliability.elastic import ElasticOutcome
    from scaletrain_cli.plan.reliability.node_sizes import NodeSize
    from scaletrain_cli.plan.reliability.spot_trace import SpotTrace, TraceOutcome
    from scaletrain_cli.plan.search.cluster_limits import Limits
    from scaletrain_cli.plan.search.sizing import Sizing


# Problems that state the size of a run instead of a change that would make it fit, by their ``where``.
_SIZES = ("needed", "smallest")


@dataclass(frozen=True)
class Compared:
    """One run of a comparison. ``plan``: that of the smallest layout if none fits; None if no layout divides."""

    name: str
    spec: RunSpec
    plan: RunPlan | None
    reason: Reason | None
    problems: tuple[Problem, ...] = ()

    @property
    def feasible(self) -> bool:
        return self.reason is None

    def to_json(self) -> dict[str, Any]:
        """Return ``name``, ``feasible``, ``reason`` with its code beside it, ``problems`` and the plan."""
        row = {"name": self.name, "feasible": self.feasible, "reason": self.reason and str(self.reason)}
        row |= {} if self.reason is None else self.reason.to_document()
        problems = [problem.to_json() for problem in self.problems]
        return row | {"problems": problems, "plan": None if self.plan is None else self.plan.to_json()}


def compare(runs: Sequence[tuple[str, RunSpec, Measurements | None]]) -> tuple[Compared, ...]:
    """Return a plan for each named run, in the order given. Raises UsageError as ``make_plan`` does."""
    plans = []
    for name, spec, measurements in runs:
        try:
            plans.append(Compared(name, spec, make_plan(spec, measurements), None))
        except PlanInfeasibleError as error:
            reason = error.reason if error.plan else why_no_plan(error)
            plans.append(Compared(name, spec, error.plan, reason, error.problems))
    return tuple(plans)


def name_runs(runs: Sequence[tuple[Path, tuple[str, ...], RunSpec]]) -> list[tuple[str, RunSpec]]:
    """Return short names for runs given as (file, overrides, spec): only the parts in which they differ."""
    files, names = {path for path, _, _ in runs}, {spec.name for _, _, spec in runs}
    stems = {path.stem for path in files}
    named = []
    for path, overrides, spec in runs:
        varied = " ".join(override.partition(".")[2] or override for override in overrides)
        run = spec.name if len(names) == len(files) else path.stem if len(stems) == len(files) else str(path)
        named.append((" ".join(part for part in (run if len(files) > 1 else "", varied) if part) or run, spec))
    return named


def none_feasible(compared: Sequence[Compared]) -> InfeasibleError | None:
    """Return the error if no run fits, else None."""
    if any(column.feasible for column in compared):
        return None
    changes = (
        replace(problem, where=f"{column.name}: {problem.where}")
        for column in compared
        for problem in [finding for finding in column.problems if finding.where not in _SIZES][:1]
    )
    return InfeasibleError(Reason("plan.none-feasible", {"runs": len(compared)}), tuple(changes))


@dataclass(frozen=True)
class Answer:
    """The answer for one run. ``spec``: the run as planned, with the chosen cluster if one was requested."""

    spec: RunSpec
    plan: RunPlan
    infeasible: PlanInfeasibleError | None = None
    sizing: Sizing | None = None
    explanation: tuple[Question, ...] | None = None
    outcome: TraceOutcome | None = None
    sizes: tuple[NodeSize, ...] = ()  # every number of nodes of the range, if the spec has one
    elastic: ElasticOutcome | None = None  # the range on the trace, against waiting for all nodes

    def to_json(self) -> dict[str, Any]:
        """Return the plan, ``feasible``, ``problems``, and if requested ``sizing``, ``explanation`` and ``trace``.

        A range of nodes adds ``sizes``, and with a trace ``elastic``.
        """
        problems = self.infeasible.problems if self.infeasible else ()
        data = self.plan.to_json()
        data |= {"feasible": self.infeasible is None, "problems": [problem.to_json() for problem in problems]}
        if self.sizing is not None:
            data["sizing"] = self.sizing.to_json()
        if self.explanation is not None:
            data["explanation"] = [question.to_json() for question in self.explanation]
        if self.outcome is not None:
            data["trace"] = self.outcome.to_json()
        if self.sizes:
            advice = self.sizes[0].range_advice(self.sizes)
            data["sizes"] = [size.to_json() for size in self.sizes]
            data["range_advice"] = None if advice is None else {"text": str(advice), **advice.to_document()}
        if self.elastic is not None:
            data["elastic"] = self.elastic.to_json()
        return data


def answer(
    spec: RunSpec,
    limits: Limits | None = None,
    *,
    explained: bool = False,
    trace: SpotTrace | None = None,
    measurements: Measurements | None = None,
) -> Answer:
    """Return the plan of the run; with ``limits`` on the best cluster within them.

    If no layout fits, the answer has the smallest one, and ``infeasible`` is set. Raises PlanInfeasibleError if no
    layout divides, and the errors of ``size_cluster``.
    """
    sizing, infeasible, sizes = None, None, _sizes(spec, measurements)
    if usable := [size.nodes for size in sizes if size.why_not is None]:
        spec = spec.with_changes("cluster", nodes=usable[-1])
    if limits is not None:
        from scaletrain_cli.plan.search.sizing import size_cluster

        sizing = size_cluster(spec, **vars(limits))
        spec, plan = sizing.spec, sizing.plan
    else:
        try:
            plan = make_plan(spec, measurements)
        except PlanInfeasibleError as error:
            if error.plan is None:
                raise
            plan, infeasible = error.plan, error
    explanation = outcome = elastic = None
    if explained:
        from scaletrain_cli.plan.advice.explain import explain

        explanation = explain(spec, plan)
    if trace is not None and sizes:
        from scaletrain_cli.plan.reliability.elastic import compare_on_trace

        elastic = compare_on_trace(spec, sizes, trace)
    elif trace is not None and infeasible is None:
        from scaletrain_cli.plan.reliability.spot_trace import simulate

        outcome = simulate(spec, plan, trace)
    return Answer(spec, plan, infeasible, sizing, explanation, outcome, sizes, elastic)


def _sizes(spec: RunSpec, measurements: Measurements | None) -> tuple[NodeSize, ...]:
    if spec.cluster.node_range is None:
        return ()
    from scaletrain_cli.plan.planning import plan_or_raise
    from scaletrain_cli.plan.reliability.node_sizes import plan_sizes

    return plan_sizes(spec, lambda one: plan_or_raise(one, measurements, compared=False))
