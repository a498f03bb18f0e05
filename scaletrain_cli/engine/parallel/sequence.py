"""Sequence parallelism: ranks have parts of each sequence. DeepSpeed takes these ranks for data-parallel ones.

Ulysses (DeepSpeed-Ulysses, arXiv:2309.14509) exchanges parts of a sequence for heads around attention, a ring of
context ranks passes keys and values around. With both, the ranks of Ulysses join the part of their
context rank.

Context parallelism: ring attention (arXiv:2310.01889) over parts of sequences of equal cost in causal attention.

Each rank has two chunks of a sequence (``SequencePart``), and its queries see the keys and values of all ranks, which
travel around the ring while the previous ones are computed. Of another rank's chunks they see either the first one, or
both, but then only the queries of the second chunk do: half of the scores, on every rank, without a mask. Partial
results are merged by their log-sum-exps L: with J = log(exp(L1) + exp(L2)) the sum over both is
exp(L1 - J) O1 + exp(L2 - J) O2 (arXiv:2205.14135, section 3.1). A backward kernel that is given J and the merged
output returns the part of the gradients of its keys (FlashAttention-2, arXiv:2307.08691, algorithm 2), so keys and
values travel once more, and their gradients follow them, are summed on the way, and come home after the last rank.

Saved for the backward pass: queries, keys, values, output and one log-sum-exp per query, as of attention on one rank.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.attention import SDPBackend

from scaletrain_cli.engine.eager import never_compiled
from scaletrain_cli.engine.model.attention import (
    PLAIN,
    AttentionSettings,
    AttentionWithDropout,
    KeyedDropout,
    TokenContext,
)
from scaletrain_cli.engine.model.attention_sinks import fused_kernel, repeated
from scaletrain_cli.engine.model.base import CausalLM, longest
from scaletrain_cli.engine.parallel.mesh import Axis, Mesh, RingShift, exchange

_ops: Any = torch.ops.aten
_HEAD_MULTIPLE = 8  # of channels, in the kernels for CUDA


class RingAttention(nn.Module):
    """Causal attention with query, key, value and result as [batch, heads, length / ranks, head_dim]."""

    def __init__(self, core: Callable[..., Tensor], axis: Axis) -> None:
        super().__init__()
        self._settings: AttentionSettings = getattr(core, "settings", PLAIN)
        self._axis = axis

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, context: TokenContext, sinks: Tensor | None = None
    ) -> Tensor:
        """Return attention over the whole length; key and value may have fewer heads. Collective, as its backward pass.

        ``context`` has no documents, and ``sinks`` is None: engine_support.py refuses such models.
        """
        assert context.documents is None
        assert sinks is None
        mixed: Tensor = ring_attention(query, key, value, self._axis, self._settings.scale)
        return mixed


@never_compiled
def ring_attention(query: Tensor, key: Tensor, value: Tensor, axis: Axis, scale: float | None = None) -> Tensor:
    """Return causal attention of this rank's queries to the keys of all ranks, [batch, heads, local length, value_dim].

    Each rank has the parts of ``SequencePart``. ``scale``: factor of the scores; None: 1 / sqrt(head_dim).
    """
    head_dim, width = query.shape[-1], value.shape[-1]
    channels = max(head_dim, width)
    if query.is_cuda:
        channels = -(-channels // _HEAD_MULTIPLE) * _HEAD_MULTIPLE
    query, key, value = (
        x if x.shape[-1] == channels else F.pad(x, (0, channels - x.shape[-1])) for x in (query, key, value)
    )
    backend = fused_kernel(query, key, value, None)
    scale = head_dim**-0.5 if scale is None else scale
    mixed: Tensor = _Ring.apply(query, key, value, axis, scale, backend)  # type: ignore[no-untyped-call]
    return mixed if width == channels else mixed[..., :width]


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, axis: Axis, scale: float, backend: SDPBackend | None
    ) -> Tensor:
        kernel = _Kernel(backend, scale)
        block = torch.stack((key, value))
        result = sums = query  # replaced by the first block's
        for hop in range(axis.size):
            shift = RingShift([block], axis, 1) if hop + 1 < axis.size else None
            rows, columns = _visible(hop, axis.rank, query.shape[2])
            mixed, of_block = kernel.forward(query[:, :, rows], *block[:, :, :, columns], causal=hop == 0)
            if hop == 0:
                result, sums = mixed.to(torch.promote_types(mixed.dtype, torch.float32)), of_block
            else:
                _merge(result[:, :, rows], sums[:, :, rows], mixed, of_block)
            if shift is not None:
                (block,) = shift.wait()
        result = result.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, sums)
        ctx.axis, ctx.kernel = axis, kernel
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, result, sums = ctx.saved_tensors
        axis, kernel = ctx.axis, ctx.kernel
        wide = torch.promote_types(query.dtype, torch.float32)
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        block = torch.stack((key, value))
        of_query = torch.zeros_like(query, dtype=wide)
        of_own = collected = torch.zeros_like(block, dtype=wide)
        carried: RingShift | None = None
        for hop in range(axis.size):
            shift = RingShift([block], axis, 1) if hop + 1 < axis.size else None
            rows, columns = _visible(hop, axis.rank, query.shape[2])
            mine = [x[:, :, rows] for x in (gradient, query, result, sums)]
            own, of_keys, of_values = kernel.backward(*mine, *block[:, :, :, columns], causal=hop == 0)
            of_query[:, :, rows] += own
            if hop:  # the gradient of this block, as far as the ranks before this one have summed it
                collected = carried.wait()[0] if carried is not None else torch.zeros_like(of_own)
            collected[0, :, :, columns] += of_keys
            collected[1, :, :, columns] += of_values
            if hop:
                carried = RingShift([collected], axis, 1)
            if shift is not None:
                (block,) = shift.wait()
        if carried is not None:
            of_own += carried.wait()[0]
        return of_query.to(query.dtype), *of_own.to(key.dtype).unbind(), None, None, None


def _visible(hop: int, rank: int, length: int) -> tuple[slice, slice]:
    """Return which queries of a rank see which keys of the block that has come ``hop`` ranks far."""
    if hop == 0:
        return slice(None), slice(None)
    # From a rank before this one in the sequence the first chunk is the past of all queries, the last chunk of none.
    return (slice(None), slice(length // 2)) if hop <= rank else (slice(length // 2, None), slice(None))


def _merge(result: Tensor, sums: Tensor, mixed: Tensor, of_block: Tensor) -> None:
    """Add what other keys contribute to results and log-sum-exps, in place."""
    joint = torch.logaddexp(sums, of_block)
    result.mul_((sums - joint).exp_().unsqueeze(-1)).add_((of_block - joint).exp_().unsqueeze(-1) * mixed)
    sums.copy_(joint)


class _Kernel:
    """Attention of queries to a block of keys, with its log-sum-exps; ``backend`` None: unfused.

    Shapes: [batch, heads, length, head_dim], of keys and values with fewer heads; sums [batch, heads, length] in fp32.
    """

    def __init__(self, backend: SDPBackend | None, scale: float) -> None:
        self._backend, self._scale = backend, scale
        self._generator: tuple[Tensor, ...] = ()  # what the kernels for CUDA return of theirs; unused without dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
        """Return the result and the log-sum-exps."""
        scale, length = self._scale, query.shape[2]
        if self._backend is SDPBackend.FLASH_ATTENTION and query.is_cuda:
            outputs = _ops._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)
            self._generator = tuple(outputs[6:8])
            return outputs[0], outputs[1]
        key, value = repeated(key, query), repeated(value, query)
        if self._backend is SDPBackend.EFFICIENT_ATTENTION:
            mixed, sums, *generator = _ops._scaled_dot_product_efficient_attention(
                query, key, value, None, True, 0.0, causal, scale=scale
            )
            self._generator = tuple(generator)
            return mixed, sums[..., :length].contiguous()  # it pads the sums
        if self._backend is SDPBackend.FLASH_ATTENTION:
            mixed, sums = _ops._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, causal, attn_mask=None, scale=scale
            )
            return mixed, sums
        scores = _scores(query, key, scale, causal)
        sums = scores.logsumexp(-1)
        return ((scores - sums.unsqueeze(-1)).exp_().to(value.dtype) @ value), sums

    def backward(
        self, gradient: Tensor, query: Tensor, result: Tensor, sums: Tensor, key: Tensor, value: Tensor, *, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values; ``result`` and ``sums`` are those over all keys."""
        scale, heads, queries, keys = self._scale, key.shape[1], query.shape[2], key.shape[2]
        if self._backend is SDPBackend.FLASH_ATTENTION and query.is_cuda:
            saved = (gradient, query, key, value, result, sums.contiguous())
            return _ops._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
                *saved, None, None, queries, keys, 0.0, causal, *self._generator, scale=scale
            )
        key, value = repeated(key, query), repeated(value, query)
        if self._backend is SDPBackend.EFFICIENT_ATTENTION:
            padded = F.pad(sums, (0, -queries % _PADDED_SUMS), value=torch.inf)
            own, of_keys, of_values, _ = _ops._scaled_dot_product_efficient_attention_backward(
                *(gradient, query, key, value, None, result, padded, *self._generator),
                *(0.0, [True, True, True, False], causal),
                scale=scale,
            )
        elif self._backend is SDPBackend.FLASH_ATTENTION:
            own, of_keys, of_values = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient, query, key, value, result, sums, 0.0, causal, attn_mask=None, scale=scale
            )
        else:
            weights = (_scores(query, key, scale, causal) - sums.unsqueeze(-1)).exp_()
            wide = gradient.to(weights.dtype)
            of_values = weights.transpose(-1, -2) @ wide
            of_scores = wide @ value.to(weights.dtype).transpose(-1, -2)
            of_scores = weights * (of_scores - (wide * result).sum(-1, keepdim=True)) * scale
            own, of_keys = of_scores @ key.to(weights.dtype), of_scores.transpose(-1, -2) @ query.to(weights.dtype)
        return own, _summed(of_keys, heads), _summed(of_values, heads)


