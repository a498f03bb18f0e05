"""GPT-2 and GPT-3: learned positions, LayerNorm, GELU, biases everywhere, tied head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaletrain_cli.engine.model.attention import KeyedDropout, TokenContext, attention_core
from scaletrain_cli.engine.model.base import CausalLM
from scaletrain_cli.engine.model.linear import Product, linear_product
from scaletrain_cli.spec import ModelSpec


class Conv1D(nn.Module):
    """A linear layer whose weight is [in, out], as in Hugging Face's GPT-2 files."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.product: Product = linear_product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias, transposed=True)


class Attention(nn.Module):
    """Causal multi-head attention with one fused projection, [batch, length, hidden] in and out."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        width = spec.num_attention_heads * spec.head_dim
        self.c_attn = Conv1D(spec.hidden_size, 3 * width)
        self.c_proj = Conv1D(width, spec.hidden_size)
        self.core = attention_core(spec.attention_dropout)

    def forward(self, x: Tensor, context: TokenContext) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            part.view(batch, length, -1, self.head_dim).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=-1)
        )
        mixed = self.core(query, key, value, context)
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
        self.attention_dropout = KeyedDropout(spec.hidden_dropout)
        self.mlp_dropout = KeyedDropout(spec.hidden_dropout)

    @property
    def attention(self) -> nn.Module:
        return self.attn

    def forward(self, x: Tensor, context: TokenContext) -> Tensor:
        x = x + self.attention_dropout(self.attn(self.ln_1(x), context), context)
        return x + self.mlp_dropout(self.mlp(self.ln_2(x)), context)  # type: ignore[no-any-return]


class GPT2Model(nn.Module):
    """Modules with the names of Hugging Face's inner model: embeddings, blocks by number, final norm."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.wte = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.wpe = nn.Embedding(spec.max_position_embeddings, spec.hidden_size)
        self.drop = KeyedDropout(spec.hidden_dropout)
        self.h = nn.ModuleDict({str(index): Block(spec) for index in range(spec.num_hidden_layers)})
        self.ln_f = nn.LayerNorm(spec.hidden_size, eps=spec.norm_eps)


class GPT2LMHeadModel(CausalLM):
    """A GPT, in the parts of ``CausalLM``."""

    residual_projections = ("c_proj.weight",)
    opening = ("transformer.wte", "transformer.wpe")
    closing = ("transformer.ln_f", "lm_head")

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.transformer = GPT2Model(spec)
        self.add_head()

    @property
    def blocks(self) -> nn.ModuleDict:
        return self.transformer.h

    def embed(self, tokens: Tensor, context: TokenContext) -> Tensor:
        hidden = self.transformer.wte(tokens) + self.transformer.wpe(context.positions)
        return self.transformer.drop(hidden, context)  # type: ignore[no-any-return]

    def transform(self, hidden: Tensor, context: TokenContext) -> Tensor:
        for block in self.blocks.values():
            hidden = block(hidden, context)
        return hidden

    def final_norm(self, hidden: Tensor) -> Tensor:
        return self.transformer.ln_f(hidden)  # type: ignore[no-any-return]
