"""Schedules of a pipeline with unequal stages, 1F1B and interleaved 1F1B: their seconds, and a timeline for plots."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scaletrain_cli.plan.result import RunPlan

# Least number of micro-batches in a timeline: enough to show warm-up, steady state and cool-down.
_FEWEST_MICRO_BATCHES = 8


class Pass(NamedTuple):
    """One forward or backward pass of a micro-batch through a stage, or through its virtual stage ``chunk``."""

    stage: int
    start: float  # seconds
    seconds: float
    backward: bool
    micro_batch: int
    chunk: int


class Timeline(NamedTuple):
    """The passes of a step, for a plot.

    ``passes`` has only the first ``drawn`` of ``micro_batches`` micro-batches; the others, which repeat the steady
    state, take ``left_out_seconds``.
    """

    passes: tuple[Pass, ...]
    stages: int
    micro_batches: int
    drawn: int
    seconds: float  # of the part that is drawn
    left_out_seconds: float


def plan_timeline(plan: RunPlan) -> Timeline | None:
    """Return the timeline of a step of this plan; None if it has no pipeline stages or does not fit."""
    if not plan.memory.fits or plan.layout.pipeline_parallel == 1 or not plan.time.by_stage:
        return None
    times = [(stage.forward, stage.backward) for stage in plan.time.by_stage]
    times += times[-1:] * (plan.layout.pipeline_parallel - len(times))  # a plan has the times of its first 64 stages
    return timeline(times, plan.layout.gradient_accumulation_steps, plan.layout.virtual_pipeline)


def timeline(times: Sequence[tuple[float, float]], micro_batches: int, chunks: int = 1) -> Timeline:
    """Return the timeline of one step; ``times``: (forward, backward) seconds of each stage per micro-batch.

    One chunk per stage is 1F1B (arXiv:2104.04473, section 2.2). More are interleaved in Megatron-LM's order
    (pipeline_parallel/schedules.py forward_backward_pipelining_with_interleaving), which needs a multiple of the stages
    as number of micro-batches.
    """
    stages = len(times)
    drawn = min(micro_batches, -(-max(_FEWEST_MICRO_BATCHES, 2 * stages) // stages) * stages)
    if drawn % stages:
        chunks = 1
    orders = [_order(stage, stages, drawn, chunks) for stage in range(stages)]
    ends: dict[tuple[int, bool, int, int], float] = {}
    free, done = [0.0] * stages, [0] * stages
    passes: list[Pass] = []
    while any(done[stage] < len(orders[stage]) for stage in range(stages)):
        for stage in range(stages):
            while done[stage] < len(orders[stage]):
                backward, chunk, index = orders[stage][done[stage]]
                before = _before(stage, stages, backward, chunk, chunks)
                ready = 0.0 if before is None else ends.get((*before, index))
                if ready is None:
                    break
                start = max(free[stage], ready)
                seconds = times[stage][backward] / chunks
                free[stage] = ends[stage, backward, chunk, index] = start + seconds
                passes.append(Pass(stage, start, seconds, backward, index, chunk))
                done[stage] += 1
    period = max(map(sum, times))
    return Timeline(tuple(passes), stages, micro_batches, drawn, max(free), period * (micro_batches - drawn))


def _order(stage: int, stages: int, micro_batches: int, chunks: int) -> list[tuple[bool, int, int]]:
    """Return the passes of one stage in order, as (is backward, chunk, micro-batch): warm-up, 1F1B, cool-down."""
    total = micro_batches * chunks
    warm_up = stages - 1 - stage if chunks == 1 else 2 * (stages - 1 - stage) + (chunks - 1) * stages
    warm_up = min(warm_up, total)
    forwards = [(False, *_virtual(k, stages, chunks)) for k in range(total)]
    backwards = [(True, chunks - 1 - chunk, index) for _, chunk, index in forwards]
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[total - warm_up :]


def _virtual(k: int, stages: int, chunks: int) -> tuple[int, int]:
    """Return (chunk, micro-batch) of the k-th pass; each chunk takes one micro-batch per stage in a row."""
    group, within = divmod(k, stages * chunks)
    return within // stages, group * stages + within % stages


def _before(stage: int, stages: int, backward: bool, chunk: int, chunks: int) -> tuple[int, bool, int] | None:
    """Return (stage, is backward, chunk) of the pass that must end before this one; None for a first pass."""
    if not backward:
        if stage:
            return stage - 1, False, chunk
        return (stages - 1, False, chunk - 1) if chunk else None
    if stage < stages - 1:
        return stage + 1, True, chunk
    return (0, True, chunk + 1) if chunk < chunks - 1 else (stage, False, chunk)


@dataclass(frozen=True)
class Schedule:
    """Seconds of all passes of a step, on the stage that finishes last."""

    busy: float  # computing
    bubble: float  # waiting for other stages
    slowest: int  # index of that stage


def one_forward_one_backward(
    stages: Sequence[float],
    micro_batches: int,
    chunks: int = 1,
    filling: Sequence[float] | None = None,
    after: Sequence[float] | None = None,
) -> Schedule:
    """Return the schedule of 1F1B; ``stages``: seconds of each stage per micro-batch, forward and backward together.

    ``chunks``: virtual stages per stage. ``filling``: seconds of each stage per micro-batch while the pipeline fills
    and drains (default: as ``stages``). ``after``: seconds of each stage after its last micro-batch.

    The slowest stage runs all m micro-batches without a pause. It waits until the first micro-batch has passed the
    stages before it, and the step ends when the last one has passed back. So a step takes m times the seconds of the
    slowest stage, and once those of every other stage, divided by the number of chunks. With p equal stages the bubble
    is (p - 1) / m of the compute (arXiv:2104.04473, section 2.2).
    """
    filling = stages if filling is None else filling
    total = sum(filling)
    ends = [micro_batches * busy + (total - way) / chunks for busy, way in zip(stages, filling, strict=True)]
    if after is not None:
        ends = [end + rest for end, rest in zip(ends, after, strict=True)]
    slowest = max(range(len(stages)), key=ends.__getitem__)
    return Schedule(micro_batches * stages[slowest], (total - filling[slowest]) / chunks, slowest)
