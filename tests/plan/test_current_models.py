"""Current models from their config.json: counts of transformers' modules, attention by a plain loop, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.errors import InfeasibleError
from scaletrain_cli.plan import submittable
from scaletrain_cli.plan.architecture import (
    architecture,
    attention_flops,
    mamba_flops,
    mean_block_flops,
    parameter_count,
    training_flops_per_token,
    window_keys,
)
from scaletrain_cli.plan.memory.activations import token_activations
from scaletrain_cli.plan.memory.block_activations import BlockKernels
from scaletrain_cli.plan.parameters import model_parameters
from scaletrain_cli.plan.planning import make_plan
from scaletrain_cli.plan.stages import engine_stages, stage_shard
from scaletrain_cli.spec import ModelSpec
from scaletrain_cli.spec.hugging_face import from_config
from scaletrain_cli.spec.loading import complete
from scaletrain_cli.spec.presets import hub_presets, presets
from tests.plan.specs import DATA_ALONE, model_of, spec_of

CONFIGS = Path(__file__).parents[1] / "spec/hugging_face"
# Folders of CONFIGS by preset.
CURRENT = {
    "gpt-oss-20b": "gpt_oss",
    "gpt-oss-120b": "gpt_oss_120b",
    "qwen3-235b-a22b": "qwen3_235b",
    "kimi-k2": "kimi_k2",
    "deepseek-v3": "deepseek_v31",
    "deepseek-v3.2": "deepseek_v32",
    "llama-4-scout": "llama4_scout",
    "llama-4-maverick": "llama4_maverick",
    "gemma-3-4b": "gemma3_4b",
    "gemma-3-12b": "gemma3_12b",
    "gemma-3-27b": "gemma3_27b",
    "nemotron-4-340b": "nemotron4_340b",
    "llama-3.1-70b": "llama_nemotron_70b",
    "nemotron-h-8b": "nemotron_h_8b",
    "nemotron-3-nano-30b-a3b": "nemotron3_nano_30b",
    "jamba-v0.1": "jamba",
}
HYBRID = ("nemotron-h-8b", "nemotron-3-nano-30b-a3b", "jamba-v0.1")


def config_of(folder: str) -> dict[str, Any]:
    return dict(json.loads((CONFIGS / folder / "config.json").read_text()))


def model_from(config: dict[str, Any], **overrides: Any) -> ModelSpec:
    return ModelSpec.model_validate(complete({**from_config(config), **overrides}, Path(), {}))


def count_of_transformers(config: dict[str, Any]) -> int:
    """Return the parameters of transformers' language model of a config.json, built without memory."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    text = dict(config.get("text_config", config))
    kind = text.pop("model_type")
    text = {key: value for key, value in text.items() if key not in ("quantization_config", "auto_map", "_source")}
    theirs = CONFIG_MAPPING["deepseek_v3" if kind == "kimi_k2" else kind](**text)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(theirs)
    return sum(parameter.numel() for parameter in built.parameters())


