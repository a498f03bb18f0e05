"""The layout of a run that needs the least memory, and the blocks of its pipeline divided by memory instead of time."""

import copy
from collections.abc import Iterator
from dataclasses import replace

from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.search.bounds import Bounds
from scaletrain_cli.plan.search.layout_search import Found, Sized, choose, search
from scaletrain_cli.plan.search.layouts import build_layout, checkpointing_modes
from scaletrain_cli.plan.search.search_space import RejectionCounts, axes_to_try, degrees_to_try, groups
from scaletrain_cli.plan.stages import MOST_STAGES
from scaletrain_cli.plan.workloads.registry import workload_of
from scaletrain_cli.spec import RunSpec

# How many layouts with the lowest memory bound are sized to find the smallest one.
_MOST_SIZED = 24


def smallest_memory(spec: RunSpec, device: Accelerator) -> Sized | None:
    """Return the layout of the spec that needs the least memory; None if none divides."""
    modes = checkpointing_modes(spec)
    points = [
        (group, mode, offload)
        for group in groups(spec, axes_to_try(spec, RejectionCounts()))
        for mode in modes
        for offload in group.offload
    ]
    if len(points) > _MOST_SIZED:
        bounds = Bounds(spec, device, modes[0])
        points.sort(key=lambda p: bounds.peak_bytes(p[0].axes, p[0].zero_stage, p[0].micro_batches[0], p[1], p[2]))
    layouts = (
        build_layout(spec, group.axes, group.zero_stage, mode, group.micro_batches[0], offload)
        for group, mode, offload in points[:_MOST_SIZED]
    )
    sized = [Sized(layout, workload_of(spec.model).memory(spec, layout, device)) for layout in layouts]
    return min(sized, key=lambda candidate: candidate.memory.peak, default=None)


def search_splits(
    spec: RunSpec, device: Accelerator, counts: RejectionCounts, refused: Found, *, compared: bool, most_seconds: float
) -> Found:
    """Return the best of the searches with the blocks of a pipeline divided by memory; ``refused`` if nothing fits.

    ``refused``: what ``search`` has found with blocks divided by time, ``counts``: what it has counted. The other
    arguments are those of ``search``.
    """
    results = []
    for changed, _ in splits_by_memory(spec, device) if not spec.layout.pipeline_split else ():
        further = copy.deepcopy(counts)
        axes = axes_to_try(changed)
        outcome = search(changed, device, axes, further, compared=compared, most_seconds=most_seconds)
        results.append(replace(outcome, considered=refused.considered + outcome.considered))
    chosen = choose([outcome.chosen for outcome in results if outcome.chosen is not None])
    decisive = (outcome for outcome in results if (outcome.too_slow if chosen is None else outcome.chosen is chosen))
    return next(decisive, refused)


def splits_by_memory(spec: RunSpec, device: Accelerator) -> Iterator[tuple[RunSpec, Sized]]:
    """Yield the spec with each pipeline that fits because blocks have left its full stages, and its smallest layout.

    The embedding weighs as much as several blocks and takes almost no time, so that a split by time may fill the first
    stage, and of a tied model the last. If the spec sets a split, the one by time is yielded too where that fits.
    """
    if not framework_of(spec).is_engine or spec.layout.virtual_pipeline not in (1, "auto"):
        return
    for degree in degrees_to_try(spec, "pipeline_parallel", RejectionCounts()):
        update = {"pipeline_parallel": degree, "pipeline_split": (), "virtual_pipeline": 1}
        by_time = spec.with_changes("layout", **update)
        least = smallest_memory(by_time, device) if 1 < degree <= MOST_STAGES else None
        if least is None or (least.memory.fits and not spec.layout.pipeline_split):
            continue
        least = _divided_by_memory(spec, least, device)
        if least.memory.fits:
            update |= {"pipeline_split": least.layout.pipeline_split}
            yield spec.with_changes("layout", **update), least


def _divided_by_memory(spec: RunSpec, sized: Sized, device: Accelerator) -> Sized:
    """Return a layout with as few blocks moved from the fullest stage to the emptiest as leave a margin, or the most
    memory.
    """
    split = list(framework_of(spec).blocks_by_stage(spec.transformer, sized.layout.pipeline_parallel))
    sized = sized._replace(layout=replace(sized.layout, pipeline_split=tuple(split)))
    while sized.memory.verdict != "fits":
        peaks = [stage.peak for stage in sized.memory.by_stage]
        if sum(peaks) > len(peaks) * sized.memory.capacity:
            break
        split[peaks.index(max(peaks))] -= 1
        split[peaks.index(min(peaks))] += 1
        layout = replace(sized.layout, pipeline_split=tuple(split))
        moved = Sized(layout, workload_of(spec.model).memory(spec, layout, device)) if min(split) else sized
        if sorted((stage.peak for stage in moved.memory.by_stage), reverse=True) >= sorted(peaks, reverse=True):
            break
        sized = moved
    return sized
