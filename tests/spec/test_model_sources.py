import json
from pathlib import Path

import pytest

from scaletrain_cli.errors import SpecError
from scaletrain_cli.plan.architecture import parameter_count
from scaletrain_cli.spec import ModelSpec, parse_spec
from scaletrain_cli.spec.hugging_face_weights import config_mismatches, to_hugging_face
from scaletrain_cli.spec.presets import presets
from tests.plan.specs import model_of
from tests.spec.samples import FIXTURES, SPEC, load, problem, problems

START = "schema: scaletrain/v1\nname: a\ndata: {source: x, tokenizer: {vocab_size: 512}}\n"
START += "training: {global_batch_size: 8, steps: 10}\n"

# Folders of config.json files; test_architecture.py has the parameters of these presets as published.
PRESETS: dict[str, str | int] = {
    **{"llama": "llama-7b", "llama_v5": "llama-3-8b", "mistral": "mistral-7b-v0.1", "mixtral": "mixtral-8x7b"},
    **{"qwen2": "qwen2.5-0.5b", "qwen3": "qwen3-8b", "qwen3_moe": "qwen3-30b-a3b", "deepseek_v3": "deepseek-v3"},
    **{"gpt2": "gpt2", "gemma2": "gemma-2-2b", "gemma3_text": "gemma-3-1b", "olmo2": "olmo-2-7b"},
    "phi3": 3_836_021_760,  # that of Phi-4-mini, which is no preset
}


@pytest.mark.parametrize(("name", "preset"), PRESETS.items())
def test_a_config_json_gives_the_published_model(name: str, preset: str | int) -> None:
    spec = load(f"{START}model: {{hf_config: {name}/config.json}}\n")
    assert parameter_count(spec.model) == (preset if isinstance(preset, int) else parameter_count(model_of(preset)))
    assert load(f"{START}model: {{hf_config: {name}}}\n") == spec, "its folder is as good"


def test_a_preset_in_a_spec_is_the_model_whose_parameters_are_counted() -> None:  # by test_architecture.py
    assert len(presets()) > 3
    for name in presets():
        assert load(f"{START}model: {{preset: {name}}}\n").model == model_of(name)


FAMILIES = (
    "llama mistral mixtral qwen2 qwen3 qwen2_moe qwen3_moe gemma2 gemma3_text phi3 olmo2 gpt_oss deepseek_v2 "
    "deepseek_v3 gpt2 resnet convnext vit clip llava deepseek_v32 llama4_text nemotron nemotron_h jamba gemma3 llama4"
).split()
# Settings of transformers' classes under which a model computes something else, each refused by name.
OTHERWISE = {
    "deepseek_v32": {"scoring_func": "softmax", "moe_layer_freq": 2, "mlp_layer_types": ["sparse"] * 61},
    "llama4_text": {
        "router_jitter_noise": 0.1,
        "attention_bias": True,
        "no_rope_layers": [2] * 48,
        "moe_layers": ["3"],
        "interleave_moe_layer_step": "x",
    },
    "nemotron": {"mlp_bias": True, "hidden_act": "silu"},
    "nemotron_h": {
        "moe_latent_size": 64,
        "n_shared_experts": 2,
        "mlp_hidden_act": "silu",
        "mamba_hidden_act": "relu",
        "use_bias": True,
        "ssm_state_size": 0,
    },
    "jamba": {"attn_layer_period": "x", "mamba_d_state": 0},
    "gemma3": {"tie_word_embeddings": False},
    "llama4": {"tie_word_embeddings": True},
    "qwen3": {"layer_types": ["chunked_attention"]},
    "llama": {
        **{"hidden_act": "gelu", "mlp_bias": True, "sliding_window": 4096, "is_causal": False},
        **{
            "per_layer_config": {"0": {"hidden_act": "gelu"}},
            "attention_chunk_size": 64,
            "kv_sharing_modes": ["reuse"],
        },
    },
    "gemma2": {"hidden_activation": "gelu", "use_bidirectional_attention": True},
    "gemma3_text": {"attn_logit_softcapping": 50.0},
    "phi3": {"resid_pdrop": 0.1},
    "gpt_oss": {"attention_bias": False, "swiglu_alpha": 2.0},
    "mixtral": {"router_jitter_noise": 0.1, "num_local_experts": None},
    "qwen3_moe": {"mlp_only_layers": ["3"]},
    "deepseek_v3": {"scoring_func": "softmax", "topk_method": "greedy"},
    "deepseek_v2": {"moe_layer_freq": 2, "topk_method": "noaux_tc", "norm_topk_prob": True},
    "gpt2": {
        "activation_function": "relu",
        "scale_attn_by_inverse_layer_idx": True,
        "scale_attn_weights": False,
        "add_cross_attention": True,
        "resid_pdrop": 0.3,
    },
    "resnet": {"downsample_in_bottleneck": True, "downsample_in_first_stage": True, "hidden_act": "gelu"},
    "convnext": {"hidden_act": "relu", "num_stages": 3},
    "vit": {"head_dim": 32, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "hidden_act": "relu"},
    "clip": {"initializer_factor": 2.0},
    "llava": {"multimodal_projector_bias": False, "vision_feature_layer": [-2, -5], "projector_hidden_act": "relu"},
}


