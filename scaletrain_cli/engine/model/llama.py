"""Llama and its relatives: RMSNorm (arXiv:1910.07467), rotary positions, grouped-query attention, a gated MLP.

One implementation for Llama, Mistral, Mixtral, Qwen 2 and 3 (dense and MoE), Gemma 2 and 3, Phi-3, OLMo 2, DeepSeek-V2
and V3, and GPT-OSS, whose differences are settings of the ``ModelSpec``. Modules have the names of the architecture
whose settings they have, in Hugging Face's files.

Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): queries come from a latent of each token, keys
and values from another one; beside it one rotated key serves all heads. The latents are whole on every tensor rank, and
the layers that read them are sharded over the heads.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from scaletrain_cli.engine.model.attention import AttentionSettings, KeyedDropout, TokenContext, attention_core
from scaletrain_cli.engine.model.base import CausalLM
from scaletrain_cli.engine.model.linear import Activation, gated, gelu_tanh
from scaletrain_cli.engine.model.moe import MoELayer
from scaletrain_cli.engine.model.rope import Tables, depends_on_longest, rotate, tables_of_layers
from scaletrain_cli.spec import ModelSpec

_LATENT_NORM_EPS = 1e-6  # fixed in transformers and in DeepSeek's own code, whatever the other norms have


class LatentAttention(nn.Module):
    """Causal multi-head latent attention, [batch, length, hidden] in and out.

    ``share_key``: applied to the rotated key before all heads of this rank read it.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        hidden, heads, latent = spec.hidden_size, spec.num_attention_heads, spec.kv_lora_rank
        self.plain, self.rotated = spec.head_dim, spec.qk_rope_head_dim  # channels of a query or key
        self.value, self.latent = spec.value_head_dim, latent
        self.interleaved = spec.rope_interleave
        self.compresses_queries = spec.q_lora_rank > 0
        if self.compresses_queries:
            self.q_a_proj = nn.Linear(hidden, spec.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(spec.q_lora_rank, _LATENT_NORM_EPS)
            self.q_b_proj = nn.Linear(spec.q_lora_rank, heads * spec.qk_head_dim, bias=False)
        else:
            self.q_proj = nn.Linear(hidden, heads * spec.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, latent + self.rotated, bias=False)
        self.kv_a_layernorm = RMSNorm(latent, _LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(latent, heads * (self.plain + self.value), bias=False)
        self.o_proj = nn.Linear(heads * self.value, hidden, bias=False)
        self.core = attention_core(spec.attention_dropout, AttentionSettings(scale=spec.attention_scale))
        self.share_key: Callable[[Tensor], Tensor] = _unchanged

    def forward(self, x: Tensor, tables: tuple[Tables, Tables], context: TokenContext) -> Tensor:
        """``tables``: of layers with full attention, and of layers with a window, which latent attention has not."""
        batch, length, _ = x.shape
        if self.compresses_queries:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        else:
            query = self.q_proj(x)
        latent, key = self.kv_a_proj_with_mqa(x).split((self.latent, self.rotated), dim=-1)
        keys_and_values = self.kv_b_proj(self.kv_a_layernorm(latent))
        # Joined in the order of memory, [batch, length, heads, channels]: attention's output then needs no copy.
        query = query.view(batch, length, -1, self.plain + self.rotated)
        keys_and_values = keys_and_values.view(batch, length, -1, self.plain + self.value)
        rotated_key = self._rotate(self.share_key(key).unsqueeze(2), tables[0]).expand(-1, -1, query.shape[2], -1)
        plain_query, rotated_query = query.split((self.plain, self.rotated), dim=-1)
        plain_key, value = keys_and_values.split((self.plain, self.value), dim=-1)
        query = torch.cat((plain_query, self._rotate(rotated_query, tables[0])), dim=-1)
        rows = torch.cat((plain_key, rotated_key), dim=-1)
        # contiguous: saved for the backward pass without the keys before their rotation
        mixed = self.core(*(part.transpose(1, 2) for part in (query, rows, value.contiguous())), context)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]

    def _rotate(self, x: Tensor, tables: Tables) -> Tensor:
        """Return the channels [batch, length, heads, rotated] after their rotation, in the order of ``rotate``.

        The order of the channels is the same for queries and keys, so that it does not change their products.
        """
        if self.interleaved:
            x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
        return rotate(x.transpose(1, 2), tables).transpose(1, 2)


def _unchanged(x: Tensor) -> Tensor:
    return x


class RMSNorm(nn.Module):
    """Root-mean-square norm of the last dimension. ``zero_centered``: multiplies by 1 + weight."""

    def __init__(self, size: int, eps: float, *, zero_centered: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if zero_centered else torch.ones(size))
        self.eps, self.zero_centered = eps, zero_centered

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.zero_centered)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """Return the normalized last dimension, computed in fp32.

    The backward pass keeps the input and one inverse root per row. On a GPU torch's fused kernels compute it, except
    if it is zero-centered; torch.compile fuses the operations itself.
    """
    if torch.compiler.is_compiling():
        return _normalized(x, weight, eps, zero_centered)[0]
    return _RMSNorm.apply(x, weight, eps, zero_centered)  # type: ignore[no-any-return, no-untyped-call]


