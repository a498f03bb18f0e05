"""Time of a pipeline of unequal stages, and its timeline: 1F1B, and interleaved with virtual stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scaletrain_cli.plan.result import RunPlan

# Passes drawn per stage: enough to show fill, steady state and drain; the steady state repeats.
_FEWEST_MICRO_BATCHES = 8


class Pass(NamedTuple):
    """One forward or backward pass of one micro-batch through one stage (or one of its virtual stages, ``chunk``)."""

    stage: int
    start: float  # seconds
    seconds: float
    backward: bool
    micro_batch: int
    chunk: int


class Timeline(NamedTuple):
    """The passes of a step. Steady micro-batches beyond ``drawn`` are left out; they take ``left_out_seconds``."""

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
    """Return one step of stages that take (forward, backward) seconds each per micro-batch.

    1F1B: arXiv:2104.04473, section 2.2; interleaved: the order of Megatron-LM (pipeline_parallel/schedules.py
    forward_backward_pipelining_with_interleaving), which needs micro-batches in multiples of the stages.
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
    """Return (backward, chunk, micro-batch) in the order of one stage: fill, one forward one backward, drain."""
    total = micro_batches * chunks
    warm_up = stages - 1 - stage if chunks == 1 else 2 * (stages - 1 - stage) + (chunks - 1) * stages
    warm_up = min(warm_up, total)
    forwards = [(False, *_virtual(k, stages, chunks)) for k in range(total)]
    backwards = [
        (True, chunks - 1 - chunk, index) for chunk, index in (_virtual(k, stages, chunks) for k in range(total))
    ]
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[total - warm_up :]


def _virtual(k: int, stages: int, chunks: int) -> tuple[int, int]:
    """Return (chunk, micro-batch) of the k-th pass: micro-batches pass through a chunk in groups of the number of
    stages.
    """
    if chunks == 1:
        return 0, k
    group, within = divmod(k, stages * chunks)
    return within // stages, group * stages + within % stages


def _before(stage: int, stages: int, backward: bool, chunk: int, chunks: int) -> tuple[int, bool, int] | None:
    """Return the pass of the same micro-batch that must end first; None for the first pass."""
    if not backward:
        if stage:
            return stage - 1, False, chunk
        return (stages - 1, False, chunk - 1) if chunk else None
    if stage < stages - 1:
        return stage + 1, True, chunk
    return (0, True, chunk + 1) if chunk < chunks - 1 else (stage, False, chunk)


@dataclass(frozen=True)
class Schedule:
    """Seconds of one step's passes: of the slowest stage, and its waiting for the others."""

    busy: float
    bubble: float
    slowest: int  # index of the last stage to finish


def one_forward_one_backward(
    stages: Sequence[float],
    micro_batches: int,
    chunks: int = 1,
    filling: Sequence[float] | None = None,
    after: Sequence[float] | None = None,
) -> Schedule:
    """Return the schedule of 1F1B over stages that take ``stages`` seconds each per micro-batch, both passes.

    ``filling``: what they take while the pipeline fills and drains, where that is less. ``after``: what each has to do
    once its micro-batches are done.

    The slowest stage runs all micro-batches without a pause, after the first has come down to it and before the last
    has gone back up: m times its own time, and once that of each other stage. With equal stages this is the
    (p - 1) / m of arXiv:2104.04473, section 2.2; with v chunks per stage the way is a v-th as long.
    """
    filling = stages if filling is None else filling
    total = sum(filling)
    ends = [micro_batches * busy + (total - way) / chunks for busy, way in zip(stages, filling, strict=True)]
    if after is not None:
        ends = [end + rest for end, rest in zip(ends, after, strict=True)]
    slowest = max(range(len(stages)), key=ends.__getitem__)
    return Schedule(micro_batches * stages[slowest], (total - filling[slowest]) / chunks, slowest)
