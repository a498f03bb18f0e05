"""Parameter counts and FLOPs against torch modules on the meta device, for every trait that a transformer may have."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from scaletrain_cli.plan.architecture import active_parameter_count, parameter_count, training_flops_per_token
from scaletrain_cli.spec import ModelSpec
from tests.model_sizes import model_sizes
from tests.plan.specs import model_of

SMALL = model_sizes(
    hidden=64, layers=3, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=101, seq_len=32, positions=40
)
TRAITS: list[dict[str, Any]] = [
    {"gated_mlp": gated, "norm": norm, "bias": bias, "position_embedding": positions, "tie_word_embeddings": tied}
    for gated, norm, bias, positions, tied in itertools.product(
        (True, False), ("rmsnorm", "layernorm"), (True, False), ("rotary", "learned"), (True, False)
    )
]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4}
TRAITS += [
    {"qk_norm": True},
    {"qkv_bias": True},
    {"norm": "layernorm", "norm_bias": False, "embedding_norm": True, "position_embedding": "alibi"},
    EXPERTS,
    EXPERTS | {"gated_mlp": False, "bias": True},
    EXPERTS | {"shared_expert_intermediate_size": 80, "first_k_dense_replace": 1},
    LATENT,
    LATENT | EXPERTS | {"q_lora_rank": 20, "shared_expert_intermediate_size": 48, "first_k_dense_replace": 2},
]


def small(traits: dict[str, Any]) -> ModelSpec:
    return model_of("llama-7b", **SMALL | traits)


class Norm(nn.Module):
    def __init__(self, model: ModelSpec, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        if model.has_norm_bias:
            self.bias = nn.Parameter(torch.empty(size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.weight


class Attention(nn.Module):
    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.model = model
        hidden, dim, heads = model.hidden_size, model.head_dim, model.num_attention_heads
        keys = model.num_key_value_heads * dim
        bias = model.has_bias or model.qkv_bias
        self.q = nn.Linear(hidden, heads * dim, bias=bias)
        self.k = nn.Linear(hidden, keys, bias=bias)
        self.v = nn.Linear(hidden, keys, bias=bias)
        self.o = nn.Linear(heads * dim, hidden, bias=model.has_bias)
        if model.qk_norm:
            self.q_norm, self.k_norm = (nn.Parameter(torch.empty(dim)) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        model, (batch, length, _) = self.model, hidden.shape
        repeats = model.num_attention_heads // model.num_key_value_heads
        query = self.q(hidden).view(batch, length, -1, model.head_dim).transpose(1, 2)
        key, value = (
            project(hidden).view(batch, length, -1, model.head_dim).transpose(1, 2).repeat_interleave(repeats, 1)
            for project in (self.k, self.v)
        )
        mixed = (query @ key.transpose(2, 3)) @ value
        return self.o(mixed.transpose(1, 2).reshape(batch, length, -1))


class LatentAttention(nn.Module):
    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.model = model
        hidden, heads, latent = model.hidden_size, model.num_attention_heads, model.kv_lora_rank
        wide = heads * (model.head_dim + model.qk_rope_head_dim)
        if model.q_lora_rank:
            self.q_down = nn.Linear(hidden, model.q_lora_rank, bias=False)
            self.q_norm = nn.Parameter(torch.empty(model.q_lora_rank))
        self.q_up = nn.Linear(model.q_lora_rank or hidden, wide, bias=False)
        self.kv_down = nn.Linear(hidden, latent + model.qk_rope_head_dim, bias=False)
        self.kv_norm = nn.Parameter(torch.empty(latent))
        self.kv_up = nn.Linear(latent, heads * (model.head_dim + model.v_head_dim), bias=False)
        self.o = nn.Linear(heads * model.v_head_dim, hidden, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        model, (batch, length, _) = self.model, hidden.shape
        narrow = self.q_down(hidden) if model.q_lora_rank else hidden
        query = self.q_up(narrow).view(batch, length, model.num_attention_heads, -1).transpose(1, 2)
        latent, turned = self.kv_down(hidden).split([model.kv_lora_rank, model.qk_rope_head_dim], -1)
        both = self.kv_up(latent).view(batch, length, model.num_attention_heads, -1).transpose(1, 2)
        key, value = both.split([model.head_dim, model.v_head_dim], -1)
        key = torch.cat([key, turned[:, None].expand(-1, model.num_attention_heads, -1, -1)], -1)
        mixed = (query @ key.transpose(2, 3)) @ value
        return self.o(mixed.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self, model: ModelSpec, inner: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(
            nn.Linear(model.hidden_size, inner, bias=model.has_bias) for _ in range(2 if model.has_gated_mlp else 1)
        )
        self.down = nn.Linear(inner, model.hidden_size, bias=model.has_bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(torch.stack([up(hidden) for up in self.up]).sum(0))


class Mixture(nn.Module):
    """Every token to the first experts: as much work as any routing."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.met = model.num_experts_per_tok
        self.router = nn.Linear(model.hidden_size, model.num_experts, bias=False)
        self.experts = nn.ModuleList(Mlp(model, model.moe_intermediate_size) for _ in range(model.num_experts))
        shared = model.shared_expert_intermediate_size
        self.shared = Mlp(model, shared) if shared else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights = self.router(hidden)
        mixed = sum(expert(hidden) * weights[..., :1] for expert in list(self.experts)[: self.met])
        return mixed + self.shared(hidden) if self.shared else mixed


