import io
import json
from pathlib import Path
from typing import Any

import pytest
import transformers  # noqa: TID253
from ruamel.yaml import YAML

from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan import make_plan
from scaletrain_cli.plan.workloads.registry import workload_of
from scaletrain_cli.spec import LlavaSpec, RunSpec
from scaletrain_cli.spec.presets import vision_presets
from scaletrain_cli.spec.run import AnyModel
from tests.spec.samples import load, problem, problems, schema_validator

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
    [("resnet", 44_549_160 - 998 * 2049), ("convnext", 88_591_464), ("vit", 304_326_632), ("clip", 427_616_513)],
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
        ("{preset: resnet-50, family: resnt}", "must be one of llama, gpt, resnet, convnext, vit, clip, llava. Did"),
        ("{preset: resnet-50, depths: 3}", "model.depths = 3: must be a list."),
        ("{preset: resnet-50, depths: [3, 4]}", "model.depths: must have 4 items, one per stage in hidden_sizes."),
        ("{preset: resnet-50, hidden_sizes: [2, 4, 8, 9]}", "must be multiples of 4, the channel reduction"),
        ("{preset: resnet-50, layer_type: wide}", "must be 'basic' or 'bottleneck'."),
        ("{preset: convnext-tiny, image_size: 16}", "must be at least 32, which the stages reduce to one pixel."),
        ("{preset: vit-base-patch16, num_attention_heads: 7}", "must divide hidden_size = 768."),
        ("{preset: vit-base-patch16, image_size: 200}", "model.patch_size = 16: must divide image_size = 200."),
        ("{family: vit, hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1}", "intermediate_size: is miss"),
        ("{preset: clip-vit-base-patch32, text_config: {width: 3}}", "model.text_config.width: unknown key."),
        ("{preset: llava-tiny, vision_feature_layer: 3}", "vision_feature_layer = 3: must be between -3 and 2, with 2"),
        ("{preset: llava-tiny, text_config: {seq_len: 15}}", "must be at least 16, the tokens of one image."),
        ("{preset: llava-tiny, text_config: {preset: gpt2}}", "model.text_config.family = gpt: must be llama"),
        ("{preset: llava-tiny, text_config: {preset: llama7b}}", "model.text_config.preset = llama7b: is not a known"),
        ("{preset: llava-tiny, text_config: {preset: llama7b}}", "Did you mean llama-7b?"),
        ("{preset: llava-tiny, text_config: {weights: w}}", "has no effect in family: llava. Remove it, and set"),
        ("{preset: llava-tiny, text_config: {num_hidden_layers: 4097}}", "= 4097: must not exceed 4096 in a llava"),
        ("{preset: llava-tiny, text_config: {qk_norm_scope: projection}}", "with model.text_config.qk_norm = false."),
        ("{preset: llava-tiny, text_config: {hidden_size: x}}", "model.text_config.hidden_size = x: must be a whole"),
        ("{preset: clip-vit-base-patch32, text_config: {vocab_size: 9}}", "eos_token_id = 49407: must be below"),
        ("{preset: vit-base-patch16, num_hidden_layers: 1001}", "num_hidden_layers = 1001: must be at most 1000."),
        ("{preset: clip-vit-base-patch32, logit_scale_init_value: 5}", "must not exceed max_logit_scale = 4.60517."),
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


def test_the_language_model_of_a_llava_is_any_of_its_own_family() -> None:
    seven = load(with_model("{preset: llava-1.5-7b}")).model
    assert isinstance(seven, LlavaSpec)
    assert (seven.tokens_per_image, seven.tower_depth, seven.text_config.seq_len) == (576, 23, 4096)
    own = load(with_model("{preset: llava-1.5-7b, text_config: {seq_len: 2048, rope_theta: 5}}")).model
    assert isinstance(own, LlavaSpec)
    assert (own.text_config.seq_len, own.text_config.rope_theta, own.text_config.vocab_size) == (2048, 5, 32064)
    other = load(with_model("{preset: llava-1.5-7b, text_config: {preset: qwen2.5-0.5b}}")).model
    assert isinstance(other, LlavaSpec)
    assert (other.text_config.vocab_size, other.text_config.qkv_bias, other.text_config.norm_eps) == (
        151936,
        True,
        1e-6,
    )


def test_a_llava_is_planned_for_the_engine_alone() -> None:
    spec = load(with_model("{preset: llava-tiny}"))
    assert make_plan(spec).model.parameters > 100_000
    other = spec.model_copy(update={"planner": spec.planner.model_copy(update={"framework": "fsdp"})})
    with pytest.raises(UsageError, match="cannot be planned") as raised:
        make_plan(other)
    (found,) = raised.value.problems
    assert str(found).startswith("run.yaml:3 model.family = llava: its memory and time are modeled for")


