"""Parameters of every trait that a transformer may have, written out; counts and FLOPs of transformers' models."""

import itertools
from typing import Any

import pytest

from scaletrain_cli.plan.architecture import active_parameter_count, parameter_count, training_flops_per_token
from scaletrain_cli.spec import ModelSpec
from scaletrain_cli.spec.hugging_face_weights import to_hugging_face
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
SHARED = EXPERTS | {"shared_expert_intermediate_size": 80, "first_k_dense_replace": 1}
LATENT = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4}
TRAITS += [
    {"qk_norm": True},
    {"qkv_bias": True},
    {"norm": "layernorm", "norm_bias": False, "embedding_norm": True, "position_embedding": "alibi"},
    EXPERTS,
    EXPERTS | {"gated_mlp": False, "bias": True},
    SHARED,
    LATENT,
    SHARED | LATENT | {"q_lora_rank": 20},
]
OF_TRANSFORMERS: list[tuple[str, dict[str, Any]]] = [
    ("llama-7b", {}),
    ("gpt2", {"num_key_value_heads": 4}),
    ("mixtral-8x7b", EXPERTS),
    ("gpt-oss-20b", EXPERTS),
    ("llama-7b", LATENT),
    ("deepseek-v2-lite", SHARED | LATENT | {"shared_expert_intermediate_size": 96}),
    (
        "deepseek-v3",
        SHARED | LATENT | {"q_lora_rank": 20, "shared_expert_intermediate_size": 48, "n_group": 2, "topk_group": 1},
    ),
]


def small(traits: dict[str, Any]) -> ModelSpec:
    return model_of("llama-7b", **SMALL | traits)


def linear(inputs: int, outputs: int, bias: bool) -> int:
    return inputs * outputs + (outputs if bias else 0)


def attention(model: ModelSpec) -> int:
    hidden, dim, heads = model.hidden_size, model.head_dim, model.num_attention_heads
    if model.kv_lora_rank:
        turned, latent, rank, of_value = model.qk_rope_head_dim, model.kv_lora_rank, model.q_lora_rank, model.v_head_dim
        assert of_value is not None
        queries = hidden * rank + rank if rank else 0
        queries += (rank or hidden) * heads * (dim + turned)
        return queries + hidden * (latent + turned) + latent + heads * (latent * (dim + of_value) + of_value * hidden)
    biased = model.has_bias or model.qkv_bias
    keys_and_values = 2 * linear(hidden, model.num_key_value_heads * dim, biased) + (2 * dim if model.qk_norm else 0)
    return linear(hidden, heads * dim, biased) + keys_and_values + linear(heads * dim, hidden, model.has_bias)


def written_out(model: ModelSpec) -> int:
    hidden = model.hidden_size

    def mlp(inner: int) -> int:
        ups = (2 if model.has_gated_mlp else 1) * linear(hidden, inner, model.has_bias)
        return ups + linear(inner, hidden, model.has_bias)

    sparse = model.num_hidden_layers - model.first_k_dense_replace if model.num_experts else 0
    experts = model.num_experts * (hidden + mlp(model.moe_intermediate_size or 0))
    experts += mlp(model.shared_expert_intermediate_size) if model.shared_expert_intermediate_size else 0
    norm = hidden * (2 if model.has_norm_bias else 1)
    blocks = model.num_hidden_layers * (attention(model) + 2 * norm) + sparse * experts
    blocks += (model.num_hidden_layers - sparse) * mlp(model.intermediate_size)
    tables = model.vocab_size * (1 if model.tie_word_embeddings else 2)
    tables += model.max_position_embeddings if model.positions == "learned" else 0
    return tables * hidden + blocks + norm * (2 if model.embedding_norm else 1)


@pytest.mark.parametrize("traits", TRAITS, ids=lambda traits: "-".join(map(str, traits.values())))
def test_a_model_has_the_parameters_of_its_traits(traits: dict[str, Any]) -> None:
    assert parameter_count(small(traits)) == written_out(small(traits))


@pytest.mark.parametrize(("preset", "sizes"), OF_TRANSFORMERS, ids=[f"{name}-{len(s)}" for name, s in OF_TRANSFORMERS])
def test_parameters_and_flops_are_those_of_transformers(preset: str, sizes: dict[str, Any]) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    model = model_of(preset, **SMALL | sizes)
    config = transformers.AutoConfig.for_model(**to_hugging_face(model))
    config._attn_implementation = config._experts_implementation = "eager"  # whose products torch counts
    theirs, tokens = transformers.AutoModelForCausalLM.from_config(config), torch.zeros(2, 32, dtype=torch.long)
    assert parameter_count(model) == sum(parameter.numel() for parameter in theirs.parameters())
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        theirs(tokens)
    assert training_flops_per_token(model) == 3 * counted.get_total_flops() / tokens.numel()


def test_a_token_uses_only_the_shared_experts_and_those_it_is_routed_to() -> None:
    model = small(SHARED)
    idle = 2 * 2 * 3 * model.hidden_size * model.moe_intermediate_size
    assert active_parameter_count(model) == parameter_count(model) - idle
