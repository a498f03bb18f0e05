"""Plan a run on clusters of different sizes: a coarse grid of node counts, then those between.

A lower bound on the time of each cluster comes first, from bounds on the step and on goodput. Clusters are planned most
promising first, and none whose bound is behind the best one so far. The search for the layout of a cluster ends when
no layout that is left can make it the best. Neither changes which cluster is chosen.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from scaletrain_cli.plan.axes import Axes, divisors
from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.plan.planning import plan_within
from scaletrain_cli.plan.reliability.cost import price_quote
from scaletrain_cli.plan.reliability.durability import checkpoint_bytes, most_goodput
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.plan.search.bounds import Bounds
from scaletrain_cli.plan.search.cluster_limits import ClusterLimits, Considered
from scaletrain_cli.plan.search.infeasible import PlanInfeasibleError, why_no_plan
from scaletrain_cli.plan.search.layouts import build_layout, checkpointing_modes
from scaletrain_cli.plan.search.search_space import groups, least_of_axes
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.cluster import MOST_NODES, EfficiencySpec

# Smallest ratio of neighboring node counts in the coarse pass: closer counts give nearly the same result. It is larger
# above _LARGE nodes, which take longest to plan; the second pass refines where it matters.
_STEP = 1.2
_LARGE_STEP = 1.5
_LARGE = 16
# Maximum number of node counts for which a bound is computed after the coarse pass; each takes about 10 ms.
_MOST_BOUNDED = 48


def most_nodes(spec: RunSpec, max_gpus: int) -> int:
    """Return the most nodes for training in a job of ``max_gpus`` GPUs and within the limit of a spec."""
    within = max_gpus // spec.cluster.gpus_per_node - spec.cluster.spare_nodes
    return min(within, spec.cluster.traits.max_nodes or MOST_NODES)


def node_counts(spec: RunSpec, max_gpus: int) -> list[int]:
    """Return the node counts of the coarse pass, ascending.

    They are powers of two, counts whose ranks divide the global batch, and the spec's own.
    """
    per_node = spec.cluster.gpus_per_node
    most = most_nodes(spec, max_gpus)
    wanted = {1 << power for power in range(most.bit_length())}
    dividing = [ranks // per_node for ranks in divisors(spec.training.global_batch_size) if ranks % per_node == 0]
    counts: list[int] = []
    for count in sorted(count for count in wanted | set(dividing) if count <= most):
        step = _STEP if count <= _LARGE else _LARGE_STEP
        if not counts or count >= step * counts[-1] or count in wanted:
            counts.append(count)
    return sorted({*counts, *([spec.cluster.nodes] if spec.cluster.nodes <= most else [])})


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


# How many clusters of a kind of GPU that cannot be the best are planned until one fits.
_MOST_TRIES = 3
# Maximum number of clusters that are planned after the first pass.
_MOST_REFINED = 12
# Assumption that ends the search: no cluster needs less than 95 % of the GPU seconds of the best one of the first pass,
# and no step time is below 95 % of what the bound, scaled by the nearest plan, predicts.
_BETTER = 0.95


class Tried(NamedTuple):
    """One cluster: the requested ``gpu`` (None: the spec's), time and cost in ``row``, and its plan if there is one.

    A cluster that a bound excludes has no plan, and the least time and cost in its row.
    """

    spec: RunSpec
    gpu: str | None
    row: Considered
    plan: RunPlan | None


class Clusters:
    """The clusters of one run, and the lower bounds that those of one kind of GPU share."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self._bounds: dict[str | None, Bounds] = {}
        self._on_cluster: dict[tuple[int, str | None], Bounds] = {}
        self._least: dict[tuple[int, str | None], float] = {}
        self._checkpoint_bytes: int | None = None

    def bounds(self, spec: RunSpec, gpu: str | None) -> Bounds:
        """Return the lower bounds for the layouts of one cluster; ``spec``: the run on it."""
        if gpu not in self._bounds:
            self._bounds[gpu] = Bounds(spec, find_accelerator(spec.cluster), checkpointing_modes(spec)[0])
        nodes = spec.cluster.nodes
        if (nodes, gpu) not in self._on_cluster:
            self._on_cluster[nodes, gpu] = self._bounds[gpu].on_cluster(spec)
        return self._on_cluster[nodes, gpu]

    def least_step_seconds(self, nodes: int, gpu: str | None) -> float:
        """Return a lower bound on the step seconds of a cluster; infinite if no layout divides."""
        if (nodes, gpu) not in self._least:
            spec = on_cluster(self.spec, nodes, gpu)
            bounds = self.bounds(spec, gpu)

            def least(axes: Axes) -> float:
                by_group = (bounds.step_seconds(axes, group.micro_batches) for group in groups(spec, [axes]))
                return min((min(seconds) for seconds in by_group), default=math.inf)

            self._least[nodes, gpu] = least_of_axes(spec, bounds.least_step_seconds, least)
        return self._least[nodes, gpu]

    def most_goodput(self, nodes: int, gpu: str | None) -> float:
        """Return an upper bound on the goodput of a cluster; 1 if no layout divides."""
        step = self.least_step_seconds(nodes, gpu)
        if not math.isfinite(step):
            return 1.0
        spec = on_cluster(self.spec, nodes, gpu)
        # Its size depends on the ZeRO stage alone.
        if self._checkpoint_bytes is None:
            alone = Axes(1, 1, 1, 1, 1, 1, 1)
            layouts = (build_layout(self.spec, alone, stage, "none", 1) for stage in range(4))
            self._checkpoint_bytes = min(checkpoint_bytes(self.spec, layout) for layout in layouts)
        return most_goodput(spec, find_accelerator(spec.cluster), self._checkpoint_bytes, step)

    def at_least(self, nodes: int, gpu: str | None) -> Tried:
        """Return the cluster without a plan; ``row`` has lower bounds on its time and cost."""
        spec = on_cluster(self.spec, nodes, gpu)
        device, quote = find_accelerator(spec.cluster), price_quote(spec, spec.cluster.spot)
        seconds = self.least_step_seconds(nodes, gpu) * spec.total_steps / self.most_goodput(nodes, gpu)
        dollars = None if quote is None else quote.usd * spec.allocated_devices * seconds / 3600
        row = Considered(device.name, nodes, spec.allocated_devices, seconds, dollars, None, None, None, False, None)
        return Tried(spec, gpu, row, None)

    def plan(self, nodes: int, gpu: str | None, most_seconds: float = math.inf) -> Tried:
        """Plan the run on a cluster, unless it takes more than ``most_seconds`` with every layout that fits.

        The row has the reason if there is no plan.
        """
        spec = on_cluster(self.spec, nodes, gpu)
        name = find_accelerator(spec.cluster).name
        row = Considered(name, nodes, spec.allocated_devices, None, None, None, None, None, False, None)
        try:
            most_step = most_seconds * self.most_goodput(nodes, gpu) / spec.total_steps
            plan = plan_within(spec, most_step, bounds=self.bounds(spec, gpu), counted=False)
        except PlanInfeasibleError as error:
            return Tried(spec, gpu, replace(row, why=why_no_plan(error)), None)
        if plan is None:
            return Tried(spec, gpu, _excluded(self.at_least(nodes, gpu).row), None)
        goodput = plan.durability.expected_goodput
        row = replace(row, goodput=goodput, step_seconds=plan.time.step, layout=plan.layout)
        if goodput <= 0:
            return Tried(spec, gpu, replace(row, why=Reason("plan.no-progress")), plan)
        row = replace(row, seconds=plan.time.to_train / goodput, dollars=plan.cost.expected_usd)
        return Tried(spec, gpu, row, plan)

    def complete_plan(self, tried: Tried) -> RunPlan:
        """Return the plan of a cluster with its alternatives."""
        plan = plan_within(tried.spec, math.inf, compared=True, bounds=self.bounds(tried.spec, tried.gpu))
        assert plan is not None
        return plan


def on_cluster(spec: RunSpec, nodes: int, gpu: str | None = None) -> RunSpec:
    """Return the same run on another cluster. Prices and rates of the spec apply only to the spec's own GPU."""
    change: dict[str, Any] = {"nodes": nodes}
    if gpu is not None and gpu != spec.cluster.gpu:
        own = ["price_per_gpu_hour", "spot_price_per_gpu_hour"]
        own += ["intra_node_bandwidth", "nvlink_domain", "host_bandwidth"]
        change |= {"gpu": gpu, "efficiency": EfficiencySpec()} | dict.fromkeys(own, "auto")
    return spec.with_changes("cluster", **change)


def meets(limits: ClusterLimits, tried: Tried) -> bool:
    """Return whether a planned cluster meets the limits."""
    return tried.row.seconds is not None and not limits.broken_by(tried.row)


def first_pass(clusters: Clusters, limits: ClusterLimits, names: Sequence[str | None]) -> list[Tried]:
    """Return a coarse grid of node counts for each kind of GPU: planned if the cluster may be the best.

    If none meets the limits, the clusters that may miss them least are planned too. Of several kinds each has a planned
    cluster, to be compared.
    """
    counts = node_counts(clusters.spec, limits.max_gpus)
    least = [clusters.at_least(nodes, gpu) for gpu in names for nodes in counts]
    tried, best = plan_promising(clusters, limits, least)
    if best is None:
        tried = with_closest(clusters, limits, tried)
    for gpu in names if len(names) > 1 else ():
        if not any(trial.row.seconds for trial in tried if trial.gpu == gpu):
            # That with the best bound; if it does not fit, the next, up to _MOST_TRIES.
            ranks = {
                place: limits.rank(row.at_least)
                for place, row in enumerate(trial.row for trial in tried)
                if tried[place].gpu == gpu and row.least_seconds is not None
            }
            for place in sorted(ranks, key=ranks.__getitem__)[:_MOST_TRIES]:
                tried[place] = clusters.plan(tried[place].row.nodes, gpu)
                if tried[place].row.seconds:
                    break
    return tried


def plan_promising(
    clusters: Clusters, limits: ClusterLimits, least: Sequence[Tried], best: Considered | None = None
) -> tuple[list[Tried], Considered | None]:
    """Plan clusters, most promising first, unless a bound excludes them; return all, and the row of the best one.

    ``least``: see ``Clusters.at_least``; ``best``: the best one so far.
    """
    tried: list[Tried] = []
    open_, ratios = list(least), _PlanToBoundRatios()
    while open_:
        cluster = ratios.most_promising(open_, limits)
        open_.remove(cluster)
        row = cluster.row
        divides = row.seconds is not None and math.isfinite(row.seconds)
        most = limits.most_seconds(row, best) if divides else math.inf
        if divides and (row.seconds or 0.0) > most:
            tried.append(cluster._replace(row=_excluded(row)))
            continue
        tried.append(clusters.plan(row.nodes, cluster.gpu, most))
        ratios.add(cluster, tried[-1].row)
        if meets(limits, tried[-1]):
            best = min((tried[-1].row, best or tried[-1].row), key=limits.rank)
    return tried, best


class _PlanToBoundRatios:
    """The ratio of planned to least time of the clusters planned so far, to estimate the time of the others.

    Estimates decide only the order in which clusters are planned. The sooner a good one is, the sooner bounds end the
    search on all others.
    """

    def __init__(self) -> None:
        self._known: list[tuple[str | None, float, float]] = []  # GPU, logarithms of nodes and of the ratio

    def add(self, least: Tried, planned: Considered) -> None:
        """Add the ratio of a cluster, if it has a plan."""
        if planned.seconds and least.row.seconds:
            self._known.append((least.gpu, math.log(planned.nodes), math.log(planned.seconds / least.row.seconds)))

    def most_promising(self, open_: Sequence[Tried], limits: ClusterLimits) -> Tried:
        """Return the cluster with the best estimate; with nothing known and the least cost wanted, the middle one.

        A bound on the cost hardly differs between clusters, because it has no communication.
        """
        if not self._known and limits.objective == "cost":
            return open_[len(open_) // 2]
        return min(open_, key=lambda cluster: self._rank(cluster, limits))

    def _rank(self, cluster: Tried, limits: ClusterLimits) -> tuple[float, ...]:
        ratio, row = self._ratio(cluster), cluster.row
        seconds = ratio * (row.seconds or math.inf)
        estimate = replace(row, seconds=seconds, dollars=None if row.dollars is None else ratio * row.dollars)
        return (float(limits.broken_by(estimate) is not None), *limits.rank(estimate))

    def _ratio(self, cluster: Tried) -> float:
        """Return the ratio between the planned neighbors in nodes, along logarithms; that of the nearest at an end."""
        at = math.log(cluster.row.nodes)
        known = [row for row in self._known if row[0] == cluster.gpu] or self._known
        below = max((row for row in known if row[1] <= at), key=lambda row: row[1], default=None)
        beyond = min((row for row in known if row[1] > at), key=lambda row: row[1], default=None)
        if below is None or beyond is None:
            nearest = below or beyond
            return math.exp(nearest[2]) if nearest else 1.0
        share = (at - below[1]) / (beyond[1] - below[1])
        return math.exp(below[2] + share * (beyond[2] - below[2]))


def _excluded(row: Considered) -> Considered:
    """Return the row of a cluster without a plan, from its least time and cost."""
    return replace(row, seconds=None, dollars=None, least_seconds=row.seconds, least_dollars=row.dollars)


def with_closest(clusters: Clusters, limits: ClusterLimits, tried: Sequence[Tried]) -> list[Tried]:
    """Plan those clusters without a plan that may miss the limits least, the least bound first; return all."""
    open_ = [index for index, trial in enumerate(tried) if trial.row.least_seconds is not None]
    closed = list(tried)
    closest = min((limits.miss(trial.row) for trial in tried if trial.row.seconds), default=math.inf)
    for index in sorted(open_, key=lambda index: limits.miss(tried[index].row.at_least)):
        row = tried[index].row
        if limits.miss(row.at_least) < closest:
            closed[index] = clusters.plan(row.nodes, tried[index].gpu, limits.seconds_within(row, closest))
            if closed[index].row.seconds:
                closest = min(closest, limits.miss(closed[index].row))
    return closed


def refined(
    clusters: Clusters, limits: ClusterLimits, names: Sequence[str | None], tried: Sequence[Tried], fewest_nodes: int
) -> tuple[list[Tried], int]:
    """Plan more clusters, most promising first, until none can beat the best; return them, and how many were left."""
    spec = clusters.spec
    best = min((trial.row for trial in tried if meets(limits, trial)), key=limits.rank, default=None)
    chances: list[tuple[tuple[float, ...], Tried]] = []  # clusters that may be the best, with the rank they could reach
    looked_at = 0
    for gpu in names if spec.cluster.traits.max_nodes != 1 else ():
        more, count = _chances(clusters, limits, [trial for trial in tried if trial.gpu == gpu], best, fewest_nodes)
        chances += more
        looked_at += count
    planned: list[Tried] = []
    for rank, cluster in sorted(chances, key=lambda chance: chance[0])[:_MOST_REFINED]:
        if best is None or rank < limits.rank(best):
            found_here, best = plan_promising(clusters, limits, [cluster], best)
            planned += [trial for trial in found_here if trial.row.least_seconds is None]
    return planned, looked_at - len(planned)


def _chances(
    clusters: Clusters, limits: ClusterLimits, tried: Sequence[Tried], best: Considered | None, fewest_nodes: int
) -> tuple[list[tuple[tuple[float, ...], Tried]], int]:
    """Return the node counts of one kind of GPU that may beat the best, and how many counts were checked.

    Two estimates must allow it: the GPU seconds of the cheapest cluster, and the lower bound on the step. Bounds are
    scaled by the ratio of plan to bound of the planned cluster nearest to the best.
    """
    known = [trial for trial in tried if trial.row.seconds and trial.row.step_seconds]
    if not known:
        return [], 0
    spec = clusters.spec
    most = most_nodes(spec, limits.max_gpus)
    aim = best.gpus if best else limits.max_gpus
    nearest = min(known, key=lambda trial: abs(trial.row.gpus - aim))
    bound = clusters.at_least(nearest.row.nodes, nearest.gpu).row.seconds or math.inf
    ratio = (nearest.row.seconds or 0.0) / bound
    rows = [trial.row for trial in known]
    rows += [
        _as_planned(trial.row, ratio, nearest.row.dollars is not None) for trial in tried if trial.row.least_seconds
    ]
    cheapest = min(rows, key=lambda row: (row.seconds or 0.0) * row.nodes)
    done = {trial.row.nodes for trial in tried}
    hopeful = []
    for nodes in range(fewest_nodes, most + 1):
        row = _scaled(spec, cheapest, nodes, _BETTER * cheapest.nodes / nodes)
        if nodes not in done and _could_win(limits, row, best):
            hopeful.append(nodes)
    chances = []
    counts = likeliest(spec, hopeful, most_nodes(spec, aim))
    for nodes in counts:
        cluster = clusters.at_least(nodes, nearest.gpu)
        least = cluster.row.seconds or math.inf
        if not math.isfinite(least):
            continue  # no layout divides
        row = _scaled(spec, nearest.row, nodes, _BETTER * least / bound)
        if _could_win(limits, row, best):
            chances.append((limits.rank(row), cluster))
    return chances, len(counts)


def _as_planned(row: Considered, ratio: float, priced: bool) -> Considered:
    """Return what a plan of a cluster without one would find, if it is ``ratio`` times its bound."""
    dollars = row.least_dollars * ratio if priced and row.least_dollars is not None else None
    return replace(row, seconds=(row.least_seconds or 0.0) * ratio, dollars=dollars)


def _could_win(limits: ClusterLimits, row: Considered, best: Considered | None) -> bool:
    return not limits.broken_by(row) and (best is None or limits.rank(row) < limits.rank(best))


def _scaled(spec: RunSpec, row: Considered, nodes: int, times: float) -> Considered:
    """Return the row for another number of nodes, on which the run takes ``times`` as long."""
    gpus = row.gpus + (nodes - row.nodes) * spec.cluster.gpus_per_node
    money = None if row.dollars is None else row.dollars * times * gpus / row.gpus
    return replace(row, nodes=nodes, gpus=gpus, seconds=(row.seconds or 0.0) * times, dollars=money)
