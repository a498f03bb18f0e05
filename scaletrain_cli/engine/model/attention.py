"""Causal attention and the kernel that torch selects for it, and dropout with masks that are the same in every layout.

Each dropout decision is a few bits of a counter-based generator, a pure function of (seed, site, sample, position or
head and query, channel or key), so that any part of a mask can be computed anywhere, and again in the backward pass.
The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014)
with Stafford's mixer, variant 13. A rank with some of the heads has the number of its first one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from scaletrain_cli.engine.deepspeed_engine import forward_dtype
from scaletrain_cli.engine.model.attention_sinks import fused_attention_with_sinks, fused_kernel, repeated
from scaletrain_cli.engine.model.document_attention import (
    Segments,
    document_attention,
    is_supported,
    segments_of,
    whole_rows,
)
from scaletrain_cli.engine.parallel.mesh import WHOLE_SEQUENCE, SequencePart
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.spec import ModelSpec, RunSpec


class TokenContext(NamedTuple):
    """The tokens of a forward pass that a block does not see in its hidden states: their places and documents.

    positions: [length] or [batch, length] int64, positions of these tokens in their sequence or document.
    samples: [batch] int64, unique numbers of the sequences in the run, which key their dropout.
    documents: [batch, whole length] int64, the number of the document of each position, padding with its own; None if
    each sequence is one document. A token attends to earlier tokens of its document. On sequence-parallel ranks,
    positions are those of the rank's part, documents those of the whole length.
    segments: the same documents as ``document_attention`` needs them; None if they are to be found in ``documents``.
    mask, window_mask: see ``with_masks``.
    real: [batch, length] bool, False for padding; None: no padding.
    """

    positions: Tensor
    samples: Tensor
    documents: Tensor | None = None
    segments: Segments | None = None
    mask: Tensor | None = None
    window_mask: Tensor | None = None
    real: Tensor | None = None

    @classmethod
    def of(cls, tokens: Tensor) -> TokenContext:
        """Return the context of whole sequences [batch, length] of one document each."""
        batch, length = tokens.shape
        positions, samples = (torch.arange(size, device=tokens.device) for size in (length, batch))
        return cls(positions, samples)

    @property
    def real_positions(self) -> Tensor:
        """Return the positions, with 0 for padding."""
        return self.positions if self.real is None else self.positions * self.real

    def with_segments(self) -> TokenContext:
        """Return the context with the segments of its documents, so that all blocks share them."""
        if self.documents is None or self.segments is not None:
            return self
        return self._replace(segments=segments_of(self.documents))

    def with_masks(self, dtype: torch.dtype, length: int, window: int | None) -> TokenContext:
        """Return the context with the masks of its documents and of a window, so that all blocks share them.

        For attention that needs masks: see ``needs_mask``. ``dtype`` of the queries; ``length``: the whole length;
        ``window``: of layers with sliding attention, in tokens.
        """
        return self._replace(
            mask=self.mask_for(dtype, length, None),
            window_mask=None if window is None or window >= length else self.mask_for(dtype, length, window),
        )

    def mask_for(self, dtype: torch.dtype, length: int, window: int | None) -> Tensor | None:
        """Return what is added to the scores within a window, or of full attention; None if every earlier token counts.

        [batch or 1, 1, length, length]: 0, or -inf if masked.
        """
        if window is None or window >= length:
            if self.documents is None or self.mask is not None:
                return self.mask
            return attention_mask(self.documents, dtype)
        if self.window_mask is not None:
            return self.window_mask
        documents = self.documents
        if documents is None:
            documents = torch.zeros(1, length, dtype=torch.int64, device=self.positions.device)
        return attention_mask(documents, dtype, window)


def attention_mask(documents: Tensor, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """Return what is added to the scores of a query and a key, [batch, 1, length, length]: 0, or -inf if masked.

    A token sees the last ``window`` tokens of its document, itself included; None: all earlier ones.
    """
    length = documents.shape[1]
    visible = (documents.unsqueeze(2) == documents.unsqueeze(1)).tril_()
    if window is not None:
        visible.triu_(1 - window)
    mask = torch.full((len(documents), 1, length, length), -torch.inf, dtype=dtype, device=documents.device)
    return mask.masked_fill_(visible.unsqueeze(1), 0.0)


class AttentionSettings(NamedTuple):
    """Settings of a layer's attention; the defaults are plain causal attention.

    ``scale``: factor of scores; None: 1 / sqrt(head_dim). ``window``: tokens that a token attends to, itself included.
    ``softcap``: scores x become softcap * tanh(x / softcap).
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None


