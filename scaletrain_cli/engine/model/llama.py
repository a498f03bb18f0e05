"""Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU. Also Mistral and Qwen2/3."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaletrain_cli.engine.model.attention import KeyedDropout, TokenContext, attention_core
from scaletrain_cli.engine.model.causal_lm import CausalLM
from scaletrain_cli.engine.model.moe import MoELayer
from scaletrain_cli.spec import ModelSpec
from scaletrain_cli.spec.rope import RopeScalingSpec

# Rotary frequencies for contexts longer than the model was first trained on.


def scaled(
    frequencies: Tensor, head_dim: int, theta: float, scaling: RopeScalingSpec, longest: int
) -> tuple[Tensor, float]:
    """Return the scaled frequencies [head_dim / 2] and a factor of cosines and sines.

    ``longest`` is the original context if ``scaling`` does not state it.
    """
    original = scaling.original_max_position_embeddings or longest
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.rope_type == "llama3":
        return _llama3(frequencies, scaling, original), 1.0
    return _yarn(frequencies, head_dim, theta, scaling, original), _yarn_attention_factor(scaling)


def _llama3(frequencies: Tensor, scaling: RopeScalingSpec, original: int) -> Tensor:
    """Return frequencies with slow channels divided by the factor and those between interpolated (arXiv:2407.21783)."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert low is not None, "the spec requires it"
    assert high is not None, "the spec requires it"
    turns = original * frequencies / (2 * math.pi)  # within the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _yarn(frequencies: Tensor, head_dim: int, theta: float, scaling: RopeScalingSpec, original: int) -> Tensor:
    """Return NTK-by-parts frequencies: a ramp over channels between two rotation counts (arXiv:2309.00071, 3.2)."""

    def channel(turns: float) -> float:
        """Return the channel that rotates this many times within the original context."""
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = channel(scaling.beta_fast or 32.0), channel(scaling.beta_slow or 1.0)
    if scaling.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    ramp = torch.arange(len(frequencies), device=frequencies.device, dtype=torch.float32)
    stretched = ((ramp - first) / (last - first)).clamp(0, 1)
    return frequencies * ((1 - stretched) + stretched / scaling.factor)


def _yarn_attention_factor(scaling: RopeScalingSpec) -> float:
    """Return the attention temperature, as a factor of queries and keys (section 3.4)."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def growth(scale: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * scale * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return growth(scaling.mscale) / growth(scaling.mscale_all_dim)
    return growth(1.0)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight per channel."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the normalized last dimension, computed in fp32 (arXiv:1910.07467)."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def rotary_tables(
    positions: Tensor, head_dim: int, theta: float, scaling: RopeScalingSpec | None = None, longest: int = 0
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines for positions [length], each [length, head_dim] (arXiv:2104.09864), in fp32.

    For positions [batch, length], each [batch, 1, length, head_dim]. Not buffers, which would be cast to bf16.
    ``longest`` is the context that ``scaling`` extends, if it does not state one.
    """
    frequencies = theta ** -(torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    factor = 1.0
    if scaling is not None:
        frequencies, factor = scaled(frequencies, head_dim, theta, scaling, longest)
    angles = positions.float().unsqueeze(-1) * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    if positions.ndim == 2:
        angles = angles.unsqueeze(1)  # the same for all heads
    return angles.cos() * factor, angles.sin() * factor


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Return each head, [batch, heads, length, head_dim], rotated, with Hugging Face's pairing of channels."""
    cos, sin = tables
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention, [batch, length, hidden] in and out."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        heads, kv_heads, bias = spec.num_attention_heads, spec.num_key_value_heads, spec.qkv_bias
        self.q_proj = nn.Linear(spec.hidden_size, heads * spec.head_dim, bias=bias)
        self.k_proj = nn.Linear(spec.hidden_size, kv_heads * spec.head_dim, bias=bias)
        self.v_proj = nn.Linear(spec.hidden_size, kv_heads * spec.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * spec.head_dim, spec.hidden_size, bias=False)
        self.core = attention_core(spec.attention_dropout)
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps)
            self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps)
        self.qk_norm = spec.qk_norm

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor], context: TokenContext) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            projection(x).view(batch, length, -1, self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query.transpose(1, 2), tables), rotate(key.transpose(1, 2), tables)
        mixed = self.core(query, key, value.transpose(1, 2), context)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)  # both first: ZeRO-3 breaks a compiled block at each projection
        return self.down_proj(F.silu(gate) * up)  # type: ignore[no-any-return]


def feed_forward(spec: ModelSpec, index: int) -> nn.Module:
    """Return the MLP of block ``index``, or its MoE layer; leading blocks may be dense."""
    if index < spec.num_hidden_layers - spec.moe_layers:
        return MLP(spec.hidden_size, spec.intermediate_size)
    shared = spec.shared_expert_intermediate_size
    return MoELayer(spec, MLP(spec.hidden_size, shared) if shared else None)


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP with residuals."""

    def __init__(self, spec: ModelSpec, index: int) -> None:
        super().__init__()
        self.self_attn = Attention(spec)
        self.mlp = feed_forward(spec, index)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.attention_dropout = KeyedDropout(spec.hidden_dropout)
        self.mlp_dropout = KeyedDropout(spec.hidden_dropout)

    @property
    def attention(self) -> nn.Module:
        return self.self_attn

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor], context: TokenContext) -> Tensor:
        mixed = self.self_attn(self.input_layernorm(x), tables, context)
        x = x + self.attention_dropout(mixed, context)
        return x + self.mlp_dropout(self.mlp(self.post_attention_layernorm(x)), context)  # type: ignore[no-any-return]


class LlamaModel(nn.Module):
    """Modules with the names of Hugging Face's inner model: embedding, decoder layers by number, final norm."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.dropout = KeyedDropout(spec.hidden_dropout)
        self.layers = nn.ModuleDict({str(index): DecoderLayer(spec, index) for index in range(spec.num_hidden_layers)})
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps)


class LlamaForCausalLM(CausalLM):
    """A Llama, in the parts of ``CausalLM``."""

    residual_projections = ("o_proj.weight", "down_proj.weight")
    opening = ("model.embed_tokens",)
    closing = ("model.norm", "lm_head")

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.model = LlamaModel(spec)
        self.add_head()

    @property
    def blocks(self) -> nn.ModuleDict:
        return self.model.layers

    def embed(self, tokens: Tensor, context: TokenContext) -> Tensor:
        return self.model.dropout(self.model.embed_tokens(tokens), context)  # type: ignore[no-any-return]

    def transform(self, hidden: Tensor, context: TokenContext) -> Tensor:
        spec = self.spec
        longest = spec.max_position_embeddings
        tables = rotary_tables(context.positions, spec.head_dim, spec.rope_theta, spec.rope_scaling, longest)
        for layer in self.blocks.values():
            hidden = layer(hidden, tables, context)
        return hidden

    def final_norm(self, hidden: Tensor) -> Tensor:
        return self.model.norm(hidden)  # type: ignore[no-any-return]
