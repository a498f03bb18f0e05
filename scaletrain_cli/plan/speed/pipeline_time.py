"""How long a pipeline of unequal stages takes, and which blocks each stage holds. Knows no kernels and no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from scaletrain_cli.spec import ModelSpec


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


@lru_cache(maxsize=4096)
def blocks_by_stage(model: ModelSpec, stages: int, balanced: bool) -> tuple[int, ...]:
    """Blocks on each pipeline stage.

    By number, the first stages take what does not divide. ``balanced``: by cost, as nanotron does (models/base.py
    build_model): a stage ends at the block with which the cost so far reaches its share; the head costs what it weighs.
    Step times of the published 1B to 8B runs over 2 to 32 stages tell it from its variants (a share that must be
    passed, a block that opens the next stage, a head that costs nothing).
    """
    layers = model.num_hidden_layers
    if not balanced or stages == 1:
        return tuple(layers // stages + (1 if index < layers % stages else 0) for index in range(stages))
    block = model.hidden_size * (
        4 * model.num_attention_heads * model.head_dim + (3 if model.has_gated_mlp else 2) * model.intermediate_size
    )
    total = layers * block + model.vocab_size * model.hidden_size
    starts = [0]
    for stage in range(1, stages):  # counted by stage: a spec may have a billion blocks
        starts.append(min(layers, max(starts[-1] + 1, -(-total * stage // (block * stages)))))
    return tuple(end - start for start, end in zip(starts, [*starts[1:], layers], strict=True))
