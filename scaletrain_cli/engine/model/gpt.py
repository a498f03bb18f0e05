"""GPT-2 and GPT-3: learned positions, LayerNorm, GELU, biases everywhere, tied head. No dropout."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaletrain_cli.engine.model.loss import next_token_loss
from scaletrain_cli.spec import ModelSpec


class Conv1D(nn.Module):
    """A linear layer whose weight is [in, out], as in Hugging Face's GPT-2 files."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)


class Attention(nn.Module):
    """Causal multi-head attention with one fused projection, [batch, length, hidden] in and out."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        width = spec.num_attention_heads * spec.head_dim
        self.c_attn = Conv1D(spec.hidden_size, 3 * width)
        self.c_proj = Conv1D(width, spec.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            part.view(batch, length, -1, self.head_dim).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Two layers with the tanh form of GELU."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.c_fc = Conv1D(spec.hidden_size, spec.intermediate_size)
        self.c_proj = Conv1D(spec.intermediate_size, spec.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Pre-norm attention and MLP with residuals."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(spec.hidden_size, eps=spec.norm_eps)
        self.attn = Attention(spec)
        self.ln_2 = nn.LayerNorm(spec.hidden_size, eps=spec.norm_eps)
        self.mlp = MLP(spec)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


class GPT2Model(nn.Module):
    """Embeddings, blocks and final norm; tokens [batch, length] to hidden states [batch, length, hidden]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.wte = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.wpe = nn.Embedding(spec.max_position_embeddings, spec.hidden_size)
        self.h = nn.ModuleList(Block(spec) for _ in range(spec.num_hidden_layers))
        self.ln_f = nn.LayerNorm(spec.hidden_size, eps=spec.norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.ln_f(x)  # type: ignore[no-any-return]


class GPT2LMHeadModel(nn.Module):
    """Mean next-token cross-entropy in nats, for tokens and labels of shape [batch, length]."""

    residual_projections = ("c_proj.weight",)

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.transformer = GPT2Model(spec)
        self.tied = spec.tie_word_embeddings
        if not self.tied:
            self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)

    def blocks(self) -> Iterable[nn.Module]:
        """The repeated blocks, in order."""
        return self.transformer.h

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.transformer(tokens)
        weight = self.transformer.wte.weight if self.tied else self.lm_head.weight
        return next_token_loss(hidden, weight, labels)
