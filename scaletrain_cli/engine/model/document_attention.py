"""Causal attention within the documents of packed rows, and within sliding windows, without a mask of all pairs.

Memory grows with the number of tokens, and time with the sum of the squares of the lengths of the documents (or with
length times window). On CUDA in 16 bits this is torch's variable-length FlashAttention
(``torch.nn.attention.varlen``); on the CPU, torch's flash kernel for each document, and for each block of queries if a
document is longer than the window. Both are single operations to ``torch.compile``.
"""

import functools
import inspect
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaletrain_cli.engine.eager import constant_when_compiled

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# Queries that attend to a window at once on the CPU; more would compute more scores outside of it.
_BLOCK = 256
_LARGEST_CUDA_HEAD = 256  # FlashAttention 2
# Its backward pass has heads of these channels on two capabilities only (torch, ``flash_attn/flash_api.cpp``).
_RARE_CUDA_HEADS, _CAPABILITIES_WITH_RARE_HEADS = range(193, 225), ((8, 0), (9, 0))


@functools.cache
def _cuda_kernel() -> Any | None:
    """Return torch's variable-length attention; None if this torch lacks it, or one of the arguments used here.

    Its module loads torch's compiler.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"scale", "window_size", "enable_gqa"} <= known.keys() else None


class Segments(NamedTuple):
    """The documents of a micro-batch.

    ``bounds``: int32 [documents + 1], the first token of each document and the end of the last one, where all rows
    stand one after another; padding is a document, and documents may be empty. ``longest``: at least the number of
    tokens of the longest document.
    """

    bounds: Tensor
    longest: int


def segments_of(documents: Tensor) -> Segments:
    """Return the segments of the numbers of the documents of each position, [rows, length]; waits for a GPU."""
    changes = torch.ones_like(documents, dtype=torch.bool)
    changes[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = changes.flatten().nonzero().flatten()
    bounds = torch.cat([starts, starts.new_tensor([documents.numel()])]).to(torch.int32)
    return Segments(bounds, int(bounds.diff().max()))


def whole_rows(rows: int, length: int, device: torch.device) -> Segments:
    return Segments(torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=device), length)


@constant_when_compiled
def is_supported(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return True if ``document_attention`` has a kernel for queries of this kind."""
    if device.type != "cuda":
        return device.type == "cpu"
    capability = torch.cuda.get_device_capability(device)
    return (
        dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= _LARGEST_CUDA_HEAD
        and torch.version.hip is None
        and capability >= (8, 0)
        and (head_dim not in _RARE_CUDA_HEADS or capability in _CAPABILITIES_WITH_RARE_HEADS)
        and _cuda_kernel() is not None
    )


def document_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Return causal attention within each document, [batch, heads, length, head_dim].

    Key and value may have fewer heads. ``window``: tokens that a token attends to, itself
    included. Only for what ``is_supported``.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if window is not None and window >= segments.longest:
        window = None
    if query.is_cuda:
        return _on_cuda(query, key, value, segments, scale, window)
    query, key, value = (_with_adjacent_channels(x) for x in (query, key, value))
    result: Tensor = _attention(query, key, value, segments.bounds, scale, window)[0]
    return result