def test_partial_configs_of_llava_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    """The first files of LLaVA state only what differs from the classes of transformers."""
    text = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}
    vision = {"hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model"}
    vision |= {"num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768}
    whole = {"model_type": "llava", "text_config": text, "vision_config": vision | {"vocab_size": 32000}}
    whole |= {"ignore_index": -100, "image_token_index": 32000, "vocab_size": 32064, "torch_dtype": "float16"}
    expected = load(with_model("{preset: llava-1.5-7b}")).model

    def read(config: dict[str, Any]) -> AnyModel:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return load(with_model("{hf_config: .}"), base_dir=tmp_path).model

    assert read(whole) == expected.model_copy(update={"preset": None})
    assert read({**whole, "vision_config": None}) == read(whole)
    assert read({**whole, "image_token_index": None, "image_token_id": 7}).image_token_index == 7  # type: ignore[union-attr]
    for kind in ("llama", "mistral", "qwen2"):
        theirs = transformers.LlavaConfig(text_config={"model_type": kind}).text_config
        ours = read({"model_type": "llava", "text_config": {"model_type": kind}}).text_config  # type: ignore[union-attr]
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"):
            assert getattr(ours, key) == getattr(theirs, key)
        assert ours.intermediate_size == theirs.intermediate_size
        assert ours.max_position_embeddings == theirs.max_position_embeddings
        assert ours.norm_eps == theirs.rms_norm_eps


def test_the_older_sections_of_a_clip_config_take_precedence(tmp_path: Path) -> None:
    tower = {"hidden_size": 64, "num_attention_heads": 2, "hidden_act": "gelu", "eos_token_id": 2}
    config = {"model_type": "clip", "text_config": {"hidden_size": 32}, "text_config_dict": tower}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = load(with_model("{hf_config: .}"), base_dir=tmp_path).model.text_config  # type: ignore[union-attr]
    theirs = transformers.CLIPConfig.from_pretrained(tmp_path).text_config
    for key in (*tower, "num_hidden_layers"):
        assert getattr(ours, key) == getattr(theirs, key)


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
    assert "counts tokens of text. Set training.samples with family: resnet." in found
    spec = load(VISION)
    assert (spec.unit, spec.units_per_sample, spec.total_steps) == ("images", 1, 1000)
    assert load(with_model("{preset: clip-vit-base-patch32}")).unit == "pairs"


def test_contradictions_in_a_network_are_reported_beside_invalid_sections() -> None:
    keys = {one.key for one in problems(VISION, "model.depths=[1]", "training.steps=x")}
    assert keys == {"model.depths", "training.steps"}


def test_a_vision_network_is_rejected_where_a_language_model_is_required() -> None:
    with pytest.raises(UsageError, match="resnet is not a language model"):
        _ = load(VISION).transformer


def test_autocast_is_for_vision_networks_only() -> None:
    assert load(VISION, "planner.autocast=true").planner.autocast
    text = VISION.replace("resnet-50", "gpt2").replace("imagenet/", "a, tokenizer: {vocab_size: 512}")
    assert "must be false for a language model" in problem(text, "planner.autocast=true")


def complaints(text: str) -> list[Any]:
    data = YAML(typ="safe", pure=True).load(io.StringIO(text))
    return list(schema_validator().iter_errors(data))


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


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.source=python-stdlib", "is a source of text. Use sklearn-digits, or files with images"),
        ("data.source=python-docstrings", "is a source of text. Use sklearn-digits, or files with images"),
        ("data={sources: [{name: a, path: a/, format: jsonl}]}", "must be auto or image_folder or webdataset or parq"),
        ("data={sources: [{name: a, path: a/, field: body}]}", "is the column of a text. For images set fields."),
        ("data={sources: [{name: a, path: a/, fields: {caption: t}}]}", "this run reads no caption"),
        ("training={global_batch_size: 255, steps: 9}", "must be even with mixup or cutmix"),
    ],
)
def test_data_that_a_vision_network_cannot_read_are_rejected(override: str, expected: str) -> None:
    given = problem(VISION, override, "data.images.augment.mixup=0.2")
    assert expected in given


def test_micro_batches_of_mixed_images_are_even() -> None:
    spec = load(VISION, "data.images.augment.cutmix=1", "training.global_batch_size=198", "cluster.gpus_per_node=1")
    assert make_plan(spec).layout.micro_batch_size % 2 == 0


@pytest.mark.parametrize(("preset", "why"), [("llava-tiny", ""), ("resnet-50", ", which has no logits of tokens")])
def test_the_cross_entropy_of_a_network_is_chosen_by_the_engine(preset: str, why: str) -> None:
    found = problem(with_model(f"{{preset: {preset}}}"), "training.cross_entropy=whole")
    assert f"must be auto with family: {preset.partition('-')[0]}{why}." in found


def test_answers_of_samples_require_a_loss_of_answers() -> None:
    text = with_model("{preset: llava-tiny}")
    own = ("data={source: rows.json, loss_on: all}",)
    load(text, *own)
    found = problem(text, *own, "evaluation={every: 2, sample_answers: 1}")
    assert "evaluation.sample_answers = 1: must be 0 with data.loss_on: all, which has no answers." in found