def smaller(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json with few layers, of each kind at least one."""
    text = dict(config.get("text_config", config))
    if "hybrid_override_pattern" in text:
        text |= {"hybrid_override_pattern": "ME*M-" if "E" in text["hybrid_override_pattern"] else "M-*-M"}
    text["num_hidden_layers"] = 5
    text |= {"layer_types": text["layer_types"][:5]} if text.get("layer_types") else {}
    text |= {"first_k_dense_replace": 2} if "first_k_dense_replace" in text else {}
    return {**config, "text_config": text} if "text_config" in config else text


@pytest.mark.parametrize("layers", ["five layers", pytest.param("every layer", marks=pytest.mark.long)])
@pytest.mark.parametrize("folder", CURRENT.values())
def test_a_model_has_as_many_parameters_as_its_modules_in_transformers(folder: str, layers: str) -> None:
    config = config_of(folder)
    config = config if layers == "every layer" else smaller(config)
    model = model_from(config)
    named = model_parameters(model)
    assert sum(parameter.numel for parameter in named) == parameter_count(model) == count_of_transformers(config)
    assert len({parameter.name for parameter in named}) == len(named)


# Sizes of published models of kinds without a preset, of three blocks.
_FALCON_40B = {"new_decoder_architecture": True, "num_kv_heads": 8, "hidden_size": 8192, "num_attention_heads": 128}
_FALCON_RW = {"alibi": True, "parallel_attn": False, "multi_query": False, "bias": True}
_GLM_46 = {
    **{"hidden_size": 5120, "intermediate_size": 12_288, "moe_intermediate_size": 1536, "n_routed_experts": 160},
    **{"head_dim": 128, "use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 2},
}
_GRANITE = {
    **{"hidden_size": 4096, "intermediate_size": 12_800, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"vocab_size": 49_155, "residual_multiplier": 0.22, "logits_scaling": 16.0, "max_position_embeddings": 4096},
}
_PYTHIA = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "vocab_size": 50_304}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "command r": ("cohere", {}),
    "command r+": ("cohere", {"use_qk_norm": True, "num_key_value_heads": 8, "attention_bias": True}),
    "command r7b": ("cohere2", {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}),
    "falcon 7b": ("falcon", {}),
    "falcon 40b": ("falcon", {**_FALCON_40B, "ffn_hidden_size": 32_768}),
    "falcon one norm": ("falcon", {**_FALCON_40B, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 32_768}),
    "falcon rw": ("falcon", {**_FALCON_RW, "hidden_size": 2048, "num_attention_heads": 32, "ffn_hidden_size": 8192}),
    "gpt-neox": ("gpt_neox", {}),
    "pythia": ("gpt_neox", _PYTHIA),
    "starcoder2": ("starcoder2", {"sliding_window": 4096}),
    "glm-4": ("glm4", {}),
    "glm-4.6": ("glm4_moe", _GLM_46),
    "smollm3": ("smollm3", {}),
    "granite": ("granite", _GRANITE),
    "minimax m2": ("minimax_m2", {}),
    "gemma": ("gemma", {}),
    "olmo 3": ("olmo3", {}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_kind_without_a_preset_is_counted_like_its_modules_and_planned(name: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind, sizes = OTHERS[name]
    config = {**CONFIG_MAPPING[kind](**sizes).to_dict(), "num_hidden_layers": 3}
    per_layer = {key: config[key][:3] for key in ("layer_types", "no_rope_layers") if config.get(key)}
    config = {key: value for key, value in {**config, **per_layer}.items() if value is not None}
    model = model_from(config)
    assert parameter_count(model) == count_of_transformers(config)
    assert sum(parameter.numel for parameter in model_parameters(model)) == parameter_count(model)
    spec = spec_of("llama-7b", **DATA_ALONE).model_copy(update={"model": model.model_copy(update={"seq_len": 2048})})
    plan = make_plan(spec)
    assert 0.05 < plan.time.mfu < 0.75
    refused = [rule.code for rule in submittable(spec, plan)]
    assert refused == ([] if kind in ("gemma", "olmo3") else ["engine-planned-architecture"])


@pytest.mark.parametrize(("preset", "folder"), CURRENT.items())
def test_a_preset_is_what_its_config_json_gives(preset: str, folder: str) -> None:
    ours, theirs = model_of(preset), model_from(config_of(folder))
    pretrained = (
        "max_position_embeddings",
        "rope_scaling",
        "rope_theta",
        "seq_len",
    )  # of DeepSeek-V3 before its extension
    unlike = {key for key in ModelSpec.model_fields if getattr(ours, key) != getattr(theirs, key)}
    # A preset has dimensions; how its router is trained is a setting of the run.
    assert unlike - {"preset", "router_aux_loss_coef", *(pretrained if preset == "deepseek-v3" else ())} == set()


def test_models_have_the_names_of_the_hub() -> None:
    assert set(hub_presets().values()) <= set(presets())
    named = spec_of("Qwen/Qwen3-235B-A22B").transformer
    assert parameter_count(named) == parameter_count(model_of("qwen3-235b-a22b"))
    assert named.preset == "Qwen/Qwen3-235B-A22B"


@pytest.mark.parametrize("preset", CURRENT)
def test_every_current_model_is_planned_and_only_what_the_engine_builds_may_be_submitted(preset: str) -> None:
    experts = 8 if presets()[preset].get("num_experts") else 1
    alone = {**DATA_ALONE, "layout__expert_parallel": experts, "layout__activation_checkpointing": "full"}
    sizes = {"cluster__nodes": 128, "training__global_batch_size": 1024, "layout__zero_stage": 3}
    spec = spec_of(preset, **alone, **sizes)
    plan = make_plan(spec)
    assert plan.model.parameters == parameter_count(spec.transformer)
    assert plan.memory.peak > 0
    assert 0.02 < plan.time.mfu < 0.75
    refusals = [rule.code for rule in submittable(spec, plan) if rule.code != "layout-does-not-fit"]
    planned = spec.transformer.planned_architecture
    assert refusals == (["engine-planned-architecture"] if planned else [])


@pytest.mark.parametrize(
    ("setting", "value"),
    [("attention_chunk_size", 1024), ("qk_norm_scope", "unweighted"), ("hidden_activation", "relu2")],
)
def test_a_setting_that_only_the_planner_knows_is_refused_by_name(setting: str, value: object) -> None:
    given: dict[str, object] = {setting: value, "qk_norm": True}
    given |= {"layer_types": ["chunked_attention"]} if setting == "attention_chunk_size" else {}
    spec = spec_of("llama-3.2-1b", **{f"model__{key}": each for key, each in given.items()})
    codes = {rule.key: rule.code for rule in submittable(spec, make_plan(spec))}
    assert codes == {f"model.{setting}": "engine-planned-only"}


def attended(model: ModelSpec, layer: int) -> int:
    """Return the pairs of tokens of one sequence that attend to each other, counted one by one."""
    pairs = 0
    for query in range(model.seq_len):
        first = 0
        if model.is_local(layer):
            chunk, window = model.attention_chunk_size, model.sliding_window
            first = query // chunk * chunk if chunk else max(0, query + 1 - (window or 0))
        seen = query + 1 - first
        pairs += min(seen, model.index_topk) if model.index_topk else seen
    return pairs


@pytest.mark.parametrize(
    ("preset", "setting"),
    [
        ("llama-4-scout", {"attention_chunk_size": 64}),
        ("llama-4-scout", {"attention_chunk_size": 96}),
        ("gemma-3-4b", {"sliding_window": 64}),
        ("deepseek-v3.2", {"index_topk": 64}),
        ("llama-3.2-1b", {}),
    ],
)
def test_attention_flops_are_those_of_the_pairs_in_windows_and_chunks(preset: str, setting: dict[str, Any]) -> None:
    model = model_of(preset, seq_len=512, **setting)
    pairs = sum(attended(model, layer) for layer in range(model.num_hidden_layers))
    per_pair = 2 * model.num_attention_heads * (model.qk_head_dim + model.value_head_dim)
    indexed = model.num_hidden_layers * 2 * 512 * model.index_n_heads * model.index_head_dim
    # By convention all pairs count, twice those below the diagonal; the diagonal itself is left out.
    expected = 2 * pairs * per_pair / 512 + indexed
    assert attention_flops(model) == pytest.approx(expected, rel=0.02)


def test_chunks_and_windows_as_long_as_the_sequence_are_full_attention() -> None:
    for preset, key in (("llama-4-scout", "attention_chunk_size"), ("gemma-3-4b", "sliding_window")):
        long = model_of(preset, seq_len=512, **{key: 512})
        assert long.windowed_layers == 0
        full = long.num_hidden_layers * 4 * 512 * long.num_attention_heads * long.head_dim
        assert attention_flops(long) == full
        assert window_keys(long) == 512


def test_a_hybrid_model_of_whole_blocks_is_a_transformer() -> None:
    for framework in ("deepspeed", "megatron"):
        for preset in ("llama-3.2-1b", "qwen3-30b-a3b"):
            whole = spec_of(preset, planner__framework=framework, layout__zero_stage=1, layout__tensor_parallel=2)
            kind = "attention+experts" if whole.transformer.num_experts else "attention+mlp"
            model = whole.transformer.model_copy(update={"block_types": (kind,)})
            hybrid = whole.model_copy(update={"model": model})
            first, second = make_plan(whole), make_plan(hybrid)
            assert second.model == first.model
            assert second.time.step == pytest.approx(first.time.step, rel=0.02)
            assert second.memory.parameters == first.memory.parameters
            assert second.memory.peak == pytest.approx(first.memory.peak, rel=0.02)


@pytest.mark.parametrize("preset", HYBRID)
def test_the_stages_of_a_hybrid_model_hold_all_of_its_blocks(preset: str) -> None:
    model = model_of(preset)
    per_rank = architecture(model)
    for stages in (1, 2, 5):
        held = [stage_shard(per_rank, stage).parameters for stage in engine_stages(model, stages)]
        assert sum(held) == parameter_count(model)
    halves = architecture(model, tensor_parallel=2)
    assert parameter_count(model) / 2 < halves.parameters < parameter_count(model) * 0.51


def test_tensor_ranks_divide_the_groups_of_a_state_space_layer() -> None:
    spec = spec_of("nemotron-h-8b", cluster__gpus_per_node=16, layout__tensor_parallel=16)
    with pytest.raises(InfeasibleError) as found:
        make_plan(spec)
    assert "mamba.groups" in str(found.value)


def test_a_state_space_layer_has_the_flops_of_megatron_lm() -> None:
    model = model_of("nemotron-h-8b")
    hidden, inner, groups, state, heads = 4096, 128 * 64, 8, 128, 128
    projected = 2 * hidden * (2 * inner + 2 * groups * state + heads) + 2 * inner * hidden
    assert mamba_flops(model) == projected + 7 * inner * state
    blocks = 24 * mamba_flops(model) + 24 * 2 * 2 * hidden * 21504 + 4 * 2 * hidden * 128 * (2 * 32 + 2 * 8)
    total = blocks + attention_flops(model) + 2 * hidden * 131072
    assert training_flops_per_token(model) == 3 * total
    assert mean_block_flops(model) == (total - 2 * hidden * 131072) // 52


def test_a_block_with_less_inside_keeps_less_for_its_backward_pass() -> None:
    def saved(*kinds: str) -> int:
        model = model_of("nemotron-h-8b", block_types=list(kinds), num_hidden_layers=len(kinds))
        return token_activations(model, BlockKernels(2)).saved

    assert saved("attention", "mamba") < saved("attention", "mamba+mlp")
    assert saved("mlp", "mamba") == pytest.approx((saved("mamba+mlp")) / 2, rel=1e-3)