def write_config(folder: Path, config: dict[str, object]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_of_a_transformers_config_is_supported_or_refused_by_name(family: str, tmp_path: Path) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    whole = CONFIG_MAPPING[family]().to_dict()
    if family in ("mistral", "deepseek_v2"):
        whole |= {"sliding_window": None, "num_experts_per_tok": 6 if family == "deepseek_v2" else None}
    assert len(whole) > 15
    write_config(tmp_path, whole)
    start = START.replace(", tokenizer: {vocab_size: 512}", "") if family in ("resnet", "convnext", "vit") else START
    load(f"{start}model: {{hf_config: .}}\n", base_dir=tmp_path)
    for key, value in OTHERWISE.get(family, {}).items():
        write_config(tmp_path, whole | {key: value})
        reported = problem(f"{start}model: {{hf_config: .}}\n", base_dir=tmp_path)
        assert f"has {key} = " in reported or f"and {key} = " in reported, key


@pytest.mark.parametrize("family", [*FAMILIES[:11], "gpt2"])
def test_keys_missing_in_a_config_have_the_defaults_of_transformers(family: str, tmp_path: Path) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2, "vocab_size": 1000}
    sizes |= {"intermediate_size": 128, "max_position_embeddings": 64}
    if family == "gpt2":
        sizes = {"n_embd": 64, "n_head": 8, "n_layer": 2, "vocab_size": 1000, "n_positions": 64}
    if family in ("qwen2", "qwen3", "qwen2_moe", "llama"):
        sizes |= {"num_key_value_heads": 8}
    if family == "phi3":
        sizes |= {"pad_token_id": 0}
    theirs = CONFIG_MAPPING[family](**sizes)
    write_config(tmp_path, {"model_type": family, **sizes})
    ours = load(f"{START}model: {{hf_config: .}}\n", base_dir=tmp_path).model
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 8)
    assert ours.norm_eps == (theirs.layer_norm_epsilon if family == "gpt2" else theirs.rms_norm_eps)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.initializer_range == theirs.initializer_range
    for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
        assert getattr(ours, name) == getattr(theirs, name, 0)
    if family == "gpt2":
        assert (ours.hidden_dropout, ours.attention_dropout) == (theirs.resid_pdrop, theirs.attn_pdrop)
    else:
        assert ours.num_key_value_heads == theirs.num_key_value_heads
        rope = theirs.rope_parameters
        scaling = None if ours.rope_scaling is None else ours.rope_scaling.to_hugging_face()
        assert ours.attention_dropout == theirs.attention_dropout
        if family == "gpt_oss":
            assert {**(scaling or {}), "rope_theta": ours.rope_theta} == rope
            assert (ours.swiglu_limit, ours.num_experts) == (theirs.swiglu_limit, theirs.num_local_experts)
        else:
            assert scaling is None
        if family != "mixtral":  # whose default has changed between versions of transformers
            assert ours.rope_theta == rope.get("full_attention", rope)["rope_theta"]
        slides = [kind == "sliding_attention" for kind in getattr(theirs, "layer_types", None) or []]
        assert ours.sliding_window == (getattr(theirs, "sliding_window", None) if slides != [False] * 2 else None)
        if any(slides):
            assert [ours.slides(layer) for layer in range(2)] == slides
        for name in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"):
            assert getattr(ours, name) == getattr(theirs, name, None)
        if family == "gemma3_text":
            assert ours.rope_local_base_freq == rope["sliding_attention"]["rope_theta"]


