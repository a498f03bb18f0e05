"""How long a pipeline of unequal stages takes. Knows no kernels and no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Seconds of one step's forwards and backwards: of the slowest stage, and what it waits for the others."""

    busy: float
    bubble: float
    slowest: int  # index of the stage that is done last


def one_forward_one_backward(
    stages: Sequence[float],
    micro_batches: int,
    chunks: int = 1,
    filling: Sequence[float] | None = None,
    after: Sequence[float] | None = None,
) -> Schedule:
    """1F1B over stages that take ``stages`` seconds each for one micro-batch, forward and backward.

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