def scaled(normed: Tensor, weight: Tensor, dtype: torch.dtype, zero_centered: bool) -> Tensor:
    """Return fp32 values times the weight, or times 1 + weight in fp32 as Gemma does, in ``dtype``."""
    return (normed * (1.0 + weight.float())).to(dtype) if zero_centered else normed.to(dtype) * weight


def has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Return whether torch has fused kernels for this norm."""
    return x.is_cuda and weight.dtype == x.dtype


def _normalized(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """Return the norm, and the inverse root of each row, [..., 1] in fp32."""
    wide = x.float()
    root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return scaled(wide * root, weight, x.dtype, zero_centered), root


class _RMSNorm(Function):
    """Autograd's own formula would keep the fp32 input and the normalized value, and launch a kernel for each step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        ctx.fused = has_kernel(x, weight) and not zero_centered
        if ctx.fused:
            result, root = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)
        else:
            result, root = _normalized(x, weight, eps, zero_centered)
        ctx.save_for_backward(x, weight, root)
        ctx.zero_centered = zero_centered
        return result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, root = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:2])
        if ctx.fused:
            return *torch.ops.aten._fused_rms_norm_backward(gradient, x, weight.shape, root, weight, wanted), None, None
        normed, wide = x.float() * root, gradient.float()
        of_x = of_weight = None
        if wanted[1]:
            of_weight = (wide * normed).flatten(0, -2).sum(0).to(weight.dtype)
        if wanted[0]:
            inner = wide * (1.0 + weight.float() if ctx.zero_centered else weight.float())
            of_x = (root * (inner - normed * (inner * normed).mean(-1, keepdim=True))).to(x.dtype)
        return of_x, of_weight, None, None


def norm_of(spec: ModelSpec, size: int | None = None) -> RMSNorm:
    """Return a norm of ``size`` channels, or of the hidden states."""
    return RMSNorm(size or spec.hidden_size, spec.norm_eps, zero_centered=spec.zero_centered_norm)