def test_rope_scaling_is_imported_or_rejected_by_name(tmp_path: Path) -> None:
    scaling = load(f"{START}model: {{hf_config: llama_v5}}\n").model.rope_scaling
    assert (scaling.rope_type, scaling.factor, scaling.original_max_position_embeddings) == ("llama3", 8.0, 8192)
    config = json.loads((FIXTURES / "llama/config.json").read_text())
    write_config(tmp_path, config | {"rope_scaling": {"type": "ntk", "factor": 2.0}})
    reported = problem(f"{START}model: {{hf_config: .}}\n", base_dir=tmp_path)
    assert "has rope_scaling of type ntk, but llama has linear, dynamic, llama3, yarn or longrope only" in reported
    factors = {"long_factor": [2.0] * 64, "short_factor": [1.0] * 64}
    write_config(tmp_path, config | {"rope_scaling": {"type": "su", **factors}, "original_max_position_embeddings": 64})
    scaling = load(f"{START}model: {{hf_config: .}}\n", base_dir=tmp_path).model.rope_scaling
    assert (scaling.rope_type, scaling.original_max_position_embeddings) == ("longrope", 64), "its earlier name"
    write_config(tmp_path, config | {"rope_scaling": {"type": "yarn", "factor": 2.0, "surprise": 1}})
    spec = load(f"{START}model: {{hf_config: .}}\n", base_dir=tmp_path)
    assert spec.ignored_config_keys == ("rope_scaling.surprise",)
    local = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "yarn", "factor": 2.0}}
    write_config(tmp_path, config | {"rope_scaling": None, "rope_parameters": local})
    reported = problem(f"{START}model: {{hf_config: .}}\n", base_dir=tmp_path)
    assert "has rope_parameters.full_attention, but llama has the same positions in all layers" in reported
    whole = f"{START}model: {{hf_config: llama, rope_scaling: {{rope_type: llama3, factor: 8, low_freq_factor: 4, "
    found = {one.key: one.message for one in problems(f"{whole}high_freq_factor: 1, beta_fast: 2}}}}\n")}
    assert found == {
        "model.rope_scaling.original_max_position_embeddings": "is required with rope_type: llama3.",
        "model.rope_scaling.beta_fast": "has no effect with rope_type: llama3. Remove it.",
        "model.rope_scaling.low_freq_factor": "must be below high_freq_factor = 1.",
    }
    assert "has no effect on learned positions" in problem(
        f"{START}model: {{hf_config: gpt2, rope_scaling: {{rope_type: linear, factor: 2}}}}\n"
    )


def model_problems(settings: str) -> dict[str, str]:
    """Return the messages about a model by key; none if it loads."""
    text = f"{START}model: {{hf_config: llama, {settings}}}\n"
    try:
        load(text)
    except SpecError as error:
        return {str(one.key).removeprefix("model.rope_scaling."): one.message for one in error.problems}
    return {}


