"""Choose the number and type of GPUs of a run, for an objective and within limits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from scaletrain_cli.errors import InfeasibleError, Problem, UsageError
from scaletrain_cli.plan.planning import plan_or_raise
from scaletrain_cli.plan.ranges import chance_within
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.plan.search.cluster_limits import OBJECTIVES, ClusterLimits, Considered
from scaletrain_cli.plan.search.cluster_search import (
    Clusters,
    Tried,
    first_pass,
    meets,
    most_nodes,
    node_counts,
    on_cluster,
    plan_promising,
    refined,
    with_closest,
)
from scaletrain_cli.plan.search.infeasible import PlanInfeasibleError, infeasible_json
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.text import dollars_text, seconds_text

# A sufficient number of GPUs is searched for up to this multiple of the limit.
_BEYOND = 16
# Node counts of a scaling curve, relative to the run's: an eighth to four times.
_HALVINGS, _DOUBLINGS = 3, 2


@dataclass(frozen=True)
class Sizing:
    """The chosen cluster: ``spec`` with its nodes and GPU, the plan, and the clusters that it was compared with."""

    spec: RunSpec
    plan: RunPlan
    limits: ClusterLimits
    considered: tuple[Considered, ...]
    ruled_out: int = 0
    notes: tuple[Reason, ...] = ()

    @property
    def probability(self) -> float | None:
        """The probability that the run meets the limits of time and dollars on the chosen cluster; None if unknown."""
        return chance_within(self.plan, self.limits.deadline_seconds, self.limits.budget_usd)

    def to_json(self) -> dict[str, Any]:
        """Return objective, limits and the table of clusters, without the plan.

        ``tried``: the number of clusters planned; ``ruled_out``: the number that a bound excluded. For one kind of GPU
        ``considered`` has the latter too, with ``least_seconds`` and ``least_dollars``. ``probability``: of meeting the
        limits of time and dollars on the chosen cluster, null without either or without evidence.
        """
        return vars(self.limits) | {
            "ruled_out": self.ruled_out,
            "notes": [str(note) for note in self.notes],
            "note_reasons": [note.to_document() for note in self.notes],
            "probability": self.probability,
            "tried": sum(row.least_seconds is None for row in self.considered),
            "considered": [row.to_json() for row in self.considered],
        }


class SizingError(InfeasibleError):
    """No cluster meets the limits (exit 3).

    ``closest``: the one that misses them least, None if the run fits on none.
    """

    def __init__(
        self,
        reason: Reason,
        problems: tuple[Problem, ...],
        considered: tuple[Considered, ...],
        closest: Considered | None,
    ) -> None:
        super().__init__(reason, problems)
        self.considered = considered
        self.closest = closest

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of a run without a plan, with the table of clusters under ``sizing``."""
        return infeasible_json(self) | {"sizing": {"considered": [row.to_json() for row in self.considered]}}


class ScalingPoint(NamedTuple):
    """One cluster size. ``efficiency``: throughput per GPU relative to the smallest size's."""

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
    """Return the cluster with the least ``time``, ``cost`` or ``gpus`` (the objective) that meets the limits.

    Time includes interruptions: seconds to train, divided by the expected goodput. ``max_gpus``: of the job, with those
    of spare nodes; by default as in the spec, for the objective ``gpus`` up to 16 times as many if needed. ``gpus``:
    names of GPUs to compare, by default the spec's. The global batch does not change, so node counts over which it does
    not divide are listed with that reason. Raises SizingError with the closest cluster if none meets the limits;
    UsageError for an unknown objective or GPU, a limit below one node, or a cost objective or budget without a price.
    """
    limits = _limits(spec, objective, max_gpus, deadline_seconds, budget_usd)
    names: list[str | None] = [None] if not gpus else list(gpus)
    clusters = Clusters(spec)
    tried = first_pass(clusters, limits, names)
    further, ruled_out = refined(clusters, limits, names, tried, 1)
    tried = sorted([*tried, *further], key=lambda trial: (names.index(trial.gpu), trial.row.nodes))
    notes = list[Reason]()
    if spec.cluster.traits.max_nodes == 1 and limits.max_gpus >= 2 * spec.cluster.gpus_per_node:
        notes.append(Reason("plan.scheduler-is-one-node", {"scheduler": spec.cluster.scheduler}))
    if not any(meets(limits, trial) for trial in tried):
        sufficient, looked_at = _beyond(clusters, limits, names)
        if objective == "gpus" and max_gpus is None and looked_at:  # the spec's number of GPUs is no limit then
            tried = sorted([*tried, *looked_at], key=lambda trial: (names.index(trial.gpu), trial.row.nodes))
            limits = replace(limits, max_gpus=sufficient.gpus if sufficient else max(trial.row.gpus for trial in tried))
            tried = [trial for trial in tried if trial.row.gpus <= limits.max_gpus]
        if not any(meets(limits, trial) for trial in tried):
            tried = with_closest(clusters, limits, tried)
            rows = [replace(trial.row, why=_why_not(limits, trial.row, None)) for trial in tried]
            raise _out_of_reach(spec, limits, rows, sufficient)
    best = min((trial for trial in tried if meets(limits, trial)), key=lambda trial: limits.rank(trial.row))
    left_out = sum(trial.row.least_seconds is not None for trial in tried)
    considered = tuple(
        replace(trial.row, chosen=trial is best, why=None if trial is best else _why_not(limits, trial.row, best.row))
        for trial in tried
        if trial.row.least_seconds is None or len(names) == 1
    )
    if max_gpus is None and best.row.gpus > spec.allocated_devices:
        params = {"gpus": spec.allocated_devices, "nodes": best.spec.cluster.nodes}
        notes.append(Reason("plan.more-than-the-spec", params))
    plan = clusters.complete_plan(best)
    return Sizing(best.spec, plan, limits, considered, ruled_out + left_out, tuple(notes))


