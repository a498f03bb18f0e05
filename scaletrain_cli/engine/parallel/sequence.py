"""Sequence parallelism: ranks have parts of each sequence. DeepSpeed takes these ranks for data-parallel ones.

Ulysses (DeepSpeed-Ulysses, arXiv:2309.14509) exchanges parts of a sequence for heads around attention, a ring of
context ranks (context.py) passes keys and values around. With both, the ranks of Ulysses join the part of their
context rank.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scaletrain_cli.engine.model.attention import AttentionWithDropout, KeyedDropout, TokenContext
from scaletrain_cli.engine.model.base import CausalLM, longest
from scaletrain_cli.engine.parallel.context import RingAttention
from scaletrain_cli.engine.parallel.mesh import Axis, Mesh, exchange

_HEADS, _LENGTH = 1, 2


def shard_attention_over_sequence(model: CausalLM, mesh: Mesh) -> None:
    """Let the attention of every block see whole sequences, of which each rank has a part."""
    if mesh.parts.size == 1:
        return
    for block in model.blocks.values():
        attention: Any = block.attention
        if mesh.context.size > 1:
            attention.core = RingAttention(attention.core, mesh.context)
        if mesh.sequence.size > 1:
            attention.core = UlyssesAttention(attention.core, mesh.sequence)
    model.sequence_ranks = mesh.sequence.size
    model.longest = partial(_longest, mesh.parts)


def _longest(axis: Axis, positions: Tensor) -> Tensor:
    """Return the highest position plus 1 of each row in the parts of all ranks. Collective."""
    found = longest(positions)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=axis.group)
    return found


def place_dropout(model: CausalLM, mesh: Mesh) -> None:
    """Set the number of this rank's first head, and its part of each sequence, in modules with dropout."""
    tensor, sequence = mesh.tensor, mesh.sequence
    for module in model.modules():
        if isinstance(module, KeyedDropout):
            module.part = mesh.part
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
