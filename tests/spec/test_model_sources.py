"""Dimensions from presets and from Hugging Face config.json: what a user gives beside them wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaletrain_cli.errors import SpecError
from scaletrain_cli.plan import parameter_count
from scaletrain_cli.spec import presets
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
def test_a_config_json_gives_the_model_that_its_authors_published(name: str, parameters: int) -> None:
    spec = load(f"{START}model: {{hf_config: {name}/config.json}}\n")
    assert parameter_count(spec.model) == parameters
    assert load(f"{START}model: {{hf_config: {name}}}\n") == spec, "its folder is as good"


@pytest.mark.parametrize(("name", "parameters"), PRESETS.items())
def test_a_preset_gives_the_model_that_its_authors_published(name: str, parameters: int) -> None:
    assert parameter_count(load(f"{START}model: {{preset: {name}}}\n").model) == parameters


def test_every_preset_loads_and_all_but_those_without_weights_are_checked() -> None:
    for name in presets():
        load(f"{START}model: {{preset: {name}}}\n")
    assert presets().keys() - PRESETS.keys() == {"gpt3-175b"}


def test_rope_theta_is_found_where_either_transformers_keeps_it() -> None:
    assert load(f"{START}model: {{hf_config: qwen3}}\n").model.rope_theta == 1e6
    assert load(f"{START}model: {{hf_config: llama_v5}}\n").model.rope_theta == 5e5


def test_what_each_architecture_adds_is_known() -> None:
    assert load(f"{START}model: {{hf_config: qwen2}}\n").model.qkv_bias
    assert load(f"{START}model: {{hf_config: qwen3}}\n").model.qk_norm
    mixtral = load(f"{START}model: {{hf_config: mixtral}}\n").model
    assert (mixtral.num_experts, mixtral.num_experts_per_tok) == (8, 2)
    assert (mixtral.norm_topk_prob, mixtral.router_aux_loss_coef) == (True, 0.02), "its modelling code renormalises"
    gpt2 = load(f"{START}model: {{hf_config: gpt2}}\n").model
    assert (gpt2.family, gpt2.intermediate_size, gpt2.tie_word_embeddings) == ("gpt", 3072, True)


def test_keys_beside_a_source_win_over_it() -> None:
    spec = load(f"{START}model: {{hf_config: llama, num_hidden_layers: 2, seq_len: 512}}\n")
    assert (spec.model.num_hidden_layers, spec.model.seq_len, spec.model.hidden_size) == (2, 512, 4096)
    spec = load(f"{START}model: {{preset: llama-7b, num_attention_heads: 16, num_key_value_heads: 16}}\n")
    assert spec.model.head_dim == 256, "derived from what was given, not from the preset"
    spec = load(f"{START}model: {{preset: gpt2, hf_config: llama}}\n")
    assert spec.model.family == "llama", "a config.json wins over a preset"


def test_a_long_context_is_not_trained_at_full_length_unless_asked() -> None:
    assert load(f"{START}model: {{preset: qwen2.5-7b}}\n").model.seq_len == 8192
    assert load(f"{START}model: {{preset: qwen2.5-7b, seq_len: 131072}}\n").model.seq_len == 131072


def test_a_config_json_is_looked_for_beside_the_spec(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((FIXTURES / "gpt2/config.json").read_text())
    assert load(f"{START}model: {{hf_config: config.json}}\n", base_dir=tmp_path).model.family == "gpt"


def test_a_preset_that_is_none_is_reported_once_with_the_nearest() -> None:
    found = problem(f"{START}model: {{preset: llama7b}}\n")
    assert "is not a known preset." in found
    assert "Did you mean llama-7b?" in found


def test_two_bad_sources_are_both_reported() -> None:
    keys = {one.key for one in problems(f"{START}model: {{preset: a, hf_config: b}}\n")}
    assert keys == {"model.preset", "model.hf_config"}


def test_other_mistakes_beside_a_bad_source_are_still_found() -> None:
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
        ('{"model_type": "llama", "attention_bias": true}', "has attention_bias or mlp_bias"),
        ('{"model_type": "llama", "hidden_act": "gelu"}', "has hidden_act 'gelu'; llama trains silu alone"),
        (" " * 1_000_001, "is not a Hugging Face config.json"),
    ],
    ids=range(10),
)
def test_a_config_json_that_is_of_no_use_is_refused(content: str | None, expected: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(SpecError) as caught:
        load(f"{START}model: {{hf_config: config.json}}\n", base_dir=tmp_path)
    assert expected in str(caught.value)


@pytest.mark.parametrize("path", ["[1]", "3", '"a\\0b"', '"\\ud800"', "a" * 5000, "''", "/dev/null"])
def test_a_path_that_is_none_ends_in_a_message(path: str) -> None:
    assert any(one.key == "model.hf_config" for one in problems(f"{START}model: {{hf_config: {path}}}\n"))


def test_wrong_values_in_a_config_json_are_reported_at_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide", "vocab_size": 1e400}')
    with pytest.raises(SpecError, match=r"hidden_size = wide: must be a whole number"):
        load(f"{START}model: {{hf_config: config.json}}\n", base_dir=tmp_path)
