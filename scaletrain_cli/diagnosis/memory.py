"""Checks of memory: growth on any rank, the room that is left, and the plan.

The peaks of rank 0 are in metrics.jsonl, those of all ranks in the telemetry.
"""

import bisect
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from scaletrain_cli.diagnosis.case import Case, check
from scaletrain_cli.diagnosis.findings import Cause, Finding, warning_if
from scaletrain_cli.reasons import Reason, Texts
from scaletrain_cli.telemetry.series import Series

TEXTS: Texts = {
    "memory-grows": "the memory of rank {rank} grows by {per_step:bytes} per step, to {now:bytes} at step {step:whole}",
    "memory-grows-full": "the memory of rank {rank} grows by {per_step:bytes} per step, to {now:bytes} at step "
    "{step:whole}: the {capacity:bytes} are full around step {full_at:whole}",
    "memory-nearly-full": "{share:percent} of the memory of a GPU is used: {used:bytes} of {capacity:bytes}",
    "memory-above-plan": "{part} take {measured:bytes}, planned are {planned:bytes}",
    "cause-free-blocks": "the C library keeps free blocks between blocks in use",
    "cause-large-micro-batch": "the micro-batch of {micro_batch} needs too much for activations",
    "cause-larger-batches": "later batches are larger",
    "cause-leak": "a program keeps tensors or objects of every step",
    "cause-no-recompute": "activations are kept that could be recomputed",
    "cause-plan-is-low": "the plan is too low for this model or library; its verdict is not to be relied on",
}

_FEWEST = 400
_FEWEST_ROWS, _FEWEST_STEPS = 8, 100
_GROWTH = 0.02
_STEADY = 0.5
FULL = 0.95
ABOVE_PLAN, LEAST_BYTES = 0.1, 256e6


@check()
def nearly_full(case: Case) -> Iterator[Finding]:
    """Yield a warning if a GPU is over 95 % full: an allocation that fragments ends the run.

    Measured by the allocator in one step (measured.json), beside the capacity that the plan counts with; CUDA's context
    and NCCL come on top of the allocator.
    """
    if case.measured is None or case.measured.device != "cuda":
        return
    outside = case.plan.memory.peak - case.plan.memory.reserved if case.plan.memory.reserved else 0
    reserved = [stage.figures["reserved"].measured for stage in case.measured.stages if "reserved" in stage.figures]
    capacity = case.plan.memory.capacity
    if not reserved or capacity <= 0 or max(reserved) + outside <= FULL * capacity:
        return
    used = max(reserved) + outside
    evidence = {"used": used, "capacity": capacity, "share": used / capacity}
    recompute = case.cause("diagnosis.cause-no-recompute", "layout.activation_checkpointing", "full")
    causes = (large_micro_batch(case), recompute)
    yield Finding(Reason("diagnosis.memory-nearly-full", evidence), "warning", "high", causes)


@check()
def growing(case: Case) -> Iterator[Finding]:
    """Yield a finding if the peak of memory keeps rising: in the last two quarters by 2 % each, and not ever slower.

    What is recorded is a peak, which never falls; in a healthy run it is constant once the largest step, the first save
    and the first evaluation are over. A leak rises by the same amount per step. A warning if it reaches the capacity
    before the last step. An attempt begins anew. On a CPU only a warning, and with low confidence: resident memory also
    counts free blocks, which become more over thousands of allocations while no more is in use.
    """
    own = case.history.of_last_attempt("memory_bytes")
    by_rank = {rank: _telemetry_peaks(series) for rank, series in case.telemetry.ranks.items()}
    growths = {rank: growth for rank, rows in by_rank.items() if (growth := _growth(rows)) is not None}
    if not growths and len(own) >= _FEWEST and (growth := _growth(own)) is not None:
        growths = {0: growth}
    if not growths:
        return
    rank = max(growths, key=lambda number: growths[number].per_step)
    now, per_step, last = growths[rank]
    capacity = case.plan.memory.capacity
    full = last + (capacity - now) / per_step
    evidence = {"rank": rank, "now": now, "per_step": per_step, "capacity": capacity, "step": last}
    evidence |= {"full_at": round(full)}
    reaches = full <= case.spec.total_steps
    if case.on_cpu and not reaches:
        return
    free_blocks = (case.cause("diagnosis.cause-free-blocks"),) if case.on_cpu else ()
    causes = (*free_blocks, case.cause("diagnosis.cause-leak"), case.cause("diagnosis.cause-larger-batches", "data"))
    code = Reason("diagnosis.memory-grows-full" if reaches else "diagnosis.memory-grows", evidence)
    yield Finding(code, warning_if(reaches), "low" if case.on_cpu else "medium", causes)


def large_micro_batch(case: Case) -> Cause:
    """Return the cause that the micro-batch is too large, with half of it."""
    size = case.plan.layout.micro_batch_size
    key = "training.micro_batch_size"
    return case.cause("diagnosis.cause-large-micro-batch", key, max(1, size // 2), micro_batch=size)


@check(of_engine=True)
def above_plan(case: Case) -> Iterator[Finding]:
    """Yield a note if a measured part of memory exceeds its plan by over 10 % and 256 MB (measured.json).

    Not for what the allocator reserves, which it also keeps for later steps.
    """
    if case.measured is None:
        return
    excesses = [
        (figure.measured - figure.planned, name, figure)
        for stage in case.measured.stages
        for name, figure in stage.figures.items()
        if name != "reserved" and figure.measured - figure.planned > max(LEAST_BYTES, ABOVE_PLAN * figure.planned)
    ]
    if not excesses:
        return
    _, name, figure = max(excesses, key=lambda excess: excess[0])
    evidence = {"part": name.replace("_", " "), "measured": figure.measured, "planned": figure.planned}
    cause = case.cause("diagnosis.cause-plan-is-low")
    yield Finding(Reason("diagnosis.memory-above-plan", evidence), "note", "high", (cause,))


class _Growth(NamedTuple):
    """Bytes at ``step``, and by how many they grow per step."""

    now: float
    per_step: float
    step: int


def _growth(rows: Sequence[tuple[int, float]]) -> _Growth | None:
    """Return the growth over the last two quarters of (step, bytes); None if it is small, or ends."""
    if len(rows) < _FEWEST_ROWS or rows[-1][0] - rows[0][0] < _FEWEST_STEPS:
        return None
    steps = [step for step, _ in rows]
    marks = [rows[bisect.bisect_left(steps, steps[0] + (steps[-1] - steps[0]) * part / 4)] for part in (2, 3, 4)]
    (_, second), (middle, third), (last, now) = marks
    before, after = third - second, now - third
    if min(before, after) < _GROWTH * second or after < _STEADY * before:
        return None
    return _Growth(now, after / max(1, last - middle), last)


def _telemetry_peaks(series: Series) -> list[tuple[int, float]]:
    """Return (step, bytes) of a rank, the largest so far, of steps after the first ones."""
    rows, largest = [], 0.0
    for step, size in zip(series.steps, series.highest.get("memory_bytes", ()), strict=False):
        if size == size and step > 0:
            largest = max(largest, size)
            rows.append((step, largest))
    return rows
