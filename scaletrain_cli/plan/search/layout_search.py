"""The search over all layouts that a spec allows, lowest bound on the step time first; the fastest that fits is chosen.

``search`` is the entry: branch and bound with the lower bounds of bounds.py. ``choose`` states the preference.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import takewhile
from typing import NamedTuple

from scaletrain_cli.plan.axes import CHECKPOINTING, OFFLOAD, Axes
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.memory.device_memory import comfortable_bytes
from scaletrain_cli.plan.result import Alternative, Layout, Memory, Network, Rejection, Time
from scaletrain_cli.plan.search.bounds import Bounds
from scaletrain_cli.plan.search.layouts import build_layout, checkpointing_modes, describe
from scaletrain_cli.plan.search.search_space import Group, RejectionCounts, axes_to_try, groups
from scaletrain_cli.plan.workloads.registry import workload_of
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.text import bytes_text

# Step times within this ratio are equal within the accuracy of the time model; then the simpler layout is preferred.
SAME_TIME = 1.02
# A layout within a limit of time may have expected seconds above it, with which others are compared: up to a tenth for
# the probability of running out of memory, and SAME_TIME.
_REACH = SAME_TIME / 0.9
MOST_ALTERNATIVES = 200
# A layout is called faster only if its step time is less than this share of the other's: 0.0 % is not shown as faster.
_NOT_FASTER = 0.9995


class Sized(NamedTuple):
    """A layout whose memory is known."""

    layout: Layout
    memory: Memory


@dataclass(frozen=True)
class Candidate:
    """A layout with its memory, step time and traffic."""

    layout: Layout
    memory: Memory
    time: Time
    network: Network

    @property
    def comfortable(self) -> bool:
        """Return whether it fits with a margin for the memory model's error: an OOM costs more than a slower step."""
        return self.memory.verdict == "fits"

    @property
    def expected_seconds(self) -> float:
        """Return the mean seconds per step, stalls included, over the probability of not running out of memory."""
        return (self.time.expected - self.time.data_wait) / max(1 - self.memory.out_of_memory_probability, 1e-4)

    @property
    def busy_seconds(self) -> float:
        """Return seconds per step without waiting for data, which does not depend on the layout and may be cured."""
        return self.time.step - self.time.data_wait


def choose(fitting: list[Candidate], *, contrastive: bool = False) -> Candidate | None:
    """Return the fastest layout that fits with a margin; if there is none, the fastest that fits. None if none fits.

    Layouts are compared by expected seconds, so one that may run out of memory must be faster in proportion. Of layouts
    within SAME_TIME the simplest is returned. For a ``contrastive`` loss, layouts without gradient accumulation come
    first.
    """
    pool = [candidate for candidate in fitting if candidate.comfortable] or fitting
    if contrastive:
        pool = [candidate for candidate in pool if candidate.layout.gradient_accumulation_steps == 1] or pool
    if not pool:
        return None
    limit = min(candidate.expected_seconds for candidate in pool) * SAME_TIME
    return min((candidate for candidate in pool if candidate.expected_seconds <= limit), key=simplicity)


def simplicity(candidate: Candidate) -> tuple[int, ...]:
    """Return a sort key, smallest for the simplest: offload, model parallelism, ZeRO stage, recomputation, memory."""
    layout = candidate.layout
    return (
        OFFLOAD.index(layout.offload),
        Axes.of(layout).model_parallel,
        layout.expert_parallel,
        layout.virtual_pipeline,
        layout.zero_stage,
        CHECKPOINTING.index(layout.activation_checkpointing),
        candidate.memory.peak,
        layout.micro_batch_size,
    )