PLAIN = AttentionSettings()


def needs_mask(model: ModelSpec, device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if attention within documents or windows takes a mask of all pairs of positions.

    That is so with a cap of scores and with dropout, whose attention is unfused, with sinks, and on a GPU in fp32 or
    with heads that torch's variable-length kernel does not have.
    """
    unfused = model.attn_logit_softcapping is not None or model.attention_dropout > 0
    return (
        unfused
        or model.attention_sinks
        or not is_supported(device, dtype, max(model.qk_head_dim, model.value_head_dim))
    )


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: TokenContext,
    settings: AttentionSettings = PLAIN,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return scaled dot-product attention, [batch, heads, length, head_dim]; key and value may have fewer heads.

    Within the documents of the context, if it has documents. ``sinks``: [heads], see ``attention_sinks``. Unfused with
    a cap, which no kernel of torch has. Values may have another head_dim than queries and keys: zeros fill the smaller
    ones, because fused kernels need equal ones.
    """
    if settings.softcap is not None:
        return _mixed(attention_weights(query, key, context, settings, sinks), value)
    head_dim, width = query.shape[-1], value.shape[-1]
    if width != head_dim:
        settings = settings._replace(scale=settings.scale or head_dim**-0.5)
        if width < head_dim:
            value = F.pad(value, (0, head_dim - width))
        else:
            query, key = (F.pad(x, (0, width - head_dim)) for x in (query, key))
        return causal_attention(query, key, value, context, settings, sinks)[..., :width]
    rows, length = query.shape[0], query.shape[2]
    window = None if settings.window is None or settings.window >= length else settings.window
    if sinks is not None:
        mask = context.mask_for(query.dtype, length, window)
        fused = fused_attention_with_sinks(query, key, value, sinks, mask, settings.scale)
        return _mixed(attention_weights(query, key, context, settings, sinks), value) if fused is None else fused
    if context.documents is None and window is None:
        grouped = query.shape[1] != key.shape[1]
        scale = settings.scale
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped, scale=scale)
    if not is_supported(query.device, query.dtype, head_dim):
        return masked_attention(query, key, value, context, settings)
    segments = context.with_segments().segments or whole_rows(rows, length, query.device)
    return document_attention(query, key, value, segments, settings.scale, window)


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, context: TokenContext, settings: AttentionSettings = PLAIN
) -> Tensor:
    """Return ``causal_attention`` without a cap or sinks, computed with a mask of all pairs of positions."""
    mask, grouped = context.mask_for(query.dtype, query.shape[2], settings.window), query.shape[1] != key.shape[1]
    if grouped and query.is_cuda:  # of the kernels there that take a mask, only the unfused one has grouped queries
        key, value, grouped = repeated(key, query), repeated(value, query), False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped, scale=settings.scale
    )


def attention_weights(
    query: Tensor, key: Tensor, context: TokenContext, settings: AttentionSettings, sinks: Tensor | None = None
) -> Tensor:
    """Return the weights after softmax, [batch, key-value heads, queries per key, length, length], in query's dtype.

    With ``sinks`` [heads] the weights of a query sum to less than 1.
    """
    batch, heads, length, head_dim = query.shape
    kv_heads = key.shape[1]
    rows = query.reshape(batch, kv_heads, -1, head_dim)  # the queries of one key side by side: no key is repeated
    scores = rows @ key.transpose(-1, -2) * (settings.scale or head_dim**-0.5)
    if settings.softcap is not None:
        scores = torch.tanh(scores / settings.softcap) * settings.softcap
    mask = context.mask_for(query.dtype, length, settings.window)
    if mask is None:
        mask = attention_mask(torch.zeros(1, length, dtype=torch.int64, device=query.device), query.dtype)
    scores = scores.view(batch, kv_heads, heads // kv_heads, length, length) + mask.unsqueeze(1)
    if sinks is not None:
        logits = sinks.to(scores.dtype).view(1, kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat((scores, logits), -1).softmax(-1, dtype=torch.float32)[..., :-1].to(query.dtype)
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype)


def _mixed(weights: Tensor, value: Tensor) -> Tensor:
    """Return the sums of values by the weights of ``attention_weights``: [batch, heads, length, head_dim]."""
    batch, kv_heads, groups, length, _ = weights.shape
    mixed = weights.view(batch, kv_heads, groups * length, length) @ value
    return mixed.view(batch, kv_heads * groups, length, -1)


class CausalAttention(nn.Module):
    """``causal_attention`` with the settings of a layer."""

    def __init__(self, settings: AttentionSettings) -> None:
        super().__init__()
        self.settings = settings

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, context: TokenContext, sinks: Tensor | None = None
    ) -> Tensor:
        return causal_attention(query, key, value, context, self.settings, sinks)