def test_rope_scalings_that_cannot_be_computed_are_refused() -> None:
    yarn = "rope_scaling: {rope_type: yarn, factor: 2}"
    assert model_problems(f"rope_theta: 1, {yarn}") == {"rope_type": "yarn requires model.rope_theta above 1; it is 1."}
    assert model_problems(f"rope_theta: 1.1, {yarn}") == {}
    dynamic = "num_attention_heads: 2048, num_key_value_heads: 2048, rope_scaling: {rope_type: dynamic, factor: 2}"
    assert model_problems(f"{dynamic}, head_dim: 2") == {
        "rope_type": "dynamic requires more than 2 rotated channels per head."
    }
    assert model_problems(f"{dynamic}, head_dim: 4") == {}
    ones = f"[{', '.join(['1'] * 64)}]"
    longrope = f"{{rope_type: longrope, short_factor: {ones}, long_factor: {ones}, original_max_position_embeddings: 1"
    assert model_problems(f"rope_scaling: {longrope}}}") == {
        "original_max_position_embeddings": "must be above 1 without attention_factor."
    }
    assert model_problems(f"rope_scaling: {longrope}, attention_factor: 1}}") == {}


def test_a_config_that_cannot_be_used_has_one_clear_error(tmp_path: Path) -> None:
    def reported(name: str, without: str, **changes: object) -> str:
        config = json.loads((FIXTURES / name / "config.json").read_text())
        write_config(tmp_path, {key: value for key, value in (config | changes).items() if key != without})
        return problem(f"{START}model: {{hf_config: .}}\n", base_dir=tmp_path)

    window = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 20}
    assert "has use_sliding_window, and no whole num_hidden_layers" in reported("qwen2", "num_hidden_layers", **window)
    assert "has text_config = [1], which is not a mapping" in reported("clip", "", text_config=[1])
    different = "has embd_pdrop = 0.3 and resid_pdrop = 0.1, where a missing key is 0.1; they must be equal"
    assert different in reported("gpt2", "resid_pdrop", embd_pdrop=0.3)
    config = json.loads((FIXTURES / "gpt2/config.json").read_text())
    write_config(tmp_path, {key: value for key, value in config.items() if key != "embd_pdrop"})
    assert load(f"{START}model: {{hf_config: .}}\n", base_dir=tmp_path).model.hidden_dropout == 0.1


def test_the_number_of_experts_is_the_one_that_the_architecture_reads(tmp_path: Path) -> None:
    def read(kind: str, **changes: object) -> ModelSpec:
        sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2, "vocab_size": 1000}
        sizes |= {"intermediate_size": 128, "max_position_embeddings": 64, "num_key_value_heads": 8}
        write_config(tmp_path, {"model_type": kind, **sizes, **changes})
        return load(f"{START}model: {{hf_config: .}}\n", base_dir=tmp_path).model

    assert read("qwen2_moe", num_experts=8, num_local_experts=16).num_experts == 8
    deepseek = {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 2, "aux_loss_alpha": 0.5}
    mixture = read("deepseek_v3", **deepseek, n_routed_experts=16)
    assert (mixture.num_experts, mixture.router_aux_loss_coef) == (16, 0.5)
    dense = read("deepseek_v3", **deepseek, n_routed_experts=None)
    assert (dense.num_experts, dense.moe_layers, dense.scoring_func) == (0, 0, "softmax")


def windows(config: str) -> tuple[object, ...]:
    model = load(f"{START}model: {{hf_config: {config}}}\n").model
    return model.sliding_window, model.layer_types, model.windowed_layers


