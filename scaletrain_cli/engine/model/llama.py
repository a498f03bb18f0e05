"""Llama and its relatives: RMSNorm, rotary positions, grouped-query attention, a gated MLP.

One implementation for Llama, Mistral, Mixtral, Qwen 2 and 3 (dense and MoE), Gemma 2 and 3, Phi-3, OLMo 2, DeepSeek-V2
and V3, and GPT-OSS, whose differences are settings of the ``ModelSpec``. Modules have the names of the architecture
whose settings they have, in Hugging Face's files.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaletrain_cli.engine.model.attention import AttentionSettings, KeyedDropout, TokenContext, attention_core
from scaletrain_cli.engine.model.base import CausalLM
from scaletrain_cli.engine.model.latent_attention import LatentAttention
from scaletrain_cli.engine.model.linear import Activation, gated, gelu_tanh
from scaletrain_cli.engine.model.moe import MoELayer
from scaletrain_cli.engine.model.norm import RMSNorm
from scaletrain_cli.engine.model.rope import Tables, depends_on_longest, rotate, tables_of_layers
from scaletrain_cli.spec import ModelSpec


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
