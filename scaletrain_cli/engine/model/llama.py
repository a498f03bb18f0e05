"""Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU. Also Mistral and Qwen2/3."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaletrain_cli.engine.model.loss import next_token_loss
from scaletrain_cli.spec import ModelSpec


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32 (arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


def rotary_tables(length: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [length, head_dim] (arXiv:2104.09864). Not buffers: a cast to bf16 would ruin them."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the halves of each head, [batch, heads, length, head_dim], in Hugging Face's pairing of channels."""
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
        self.grouped = kv_heads != heads
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps)
            self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps)
        self.qk_norm = spec.qk_norm

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            projection(x).view(batch, length, -1, self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query.transpose(1, 2), tables), rotate(key.transpose(1, 2), tables)
        mixed = F.scaled_dot_product_attention(
            query, key, value.transpose(1, 2), is_causal=True, enable_gqa=self.grouped
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP with residuals."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.self_attn = Attention(spec)
        self.mlp = MLP(spec)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), tables)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class LlamaModel(nn.Module):
    """Embedding, decoder layers and final norm; tokens [batch, length] to hidden states [batch, length, hidden]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(spec) for _ in range(spec.num_hidden_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        tables = rotary_tables(tokens.shape[1], self.spec.head_dim, self.spec.rope_theta, x.device)
        for layer in self.layers:
            x = layer(x, tables)
        return self.norm(x)  # type: ignore[no-any-return]


class LlamaForCausalLM(nn.Module):
    """Mean next-token cross-entropy in nats, for tokens and labels of shape [batch, length]."""

    residual_projections = ("o_proj.weight", "down_proj.weight")

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.model = LlamaModel(spec)
        self.tied = spec.tie_word_embeddings
        if not self.tied:
            self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)

    def blocks(self) -> Iterable[nn.Module]:
        """The repeated blocks, in order."""
        return self.model.layers

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.model(tokens)
        weight = self.model.embed_tokens.weight if self.tied else self.lm_head.weight
        return next_token_loss(hidden, weight, labels)