class Attention(nn.Module):
    """Causal grouped-query attention of layer number ``index``, [batch, length, hidden] in and out."""

    def __init__(self, spec: ModelSpec, index: int) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        queries, keys = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
        self.widths = (queries, keys, keys)
        self.fused = spec.fused_projections
        if self.fused:
            self.qkv_proj = nn.Linear(spec.hidden_size, sum(self.widths), bias=spec.has_qkv_bias)
        else:
            self.q_proj = nn.Linear(spec.hidden_size, queries, bias=spec.has_qkv_bias)
            self.k_proj = nn.Linear(spec.hidden_size, keys, bias=spec.has_qkv_bias)
            self.v_proj = nn.Linear(spec.hidden_size, keys, bias=spec.has_qkv_bias)
        self.o_proj = nn.Linear(queries, spec.hidden_size, bias=spec.has_output_bias)
        self.slides = spec.slides(index)
        settings = AttentionSettings(
            scale=None if spec.query_pre_attn_scalar is None else spec.attention_scale,
            window=spec.sliding_window if self.slides else None,
            softcap=spec.attn_logit_softcapping,
        )
        self.core = attention_core(spec.attention_dropout, settings)
        if spec.qk_norm:
            over_heads = spec.qk_norm_scope == "head"
            self.q_norm = norm_of(spec, spec.head_dim if over_heads else queries)
            self.k_norm = norm_of(spec, spec.head_dim if over_heads else keys)
        self.qk_norm = spec.qk_norm_scope if spec.qk_norm else None
        self.sinks = nn.Parameter(torch.zeros(spec.num_attention_heads)) if spec.attention_sinks else None

    def forward(self, x: Tensor, tables: tuple[Tables, Tables], context: TokenContext) -> Tensor:
        """Return what attention adds to the hidden states x; both [batch, length, hidden].

        ``tables``: cosines and sines of the positions for layers with full attention, and for layers with a window.
        """
        batch, length, _ = x.shape
        if self.fused:
            fused, whole = self.qkv_proj(x), sum(self.widths)
            local = [width * fused.shape[-1] // whole for width in self.widths]  # on this tensor rank
            query, key, value = torch.split(fused, local, dim=-1)
            value = value.contiguous()  # saved for the backward pass, without queries and keys before their rotation
        else:
            query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.qk_norm == "projection":
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (part.view(batch, length, -1, self.head_dim) for part in (query, key, value))
        if self.qk_norm == "head":
            query, key = self.q_norm(query), self.k_norm(key)
        own = tables[1] if self.slides else tables[0]
        query, key = rotate(query.transpose(1, 2), own), rotate(key.transpose(1, 2), own)
        mixed = self.core(query, key, value.transpose(1, 2), context, sinks=self.sinks)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """A gated MLP (arXiv:2002.05202)."""

    def __init__(self, spec: ModelSpec, intermediate: int) -> None:
        super().__init__()
        hidden, bias = spec.hidden_size, spec.has_bias
        self.fused = spec.fused_projections
        self.activation: Activation = F.silu if spec.activation == "silu" else gelu_tanh
        if self.fused:
            self.gate_up_proj = nn.Linear(hidden, 2 * intermediate, bias=bias)
        else:
            self.gate_proj = nn.Linear(hidden, intermediate, bias=bias)
            self.up_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.down_proj = nn.Linear(intermediate, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the MLP adds to the hidden states x; both [batch, length, hidden]."""
        if self.fused:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)  # both first: ZeRO-3 breaks a compiled block at each
        return self.down_proj(gated(gate, up, self.activation))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Attention and MLP with residuals, and norms before them, after them, or both.

    Hugging Face's names: ``post_attention_layernorm`` is the norm before the MLP if there are norms only before, and
    that after attention otherwise.
    """

    def __init__(self, spec: ModelSpec, index: int) -> None:
        super().__init__()
        self.self_attn = LatentAttention(spec) if spec.kv_lora_rank else Attention(spec, index)
        shared, self.has_experts = spec.shared_expert_intermediate_size, spec.has_experts(index)
        experts = MoELayer(spec, MLP(spec, shared) if shared else None) if self.has_experts else None
        self.mlp: nn.Module = experts or MLP(spec, spec.intermediate_size)
        self.norm_position = spec.norm_position
        if spec.norm_position != "post":
            self.input_layernorm = norm_of(spec)
        self.post_attention_layernorm = norm_of(spec)
        if spec.norm_position == "pre_and_post":
            self.pre_feedforward_layernorm = norm_of(spec)
        if spec.norm_position != "pre":
            self.post_feedforward_layernorm = norm_of(spec)
        self.attention_dropout = KeyedDropout(spec.hidden_dropout)
        self.mlp_dropout = KeyedDropout(spec.hidden_dropout)

    @property
    def attention(self) -> nn.Module:
        return self.self_attn

    def forward(self, x: Tensor, tables: tuple[Tables, Tables], context: TokenContext) -> Tensor:
        """Return the hidden states after this block, [batch, length, hidden]; ``tables``: as for ``Attention``."""
        if self.norm_position == "pre":
            x = x + self.attention_dropout(self.self_attn(self.input_layernorm(x), tables, context), context)
            mixed = self._feed_forward(self.post_attention_layernorm(x), context)
            return x + self.mlp_dropout(mixed, context)  # type: ignore[no-any-return]
        both = self.norm_position == "pre_and_post"
        mixed = self.self_attn(self.input_layernorm(x) if both else x, tables, context)
        x = x + self.attention_dropout(self.post_attention_layernorm(mixed), context)
        mixed = self._feed_forward(self.pre_feedforward_layernorm(x) if both else x, context)
        return x + self.mlp_dropout(self.post_feedforward_layernorm(mixed), context)  # type: ignore[no-any-return]

    def _feed_forward(self, x: Tensor, context: TokenContext) -> Tensor:
        return self.mlp(x, context.real) if self.has_experts else self.mlp(x)  # type: ignore[no-any-return]


class LlamaModel(nn.Module):
    """Modules with the names of Hugging Face's inner model: embedding, decoder layers by number, final norm."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.dropout = KeyedDropout(spec.hidden_dropout)
        self.layers = nn.ModuleDict({str(index): DecoderLayer(spec, index) for index in range(spec.num_hidden_layers)})
        self.norm = norm_of(spec)


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
        hidden = self.model.embed_tokens(tokens)
        if self.spec.scale_embedding:  # the root is rounded to the dtype, as in transformers
            hidden = hidden * hidden.new_full((), self.spec.hidden_size**0.5)
        return self.model.dropout(hidden, context)  # type: ignore[no-any-return]

    def transform(self, hidden: Tensor, context: TokenContext) -> Tensor:
        longest = self.longest(context.real_positions) if depends_on_longest(self.spec) else None
        tables = tables_of_layers(self.spec, context.positions, longest)
        for layer in self.blocks.values():
            hidden = layer(hidden, tables, context)
        return hidden

    def final_norm(self, hidden: Tensor) -> Tensor:
        return self.model.norm(hidden)  # type: ignore[no-any-return]