def reason(candidate: Candidate, chosen: Candidate, *, contrastive: bool = False) -> Reason:
    """Return why ``candidate`` was not chosen, with its numbers."""
    memory = candidate.memory
    if not memory.fits:
        return Reason("plan.needs-memory", {"peak": memory.peak, "capacity": memory.capacity})
    if not candidate.comfortable and chosen.comfortable:
        return Reason("plan.little-memory-left", {"share": memory.peak / memory.capacity})
    slower = candidate.busy_seconds / chosen.busy_seconds
    if contrastive and candidate.layout.gradient_accumulation_steps > 1 == chosen.layout.gradient_accumulation_steps:
        return Reason("plan.fewer-negatives")
    if slower > SAME_TIME:
        return Reason("plan.slower", {"ratio": slower})
    if candidate.time.expected > max(candidate.time.unstalled, chosen.time.expected) * SAME_TIME:
        times = 1 + candidate.time.stall_seconds / candidate.time.unstalled
        return Reason("plan.may-stall", {"probability": candidate.time.stall_probability, "ratio": times})
    if candidate.expected_seconds > chosen.expected_seconds * SAME_TIME:
        return Reason("plan.riskier", {"probability": candidate.memory.out_of_memory_probability})
    if slower < _NOT_FASTER:
        return Reason("plan.faster-within-error", {"gain": 1 - slower})
    return Reason("plan.not-faster")


# Codes for counting layouts: those of ``reason``, without the numbers of one layout.
_COUNTED = {
    "plan.needs-memory": "plan.does-not-fit",
    "plan.little-memory-left": "plan.counted-little-memory-left",
    "plan.slower": "plan.counted-slower",
    "plan.riskier": "plan.counted-riskier",
    "plan.may-stall": "plan.counted-may-stall",
    "plan.faster-within-error": "plan.counted-faster-within-error",
}


# Minimum number of layouts to size, for comparison, even if their bounds exclude them.
_FEWEST_SIZED = 100
# Maximum number of layouts to size on extreme clusters and models; the best of these is chosen.
_MOST_SIZED = 3000
# If nothing fits: how many layouts with the lowest memory bound are sized to find the smallest.
_MOST_TOO_LARGE = 50
# If only tight layouts fit within a limit of time: how many of the smallest are sized to find one with a margin.
_MOST_SMALL = 4


class _Bounded(NamedTuple):
    """A group with a lower bound on the step time for each of its micro-batch sizes."""

    group: Group
    floors: list[float]


class Point(NamedTuple):
    """One layout of a group, as indices into the group's lists; ``checkpointing``: index into the modes of the search.

    ``timing`` and ``memory`` are None until the layout is timed and sized.
    """

    group: Group
    micro_batch: int
    checkpointing: int
    offload: int
    timing: tuple[Time, Network] | None = None
    memory: Memory | None = None


@dataclass(frozen=True)
class Found:
    """The result of a search: layouts that fit, some that do not, and how many were considered, sized or not."""

    fitting: tuple[Candidate, ...]
    too_large: tuple[Sized, ...]
    considered: int
    rejected: tuple[Rejection, ...]
    chosen: Candidate | None
    too_slow: bool = False  # the search ended because the layout to choose exceeds its limit of time


def evaluate(spec: RunSpec, layout: Layout, device: Accelerator) -> Candidate:
    """Return memory, time and traffic of one layout."""
    time, network = workload_of(spec.model).time(spec, layout, device)
    return Candidate(layout, workload_of(spec.model).memory(spec, layout, device), time, network)


def alternatives(spec: RunSpec, device: Accelerator, outcome: Found, chosen: Candidate) -> tuple[Alternative, ...]:
    """Return the best layouts that were sized, with the reason against each; at the end some that do not fit."""
    left = max(0, MOST_ALTERNATIVES - len(outcome.fitting))
    nearest = sorted(outcome.too_large, key=lambda sized: sized.memory.peak)[: left + 1]
    sized = [*outcome.fitting, *(evaluate(spec, sized.layout, device) for sized in nearest)]
    contrastive = workload_of(spec.model).accumulation_changes_loss(spec)
    rest = [candidate for candidate in sized if candidate.layout != chosen.layout]
    rest.sort(key=lambda c: (not c.memory.fits, c.busy_seconds if c.memory.fits else c.memory.peak, simplicity(c)))
    return tuple(
        Alternative(c.layout, c.busy_seconds, c.memory.peak, c.memory.fits, reason(c, chosen, contrastive=contrastive))
        for c in rest[:MOST_ALTERNATIVES]
    )