def _with_adjacent_channels(x: Tensor) -> Tensor:
    """Return the tensor with the channels of a head adjacent in memory, which torch's CPU kernel assumes."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _on_cuda(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float, window: int | None) -> Tensor:
    kernel = _cuda_kernel()
    assert kernel is not None, "is_supported"
    batch, heads, length, channels = query.shape
    flat = [x.transpose(1, 2).reshape(batch * length, -1, channels) for x in (query, key, value)]
    bounds, longest = segments
    mixed: Tensor = kernel(
        *flat,
        bounds,
        bounds,
        longest,
        longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),  # tokens before a query, and after it
        enable_gqa=heads != key.shape[1],
    )
    return mixed.view(batch, length, heads, channels).transpose(1, 2)


class _Part(NamedTuple):
    """Queries of one row that are computed at once, and the keys that they see. ``masked``: not all of the past."""

    row: int
    queries: slice
    keys: slice
    masked: bool

    def of_queries(self, x: Tensor) -> Tensor:
        return x[self.row : self.row + 1, :, self.queries]

    def of_keys(self, x: Tensor, groups: int) -> Tensor:
        """Return the keys or values, one head for each head of the queries."""
        part = x[self.row : self.row + 1, :, self.keys]
        return part if groups == 1 else part.repeat_interleave(groups, dim=1)

    def add_to(self, x: Tensor, gradient: Tensor, groups: int) -> None:
        """Add the gradient of keys or values, summed over the heads of queries that share them."""
        if groups > 1:
            _, heads, length, channels = gradient.shape
            gradient = gradient.reshape(1, heads // groups, groups, length, channels).sum(2)
        x[self.row : self.row + 1, :, self.keys] += gradient


def _parts(bounds: Tensor, length: int, window: int | None) -> Iterator[_Part]:
    for first, end in pairwise(bounds.tolist()):
        row, start = divmod(first, length)
        stop = start + end - first
        if window is None or stop - start <= window:
            if stop > start:
                yield _Part(row, slice(start, stop), slice(start, stop), False)
            continue
        block = min(max(window, 32), _BLOCK)
        for begin in range(start, stop, block):
            queries = slice(begin, min(begin + block, stop))
            yield _Part(row, queries, slice(max(start, begin - window + 1), queries.stop), True)


class _Masks:
    """The masks of the parts of one row within a window; most are equal."""

    def __init__(self, like: Tensor, window: int | None) -> None:
        self._like, self._window = like, window
        self._known: dict[tuple[int, int], Tensor] = {}

    def of(self, part: _Part) -> Tensor | None:
        """Return what is added to the scores of a part, [queries, keys]; None for all of the past."""
        if not part.masked or self._window is None:
            return None
        before, queries = part.queries.start - part.keys.start, part.queries.stop - part.queries.start
        bias = self._known.get((before, queries))
        if bias is None:
            visible = torch.ones(queries, before + queries, dtype=torch.bool).tril_(before)
            visible.triu_(before - self._window + 1)
            mask = self._like.new_full(visible.shape, -torch.inf).masked_fill_(visible, 0.0)
            bias = self._known[before, queries] = mask
        return bias


def _new_results(query: Tensor) -> tuple[Tensor, Tensor]:
    """Return empty tensors for the result and the log-sum-exps, in the order of memory of torch's kernel."""
    batch, heads, length, channels = query.shape
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    result = query.new_empty(batch, length, heads, channels)
    return result.transpose(1, 2), query.new_empty(batch, length, heads, dtype=wide).transpose(1, 2)


_SCHEMA = "(Tensor query, Tensor key, Tensor value, Tensor bounds, float scale, int? window)"


def _forward(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    (result, normalizers), groups = _new_results(query), query.shape[1] // key.shape[1]
    masks = _Masks(query, window)
    for part in _parts(bounds, query.shape[2], window):
        mask = masks.of(part)
        keys, values = part.of_keys(key, groups), part.of_keys(value, groups)
        mixed, sums = _FLASH(part.of_queries(query), keys, values, 0.0, mask is None, attn_mask=mask, scale=scale)
        part.of_queries(result).copy_(mixed)
        part.of_queries(normalizers).copy_(sums)
    return result, normalizers


_attention: Any = torch.library.custom_op(
    "scaletrain::document_attention",
    _forward,
    mutates_args=(),
    device_types="cpu",
    schema=f"{_SCHEMA} -> (Tensor, Tensor)",
)


@_attention.register_fake  # type: ignore[untyped-decorator]
def _(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float, window: int | None) -> Any:
    return _new_results(query)


def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    normalizers: Tensor,
    bounds: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    gradient = _with_adjacent_channels(gradient)
    groups, wide = query.shape[1] // key.shape[1], query.dtype if window is None else normalizers.dtype
    of_query = torch.zeros_like(query)
    # The blocks of a window add to the same keys, so their sums are in fp32.
    of_key, of_value = torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
    masks = _Masks(query, window)
    for part in _parts(bounds, query.shape[2], window):
        mask = masks.of(part)
        keys, values = part.of_keys(key, groups), part.of_keys(value, groups)
        mine = [part.of_queries(x) for x in (gradient, query, result, normalizers)]
        own, its_keys, its_values = _FLASH_BACKWARD(
            mine[0], mine[1], keys, values, mine[2], mine[3], 0.0, mask is None, attn_mask=mask, scale=scale
        )
        part.of_queries(of_query).copy_(own)
        part.add_to(of_key, its_keys, groups)
        part.add_to(of_value, its_values, groups)
    return of_query, of_key.to(key.dtype), of_value.to(value.dtype)


_attention_backward: Any = torch.library.custom_op(
    "scaletrain::document_attention_backward",
    _backward,
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor result, Tensor normalizers, "
    "Tensor bounds, float scale, int? window) -> (Tensor, Tensor, Tensor)",
)


@_attention_backward.register_fake  # type: ignore[untyped-decorator]
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, bounds, result, normalizers = ctx.saved_tensors
    gradients = _attention_backward(gradient, query, key, value, result, normalizers, bounds, ctx.scale, ctx.window)
    return (*gradients, None, None, None)


_attention.register_autograd(_gradients, setup_context=_keep)