class Transformer(nn.Module):
    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        hidden = model.hidden_size
        self.embedding = nn.Embedding(model.vocab_size, hidden)
        self.positions = nn.Embedding(model.max_position_embeddings, hidden) if model.positions == "learned" else None
        self.embedding_norm = Norm(model, hidden) if model.embedding_norm else None
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                [
                    Norm(model, hidden),
                    LatentAttention(model) if model.kv_lora_rank else Attention(model),
                    Norm(model, hidden),
                    Mixture(model)
                    if model.num_experts and layer >= model.first_k_dense_replace
                    else Mlp(model, model.intermediate_size),
                ]
            )
            for layer in range(model.num_hidden_layers)
        )
        self.norm = Norm(model, hidden)
        self.head = nn.Linear(hidden, model.vocab_size, bias=False)
        if model.tie_word_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for first_norm, attention, second_norm, mlp in self.blocks:
            hidden = hidden + attention(first_norm(hidden))
            hidden = hidden + mlp(second_norm(hidden))
        return self.head(self.norm(hidden))


@pytest.mark.parametrize("traits", TRAITS, ids=lambda traits: "-".join(map(str, traits.values())))
def test_a_model_has_as_many_parameters_as_its_torch_modules(traits: dict[str, Any]) -> None:
    model = small(traits)
    with torch.device("meta"):
        modules = Transformer(model)
    assert parameter_count(model) == sum(parameter.numel() for parameter in modules.parameters())


@pytest.mark.parametrize("traits", [{}, {"gated_mlp": False}, *TRAITS[-5:]], ids=lambda traits: "-".join(traits))
def test_the_flops_are_those_that_torch_counts(traits: dict[str, Any]) -> None:
    model = small(traits)
    with torch.device("meta"):
        modules, tokens = Transformer(model), torch.zeros(2, model.seq_len, dtype=torch.long)
        with FlopCounterMode(display=False) as counted:
            modules(tokens)
    assert training_flops_per_token(model) == 3 * counted.get_total_flops() / tokens.numel()


def test_a_token_uses_only_the_shared_experts_and_those_it_is_routed_to() -> None:
    model = small(EXPERTS | {"shared_expert_intermediate_size": 80, "first_k_dense_replace": 1})
    idle = 2 * 2 * 3 * model.hidden_size * model.moe_intermediate_size
    assert active_parameter_count(model) == parameter_count(model) - idle
