"""Counts and FLOPs of transformers' models."""

from typing import Any

import pytest

from scaletrain_cli.plan.architecture import active_parameter_count, parameter_count, training_flops_per_token
from scaletrain_cli.spec.hugging_face_weights import to_hugging_face
from tests.model_sizes import model_sizes
from tests.plan.specs import model_of

SMALL = model_sizes(
    hidden=64, layers=3, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=101, seq_len=32, positions=40
)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 80, "first_k_dense_replace": 1}
LATENT = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4}
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
    model = model_of("llama-7b", **SMALL | SHARED)
    idle = 2 * 2 * 3 * model.hidden_size * model.moe_intermediate_size
    assert active_parameter_count(model) == parameter_count(model) - idle
