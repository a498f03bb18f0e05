from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scaletrain_cli.plan.adapters import adapter_rules, quantization_rules, quantized_layout_rules
from scaletrain_cli.plan.parameters import base_shapes, model_parameters, modules_with_adapter
from scaletrain_cli.spec import ModelSpec, parse_spec
from scaletrain_cli.spec.adapter import AdapterSpec, unmatched_targets
from tests.model_sizes import model_sizes
from tests.spec.samples import SPEC

SIZES: dict[str, Any] = {
    **model_sizes(
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=14336,
        vocab=128256,
        seq_len=8192,
        positions=8192,
    ),
    "family": "llama",
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
def test_settings_that_a_model_lacks_are_refused(settings: dict[str, Any], key: str | None, code: str | None) -> None:
    expected = [] if key is None else [(f"model.adapter.{key}", code)]

    assert [(rule.key, rule.code) for rule in adapter_rules(model(experts=4, **settings))] == expected


def test_a_pattern_matches_whole_names_and_endings_only() -> None:
    spec = model(targets=["model.layers.*.q_proj", "self_attn.v_proj", "_proj", "layers"])

    assert unmatched_targets(spec.adapter, base_shapes(spec)) == ["_proj", "layers"]
    assert {module.name.rpartition(".")[2] for module in modules_with_adapter(spec)} == {"q_proj", "v_proj"}


QUANTIZED = ("model.quantization=nf4", "model.weights=weights", "cluster.gpu=h100-sxm-80gb")
ADAPTER = "model.adapter={name: lora}"
CASES: list[tuple[tuple[str, ...], list[str]]] = [
    ((*QUANTIZED, ADAPTER), []),
    ((*QUANTIZED, "training.trainable=[{match: '*norm*'}]"), []),
    ((*QUANTIZED[:2], ADAPTER), ["quantization-needs-cuda"]),
    ((QUANTIZED[0], QUANTIZED[2], ADAPTER), ["quantization-needs-weights"]),
    (QUANTIZED, ["quantization-needs-frozen-linears"]),
    ((*QUANTIZED, ADAPTER, "training.trainable=[{match: '*.mlp.*'}]"), ["quantization-needs-frozen-linears"]),
    ((*QUANTIZED, "model.adapter={name: lora, dora: true}"), ["quantization-without-dora"]),
    ((*QUANTIZED, ADAPTER, "training.precision=fp8"), ["quantization-without-fp8"]),
]


@pytest.mark.parametrize(("overrides", "codes"), CASES)
def test_a_quantized_base_is_refused_where_it_cannot_run(overrides: tuple[str, ...], codes: list[str]) -> None:
    spec = parse_spec(SPEC, file="run.yaml", base_dir=Path(), overrides=["cluster.gpu=cpu", *overrides])

    assert [rule.code for rule in quantization_rules(spec)] == codes


def test_a_quantized_base_is_not_sharded_by_zero_3() -> None:
    spec = parse_spec(SPEC, file="run.yaml", base_dir=Path(), overrides=[*QUANTIZED, ADAPTER])
    layout = SimpleNamespace(zero_stage=3)

    found: list[Any] = list(quantized_layout_rules(spec, layout))  # type: ignore[arg-type]

    assert [(rule.key, rule.given) for rule in found] == [("layout.zero_stage", 3)]