_PADDED_SUMS = 32  # the memory-efficient kernel has log-sum-exps for a multiple of this many queries


def _scores(query: Tensor, key: Tensor, scale: float, causal: bool) -> Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).transpose(-1, -2) * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(later, -torch.inf)
    return scores


def _summed(gradient: Tensor, heads: int) -> Tensor:
    """Return the gradient of keys or values that several query heads share."""
    batch, every, length, channels = gradient.shape
    if every == heads:
        return gradient
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return gradient.view(batch, heads, every // heads, length, channels).sum(2, dtype=wide)


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
    lengths = longest(positions)
    dist.all_reduce(lengths, op=dist.ReduceOp.MAX, group=axis.group)
    return lengths


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
        if key.shape[_HEADS] % self._axis.size:  # each key-value head is repeated for its query heads
            times = query.shape[_HEADS] // key.shape[_HEADS]
            key, value = (torch.repeat_interleave(x, times, dim=_HEADS) for x in (key, value))
        query, key, value = (exchange(x, self._axis, split_dim=_HEADS, join_dim=_LENGTH) for x in (query, key, value))
        own = None if sinks is None else sinks.chunk(self._axis.size)[self._axis.rank]
        mixed = self._core(query, key, value, context, sinks=own)
        return exchange(mixed, self._axis, split_dim=_LENGTH, join_dim=_HEADS)
