"""The fastest layout that fits with a margin, without a comparison with others: for the choice among many clusters.

It chooses the same layout as the search in layout_search.py, and needs less time. It lists no degrees whose bound is
above the limit of time. Of each group it finds first, by bounds, which micro-batches may fit with how much
recomputation, and bounds the time of only these. It sizes a layout when no other one has a lower bound on its time.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, takewhile
from typing import NamedTuple

from scaletrain_cli.plan.axes import Axes
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.memory.device_memory import comfortable_bytes
from scaletrain_cli.plan.result import Layout, Memory
from scaletrain_cli.plan.search.bounds import Bounds
from scaletrain_cli.plan.search.layout_search import MOST_SIZED, SAME_TIME, Candidate, Found, Point, choose
from scaletrain_cli.plan.search.layouts import accumulation_changes_loss, checkpointing_modes
from scaletrain_cli.plan.search.search_space import Group, axes_to_try, groups
from scaletrain_cli.plan.workloads.registry import workload_of
from scaletrain_cli.spec import RunSpec

# A layout within the limit of time may have expected seconds above it, with which others are compared: up to a tenth
# for the probability of running out of memory, and SAME_TIME. More, for stalls, takes a second search.
_REACH = SAME_TIME / 0.9


def fastest(spec: RunSpec, device: Accelerator, bounds: Bounds | None, most_seconds: float) -> Found | None:
    """Return the layout that ``layout_search.search`` would choose; only that is in ``fitting``.

    None if no layout is found that fits with a margin, or if the loss is contrastive; then a complete search decides.
    ``bounds`` and ``most_seconds``: see ``search``. ``considered`` leaves out degrees that cannot keep to
    ``most_seconds``.
    """
    if accumulation_changes_loss(spec):
        return None
    bounds = bounds or Bounds(spec, device, checkpointing_modes(spec)[0])
    run, reach = _Fastest(spec, device, bounds, most_seconds), most_seconds * _REACH
    run.go(_within(spec, bounds, reach))
    if run.found and run.last_seconds > reach:  # the layouts to compare with reach further
        run = _Fastest(spec, device, bounds, most_seconds)
        run.go(_within(spec, bounds, math.inf))
    chosen = choose(run.found)
    if chosen is not None:
        chosen = replace(chosen, memory=workload_of(spec.model).memory(spec, chosen.layout, device))
        return Found((chosen,), (), run.considered, (), chosen)
    return Found((), (), run.considered, (), None, too_slow=True) if run.some_fit else None


def _within(spec: RunSpec, bounds: Bounds, seconds: float) -> list[Axes]:
    """Return the degrees of ``axes_to_try`` whose bound on the step is no longer than ``seconds``."""
    if seconds == math.inf:
        return axes_to_try(spec)
    return axes_to_try(spec, worthwhile=lambda axes: bounds.least_step_seconds(axes) <= seconds)


class _Degrees(NamedTuple):
    """The groups of layouts with the same degrees of parallelism, and a bound on the step of each micro-batch size."""

    groups: tuple[Group, ...]
    floors: list[float]


class _Sizes(NamedTuple):
    """The layouts of a group that may fit: its ``floors`` are those of its smallest micro-batches.

    ``least``: index of the first mode of recomputation with which any may fit.
    """

    group: Group
    least: int
    floors: list[float]


class _Fastest:
    """One search. ``found``: the layouts within SAME_TIME of the fastest that fits with a margin, and a few more.

    ``some_fit``: some layout is known to fit with a margin, perhaps one that takes more than ``most_seconds``.
    """

    def __init__(self, spec: RunSpec, device: Accelerator, bounds: Bounds, most_seconds: float) -> None:
        """``most_seconds``: the search ends without a layout if none that fits has a shorter step."""
        self.found: list[Candidate] = []
        self.some_fit = False
        self.considered = 0
        self._spec, self._device, self._bounds, self._most_seconds = spec, device, bounds, most_seconds
        self._workload, self._modes = workload_of(spec.model), checkpointing_modes(spec)
        self._most_bytes = comfortable_bytes(framework_of(spec), device)
        self._memories: dict[Point, Memory] = {}
        self._too_large: dict[tuple[Axes, int], list[Point]] = {}  # layouts that do not fit, by group
        self._queue: list[tuple[float, int, _Degrees | _Sizes | Point]] = []
        self._opened: list[Point] = []  # the smallest layouts of groups that may fit
        self._pushed = self._timed = 0
        self._best = math.inf

    @property
    def last_seconds(self) -> float:
        """Return the bound on the step at which the search ends."""
        return self._best * SAME_TIME if self.found else self._most_seconds

    def go(self, all_axes: Sequence[Axes]) -> None:
        """Search the layouts with these degrees, the lowest bound on the step first."""
        for axes, alike in groupby(groups(self._spec, all_axes), key=lambda group: group.axes):
            of_axes = tuple(alike)
            sizes = of_axes[0].micro_batches
            self.considered += sum(len(group.offload) for group in of_axes) * len(sizes) * len(self._modes)
            floors = self._bounds.step_seconds(axes, sizes)
            self._push(min(floors), _Degrees(of_axes, floors))
        self._search()
        if not self.found and not self.some_fit:
            any(map(self._fits, self._opened))

    def _search(self) -> None:
        while self._queue and self._timed < MOST_SIZED:
            floor, _, item = heapq.heappop(self._queue)
            if floor > self.last_seconds:
                return
            if isinstance(item, _Degrees):
                for group in item.groups:
                    self._open(group, item.floors)
            elif isinstance(item, _Sizes):
                self._queue_sizes(*item)
            elif item.timing is None:
                self._time(item, floor)
            else:
                bare = item._replace(timing=None)
                candidate = Candidate(self._layout(item), self._memories[bare], *item.timing)
                self.found.append(candidate)
                self._best = min(self._best, candidate.expected_seconds)
                self._queue_recomputing(bare, item.timing[0].step - item.timing[0].data_wait)

    def _push(self, floor: float, item: _Degrees | _Sizes | Point) -> None:
        self._pushed += 1
        heapq.heappush(self._queue, (floor, self._pushed, item))

    def _open(self, group: Group, floors: list[float]) -> None:
        """Queue the layouts of a group that may fit."""
        smallest = Point(group, 0, len(self._modes) - 1, len(group.offload) - 1)
        if not self._may_fit(smallest):
            return
        self._opened.append(smallest)
        larger = range(1, len(group.micro_batches))
        count = 1 + sum(1 for _ in takewhile(lambda at: self._may_fit(smallest._replace(micro_batch=at)), larger))
        least = next(mode for mode in range(len(self._modes)) if self._may_fit(smallest._replace(checkpointing=mode)))
        axes, sizes = group.axes, group.micro_batches[:count]
        recomputed = self._bounds.step_seconds(axes, sizes, self._modes[least]) if least else floors[:count]
        sent = self._bounds.traffic_seconds(axes, group.zero_stage, sizes)
        closer = list(map(max, floors, recomputed, sent))
        self._push(min(closer), _Sizes(group, least, closer))

    def _queue_sizes(self, group: Group, least: int, floors: list[float]) -> None:
        """Queue a layout of each micro-batch size, with tighter bounds."""
        closer = self._bounds.group_seconds(
            group.axes,
            group.zero_stage,
            group.offload[0],
            group.micro_batches[: len(floors)],
            floors,
            self.last_seconds,
            self._modes[least],
        )
        for index, floor in enumerate(closer):
            self._push(floor, Point(group, index, least, 0))

    def _time(self, point: Point, floor: float) -> None:
        """Compute the exact time of a layout and queue it again, or its variants that need less memory."""
        if self._fits(point):
            timing = self._bounds.time(self._layout(point))
            self._timed += 1
            self._push(timing[0].step - timing[0].data_wait, point._replace(timing=timing))
            return
        self._queue_recomputing(point, floor)
        if point.offload + 1 < len(point.group.offload):  # no faster either
            self._push(floor, point._replace(offload=point.offload + 1))

    def _queue_recomputing(self, point: Point, floor: float) -> None:
        """Queue the same layout with more recomputation, which is no faster."""
        if found := point.recomputing(self._bounds, self._modes, floor):
            self._push(*found)

    def _may_fit(self, point: Point) -> bool:
        """Return whether the bound on the memory of a layout leaves a margin."""
        group = point.group
        mode, offload = self._modes[point.checkpointing], group.offload[point.offload]
        size, most = group.micro_batches[point.micro_batch], self._most_bytes
        return self._bounds.stage_bytes(group.axes, group.zero_stage, size, mode, offload, most) <= most

    def _fits(self, point: Point) -> bool:
        """Return whether a layout fits with a margin. Its memory is computed once, and only if it may fit."""
        memory = self._memories.get(point)
        if memory is None:
            too_large = self._too_large.setdefault((point.group.axes, point.group.zero_stage), [])
            if not self._may_fit(point) or any(other.needs_no_more(point) for other in too_large):
                return False
            memory = self._workload.fullest_memory(self._spec, self._layout(point), self._device)
            self._memories[point] = memory
            if memory.verdict == "fits":
                self.some_fit = True
            else:
                too_large.append(point)
        return memory.verdict == "fits"

    def _layout(self, point: Point) -> Layout:
        return point.layout(self._spec, self._modes)
