"""How many of which GPUs a run should have, for an objective and within limits. Plans each; knows no layouts itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from scaletrain_cli.errors import InfeasibleError, Problem, UsageError
from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.plan.planning import plan_or_refuse
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.plan.search.cluster_choice import OBJECTIVES, ClusterLimits, Considered, days, dollars
from scaletrain_cli.plan.search.infeasible import PlanInfeasibleError
from scaletrain_cli.plan.search.layouts import divisors
from scaletrain_cli.spec import RunSpec

# Node counts closer than this say the same twice.
_STEP = 1.2
# How far beyond the limit to look for a number of GPUs that would do.
_BEYOND = 16


@dataclass(frozen=True)
class Sizing:
    """The cluster chosen: ``spec`` with its nodes and GPU, its plan, and what it was compared with."""

    spec: RunSpec
    plan: RunPlan
    objective: str
    max_gpus: int
    deadline_seconds: float | None
    budget_usd: float | None
    considered: tuple[Considered, ...]

    def to_json(self) -> dict[str, Any]:
        """Objective, limits and the table; the plan stands by itself."""
        keys = ("objective", "max_gpus", "deadline_seconds", "budget_usd")
        rows = [dataclasses.asdict(row) for row in self.considered]
        return {key: getattr(self, key) for key in keys} | {"considered": rows}


class SizingError(InfeasibleError):
    """No cluster within the limits will do (exit 3); ``closest`` is the nearest miss, None where nothing fits."""

    def __init__(
        self,
        message: str,
        problems: tuple[Problem, ...],
        considered: tuple[Considered, ...],
        closest: Considered | None,
    ) -> None:
        super().__init__(message, problems)
        self.considered = considered
        self.closest = closest

    def to_json(self) -> dict[str, Any]:
        """The table, under the key where a plan has it."""
        return {"sizing": {"considered": [dataclasses.asdict(row) for row in self.considered]}}


class ScalingPoint(NamedTuple):
    """One cluster size. ``efficiency``: throughput per GPU as a share of the smallest size's."""

    gpus: int
    step_seconds: float
    tokens_per_second: float
    efficiency: float


def size_cluster(
    spec: RunSpec,
    objective: str,
    *,
    max_gpus: int | None = None,
    deadline_seconds: float | None = None,
    budget_usd: float | None = None,
    gpus: Sequence[str] = (),
) -> Sizing:
    """The cluster that ends soonest (``time``), costs least (``cost``) or has fewest GPUs (``gpus``) within the limits.

    Wall-clock time counts interruptions: time to train over the expected goodput. ``max_gpus``: those of the spec
    where not given. ``gpus``: names in the catalogue to compare; none means the spec's own. The global batch stays as
    it is, so node counts over which it does not divide are listed with that reason. Raises SizingError with the
    closest miss when no cluster will do, and UsageError for an unknown objective or GPU, a limit below one node, or a
    question about dollars where no price is known.
    """
    limits = _limits(spec, objective, max_gpus, deadline_seconds, budget_usd)
    names = [None] if not gpus else list(gpus)
    specs = [on_cluster(spec, nodes, gpu) for gpu in names for nodes in node_counts(spec, limits.max_gpus)]
    tried = [_try(each) for each in specs]
    rows = [row for row, _ in tried]
    meeting = [index for index, row in enumerate(rows) if not limits.broken_by(row)]
    if not meeting:
        raise _out_of_reach(spec, limits, [replace(row, why=limits.broken_by(row)) for row in rows], names)
    best = min(meeting, key=lambda index: limits.rank(rows[index]))
    told = tuple(
        replace(row, chosen=index == best, why="" if index == best else limits.broken_by(row) or limits.worse(row))
        for index, row in enumerate(rows)
    )
    plan = tried[best][1]
    assert plan is not None
    return Sizing(specs[best], plan, objective, limits.max_gpus, deadline_seconds, budget_usd, told)


def scaling_curve(spec: RunSpec, node_counts: Sequence[int]) -> tuple[ScalingPoint, ...]:
    """Throughput over node counts, fewest first; counts without a plan are left out."""
    plans = []
    for nodes in sorted(set(node_counts)):
        try:
            plans.append(plan_or_refuse(on_cluster(spec, nodes)))
        except PlanInfeasibleError:
            continue
    return tuple(
        ScalingPoint(
            gpus=plan.layout.world_size,
            step_seconds=plan.time.step,
            tokens_per_second=plan.time.tokens_per_second,
            efficiency=plan.time.tokens_per_second_per_gpu / plans[0].time.tokens_per_second_per_gpu,
        )
        for plan in plans
    )


