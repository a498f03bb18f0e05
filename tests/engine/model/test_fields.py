from functools import cache
from typing import Any

import pytest
import torch

from scaletrain_cli.plan import make_plan
from scaletrain_cli.plan.architecture import architecture
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.search.engine_support import unsupported
from scaletrain_cli.spec import ModelSpec, RunSpec
from scaletrain_cli.spec.rope import RopeScalingSpec
from tests.engine.fresh_model import build_model
from tests.engine.model.test_models import GPT, LLAMA
from tests.model_sizes import model_sizes
from tests.spec.samples import load

EXPERTS = {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {**LLAMA, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "v_head_dim": 12}
BASES: dict[str, dict[str, Any]] = {"llama": LLAMA, "gpt": GPT, "mixture": EXPERTS, "latent": LATENT}
# Another valid value of each field.
CHANGED: dict[str, Any] = {
    **model_sizes(hidden=128, layers=2, heads=8, kv_heads=1, head_dim=32, intermediate=64, vocab=640, positions=64),
    **dict.fromkeys("tie_word_embeddings qkv_bias attention_bias fused_projections qk_norm".split(), True),
    **dict.fromkeys("attention_sinks scale_embedding zero_centered_norm norm_topk_prob".split(), True),
    **dict.fromkeys("shared_expert_gate router_bias embedding_norm".split(), True),
    **dict.fromkeys("hidden_activation gated_mlp norm norm_bias bias".split(), "other"),
    **dict.fromkeys("partial_rotary_factor initializer_range capacity_factor".split(), 0.5),
    **dict.fromkeys("hidden_dropout attention_dropout".split(), 0.5),
    **dict.fromkeys("num_experts kv_lora_rank q_lora_rank qk_rope_head_dim v_head_dim index_topk".split(), 8),
    **dict.fromkeys("moe_intermediate_size shared_expert_intermediate_size attention_chunk_size".split(), 16),
    **dict.fromkeys("num_experts_per_tok first_k_dense_replace".split(), 1),
    **dict.fromkeys("decoder_sparse_step n_group topk_group".split(), 2),
    **{"qk_norm_scope": "projection", "norm_position": "pre_and_post", "position_embedding": "alibi"},
    **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": False, "mlp_only_layers": (0,)},
    **{"attn_logit_softcapping": 0.1, "final_logit_softcapping": 0.01, "norm_eps": 0.1, "swiglu_limit": 1.0},
    **{"query_pre_attn_scalar": 3.0, "rope_local_base_freq": 3.0, "rope_theta": 50.0, "routed_scaling_factor": 2.5},
    **{"sliding_window": 4, "layer_types": ("sliding_attention", "full_attention"), "block_types": ("mamba", "mlp")},
    "rope_scaling": RopeScalingSpec(rope_type="linear", factor=4.0),
}
ELSEWHERE = {
    "family": "is the base",
    "preset": "only a record",
    "text_of": "only a record",
    "planned_architecture": "tests/plan/test_current_models.py",
    "mamba": "beside block_types",
    "index_n_heads": "beside index_topk",
    "index_head_dim": "beside index_topk",
    "seq_len": "the length of the batch",
    "weights": "the first weights",
    "adapter": "tests/engine/model/test_adapters.py",
    "quantization": "of frozen weights, on GPUs",
    "bias_update_speed": "tests/engine/parity/test_parity.py",
    "router_aux_loss_coef": "tests/engine/model/test_moe.py",
    "router_z_loss_coef": "tests/engine/model/test_moe.py",
}
OF_EXPERTS = {"num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob"}
OF_EXPERTS |= {"swiglu_limit", "first_k_dense_replace", "capacity_factor", "num_experts", "intermediate_size"}
OF_EXPERTS |= {"decoder_sparse_step", "mlp_only_layers", "scoring_func", "routed_scaling_factor", "router_bias"}
# Fields that have an effect only beside another one, or after the first step: tests/engine/model/test_families.py and
# test_router.py
BESIDE_ANOTHER = {"qk_norm_scope", "layer_types", "rope_local_base_freq", "zero_centered_norm", "shared_expert_gate"}
BESIDE_ANOTHER |= {"topk_method", "n_group", "topk_group"}
OF_LATENT_ATTENTION = {"q_lora_rank", "qk_rope_head_dim", "v_head_dim", "rope_interleave"}
# Fields that have no part in a family: where the planner leaves them out too.
NO_PART = {
    "llama": OF_EXPERTS | OF_LATENT_ATTENTION | BESIDE_ANOTHER | {"max_position_embeddings"},
    "gpt": OF_EXPERTS
    | OF_LATENT_ATTENTION
    | BESIDE_ANOTHER
    | {"rope_theta", "rope_scaling", "tie_word_embeddings", "partial_rotary_factor"},
    "mixture": OF_LATENT_ATTENTION | BESIDE_ANOTHER | {"max_position_embeddings", "intermediate_size"},
    "latent": OF_EXPERTS | BESIDE_ANOTHER | {"max_position_embeddings"},
}
NO_PART["latent"] -= {"intermediate_size"}
NO_PART["llama"] -= {"intermediate_size"}  # experts are those of the mixture
NO_PART["gpt"] -= {"intermediate_size", "num_experts"}


def other(name: str, base: ModelSpec) -> Any:
    changes = {"gated_mlp": not base.has_gated_mlp, "norm_bias": not base.has_norm_bias, "bias": not base.has_bias}
    changes["norm"] = "layernorm" if base.norm_kind == "rmsnorm" else "rmsnorm"
    changes["hidden_activation"] = "gelu_pytorch_tanh" if base.activation == "silu" else "silu"
    return changes.get(name) if CHANGED[name] == "other" else CHANGED[name]


def output(spec: ModelSpec) -> tuple[int, float]:
    tokens = torch.arange(32).view(1, -1) * 7 % 500
    model = build_model(spec, seed=0)
    with torch.no_grad():
        return sum(parameter.numel() for parameter in model.parameters()), model(tokens, tokens).item()


def refused(spec: ModelSpec) -> list[str]:
    run = a_run().model_copy(update={"model": spec})
    return [rule.text for rule in unsupported(run, a_layout()) if rule.key.startswith("model.")]


@cache
def a_run() -> RunSpec:
    return load()


@cache
def a_layout() -> Layout:
    return make_plan(a_run()).layout


@pytest.mark.parametrize("family", BASES)
def test_every_model_field_changes_the_model_or_is_rejected(family: str) -> None:
    assert CHANGED.keys() | ELSEWHERE.keys() == ModelSpec.model_fields.keys()
    base = ModelSpec.model_validate(BASES[family])
    before = output(base)
    in_silence = set()
    for name in CHANGED.keys() - NO_PART[family]:
        changed = base.model_copy(update={name: other(name, base)})
        if refused(changed):
            continue
        after = output(changed)
        assert after[0] == architecture(changed).parameters, f"{name} is planned otherwise than it is trained"
        if after == before:
            in_silence.add(name)
    assert not in_silence, f"the engine trains the same without a word: {in_silence}"


def test_grouped_queries_of_a_gpt_are_rejected_with_a_remedy() -> None:
    assert refused(ModelSpec.model_validate({**GPT, "num_key_value_heads": 2})) == [
        "model.num_key_value_heads = 2: this engine's gpt models have one key-value head per attention head. "
        "Use 4, or family: llama."
    ]