_NAMES = {
    SDPBackend.MATH: "math",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
    SDPBackend.OVERRIDEABLE: "of the device",
}


def attention_kernel_of(spec: RunSpec, layout: Layout, device: torch.device) -> str:
    """Return the attention kernel for a rank's share of the heads over whole sequences, or over its part of a ring."""
    model, cut = spec.language_model, layout.tensor_parallel * layout.sequence_parallel
    heads = model.num_attention_heads // cut
    kernel = attention_kernel(
        device,
        forward_dtype(spec.training.precision),
        batch=layout.micro_batch_size,
        heads=heads,
        kv_heads=model.num_key_value_heads // cut if model.num_key_value_heads % cut == 0 else heads,
        length=model.seq_len // layout.context_parallel,
        head_dim=max(model.qk_head_dim, model.value_head_dim),
        dropout=model.attention_dropout,
        capped=model.attn_logit_softcapping is not None,
        masked=spec.data.packing != "none" or model.windowed_layers > 0,
        sinks=model.attention_sinks,
    )
    return kernel if layout.context_parallel == 1 else f"{kernel}, in a ring of {layout.context_parallel}"


def attention_kernel(
    device: torch.device,
    dtype: torch.dtype,
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    length: int,
    head_dim: int,
    dropout: float = 0.0,
    capped: bool = False,
    masked: bool = False,
    sinks: bool = False,
) -> str:
    """Return flash, memory-efficient, cudnn or math (which materializes all scores), for one rank's share of the heads.

    ``unfused`` with dropout or a cap of scores. ``masked``: rows may have several documents, or layers a window; the
    kernel is then flash by document if possible (``document_attention``). ``sinks``: see ``attention_sinks``. Allocates
    a query, a key and a value, and the mask.
    """
    if dropout or capped:
        return "unfused"
    if masked and not sinks and is_supported(device, dtype, head_dim):
        return "flash by document"
    if masked and device.type == "cuda":
        kv_heads = heads  # repeated, see masked_attention
    documents = torch.zeros(batch, length, dtype=torch.int64, device=device)
    mask = attention_mask(documents, dtype) if masked else None
    query, key, value = (
        torch.empty(batch, n, length, head_dim, dtype=dtype, device=device, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    )
    if sinks:
        return _NAMES[fused_kernel(query, key, value, mask) or SDPBackend.MATH]
    # as scaled_dot_product_attention does; torch has no public name for it
    choice = torch._fused_sdp_choice(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=heads != kv_heads
    )
    return _NAMES[SDPBackend(choice)]


_LANES = 4  # decisions per 64-bit word; 16 bits state a probability to within 1/131072
_LANE_VALUES = 2**16


class _Keyed(nn.Module):
    """``p``: the probability of dropping; 0 in evaluation. ``key``: scalar int64, see ``assign_dropout_keys``.

    The key is a tensor, because torch.compile would compile again for each number.
    """

    key: Tensor

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        key = torch.zeros((), dtype=torch.int64, device="cpu")  # has a value even in a model on the meta device
        self.register_buffer("key", key, persistent=False)


class KeyedDropout(_Keyed):
    """Drops channels of hidden states. ``part``: which positions of each sequence this rank has.

    ``first_channel``: number of the first channel in the whole model, for a rank with some of the channels.
    """

    def __init__(self, p: float, part: SequencePart = WHOLE_SEQUENCE, first_channel: int = 0) -> None:
        super().__init__(p)
        self.part, self.first_channel = part, first_channel

    def forward(self, x: Tensor, context: TokenContext) -> Tensor:
        """Return x [batch, length, channels] with dropped channels; equal samples drop equal channels."""
        if not self.training or self.p == 0:
            return x
        places = context.positions
        if places.ndim != 1:  # positions of several documents are not unique in the whole sequence
            places = self.part.places(places.shape[1] * self.part.ranks, places.device)
        rows = _split(_split(self.key, context.samples).unsqueeze(1), places)
        return _drop(x, rows, self.p, self.first_channel)


class KeyedDropPath(_Keyed):
    """Stochastic depth (arXiv:1603.09382): drops the residual branch of a sample, and rescales those that are kept."""

    def forward(self, branch: Tensor, samples: Tensor | None) -> Tensor:
        """Return the branch [batch, ...], zero for dropped samples. ``samples`` [batch]: numbers in the run, or None.

        None drops nothing, as in evaluation.
        """
        if not self.training or self.p == 0 or samples is None:
            return branch
        ones = torch.ones(len(samples), 1, dtype=branch.dtype, device=branch.device)
        kept = _drop(ones, _split(self.key, samples), self.p)
        return branch * kept.view(-1, *[1] * (branch.dim() - 1))


class AttentionWithDropout(_Keyed):
    """Causal attention, [batch, heads, length, head_dim], with dropout of the weights; no fused kernel has these masks.

    ``first_head``: number of this rank's first query head in the whole model. Fused in evaluation.
    """

    def __init__(self, p: float, first_head: int = 0, settings: AttentionSettings = PLAIN) -> None:
        super().__init__(p)
        self.first_head, self.settings = first_head, settings

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, context: TokenContext, sinks: Tensor | None = None
    ) -> Tensor:
        """Return attention over whole sequences, within their documents; key and value may have fewer heads."""
        if not self.training or self.p == 0:
            return causal_attention(query, key, value, context, self.settings, sinks)
        heads, length = query.shape[1:3]
        weights = attention_weights(query, key, context, self.settings, sinks)
        numbers = torch.arange(self.first_head, self.first_head + heads, device=query.device)
        rows = _split(_split(self.key, context.samples).unsqueeze(1), numbers)
        rows = _split(rows.unsqueeze(2), torch.arange(length, device=query.device))
        return _mixed(_drop(weights, rows.view(weights.shape[:-1]), self.p), value)


