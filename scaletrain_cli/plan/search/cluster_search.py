"""Plan a run on clusters of different sizes: a coarse grid of node counts, then those that no bound excludes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from scaletrain_cli.plan.axes import divisors
from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.plan.planning import plan_or_raise
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.plan.search.bounds import Bounds
from scaletrain_cli.plan.search.cluster_limits import ClusterLimits, Considered
from scaletrain_cli.plan.search.infeasible import PlanInfeasibleError, why_no_plan
from scaletrain_cli.plan.search.layouts import checkpointing_modes
from scaletrain_cli.plan.search.search_space import RejectionCounts, axes_to_try, groups
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.cluster import MOST_NODES

# Smallest ratio of neighboring node counts in the coarse pass: closer counts give nearly the same result. It is larger
# above _LARGE nodes, which take longest to plan; the second pass refines where it matters.
_STEP = 1.2
_LARGE_STEP = 1.5
_LARGE = 16
# Maximum number of node counts for which a bound is computed after the coarse pass; each takes about 10 ms.
_MOST_BOUNDED = 48


def most_nodes(spec: RunSpec, max_gpus: int) -> int:
    """Return the largest node count within ``max_gpus`` GPUs and within the limit of a spec."""
    return min(max_gpus // spec.cluster.gpus_per_node, spec.cluster.traits.max_nodes or MOST_NODES)


def node_counts(spec: RunSpec, max_gpus: int) -> list[int]:
    """Return the node counts of the coarse pass, ascending.

    They are powers of two, counts whose ranks divide the global batch, and the spec's own.
    """
    per_node = spec.cluster.gpus_per_node
    most = most_nodes(spec, max_gpus)
    wanted = {1 << power for power in range(most.bit_length())}
    dividing = [ranks // per_node for ranks in divisors(spec.training.global_batch_size) if ranks % per_node == 0]
    found: list[int] = []
    for count in sorted(count for count in wanted | set(dividing) if count <= most):
        step = _STEP if count <= _LARGE else _LARGE_STEP
        if not found or count >= step * found[-1] or count in wanted:
            found.append(count)
    return sorted({*found, *([spec.cluster.nodes] if spec.cluster.nodes <= most else [])})


def likeliest(spec: RunSpec, counts: Sequence[int], near: int) -> list[int]:
    """Return the node counts with the most layouts, of equal ones those nearest to ``near``; ascending.

    Data parallelism must divide the batch. Ranks beyond the greatest common divisor of ranks and batch need another
    kind of parallelism; the fewer these are, the more layouts divide.
    """
    per_node, batch = spec.cluster.gpus_per_node, spec.training.global_batch_size

    def order(nodes: int) -> tuple[int, int]:
        ranks = nodes * per_node
        return ranks // math.gcd(ranks, batch), abs(nodes - near)

    return sorted(sorted(counts, key=order)[:_MOST_BOUNDED])


def least_step_seconds(spec: RunSpec) -> float:
    """Return a lower bound on the step seconds of this cluster; infinite if no layout divides."""
    bounds = Bounds(spec, find_accelerator(spec.cluster), checkpointing_modes(spec)[0])
    found = (
        bounds.step_seconds(group.axes, group.micro_batches)
        for group in groups(spec, axes_to_try(spec, RejectionCounts()))
    )
    return min((min(seconds) for seconds in found), default=math.inf)


# Maximum number of clusters that are planned after the first pass.
_MOST_REFINED = 12
# Assumption that ends the search: no cluster needs less than 95 % of the GPU seconds of the best one of the first pass,
# and no step time is below 95 % of what the bound, scaled by the nearest plan, predicts.
_BETTER = 0.95


class Tried(NamedTuple):
    """One cluster: the requested ``gpu`` (None: the spec's), time and cost in ``row``, and its plan if there is one."""

    spec: RunSpec
    gpu: str | None
    row: Considered
    plan: RunPlan | None


class _Chance(NamedTuple):
    """A cluster that may be the best, with the sort key that it could reach."""

    rank: tuple[float, ...]
    nodes: int
    gpu: str | None


def on_cluster(spec: RunSpec, nodes: int, gpu: str | None = None) -> RunSpec:
    """Return the same run on another cluster. Prices and bandwidths of the spec apply only to the spec's own GPU."""
    change: dict[str, Any] = {"nodes": nodes}
    if gpu is not None and gpu != spec.cluster.gpu:
        own = ("price_per_gpu_hour", "spot_price_per_gpu_hour", "intra_node_bandwidth", "host_bandwidth")
        change |= {"gpu": gpu} | dict.fromkeys(own, "auto")
    return spec.model_copy(update={"cluster": spec.cluster.model_copy(update=change)})


def try_cluster(whole: RunSpec, nodes: int, gpu: str | None) -> Tried:
    """Plan the run on ``nodes`` nodes with this GPU; the row has the reason if there is no plan."""
    spec = on_cluster(whole, nodes, gpu)
    name = find_accelerator(spec.cluster).name
    row = Considered(name, spec.cluster.nodes, spec.world_size, None, None, None, None, None, False, None)
    try:
        plan = plan_or_raise(spec, compared=False)
    except PlanInfeasibleError as error:
        return Tried(spec, gpu, replace(row, why=why_no_plan(error)), None)
    goodput = plan.durability.expected_goodput
    row = replace(row, goodput=goodput, step_seconds=plan.time.step, layout=plan.layout)
    if goodput <= 0:
        return Tried(spec, gpu, replace(row, why=Reason("plan.no-progress")), plan)
    row = replace(row, seconds=plan.time.to_train / goodput, dollars=plan.cost.expected_usd)
    return Tried(spec, gpu, row, plan)


def meets(limits: ClusterLimits, tried: Tried) -> bool:
    """Return whether a cluster meets the limits."""
    return not limits.broken_by(tried.row)


def first_pass(spec: RunSpec, limits: ClusterLimits, names: Sequence[str | None]) -> tuple[list[Tried], int]:
    """Plan a coarse grid of node counts; return the clusters, and the number of counts that were left out.

    A single kind of GPU is planned at every count. Several kinds are each planned at the smallest count that fits, a
    middle one and the largest. Further counts are planned only if 95 % of the GPU seconds of the cheapest of these
    three could be the best, or if no planned cluster meets the limits.
    """
    counts = node_counts(spec, limits.max_gpus)
    if len(names) == 1:
        return [try_cluster(spec, nodes, names[0]) for nodes in counts], 0
    tried: list[Tried] = []
    chances: list[_Chance] = []
    for gpu in names:
        of_gpu, rest = _three_sizes(spec, counts, gpu)
        tried += of_gpu
        known = [each.row for each in of_gpu if each.row.seconds]
        if known:
            least = min(known, key=lambda row: (row.seconds or 0.0) * row.gpus)
            rows = {nodes: _scaled(least, nodes, _BETTER * least.nodes / nodes) for nodes in rest}
            chances += [_Chance(limits.rank(row), nodes, gpu) for nodes, row in rows.items()]
    chances.sort(key=lambda chance: chance.rank)
    left_out = []
    for chance in chances:
        best = min((limits.rank(each.row) for each in tried if meets(limits, each)), default=None)
        if best is None or chance.rank < best:
            tried.append(try_cluster(spec, chance.nodes, chance.gpu))
        else:
            left_out.append(chance)
    return tried, len(left_out)


def _three_sizes(spec: RunSpec, counts: Sequence[int], gpu: str | None) -> tuple[list[Tried], list[int]]:
    """Plan counts up to the first with a plan, a middle one and the largest; return them, and the other counts."""
    tried = []
    for index, nodes in enumerate(counts):
        tried.append(try_cluster(spec, nodes, gpu))
        if tried[-1].row.seconds:
            rest = list(counts[index + 1 :])
            for further in sorted({len(rest) // 2, len(rest) - 1} if rest else ()):
                tried.append(try_cluster(spec, rest[further], gpu))
            done = {each.row.nodes for each in tried}
            return tried, [nodes for nodes in rest if nodes not in done]
    return tried, []


def refined(
    spec: RunSpec, limits: ClusterLimits, names: Sequence[str | None], tried: Sequence[Tried], fewest_nodes: int
) -> tuple[list[Tried], int]:
    """Plan more clusters, most promising first, until none can beat the best; return them, and how many were left."""
    best = min((each.row for each in tried if meets(limits, each)), key=limits.rank, default=None)
    chances: list[_Chance] = []
    looked_at = 0
    for gpu in names if spec.cluster.traits.max_nodes != 1 else ():
        of_gpu = [each for each in tried if each.gpu == gpu]
        found, count = _chances(spec, limits, of_gpu, best, fewest_nodes)
        chances += found
        looked_at += count
    planned: list[Tried] = []
    for chance in sorted(chances, key=lambda chance: chance.rank)[:_MOST_REFINED]:
        if best is None or chance.rank < limits.rank(best):
            planned.append(try_cluster(spec, chance.nodes, chance.gpu))
            if meets(limits, planned[-1]):
                best = min((planned[-1].row, best or planned[-1].row), key=limits.rank)
    return planned, looked_at - len(planned)


def _chances(
    spec: RunSpec, limits: ClusterLimits, tried: Sequence[Tried], best: Considered | None, fewest_nodes: int
) -> tuple[list[_Chance], int]:
    """Return the node counts of one kind of GPU that may beat the best, and how many counts were checked.

    Two estimates must allow it: the GPU seconds of the cheapest cluster that was planned, and the lower bound on the
    step, scaled by the ratio of plan to bound of the planned cluster nearest to the best.
    """
    known = [each for each in tried if each.row.seconds and each.row.step_seconds]
    if not known:
        return [], 0
    most = most_nodes(spec, limits.max_gpus)
    aim = best.gpus if best else limits.max_gpus
    cheapest = min(known, key=lambda each: (each.row.seconds or 0.0) * each.row.gpus).row
    nearest = min(known, key=lambda each: abs(each.row.gpus - aim))
    done = {each.row.nodes for each in tried}
    hopeful = []
    for nodes in range(fewest_nodes, most + 1):
        row = _scaled(cheapest, nodes, _BETTER * cheapest.nodes / nodes)
        if nodes not in done and _could_win(limits, row, best):
            hopeful.append(nodes)
    stretch = _BETTER / least_step_seconds(nearest.spec) if hopeful else 0.0
    found = []
    counts = likeliest(spec, hopeful, aim // spec.cluster.gpus_per_node)
    for nodes in counts:
        times = stretch * least_step_seconds(on_cluster(spec, nodes, nearest.gpu))
        if not math.isfinite(times):
            continue  # no layout divides
        row = _scaled(nearest.row, nodes, times)
        if _could_win(limits, row, best):
            found.append(_Chance(limits.rank(row), nodes, nearest.gpu))
    return found, len(counts)


def _could_win(limits: ClusterLimits, row: Considered, best: Considered | None) -> bool:
    return not limits.broken_by(row) and (best is None or limits.rank(row) < limits.rank(best))


def _scaled(row: Considered, nodes: int, times: float) -> Considered:
    """Return the row for another number of nodes, on which the run takes ``times`` as long."""
    money = None if row.dollars is None else row.dollars * times * nodes / row.nodes
    gpus = row.gpus // row.nodes * nodes
    return replace(row, nodes=nodes, gpus=gpus, seconds=(row.seconds or 0.0) * times, dollars=money)
