"""Simulate a run whose number of nodes follows a recorded spot market, and the same run that waits for all nodes."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scaletrain_cli.plan.reliability.node_sizes import NodeSize, growth, largest_usable, usable_plans
from scaletrain_cli.plan.reliability.spot_trace import SpotTrace, Spread, intervals_from, joined, kept_seconds, spread
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec

_STARTS = 16  # as for a run of one size
_MOST_ROUNDS = 200  # repetitions of the trace, after which a run counts as one that never finishes
_NOTHING = 1e-9  # share of the run below which nothing is left


@dataclass(frozen=True)
class PolicyOutcome:
    """Figures of one policy over all starting points. ``days`` and what follows are None if no start finishes."""

    finished: int
    days: Spread | None
    samples_per_hour: Spread | None
    waiting_hours: Spread | None
    node_hours: Spread | None
    interruptions: Spread | None
    growths: Spread | None


@dataclass(frozen=True)
class ElasticOutcome:
    """The run on its range of nodes, and the same run that waits for ``most`` nodes, on the same trace."""

    trace: str
    starts: int
    most: int
    elastic: PolicyOutcome
    waiting: PolicyOutcome
    advice: Reason

    def to_json(self) -> dict[str, Any]:
        """Return the fields; ``advice`` as text, with its code in ``advice_reason``."""
        return asdict(self) | {"advice": str(self.advice), "advice_reason": self.advice.to_document()}


def compare_on_trace(spec: RunSpec, sizes: Sequence[NodeSize], trace: SpotTrace) -> ElasticOutcome | None:
    """Return the outcome of the range and of waiting for its largest size; None if fewer than two sizes are usable.

    A trace with fewer nodes than the job of the largest size is scaled up: all of its nodes stand for all of the job.
    """
    plans = usable_plans(sizes)
    if len(plans) < 2:
        return None
    most, recorded = max(plans), max(nodes for _, nodes in trace.intervals)
    held = max(recorded, most + spec.cluster.spare_nodes)
    intervals = joined((seconds, nodes * held // recorded) for seconds, nodes in trace.intervals)
    elastic = _outcome(spec, plans, intervals)
    waiting = _outcome(spec, {most: plans[most]}, intervals)
    return ElasticOutcome(trace.name, _STARTS, most, elastic, waiting, _advice(trace, most, elastic, waiting))


def _outcome(spec: RunSpec, plans: Mapping[int, RunPlan], intervals: Sequence[tuple[float, int]]) -> PolicyOutcome:
    whole = math.fsum(seconds for seconds, _ in intervals)
    runs = [simulate_sizes(spec, plans, intervals, whole * start / _STARTS) for start in range(_STARTS)]
    ended = [run for run in runs if math.isfinite(run.seconds)]
    if not ended:
        return PolicyOutcome(0, None, None, None, None, None, None)
    samples = spec.total_steps * spec.training.global_batch_size
    return PolicyOutcome(
        finished=len(ended),
        days=spread([run.seconds / 86400 for run in ended]),
        samples_per_hour=spread([samples / (run.seconds / 3600) for run in ended]),
        waiting_hours=spread([run.waiting / 3600 for run in ended]),
        node_hours=spread([run.node_seconds / 3600 for run in ended]),
        interruptions=spread([float(run.interruptions) for run in ended]),
        growths=spread([float(run.growths) for run in ended]),
    )


def _advice(trace: SpotTrace, most: int, elastic: PolicyOutcome, waiting: PolicyOutcome) -> Reason:
    params: dict[str, Any] = {"trace": trace.name, "nodes": most}
    if elastic.days is None:
        return Reason("plan.range-never-finishes", params)
    params |= {"days": elastic.days.median * 86400}
    if waiting.days is None:
        return Reason("plan.range-needed", params)
    params |= {"waiting": waiting.days.median * 86400, "factor": waiting.days.median / elastic.days.median}
    return Reason("plan.range-pays" if params["factor"] > 1 else "plan.range-does-not-pay", params)


def simulate_sizes(
    spec: RunSpec, plans: Mapping[int, RunPlan], intervals: Sequence[tuple[float, int]], start: float = 0.0
) -> "ElasticRun":
    """Return the run from ``start`` seconds into the trace, which repeats. ``plans``: of the sizes that may be used.

    The run starts on the largest size that is available beside its spare nodes, which replace failed ones only. When it
    loses a node, it loses the work since the last checkpoint, or only the notice if that is long enough for a save, and
    restarts on what is left, if it is enough. When more nodes are available, it is checked after ``check_every`` and at
    least ``grow_every`` after the last such restart whether one pays; if so, the run saves, and saves again when it
    stops. Deterministic.
    """
    run = ElasticRun(spec, plans)
    rounds = itertools.chain.from_iterable(itertools.repeat(intervals, _MOST_ROUNDS))
    for seconds, nodes in itertools.chain(intervals_from(start, intervals), rounds):
        if run.through(seconds, nodes - run.spare):
            return run
    run.seconds = math.inf
    return run


class ElasticRun:
    """The state of one run: its size, the time of its last start, and the share of the run that is left by then.

    ``seconds`` have passed, at last infinite if it never finishes; ``node_seconds``: of the nodes that it held.
    """

    def __init__(self, spec: RunSpec, plans: Mapping[int, RunPlan]) -> None:
        given = spec.cluster.node_range
        self.plans, self.usable = plans, tuple(plans)
        self.grace_seconds, self.spare = spec.cluster.grace_seconds, spec.cluster.spare_nodes
        self.grows = given is not None and given.grow and len(plans) > 1
        self.check_every = 0.0 if given is None else given.check_every
        self.grow_every = 0.0 if given is None else given.grow_every
        self.size: int | None = None
        self.seconds = self.began = self.node_seconds = self.waiting = 0.0
        self.left, self.grown = 1.0, -math.inf
        self.interruptions = self.growths = 0

    def through(self, seconds: float, nodes: int) -> bool:
        """Return whether the run ends within an interval with this number of available nodes."""
        if self.size is not None and nodes < self.size:
            worked = max(0.0, self.seconds - self.began - self._plan.durability.restart_seconds)
            self.left -= self._share(kept_seconds(self._plan.durability, self.grace_seconds, worked))
            self.interruptions += 1
            self.size = None
        if self.size is None:
            self._start(largest_usable(self.usable, nodes))
        until = self.seconds + seconds
        if self.size is None:
            self.waiting += seconds
            self.seconds = until
            return False
        while (moment := self._grows_at(nodes)) is not None and moment < min(until, self._ends_at()):
            self._pass(moment)
            # A run that stops on request saves first, and loses nothing.
            durability = self._plan.durability
            self.left -= self._share(self.seconds - self.began - durability.restart_seconds - durability.save_seconds)
            self.growths, self.grown = self.growths + 1, self.seconds
            self._start(largest_usable(self.usable, nodes))
        self._pass(min(until, self._ends_at()))
        return self.seconds >= self._ends_at() - _NOTHING

    def _start(self, size: int | None) -> None:
        self.size, self.began = size, self.seconds

    def _pass(self, moment: float) -> None:
        assert self.size is not None
        self.node_seconds += (self.size + self.spare) * (moment - self.seconds)
        self.seconds = moment

    @property
    def _plan(self) -> RunPlan:
        assert self.size is not None
        return self.plans[self.size]

    @property
    def _pace(self) -> float:
        """Return seconds per second of training: steps, and checkpoints that block them."""
        return 1 + self._plan.durability.blocked_seconds / self._plan.durability.interval_seconds

    def _ends_at(self) -> float:
        return self.began + self._plan.durability.restart_seconds + self.left * self._plan.time.to_train * self._pace

    def _share(self, seconds: float) -> float:
        """Return the share of the run of these seconds of steps and blocking checkpoints."""
        return min(self.left, max(0.0, seconds) / self._pace / self._plan.time.to_train)

    def _grows_at(self, nodes: int) -> float | None:
        """Return when the run has saved and stopped to restart on more nodes; None if it does not."""
        target = largest_usable(self.usable, nodes)
        if not self.grows or self.size is None or target is None or target <= self.size:
            return None
        durability = self._plan.durability
        ready = self.began + durability.restart_seconds
        asked = max(ready, self.seconds + self.check_every, self.grown + self.grow_every)
        done = self._share(asked + durability.save_seconds - ready)
        if not growth(self.plans, self.size, target, left=self.left - done).pays:
            return None
        return asked + 2 * durability.save_seconds  # one while it trains, and the last one