def _why_not(limits: ClusterLimits, row: Considered, best: Considered | None) -> Reason | None:
    """Return why a cluster is not chosen; None if only the limits count, and it meets them."""
    if row.least_seconds is not None:
        return limits.excluded(row, best)
    return limits.broken_by(row) or (None if best is None else limits.worse(row, best))


def scaling_curve(spec: RunSpec, node_counts: Sequence[int] = ()) -> tuple[ScalingPoint, ...]:
    """Return the throughput over node counts, fewest first; counts without a plan are left out.

    The default is an eighth to four times the run's number of nodes, in powers of two. The global batch stays the same.
    """
    if not node_counts:
        nodes = spec.cluster.nodes
        node_counts = [n for n in (nodes >> power for power in range(_HALVINGS, 0, -1)) if n]
        node_counts += [nodes << power for power in range(_DOUBLINGS + 1)]
    plans = []
    for nodes in sorted(set(node_counts)):
        try:
            plans.append(plan_or_raise(on_cluster(spec, nodes), compared=False))
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


def _limits(
    spec: RunSpec, objective: str, max_gpus: int | None, deadline_seconds: float | None, budget_usd: float | None
) -> ClusterLimits:
    if objective not in OBJECTIVES:
        raise UsageError(Reason("plan.unknown-objective", {"given": objective, "allowed": list(OBJECTIVES)}))
    most, least = spec.allocated_devices if max_gpus is None else max_gpus, on_cluster(spec, 1)
    if most < least.allocated_devices:
        params = {"max_gpus": most, "least": least.allocated_devices, "nodes": least.cluster.allocated_nodes}
        raise UsageError(Reason("plan.less-than-one-node", params))
    return ClusterLimits(objective, most, deadline_seconds, budget_usd)


def _out_of_reach(
    spec: RunSpec, limits: ClusterLimits, rows: list[Considered], beyond: Considered | None
) -> InfeasibleError | UsageError:
    """Return the error with the closest cluster, and ``beyond``: the smallest sufficient one above the limit."""
    planned = [row for row in rows if row.seconds is not None]
    if planned and all(row.why == Reason("plan.no-price") for row in planned):
        return UsageError(Reason("plan.needs-price"))
    closest = min(planned, key=lambda row: (limits.miss(row), *limits.rank(row)), default=None)
    problems: list[Problem] = []
    if closest is not None:
        problems.append(_cluster_problem("closest", closest, Reason("plan.closest-cluster", _taken(closest))))
    if beyond is not None:
        problems.append(_cluster_problem("would do", beyond, Reason("plan.sufficient-cluster", _taken(beyond))))
    elif closest is None:
        problems += [_cluster_problem("largest", row, row.why) for row in rows[-1:] if row.why]
    if spec.cluster.traits.max_nodes == 1:
        reason = Reason("plan.one-node-limit")
        problems.append(Problem.because("one node", "cluster.scheduler", reason, spec.cluster.scheduler))
    return SizingError(_headline(limits, closest, beyond), tuple(problems), tuple(rows), closest)


def _cluster_problem(where: str, row: Considered, reason: Reason) -> Problem:
    return Problem.because(where, "cluster", reason, f"{row.gpus} x {row.gpu}")


def _taken(row: Considered) -> dict[str, Any]:
    """Return the parameters of reasons for time and cost of a cluster; ``takes`` and ``missed`` are texts."""
    takes = "never finishes" if row.seconds is None else seconds_text(row.seconds)
    takes += "" if row.dollars is None else f", {dollars_text(row.dollars)}"
    return {"seconds": row.seconds, "dollars": row.dollars, "takes": takes, "missed": str(row.why or "")}


def _headline(limits: ClusterLimits, closest: Considered | None, beyond: Considered | None) -> Reason:
    if closest is None:
        reason = Reason("plan.no-cluster-fits", {"max_gpus": limits.max_gpus})
    else:
        named = []
        if limits.deadline_seconds is not None:
            named.append(f"the deadline of {seconds_text(limits.deadline_seconds)}")
        if limits.budget_usd is not None:
            named.append(f"the budget of {dollars_text(limits.budget_usd)}")
        params = {"max_gpus": limits.max_gpus, "limits": " and ".join(named), "missed": closest.why}
        reason = Reason("plan.no-cluster-meets-limits", params)
    if beyond is None:
        return reason
    return Reason("plan.larger-cluster-suffices", {"cause": reason, "gpus": beyond.gpus, "gpu": beyond.gpu})


def _beyond(
    clusters: Clusters, limits: ClusterLimits, names: Sequence[str | None]
) -> tuple[Considered | None, list[Tried]]:
    """Return the smallest sufficient cluster above the limit, and the clusters that were considered to find it."""
    spec, within = clusters.spec, most_nodes(clusters.spec, limits.max_gpus)
    tried: list[Tried] = []
    for nodes in node_counts(spec, _BEYOND * limits.max_gpus):
        if nodes <= within:
            continue
        tried += plan_promising(clusters, limits, [clusters.at_least(nodes, gpu) for gpu in names])[0]
        if any(meets(limits, trial) for trial in tried):
            fewest = replace(limits, objective="gpus", max_gpus=on_cluster(spec, nodes - 1).allocated_devices)
            tried += refined(clusters, fewest, names, tried, within + 1)[0]
            return min((trial.row for trial in tried if meets(limits, trial)), key=fewest.rank), tried
    return None, tried