def test_sliding_windows_are_read_as_each_architecture_has_them(tmp_path: Path) -> None:
    assert windows("mistral") == (4096, (), 32), "every layer"
    assert windows("qwen2") == (None, (), 0), "use_sliding_window is false"
    assert windows("gemma2") == (4096, ("sliding_attention", "full_attention"), 13)
    assert windows("gemma3_text") == (512, (*["sliding_attention"] * 5, "full_attention"), 22)
    assert windows("phi3") == (262144, (), 0), "longer than any sequence"
    qwen = json.loads((FIXTURES / "qwen2/config.json").read_text())
    write_config(tmp_path, qwen | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 20})
    model = load(f"{START}model: {{hf_config: .}}\n", base_dir=tmp_path).model
    assert [model.slides(layer) for layer in range(24)] == [False] * 20 + [True] * 4
    types = ["full_attention", "sliding_attention"] * 12
    write_config(tmp_path, qwen | {"use_sliding_window": True, "sliding_window": 64, "layer_types": types})
    model = load(f"{START}model: {{hf_config: .}}\n", base_dir=tmp_path).model
    assert model.layer_types == ("full_attention", "sliding_attention")
    mistral = json.loads((FIXTURES / "mistral/config.json").read_text())
    write_config(tmp_path, mistral | {"layer_types": ["full_attention", "sliding_attention"] * 16})
    reported = problem(f"{START}model: {{hf_config: .}}\n", base_dir=tmp_path)
    assert "has layer_types, which models of type mistral do not have" in reported


@pytest.mark.parametrize(
    ("keys", "reported"),
    [
        ("layer_types: [sliding_attention]", "has no effect without sliding_window."),
        ("rope_local_base_freq: 5", "has no effect without sliding_window."),
        ("sliding_window: 4, layer_types: [full_attention]", "has no effect if every layer has full_attention."),
        ("partial_rotary_factor: 0.01", "must leave an even number of the 128 channels of a head."),
        ("qk_norm_scope: projection", "has no effect"),
        ("zero_centered_norm: true, norm: layernorm", "must be false with layernorm."),
        ("rope_scaling: {rope_type: longrope, short_factor: [1], long_factor: [1, 2]}", "is required with"),
    ],
)
def test_settings_without_effect_or_with_others_missing_are_reported(keys: str, reported: str) -> None:
    assert any(reported in one.message for one in problems(f"{START}model: {{preset: llama-7b, {keys}}}\n"))


def test_keys_of_the_section_override_the_preset_or_config() -> None:
    spec = load(f"{START}model: {{hf_config: llama, num_hidden_layers: 2, seq_len: 512}}\n")
    assert (spec.model.num_hidden_layers, spec.model.seq_len, spec.model.hidden_size) == (2, 512, 4096)
    spec = load(f"{START}model: {{preset: llama-7b, num_attention_heads: 16, num_key_value_heads: 16}}\n")
    assert spec.model.head_dim == 256, "derived from what was given, not from the preset"
    spec = load(f"{START}model: {{preset: gpt2, hf_config: llama}}\n")
    assert spec.model.family == "llama", "a config.json wins over a preset"


def test_a_long_context_model_trains_with_a_shorter_seq_len_by_default() -> None:
    assert load(f"{START}model: {{preset: qwen2.5-7b}}\n").model.seq_len == 8192
    assert load(f"{START}model: {{preset: qwen2.5-7b, seq_len: 131072}}\n").model.seq_len == 131072


