"""The plans of a run on every number of nodes of its range, and when a restart on more nodes pays.

Every size trains the same samples with the same global batch. A size is never used if no layout divides or fits, or if
fewer nodes train as fast.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scaletrain_cli.errors import InfeasibleError, Problem
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.plan.search.infeasible import PlanInfeasibleError, why_no_plan
from scaletrain_cli.reasons import Reason, as_reason
from scaletrain_cli.spec import RunSpec


@dataclass(frozen=True)
class NodeSize:
    """One number of nodes. ``plan`` is None if no layout divides; ``why_not`` is None if the size is used."""

    nodes: int
    plan: RunPlan | None
    why_not: Reason | None = None

    @staticmethod
    def range_advice(sizes: "Sequence[NodeSize]") -> Reason | None:
        """Return when the range of nodes with these sizes pays."""
        return break_even(usable_plans(sizes))

    def to_json(self) -> dict[str, Any]:
        """Return the figures of the table: nodes, usable, layout, step and total seconds, dollars, and why not."""
        plan = self.plan
        row: dict[str, Any] = {"nodes": self.nodes, "usable": self.why_not is None}
        row |= {
            "data_parallel": None if plan is None else plan.layout.data_parallel,
            "step_seconds": None if plan is None else plan.time.step,
            "wall_seconds": None if plan is None else plan.durability.wall_seconds,
            "expected_usd": None if plan is None else plan.cost.expected_usd,
            "why_not": None if self.why_not is None else str(self.why_not),
        }
        return row | ({} if self.why_not is None else {"why_not_reason": self.why_not.to_document()})


def plan_sizes(spec: RunSpec, planned: Callable[[RunSpec], RunPlan]) -> tuple[NodeSize, ...]:
    """Return every size of the range with its plan, fewest nodes first; empty without a range.

    ``planned`` returns the plan of a run, or raises InfeasibleError.
    """
    if spec.cluster.node_range is None:
        return ()
    specs = (spec.with_changes("cluster", nodes=nodes) for nodes in spec.cluster.node_range.sizes)
    return mark_slower(_planned_size(one, planned) for one in specs)


def mark_slower(sizes: Iterable[NodeSize]) -> tuple[NodeSize, ...]:
    """Return the sizes; those that are no faster than fewer nodes get that reason."""
    marked: list[NodeSize] = []
    fastest: NodeSize | None = None
    for size in sizes:
        if size.plan is not None and size.why_not is None:
            if fastest is not None and fastest.plan is not None and size.plan.time.step >= fastest.plan.time.step:
                params = {"fewer": fastest.nodes, "seconds": size.plan.time.step, "fastest": fastest.plan.time.step}
                size = NodeSize(size.nodes, size.plan, Reason("plan.size-not-faster", params))
            else:
                fastest = size
        marked.append(size)
    return tuple(marked)


def _planned_size(spec: RunSpec, planned: Callable[[RunSpec], RunPlan]) -> NodeSize:
    nodes = spec.cluster.nodes
    try:
        return NodeSize(nodes, planned(spec))
    except PlanInfeasibleError as error:
        return NodeSize(nodes, error.plan, why_no_plan(error) if error.problems else error.reason)
    except InfeasibleError as error:  # the planner can plan it, and the engine cannot run it
        first = error.problems[0] if error.problems else None
        return NodeSize(nodes, None, as_reason((first and (first.reason or first.message)) or str(error)))


def usable_sizes(sizes: Sequence[NodeSize]) -> tuple[int, ...]:
    """Return the numbers of nodes on which the run may start, fewest first."""
    return tuple(size.nodes for size in sizes if size.why_not is None)


def usable_plans(sizes: Sequence[NodeSize]) -> dict[int, RunPlan]:
    """Return the plans of the usable sizes by number of nodes, fewest first."""
    return {size.nodes: size.plan for size in sizes if size.why_not is None and size.plan is not None}


def least_size_problem(spec: RunSpec, sizes: Sequence[NodeSize]) -> Problem | None:
    """Return why the run cannot be submitted with this range: its smallest size is not usable; None if it is."""
    given = spec.cluster.node_range
    if given is None or sizes[0].why_not is None:
        return None
    usable = usable_sizes(sizes)
    params = {"nodes": given.min, "why": sizes[0].why_not, "least": usable[0] if usable else None}
    reason = Reason("plan.range-min-unusable" if usable else "plan.range-unusable", params)
    return Problem.because(spec.where("cluster.nodes.min"), "cluster.nodes.min", reason, given.min)


def largest_usable(usable: Sequence[int], nodes: int) -> int | None:
    """Return the largest usable size of at most ``nodes`` nodes; None if there is none."""
    return max((size for size in usable if size <= nodes), default=None)


@dataclass(frozen=True)
class Growth:
    """A restart on more nodes: seconds that it costs, and that it saves until the run ends or is interrupted."""

    nodes: int
    cost_seconds: float
    gain_seconds: float

    @property
    def pays(self) -> bool:
        return self.gain_seconds > self.cost_seconds


def growth(plans: Mapping[int, RunPlan], now: int, then: int, *, left: float, pace: float = 1.0) -> Growth:
    """Return the cost and the gain of a restart on ``then`` nodes.

    ``left``: the share of the run that is left; ``pace``: measured seconds of a step over the planned ones. The cost is
    a save, the requeue and the start with its load of a checkpoint. The gain is counted until the run would end on
    ``now`` nodes, or until the next interruption on ``then`` nodes is expected: a later gain is not certain.
    """
    old, new = plans[now], plans[then]
    cost = old.durability.save_seconds + new.durability.restart_seconds
    horizon = min(left * old.time.to_train * pace, new.durability.seconds_between_interruptions or math.inf)
    return Growth(then, cost, horizon * max(0.0, 1 - new.time.step / old.time.step))


def break_even(plans: Mapping[int, RunPlan]) -> Reason | None:
    """Return from which wait for all nodes on a start on the fewest pays; None for a single size.

    In a wait of W seconds the fewest nodes start in R seconds and then do the work of (W - R) x r seconds of all nodes,
    r being the ratio of the step times. The later restart takes longer than a first start by the last save.
    """
    if len(plans) < 2:
        return None
    fewest, most = min(plans), max(plans)
    rate = plans[most].time.step / plans[fewest].time.step
    seconds = plans[fewest].durability.restart_seconds + plans[fewest].durability.save_seconds / rate
    return Reason("plan.range-break-even", {"fewest": fewest, "most": most, "rate": rate, "seconds": seconds})
