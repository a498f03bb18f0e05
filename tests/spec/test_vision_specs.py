"""Specs of vision networks: sources of dimensions, problems, and units."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan.workloads.registry import workload_of
from scaletrain_cli.spec import RunSpec, json_schema, vision_presets
from scaletrain_cli.spec.run import AnyModel
from tests.spec.samples import load, problem, problems

VISION = """\
schema: scaletrain/v1
name: images
model: {preset: resnet-50}
data: {source: imagenet/}
training: {global_batch_size: 256, steps: 1000}
"""


def _parameters(model: AnyModel) -> int:
    return workload_of(model).parameter_count(model)


def with_model(model: str) -> str:
    return VISION.replace("{preset: resnet-50}", model)


@pytest.mark.parametrize("name", vision_presets())
def test_every_vision_preset_loads_and_round_trips_through_json(name: str) -> None:
    spec = load(with_model(f"{{preset: {name}}}"))
    assert RunSpec.model_validate(spec.model_dump(mode="json", by_alias=True)) == spec


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("resnet", 44_549_160 - 998 * 2049),
        ("convnext", 88_591_464),
        ("vit", 304_326_632),
        ("clip", 427_616_513),
    ],
)
def test_a_config_json_gives_the_published_network(name: str, parameters: int) -> None:
    assert _parameters(load(with_model(f"{{hf_config: {name}}}")).model) == parameters


def test_keys_missing_in_a_vision_config_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "clip", "vision_config": {"patch_size": 16}}')
    spec = load(with_model("{hf_config: .}"), base_dir=tmp_path)
    assert _parameters(spec.model) == 149_620_737


def test_keys_of_the_section_override_the_towers_of_a_preset() -> None:
    spec = load(with_model("{preset: clip-vit-base-patch32, vision_config: {patch_size: 16}}"))
    assert _parameters(spec.model) == 149_620_737


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("{preset: resnet50}", "is not a known preset."),
        ("{preset: resnet50}", "Did you mean resnet-50?"),
        ("{preset: resnet-50, hiden_sizes: [1]}", "model.hiden_sizes: unknown key. Did you mean hidden_sizes?"),
        ("{preset: resnet-50, seq_len: 3}", "Known keys: family, preset, embedding_size, hidden_sizes,"),
        ("{preset: resnet-50, family: resnt}", "must be one of llama, gpt, resnet, convnext, vit, clip. Did you mean"),
        ("{preset: resnet-50, depths: 3}", "model.depths = 3: must be a list."),
        ("{preset: resnet-50, depths: [3, 4]}", "model.depths: must have 4 items, one per stage in hidden_sizes."),
        (
            "{preset: resnet-50, hidden_sizes: [2, 4, 8, 9]}",
            "must be multiples of 4, the channel reduction of a bottleneck.",
        ),
        ("{preset: resnet-50, layer_type: wide}", "must be 'basic' or 'bottleneck'."),
        ("{preset: convnext-tiny, image_size: 16}", "must be at least 32, which the stages reduce to one pixel."),
        ("{preset: vit-base-patch16, num_attention_heads: 7}", "must divide hidden_size = 768."),
        ("{preset: vit-base-patch16, image_size: 200}", "model.patch_size = 16: must divide image_size = 200."),
        ("{family: vit, hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1}", "intermediate_size: is miss"),
        ("{preset: clip-vit-base-patch32, text_config: {width: 3}}", "model.text_config.width: unknown key."),
        (
            "{preset: clip-vit-base-patch32, vision_config: {patch_size: 3}}",
            "model.vision_config.patch_size = 3: must divide image_size = 224.",
        ),
    ],
)
def test_a_problem_is_reported_at_its_line_with_a_hint(model: str, expected: str) -> None:
    found = problem(with_model(model))
    assert expected in found
    assert found.startswith("run.yaml:3 ")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("layout.tensor_parallel=2", "must be 1 or auto: resnet is planned with data parallelism and ZeRO only."),
        ("layout.pipeline_parallel=2", "must be 1 or auto"),
        ("layout.offload=optimizer", "must be none or auto: resnet is planned with all states on the device."),
        ("layout.activation_checkpointing=selective", "must be none, full or auto with family: resnet."),
    ],
)
def test_layouts_that_split_a_vision_network_are_rejected(override: str, expected: str) -> None:
    assert expected in problem(VISION, override)


def test_vision_networks_are_trained_for_steps_not_tokens() -> None:
    found = problem(VISION, "training.steps=null", "training.tokens=3B")
    assert "counts tokens of text. Set training.steps with family: resnet." in found
    spec = load(VISION)
    assert (spec.unit, spec.units_per_sample, spec.total_steps) == ("images", 1, 1000)
    assert load(with_model("{preset: clip-vit-base-patch32}")).unit == "pairs"


def test_contradictions_in_a_network_are_reported_beside_invalid_sections() -> None:
    keys = {one.key for one in problems(VISION, "model.depths=[1]", "training.steps=x")}
    assert keys == {"model.depths", "training.steps"}


def test_a_vision_network_is_rejected_where_a_language_model_is_required() -> None:
    with pytest.raises(UsageError, match="resnet can be planned, but not used here"):
        _ = load(VISION).transformer


def test_autocast_is_for_vision_networks_only() -> None:
    assert load(VISION, "planner.autocast=true").planner.autocast
    text = VISION.replace("resnet-50", "gpt2").replace("imagenet/", "a, tokenizer: {vocab_size: 512}")
    assert "must be false for a language model" in problem(text, "planner.autocast=true")


def complaints(text: str) -> list[Any]:
    data = YAML(typ="safe", pure=True).load(io.StringIO(text))
    return list(jsonschema.Draft202012Validator(json_schema()).iter_errors(data))


@pytest.mark.parametrize(
    ("model", "fine"),
    [
        ("{preset: resnet-50}", True),
        ("{preset: clip-vit-base-patch32, projection_dim: 256}", True),
        ("{hf_config: config.json}", True),
        ("{family: resnet, hidden_sizes: [64, 128], depths: [1, 1]}", True),
        ("{family: vit, hidden_size: 8}", False),
        ("{preset: resnet-50, seq_len: 3}", False),
        ("{preset: resnet-51}", False),
    ],
)
def test_the_schema_describes_vision_networks(model: str, fine: bool) -> None:
    assert (not complaints(with_model(model))) == fine
