"""Dimensions from presets and Hugging Face config.json; keys of the spec take precedence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scaletrain_cli.errors import SpecError
from scaletrain_cli.plan import parameter_count
from scaletrain_cli.spec import presets
from scaletrain_cli.spec.hugging_face import sliding_window
from tests.spec.samples import FIXTURES, load, problem, problems

START = "schema: scaletrain/v1\nname: a\ndata: {source: x, tokenizer: {vocab_size: 512}}\n"
START += "training: {global_batch_size: 8, steps: 10}\n"

# The sums that the authors' own weights have (safetensors, or the paper where there are none).
PUBLISHED = {
    "llama": 6_738_415_616,
    "llama_v5": 8_030_261_248,
    "mistral": 7_241_732_096,
    "mixtral": 46_702_792_704,
    "qwen2": 494_032_768,
    "qwen3": 8_190_735_360,
    "qwen3_moe": 30_532_122_624,
    "deepseek_v3": 671_026_419_200 - 58 * 256,  # without the routers' score corrections, which no gradient trains
    "gpt2": 124_439_808,
}
PRESETS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-405b": 405_853_388_800,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_a_config_json_gives_the_published_model(name: str, parameters: int) -> None:
    spec = load(f"{START}model: {{hf_config: {name}/config.json}}\n")
    assert parameter_count(spec.model) == parameters
    assert load(f"{START}model: {{hf_config: {name}}}\n") == spec, "its folder is as good"


@pytest.mark.parametrize(("name", "parameters"), PRESETS.items())
def test_a_preset_gives_the_published_model(name: str, parameters: int) -> None:
    assert parameter_count(load(f"{START}model: {{preset: {name}}}\n").model) == parameters


def test_every_preset_loads_and_all_but_those_without_weights_are_checked() -> None:
    for name in presets():
        load(f"{START}model: {{preset: {name}}}\n")
    assert presets().keys() - PRESETS.keys() == {"gpt3-175b"}


def test_rope_theta_is_read_as_transformers_4_and_5_write_it() -> None:
    assert load(f"{START}model: {{hf_config: qwen3}}\n").model.rope_theta == 1e6
    assert load(f"{START}model: {{hf_config: llama_v5}}\n").model.rope_theta == 5e5


def test_settings_of_each_architecture_are_read() -> None:
    assert load(f"{START}model: {{hf_config: qwen2}}\n").model.qkv_bias
    assert load(f"{START}model: {{hf_config: qwen3}}\n").model.qk_norm
    mixtral = load(f"{START}model: {{hf_config: mixtral}}\n").model
    assert (mixtral.num_experts, mixtral.num_experts_per_tok) == (8, 2)
    assert (mixtral.norm_topk_prob, mixtral.router_aux_loss_coef) == (True, 0.02), "its modelling code renormalises"
    gpt2 = load(f"{START}model: {{hf_config: gpt2}}\n").model
    assert (gpt2.family, gpt2.intermediate_size, gpt2.tie_word_embeddings) == ("gpt", 3072, True)


FAMILIES = "llama mistral mixtral qwen2 qwen3 qwen3_moe deepseek_v2 deepseek_v3 gpt2 resnet convnext vit clip".split()
# Settings of transformers' classes under which a model computes something else, each refused by name.
OTHERWISE = {
    "qwen3": {"layer_types": ["chunked_attention"]},
    "llama": {"hidden_act": "gelu", "attention_bias": True, "mlp_bias": True},
    "mixtral": {"router_jitter_noise": 0.1},
    "qwen3_moe": {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "deepseek_v2": {"moe_layer_freq": 2},
    "gpt2": {
        "activation_function": "relu",
        "scale_attn_by_inverse_layer_idx": True,
        "scale_attn_weights": False,
        "add_cross_attention": True,
        "resid_pdrop": 0.3,
    },
    "resnet": {"downsample_in_bottleneck": True},
    "clip": {"something_new": 1},
}


def write_config(folder: Path, config: dict[str, object]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_of_a_transformers_config_is_used_or_known_to_have_no_effect(family: str, tmp_path: Path) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    whole = CONFIG_MAPPING[family]().to_dict()
    if family in ("mistral", "deepseek_v2"):
        whole |= {"sliding_window": None, "num_experts_per_tok": 6 if family == "deepseek_v2" else None}
    assert len(whole) > 15
    write_config(tmp_path, whole)
    load(f"{START}model: {{hf_config: .}}\n", base_dir=tmp_path)
    for key in ("something_new", *OTHERWISE.get(family, {})):
        write_config(tmp_path, whole | {key: OTHERWISE.get(family, {}).get(key, "x")})
        assert f"has {key} = " in (reported := problem(f"{START}model: {{hf_config: .}}\n", base_dir=tmp_path)) or (
            f"has the unsupported key {key}." in reported or f"and {key} = " in reported
        ), key


@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gpt2"])
def test_keys_missing_in_a_config_have_the_defaults_of_transformers(family: str, tmp_path: Path) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2, "vocab_size": 1000}
    sizes |= {"intermediate_size": 128, "max_position_embeddings": 64, "moe_intermediate_size": 32}
    if family == "gpt2":
        sizes = {"n_embd": 64, "n_head": 8, "n_layer": 2, "vocab_size": 1000, "n_positions": 64}
    if family in ("qwen2", "qwen3", "qwen3_moe", "llama"):
        sizes |= {"num_key_value_heads": 8}
    if family == "qwen3_moe":
        sizes |= {"num_experts": 128, "num_experts_per_tok": 8, "head_dim": 8}
    theirs = CONFIG_MAPPING[family](**{key: size for key, size in sizes.items() if key != "moe_intermediate_size"})
    sizes = {key: size for key, size in sizes.items() if key != "moe_intermediate_size" or family == "qwen3_moe"}
    write_config(tmp_path, {"model_type": family, **sizes})
    ours = load(f"{START}model: {{hf_config: .}}\n", base_dir=tmp_path).model
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 8)
    assert ours.norm_eps == (theirs.layer_norm_epsilon if family == "gpt2" else theirs.rms_norm_eps)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.initializer_range == theirs.initializer_range
    if family == "gpt2":
        assert (ours.hidden_dropout, ours.attention_dropout) == (theirs.resid_pdrop, theirs.attn_pdrop)
    else:
        assert ours.num_key_value_heads == theirs.num_key_value_heads
        assert (ours.attention_dropout, ours.rope_scaling) == (theirs.attention_dropout, None)
        if family != "mixtral":  # whose default has changed between versions of transformers
            assert ours.rope_theta == theirs.rope_parameters["rope_theta"]


def test_rope_scaling_is_imported_or_rejected_by_name(tmp_path: Path) -> None:
    scaling = load(f"{START}model: {{hf_config: llama_v5}}\n").model.rope_scaling
    assert scaling is not None
    assert (scaling.rope_type, scaling.factor, scaling.original_max_position_embeddings) == ("llama3", 8.0, 8192)
    config = json.loads((FIXTURES / "llama/config.json").read_text())
    for kind in ("dynamic", "longrope", "su"):
        write_config(tmp_path, config | {"rope_scaling": {"type": kind, "factor": 2.0}})
        reported = problem(f"{START}model: {{hf_config: .}}\n", base_dir=tmp_path)
        assert f"has rope_scaling of type {kind}, but only linear, llama3 and yarn are supported" in reported
    write_config(tmp_path, config | {"rope_scaling": {"type": "yarn", "factor": 2.0, "surprise": 1}})
    assert "rope_scaling.surprise" in problem(f"{START}model: {{hf_config: .}}\n", base_dir=tmp_path)
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


def test_a_sliding_window_limits_seq_len() -> None:
    assert load(f"{START}model: {{hf_config: mistral}}\n").model.seq_len == 4096
    reported = problem(f"{START}model: {{hf_config: mistral, seq_len: 8192}}\n")
    assert "has sliding_window = 4096, and model.seq_len is 8192" in reported
    assert load(f"{START}model: {{hf_config: qwen2}}\n").model.seq_len == 8192, "its window is not used"
    assert sliding_window({"model_type": "qwen3", "sliding_window": 4096}) is None
    assert sliding_window({"model_type": "mistral", "sliding_window": 4096}) == 4096


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


def test_the_path_of_a_config_json_is_relative_to_the_spec(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((FIXTURES / "gpt2/config.json").read_text())
    assert load(f"{START}model: {{hf_config: config.json}}\n", base_dir=tmp_path).model.family == "gpt"


def test_an_unknown_preset_is_reported_once_with_a_suggestion() -> None:
    found = problem(f"{START}model: {{preset: llama7b}}\n")
    assert "is not a known preset." in found
    assert "Did you mean llama-7b?" in found


def test_two_bad_sources_are_both_reported() -> None:
    keys = {one.key for one in problems(f"{START}model: {{preset: a, hf_config: b}}\n")}
    assert keys == {"model.preset", "model.hf_config"}


def test_other_problems_are_reported_beside_an_invalid_source() -> None:
    keys = {one.key for one in problems(f"{START}model: {{preset: a, seq_len: x}}\nfoo: 1\n")}
    assert keys == {"model.preset", "model.seq_len", "foo"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot be read: No such file or directory"),
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is not a Hugging Face config.json, which holds one JSON object"),
        ("{}", "has model_type 'None'; known: "),
        ('{"model_type": "bert"}', "has model_type 'bert'; known: "),
        ('{"model_type": ["llama"]}', "; known: clip, convnext, deepseek_v2,"),
        (
            '{"model_type": "llama", "attention_bias": true}',
            "has attention_bias = true, but only false is supported",
        ),
        ('{"model_type": "llama", "hidden_act": "gelu"}', "has hidden_act = gelu, but only silu or swish is supported"),
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
