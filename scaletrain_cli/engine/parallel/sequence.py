"""Sequence parallelism (DeepSpeed-Ulysses, arXiv:2309.14509): ranks exchange sequence parts for heads around attention.

DeepSpeed takes these ranks for data-parallel ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scaletrain_cli.engine.model.attention import AttentionWithDropout, KeyedDropout, TokenContext
from scaletrain_cli.engine.model.causal_lm import CausalLM, longest
from scaletrain_cli.engine.parallel.mesh import Axis, exchange

_HEADS, _LENGTH = 1, 2


def shard_attention_over_sequence(model: CausalLM, axis: Axis) -> None:
    """Let every attention module compute over whole sequences, for this rank's share of the heads."""
    if axis.size == 1:
        return
    for block in model.blocks.values():
        attention: Any = block.attention
        attention.core = UlyssesAttention(attention.core, axis)
    model.sequence_ranks = axis.size
    model.longest = partial(_longest, axis)


def _longest(axis: Axis, positions: Tensor) -> Tensor:
    """Return the highest position plus 1 of each row in the parts of all ranks. Collective."""
    found = longest(positions)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=axis.group)
    return found


def place_dropout(model: CausalLM, tensor: Axis, sequence: Axis) -> None:
    """Set the number of this rank's first head, and of its part of each sequence, in modules with dropout."""
    for module in model.modules():
        if isinstance(module, KeyedDropout):
            module.sequence_rank = sequence.rank
    heads = model.spec.num_attention_heads // (tensor.size * sequence.size)
    for block in model.blocks.values():
        attention: Any = block.attention
        if isinstance(attention.core, AttentionWithDropout):
            attention.core.first_head = (tensor.rank * sequence.size + sequence.rank) * heads


class UlyssesAttention(nn.Module):
    """Attention with query, key, value and result as [batch, heads, length / ranks, head_dim]."""

    def __init__(self, core: Callable[..., Tensor], axis: Axis) -> None:
        super().__init__()
        self._core, self._axis = core, axis

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, context: TokenContext, sinks: Tensor | None = None
    ) -> Tensor:
        """Return attention over the whole length, computed by each rank for heads / ranks heads.

        ``sinks``: [heads] of all sequence ranks; a rank's gradient is that of its heads, and 0 for others.
        """
        key, value = (self._enough_heads(x, query.shape[_HEADS]) for x in (key, value))
        query, key, value = (exchange(x, self._axis, split_dim=_HEADS, join_dim=_LENGTH) for x in (query, key, value))
        own = None if sinks is None else sinks.chunk(self._axis.size)[self._axis.rank]
        mixed = self._core(query, key, value, context, sinks=own)
        return exchange(mixed, self._axis, split_dim=_LENGTH, join_dim=_HEADS)

    def _enough_heads(self, x: Tensor, query_heads: int) -> Tensor:
        """Return key-value heads repeated for their query heads if they do not divide over the ranks."""
        if x.shape[_HEADS] % self._axis.size == 0:
            return x
        return torch.repeat_interleave(x, query_heads // x.shape[_HEADS], dim=_HEADS)
