"""Everything that one question about one run brings: the plan, and what was asked beside it. Shows nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scaletrain_cli.plan.planning import make_plan
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.plan.search.infeasible import PlanInfeasibleError
from scaletrain_cli.spec import RunSpec

if TYPE_CHECKING:  # a plain plan should not wait for what it does not need
    from scaletrain_cli.plan.advice.explanation import Question
    from scaletrain_cli.plan.reliability.spot_trace import SpotTrace, TraceOutcome
    from scaletrain_cli.plan.search.limits import Limits
    from scaletrain_cli.plan.search.sizing import Sizing


@dataclass(frozen=True)
class Answer:
    """``spec`` is the run as planned: on the chosen cluster, where one was to be chosen."""

    spec: RunSpec
    plan: RunPlan
    infeasible: PlanInfeasibleError | None = None
    sizing: Sizing | None = None
    explanation: tuple[Question, ...] | None = None
    outcome: TraceOutcome | None = None

    def to_json(self) -> dict[str, Any]:
        """The plan, whether it can run and why not, and what was asked: ``sizing``, ``explanation``, ``trace``."""
        problems = self.infeasible.problems if self.infeasible else ()
        data = self.plan.to_json()
        data |= {"feasible": self.infeasible is None, "problems": [each.to_json() for each in problems]}
        if self.sizing is not None:
            data["sizing"] = self.sizing.to_json()
        if self.explanation is not None:
            data["explanation"] = [dataclasses.asdict(question) for question in self.explanation]
        if self.outcome is not None:
            data["trace"] = dataclasses.asdict(self.outcome)
        return data


def answer(
    spec: RunSpec, limits: Limits | None = None, *, explained: bool = False, trace: SpotTrace | None = None
) -> Answer:
    """The run planned, on a cluster within the limits if there are any.

    A run that does not fit is an answer with ``infeasible`` set; raises what ``make_plan`` and ``size_cluster`` raise
    where there is no layout at all.
    """
    sizing, infeasible = None, None
    if limits is not None:
        sizing = _sized(spec, limits)
        spec, plan = sizing.spec, sizing.plan
    else:
        try:
            plan = make_plan(spec)
        except PlanInfeasibleError as error:
            if error.plan is None:
                raise
            plan, infeasible = error.plan, error
    return Answer(
        spec=spec,
        plan=plan,
        infeasible=infeasible,
        sizing=sizing,
        explanation=_explained(spec, plan) if explained else None,
        outcome=_replayed(spec, plan, trace) if trace is not None and infeasible is None else None,
    )


def _sized(spec: RunSpec, limits: Limits) -> Sizing:
    from scaletrain_cli.plan.search.sizing import size_cluster

    return size_cluster(
        spec,
        limits.objective,
        max_gpus=limits.max_gpus,
        deadline_seconds=limits.deadline_seconds,
        budget_usd=limits.budget_usd,
        gpus=limits.gpus,
    )


def _explained(spec: RunSpec, plan: RunPlan) -> tuple[Question, ...]:
    from scaletrain_cli.plan.advice.explain import explain

    return explain(spec, plan)


def _replayed(spec: RunSpec, plan: RunPlan, trace: SpotTrace) -> TraceOutcome:
    from scaletrain_cli.plan.reliability.spot_trace import simulate

    return simulate(spec, plan, trace)