def attention_core(p: float, settings: AttentionSettings = PLAIN) -> Callable[..., Tensor]:
    """Return what an attention module calls with query, key, value, a ``TokenContext``, and optionally ``sinks``."""
    if p:
        return AttentionWithDropout(p, settings=settings)
    return causal_attention if settings == PLAIN else CausalAttention(settings)


def dropout_key(seed: int, name: str) -> Tensor:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.tensor(int.from_bytes(digest, "big", signed=True), device="cpu")


def assign_dropout_keys(model: nn.Module, seed: int) -> None:
    """Key each dropout module by the seed and its name in the model. Call it before modules are wrapped."""
    for name, module in model.named_modules():
        if isinstance(module, _Keyed):
            module.key = dropout_key(seed, name)


def _drop(x: Tensor, rows: Tensor, p: float, first: int = 0) -> Tensor:
    """Zero a share ``p`` of the last dimension, by the keys ``rows`` of all other dimensions, and rescale the rest.

    ``first``: number of the first element of that dimension in the whole tensor.
    """
    threshold = round(p * _LANE_VALUES)
    word, lane = divmod(first, _LANES)
    last = first + x.shape[-1]
    words = _split(rows.unsqueeze(-1), torch.arange(word, -(-last // _LANES), device=x.device))
    lanes = words.view(torch.int16)[..., lane : last - word * _LANES]
    keep = lanes >= threshold - _LANE_VALUES // 2  # signed, hence the half
    return torch.where(keep, x, 0.0) * (_LANE_VALUES / (_LANE_VALUES - threshold))


def _split(key: Tensor, index: Tensor) -> Tensor:
    """Return outputs number ``index`` of the generator that starts from ``key``, as keys; int64, wraps around."""
    x = key + (index + 1) * _GAMMA  # then a bijection in which each input bit flips half of the output bits on average
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Return a logical shift to the right; torch has none for signed integers."""
    return (x >> bits) & ((1 << 64 - bits) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


_GAMMA = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)