def search(
    spec: RunSpec,
    device: Accelerator,
    all_axes: Sequence[Axes],
    counts: RejectionCounts,
    *,
    compared: bool = True,
    bounds: Bounds | None = None,
    most_seconds: float = math.inf,
) -> Found:
    """Size the layouts with these degrees that may be the fastest, and count the others in ``counts``.

    The result is exact unless more than _MOST_SIZED layouts have bounds below the best step time; a test compares it
    with sizing every layout. ``compared``: size at least a hundred layouts, as alternatives to the chosen one, and
    count the layouts that do not fit one by one; else closer bounds on memory leave them out.
    ``bounds``: those of this spec, computed if None. ``most_seconds``: if the layout to choose has a longer
    step, the search may end without a choice.
    """
    run = _Search(spec, device, counts, _FEWEST_SIZED if compared else 0, bounds, most_seconds)
    run.go(all_axes)
    chosen = choose(run.fitting, contrastive=run.contrastive)
    for candidate in run.fitting if chosen else ():
        if chosen and candidate is not chosen:
            why = reason(candidate, chosen, contrastive=run.contrastive).code
            counts.add(Reason(_COUNTED.get(why, why)), partial(describe, candidate.layout))  # without its numbers
    rejected = counts.rejections()
    if chosen is not None:
        chosen = replace(chosen, memory=run.workload.memory(spec, chosen.layout, device))
    return Found(tuple(run.fitting), tuple(run.too_large), run.considered, rejected, chosen, run.too_slow)


def search_near(spec: RunSpec, device: Accelerator, bounds: Bounds, most_seconds: float) -> Found | None:
    """Return what ``search`` returns without comparison, from the degrees alone that can keep to ``most_seconds``.

    None if other degrees may have a layout to compare with; then the complete search decides.
    """
    if most_seconds == math.inf or workload_of(spec.model).accumulation_changes_loss(spec):
        return None
    reach = most_seconds * _REACH
    near = axes_to_try(spec, worthwhile=lambda axes: bounds.least_step_seconds(axes) <= reach)
    outcome = search(spec, device, near, RejectionCounts(), compared=False, bounds=bounds, most_seconds=most_seconds)
    chosen = outcome.chosen
    decides = chosen is not None and chosen.comfortable and chosen.expected_seconds * SAME_TIME <= reach
    return outcome if decides or outcome.too_slow else None