def test_two_bad_sources_are_both_reported() -> None:
    keys = {one.key for one in problems(f"{START}model: {{preset: a, hf_config: b}}\n")}
    assert keys == {"model.preset", "model.hf_config"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot be read: No such file or directory"),
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is not a Hugging Face config.json, which holds one JSON object"),
        ("{}", "has no model_type; known: "),
        ('{"model_type": "bert"}', "has model_type 'bert'; known: "),
        ('{"model_type": ["llama"]}', "; known: clip, cohere, cohere2, convnext,"),
        ('{"model_type": "llama", "mlp_bias": true}', "has mlp_bias = true, but only false is supported"),
        ('{"model_type": "llama", "hidden_act": "gelu"}', "has hidden_act = gelu, but only silu or swish or"),
        (" " * 1_000_001, "is not a Hugging Face config.json"),
    ],
    ids=range(10),
)
def test_an_unsupported_config_json_is_rejected(content: str | None, expected: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(SpecError) as caught:
        load(f"{START}model: {{hf_config: config.json}}\n", base_dir=tmp_path)
    assert expected in str(caught.value)


@pytest.mark.parametrize("path", ["[1]", "3", '"a\\0b"', '"\\ud800"', "a" * 5000, "''", "/dev/null"])
def test_an_invalid_path_gives_an_error(path: str) -> None:
    assert any(one.key == "model.hf_config" for one in problems(f"{START}model: {{hf_config: {path}}}\n"))


def test_wrong_values_in_a_config_json_are_reported_at_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide", "vocab_size": 1e400}')
    with pytest.raises(SpecError, match=r"hidden_size = wide: must be a whole number"):
        load(f"{START}model: {{hf_config: config.json}}\n", base_dir=tmp_path)


@pytest.mark.parametrize(("scaling", "differs"), [("dynamic", True), ("linear", False)])
def test_another_context_differs_where_frequencies_follow_it(scaling: str, differs: bool, tmp_path: Path) -> None:
    dims = {
        **{"family": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 512, "seq_len": 64},
        **{"max_position_embeddings": 4096, "rope_scaling": {"rope_type": scaling, "factor": 2.0}},
    }
    spec = ModelSpec.model_validate(dims)
    (tmp_path / "config.json").write_text(json.dumps(to_hugging_face(spec)))
    shorter = spec.model_copy(update={"max_position_embeddings": 64})
    assert list(config_mismatches(tmp_path, spec)) == []
    assert [one.key for one in config_mismatches(tmp_path, shorter)] == ["max_position_embeddings"] * differs


def test_weights_alone_supply_dimensions_and_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("w").mkdir()
    config = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 256}
    Path("w/config.json").write_text(json.dumps(config))
    without_tokenizer = problem(SPEC, "model={weights: w}", "data={source: rows.jsonl}", base_dir=Path())
    assert "data.tokenizer: is required: w has no tokenizer.json. Give the tokenizer of these" in without_tokenizer
    Path("w/tokenizer.json").write_text("{}")
    spec = load(SPEC, "model={weights: w}", "data={source: rows.jsonl}", base_dir=Path())
    assert (spec.transformer.hidden_size, spec.transformer.seq_len) == (32, 256)
    assert spec.data.tokenizer.path == "w/tokenizer.json"
    stated = "data={source: rows.jsonl, tokenizer: {tokenizer_class: PreTrainedTokenizerFast}}"
    with_class = load(SPEC, "model={weights: w}", stated, base_dir=Path()).data.tokenizer
    assert (with_class.path, with_class.tokenizer_class) == ("w/tokenizer.json", "PreTrainedTokenizerFast")
    assert (
        load(
            SPEC, "model={weights: w}", "data={source: a, tokenizer: {vocab_size: 512}}", base_dir=Path()
        ).data.tokenizer.path
        is None
    )
    with_dimensions = load(SPEC, "model.weights=w", base_dir=Path())
    assert with_dimensions.transformer.hidden_size != 32, "dimensions of the spec are used"
    said = problem(SPEC, "model={weights: none}", base_dir=Path())
    assert "model.weights = none: has no dimensions of the model: its config.json cannot be read" in said
    assert "Set model.hf_config" in said


def test_a_config_json_beside_the_spec_and_not_in_the_current_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((FIXTURES / "llama/config.json").read_text())
    text = f"{START}model: {{hf_config: config.json}}\n"
    with pytest.raises(SpecError) as caught:
        parse_spec(text, file="run.yaml", base_dir=tmp_path)
    said = str(caught.value)
    assert (
        f"is not in the current folder, to which every path of a spec is relative, but at {tmp_path}/config.json"
        in said
    )
    assert f"Write {tmp_path}/config.json" in said