def node_counts(spec: RunSpec, max_gpus: int) -> list[int]:
    """Node counts to consider: powers of two, counts over which the batch divides, and the spec's own; ascending."""
    per_node = spec.cluster.gpus_per_node
    most = max_gpus // per_node
    if spec.cluster.scheduler == "local":
        return [1]
    wanted = {1 << power for power in range(most.bit_length())}
    dividing = [ranks // per_node for ranks in divisors(spec.training.global_batch_size) if ranks % per_node == 0]
    found: list[int] = []
    for count in sorted(count for count in wanted | set(dividing) if count <= most):
        if not found or count >= _STEP * found[-1] or count in wanted:
            found.append(count)
    return sorted({*found, *([spec.cluster.nodes] if spec.cluster.nodes <= most else [])})


def on_cluster(spec: RunSpec, nodes: int, gpu: str | None = None) -> RunSpec:
    """The same run on other nodes. What the spec states of its own GPU, price and links, does not hold for another."""
    change: dict[str, Any] = {"nodes": nodes}
    if gpu is not None and gpu != spec.cluster.gpu:
        own = ("price_per_gpu_hour", "spot_price_per_gpu_hour", "intra_node_bandwidth", "host_bandwidth")
        change |= {"gpu": gpu} | dict.fromkeys(own, "auto")
    return spec.model_copy(update={"cluster": spec.cluster.model_copy(update=change)})


def _limits(
    spec: RunSpec, objective: str, max_gpus: int | None, deadline_seconds: float | None, budget_usd: float | None
) -> ClusterLimits:
    if objective not in OBJECTIVES:
        raise UsageError(f"unknown objective {objective}: use {', '.join(OBJECTIVES[:-1])} or {OBJECTIVES[-1]}.")
    most = spec.world_size if max_gpus is None else max_gpus
    if most < spec.cluster.gpus_per_node:
        raise UsageError(f"at most {most} GPUs are less than one node of {spec.cluster.gpus_per_node}.")
    return ClusterLimits(objective, most, deadline_seconds, budget_usd)


def _try(spec: RunSpec) -> tuple[Considered, RunPlan | None]:
    name = find_accelerator(spec.cluster).name
    row = Considered(name, spec.cluster.nodes, spec.world_size, None, None, None, None, None, False, "")
    try:
        plan = plan_or_refuse(spec)
    except PlanInfeasibleError as error:
        cause = "does not fit" if error.plan else "does not divide"
        first = error.problems[0] if error.problems else None
        return replace(row, why=f"{cause}: {_subject(first)}" if first else error.message), None
    goodput = plan.durability.expected_goodput
    row = replace(row, goodput=goodput, step_seconds=plan.time.step, layout=plan.layout)
    if goodput <= 0:
        return replace(row, why="interruptions leave no progress"), plan
    return replace(row, seconds=plan.time.to_train / goodput, dollars=plan.cost.expected_usd), plan


def _subject(problem: Problem) -> str:
    """What is wrong without where it stands."""
    return f"{problem.key} = {problem.given}: {problem.message}" if problem.given else problem.message


def _out_of_reach(
    spec: RunSpec, limits: ClusterLimits, rows: list[Considered], names: Sequence[str | None]
) -> InfeasibleError | UsageError:
    """The error with the closest miss, and the fewest GPUs beyond the limit that would do."""
    planned = [row for row in rows if row.seconds is not None]
    if planned and all("no price" in row.why for row in planned):
        return UsageError("cost and budget need a price: set cluster.price_per_gpu_hour.")
    closest = min(planned, key=lambda row: (limits.miss(row), *limits.rank(row)), default=None)
    problems = []
    if closest is not None:
        money = "" if closest.dollars is None else f", {dollars(closest.dollars)}"
        message = f"{days(closest.seconds)}{money}; {closest.why}."
        problems.append(Problem("closest", "cluster", message, f"{closest.gpus} x {closest.gpu}"))
    for row in _beyond(spec, limits, names):
        money = "" if row.dollars is None else f", {dollars(row.dollars)}"
        problems.append(Problem("would do", "cluster", f"{days(row.seconds)}{money}.", f"{row.gpus} x {row.gpu}"))
        break
    else:
        if closest is None:
            problems += [Problem("largest", "cluster", row.why, f"{row.gpus} x {row.gpu}") for row in rows[-1:]]
    return SizingError(_headline(limits, closest, problems), tuple(problems), tuple(rows), closest)


def _headline(limits: ClusterLimits, closest: Considered | None, problems: list[Problem]) -> str:
    asked = []
    if limits.deadline_seconds is not None:
        asked.append(days(limits.deadline_seconds))
    if limits.budget_usd is not None:
        asked.append(dollars(limits.budget_usd))
    wanted = " and ".join(asked) or "the run"
    text = f"{wanted} {'is' if not asked else 'are'} out of reach with at most {limits.max_gpus} GPUs"
    if closest is not None:
        text += f": {closest.why} at best"
    needed = [problem.given for problem in problems if problem.where == "would do"]
    return f"{text}; {needed[0]} would do" if needed else text


def _beyond(spec: RunSpec, limits: ClusterLimits, names: Sequence[str | None]) -> Iterator[Considered]:
    """Clusters over the limit that would do, smallest first."""
    counts = [
        n for n in node_counts(spec, _BEYOND * limits.max_gpus) if n * spec.cluster.gpus_per_node > limits.max_gpus
    ]
    for nodes in counts:
        for gpu in names:
            row, _ = _try(on_cluster(spec, nodes, gpu))
            if not limits.broken_by(row):
                yield row