class _Search:
    """One search. Its state is a priority queue of layouts by lower bound on the step time."""

    def __init__(
        self,
        spec: RunSpec,
        device: Accelerator,
        counts: RejectionCounts,
        fewest_sized: int,
        bounds: Bounds | None,
        most_seconds: float,
    ) -> None:
        self.spec, self.device, self.counts, self.fewest_sized = spec, device, counts, fewest_sized
        self.bounds = bounds or Bounds(spec, device, checkpointing_modes(spec)[0])
        self.most_seconds = most_seconds
        self.too_slow = False
        self.workload = workload_of(spec.model)
        self.modes = checkpointing_modes(spec)
        self.contrastive = workload_of(spec.model).accumulation_changes_loss(spec)
        self.fitting: list[Candidate] = []
        self.too_large: list[Sized] = []
        self.considered = self.timed = 0
        self._queue: list[tuple[float, int, _Bounded | Point]] = []
        self._pushed = 0
        self._ruled_out = 0  # layouts among ``considered`` that are known not to fit
        self._best = float("inf")
        self._has_comfortable = False  # among ``fitting``
        self._groups: list[Group] = []
        self._marks: dict[tuple[Axes, int], list[Point]] = {}  # layouts that do not fit, by group
        self._most_bytes = device.memory_bytes  # layouts with a larger bound are not sized
        self._needs_margin = False  # layouts that fit without a margin cannot be chosen
        self._bounded_out: list[tuple[int, Point]] = []  # the smallest layouts of groups that a bound rules out

    def go(self, all_axes: Sequence[Axes]) -> None:
        for group in groups(self.spec, all_axes):
            self._groups.append(group)
            self.considered += self._count(group)
            floors = self.bounds.step_seconds(group.axes, group.micro_batches)
            self._push(min(floors), _Bounded(group, floors))
        if not self.fewest_sized and self._small_is_comfortable:  # ``choose`` then takes a layout with a margin
            self._needs_margin = True
            self._most_bytes = comfortable_bytes(framework_of(self.spec), self.device)
        enough = False
        while self._queue and not enough:
            floor, _, item = heapq.heappop(self._queue)
            # What is left has no shorter step. The layout to choose may be in it if nothing fits yet, or if all that
            # fits is tight and some layout fits with a margin, which ``choose`` prefers.
            if floor > self.most_seconds and (
                not self.fitting or (not self._has_comfortable and self._small_is_comfortable)
            ):
                self.too_slow = True
                return
            enough = self.timed >= _MOST_SIZED or (floor > self._best * SAME_TIME and self.timed >= self.fewest_sized)
            if enough:
                self._count_the_rest(item)
            elif isinstance(item, _Bounded):
                self._open(item.group, item.floors)
            elif item.timing is None:
                self._time(item, floor)
            else:
                self._size_next(item, floor)
        if not self.fitting:
            for _, point in sorted(self._bounded_out, key=lambda pair: pair[0])[:_MOST_TOO_LARGE]:
                self.too_large.append(Sized(self._layout(point), self._memory(point)))

    @cached_property
    def _small_is_comfortable(self) -> bool:
        """Return whether a layout fits with a margin: the smallest of the groups with the lowest bounds are sized."""
        points = [Point(group, 0, len(self.modes) - 1, len(group.offload) - 1) for group in self._groups]
        most = self._most_bytes  # what needs more does not fit, however much more
        smallest = heapq.nsmallest(_MOST_SMALL, points, key=lambda point: self._least_bytes(point, most))
        return any(self._memory(point).verdict == "fits" for point in smallest)

    def _count(self, group: Group) -> int:
        return len(group.offload) * len(group.micro_batches) * len(self.modes)

    def _push(self, floor: float, item: _Bounded | Point) -> None:
        self._pushed += 1
        heapq.heappush(self._queue, (floor, self._pushed, item))

    def _open(self, group: Group, floors: list[float]) -> None:
        """Queue the layouts of a group with tighter bounds, unless not even its smallest layout can fit."""
        axes, stage, sizes = group.axes, group.zero_stage, group.micro_batches
        smallest = Point(group, 0, len(self.modes) - 1, len(group.offload) - 1)
        least = self._least_bytes(smallest)
        if least > self._most_bytes:
            self._bounded_out.append((least, smallest))
            count, have = self._count(group), bytes_text(self.device.memory_bytes)
            self._ruled_out += count
            example = f"{describe(self._layout(smallest))}: needs {bytes_text(least)} of {have}"
            self.counts.add(Reason("plan.never-fits"), example, count)
            return
        # The search ends at a step of ``last`` seconds, as far as known: no layout above it is looked at.
        compared = self._best * SAME_TIME if self.timed >= self.fewest_sized else math.inf
        mode, last = 0, min(compared, self.most_seconds)
        if not self.fewest_sized:
            larger = (smallest._replace(micro_batch=index) for index in range(len(sizes)))
            sizes = sizes[: sum(1 for _ in takewhile(self._may_fit, larger))]
            mode = next(mode for mode in range(len(self.modes)) if self._may_fit(smallest._replace(checkpointing=mode)))
            left_out = self._count(group) - len(group.offload) * len(sizes) * (len(self.modes) - mode)
            self._rule_out(Point(group, len(group.micro_batches) - 1, 0, 0), left_out)
            sent = self.bounds.traffic_seconds(axes, stage, sizes)
            floors = list(map(max, self.bounds.step_seconds(axes, sizes, self.modes[mode]), sent))
        if min(floors) <= last:
            floors = self.bounds.group_seconds(axes, stage, group.offload[0], sizes, floors, last, self.modes[mode])
        for index, floor in enumerate(floors):
            self._push(floor, Point(group, index, mode, 0))

    def _time(self, point: Point, floor: float) -> None:
        """Compute the exact time of a layout and queue it again; its memory first if only a margin may be chosen."""
        memory = None
        excluded = self._is_marked(point) or not self._may_fit(point)
        if self._needs_margin and not excluded:
            memory = self._memory(point)
            excluded = memory.verdict != "fits"
            if excluded:
                self._mark(point)
        if excluded:
            self._rule_out(point)
            self._queue_recomputing(point, floor)
            self._queue_offloading(point, floor)
            return
        timing = self.bounds.time(self._layout(point))
        self.timed += 1
        self._push(timing[0].step - timing[0].data_wait, point._replace(timing=timing, memory=memory))

    def _size_next(self, point: Point, step_seconds: float) -> None:
        """Size the layout with the lowest time, keep it if it fits, and queue its variants."""
        bare = point._replace(timing=None, memory=None)
        self._queue_recomputing(bare, step_seconds)
        memory = None if self._is_marked(point) else point.memory or self._memory(point)
        if memory and memory.fits and point.timing:
            candidate = Candidate(self._layout(point), memory, *point.timing)
            self.fitting.append(candidate)
            self._has_comfortable |= candidate.comfortable
            if candidate.comfortable and (not self.contrastive or candidate.layout.gradient_accumulation_steps == 1):
                self._best = min(self._best, candidate.expected_seconds)
                dominated = len(point.group.offload) - point.offload - 1
                self._ruled_out += dominated
                self.counts.add(Reason("plan.offloads-needlessly"), describe(candidate.layout), dominated)
                return
        else:
            self._rule_out(point)
            if memory:
                self._mark(point)
                self.too_large.append(Sized(self._layout(point), memory))
        self._queue_offloading(bare, step_seconds)

    def _queue_recomputing(self, point: Point, floor: float) -> None:
        """Queue the same layout with more recomputation, which is no faster."""
        if point.offload or point.checkpointing + 1 == len(self.modes):
            return
        group, mode = point.group, self.modes[point.checkpointing + 1]
        bound = self.bounds.step_seconds(group.axes, [group.micro_batches[point.micro_batch]], mode)[0]
        self._push(max(floor, bound), point._replace(checkpointing=point.checkpointing + 1))

    def _queue_offloading(self, point: Point, floor: float) -> None:
        """Queue the same layout with more offload, which is no faster."""
        if point.offload + 1 < len(point.group.offload):
            self._push(floor, point._replace(offload=point.offload + 1))

    def _rule_out(self, point: Point, count: int = 1) -> None:
        self._ruled_out += count
        self.counts.add(Reason("plan.does-not-fit"), lambda: describe(self._layout(point)), count)

    def _mark(self, point: Point) -> None:
        self._marks.setdefault((point.group.axes, point.group.zero_stage), []).append(point)

    def _is_marked(self, point: Point) -> bool:
        """Return whether a layout of the same group that needs no more memory is known not to fit."""
        marks = self._marks.get((point.group.axes, point.group.zero_stage), ())
        return any(
            mark.micro_batch <= point.micro_batch
            and mark.checkpointing >= point.checkpointing
            and mark.offload >= point.offload
            for mark in marks
        )

    def _may_fit(self, point: Point) -> bool:
        return self._least_bytes(point, self._most_bytes) <= self._most_bytes

    def _least_bytes(self, point: Point, enough: float = math.inf) -> int:
        group = point.group
        bound = self.bounds.peak_bytes if self.fewest_sized else self.bounds.stage_bytes
        return bound(
            group.axes,
            group.zero_stage,
            group.micro_batches[point.micro_batch],
            self.modes[point.checkpointing],
            group.offload[point.offload],
            enough,
        )

    def _count_the_rest(self, first: _Bounded | Point) -> None:
        """Count the layouts that are left in the queue when the search ends; ``first`` has the lowest bound of them."""
        point = first if isinstance(first, Point) else Point(first.group, 0, 0, 0)
        rest = self.considered - self._ruled_out - len(self.fitting)
        why = Reason("plan.cannot-be-faster")
        if self.timed >= _MOST_SIZED:
            why = Reason("plan.search-ended", {"layouts": _MOST_SIZED})
        self.counts.add(why, describe(self._layout(point)), rest)

    def _layout(self, point: Point) -> Layout:
        group, mode = point.group, self.modes[point.checkpointing]
        size, offload = group.micro_batches[point.micro_batch], group.offload[point.offload]
        return build_layout(self.spec, group.axes, group.zero_stage, mode, size, offload)

    def _memory(self, point: Point) -> Memory:
        return self.workload.fullest_memory(self.spec, self._layout(point), self.device)
