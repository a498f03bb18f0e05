"""Factors of adapters in the planner's list of parameters, and adapters that a model does not support."""

from typing import Any

import pytest

from scaletrain_cli.plan.adapters import adapter_rules
from scaletrain_cli.plan.parameters import base_shapes, model_parameters, modules_with_adapter
from scaletrain_cli.spec import ModelSpec
from scaletrain_cli.spec.adapter import AdapterSpec, unmatched_targets

SIZES: dict[str, Any] = {
    "family": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "seq_len": 8192,
    "max_position_embeddings": 8192,
}


def model(**settings: Any) -> ModelSpec:
    experts = settings.pop("experts", 0)
    sizes = {**SIZES, "num_experts": experts, "num_experts_per_tok": 2 if experts else 0}
    return ModelSpec(**sizes, adapter=AdapterSpec(name="lora", **settings))


def test_an_adapter_of_rank_16_on_llama_3_8b_has_the_parameters_that_peft_counts() -> None:
    factors = [parameter for parameter in model_parameters(model(rank=16)) if parameter.adapter]

    assert sum(parameter.numel for parameter in factors) == 41_943_040
    assert len(factors) == 2 * 7 * 32


def test_tensor_ranks_shard_b_of_sharded_outputs_and_a_of_sharded_inputs() -> None:
    dims = {parameter.name: parameter.tensor_dim for parameter in model_parameters(model(experts=4, targets=["*"]))}

    block = "model.layers.3"
    assert dims[f"{block}.self_attn.k_proj.lora_A.weight"] is None
    assert dims[f"{block}.self_attn.k_proj.lora_B.weight"] == 0
    assert dims[f"{block}.self_attn.o_proj.lora_A.weight"] == 1
    assert dims[f"{block}.self_attn.o_proj.lora_B.weight"] is None
    assert dims[f"{block}.mlp.experts.2.gate_up_proj.lora_A.weight"] is None
    assert dims[f"{block}.mlp.experts.2.up_proj.lora_B.weight"] == 0
    assert dims[f"{block}.mlp.experts.2.down_proj.lora_A.weight"] == 1
    assert dims["model.embed_tokens.lora_embedding_A"] == 1
    assert dims["lm_head.lora_B.weight"] == 0


@pytest.mark.parametrize(
    ("settings", "key", "code"),
    [
        ({"targets": ["q_proj", "query"]}, "targets", "adapter-matches-nothing"),
        ({"targets": ["gate"]}, "targets", "adapter-matches-nothing"),  # a router
        ({"targets": ["experts.*"], "dropout": 0.1}, "dropout", "adapter-on-experts"),
        ({"targets": ["experts.*"], "dora": True}, "dora", "adapter-on-experts"),
        ({"targets": ["experts.down_proj"], "rank": 4}, "rank", "adapter-rank-on-experts"),
        ({"targets": ["lm_head"], "dora": True}, "dora", "dora-on-embeddings"),
        ({"targets": ["q_proj"], "dora": True, "dropout": 0.1, "rank": 3}, None, None),
    ],
)
def test_settings_that_a_model_does_not_support_are_refused(
    settings: dict[str, Any], key: str | None, code: str | None
) -> None:
    expected = [] if key is None else [(f"model.adapter.{key}", code)]

    assert [(rule.key, rule.code) for rule in adapter_rules(model(experts=4, **settings))] == expected


def test_a_pattern_matches_whole_names_and_endings_only() -> None:
    spec = model(targets=["model.layers.*.q_proj", "self_attn.v_proj", "_proj", "layers"])
    assert spec.adapter is not None

    assert unmatched_targets(spec.adapter, base_shapes(spec)) == ["_proj", "layers"]
    assert {module.name.rpartition(".")[2] for module in modules_with_adapter(spec)} == {"q_proj", "v_proj"}
