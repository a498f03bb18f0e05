"""Names, shapes and buffers of vision networks are those of transformers' models and files; decay groups."""

from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.plan.parameters import model_parameters, stored_shapes
from scaletrain_cli.plan.trained_parameters import decays
from scaletrain_cli.plan.vision.parameters import vision_buffers
from scaletrain_cli.spec.presets import vision_presets
from scaletrain_cli.spec.training import OptimizerSpec
from scaletrain_cli.spec.vision_model import VISION
from tests.plan.vision.test_vision_modules import MODELS
from tests.plan.vision.test_vision_size import model_of
from tests.vision_of_transformers import class_and_config


def built(spec: Any) -> Any:
    """The model of transformers with these dimensions, on the meta device."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    module, config = class_and_config(spec)
    with torch.device("meta"):
        return module(config)


# Names of ViT's modules in transformers 5, of which its files keep the older ones.
_VIT = {
    "vit.layers.": "vit.encoder.layer.",
    ".attention.q_proj.": ".attention.attention.query.",
    ".attention.k_proj.": ".attention.attention.key.",
    ".attention.v_proj.": ".attention.attention.value.",
    ".attention.o_proj.": ".attention.output.dense.",
    ".mlp.fc1.": ".intermediate.dense.",
    ".mlp.fc2.": ".output.dense.",
}


def in_files(name: str, family: str) -> str:
    for module, file in _VIT.items() if family == "vit" else ():
        name = name.replace(module, file)
    return name


TRANSFORMERS = [preset for preset in vision_presets() if not preset.startswith("llava")]


@pytest.mark.parametrize("preset", TRANSFORMERS)
def test_every_parameter_has_the_name_and_shape_of_transformers(preset: str) -> None:
    spec = model_of(preset)
    module = built(spec)
    theirs = {in_files(name, spec.family): tuple(p.shape) for name, p in module.named_parameters()}
    assert {parameter.name: parameter.shape for parameter in model_parameters(spec)} == theirs
    buffers = {name: buffer for name, buffer in module.named_buffers() if "position_ids" not in name}
    assert {buffer.name: buffer.shape for buffer in vision_buffers(spec)} == {
        name: tuple(buffer.shape) for name, buffer in buffers.items()
    }
    assert sum(each.size_bytes for each in vision_buffers(spec)) == sum(b.nbytes for b in buffers.values())


@pytest.mark.parametrize("preset", ["vit-small-patch16", "clip-vit-base-patch32", "llava-tiny", "llava-1.5-7b"])
def test_every_parameter_is_one_of_the_engine_in_the_same_place(preset: str) -> None:
    pytest.importorskip("torch")
    from scaletrain_cli.engine.model import outline

    spec = model_of(preset)
    engine = [(name, tuple(p.shape), p.requires_grad) for name, p in outline(spec).named_parameters()]
    counted = [(each.name, each.shape, each.trains) for each in model_parameters(spec)]
    assert sorted(counted) == sorted(engine)
    assert [shape for _, shape, _ in counted] == [shape for _, shape, _ in engine]


@pytest.mark.parametrize("name", MODELS)
def test_a_file_of_transformers_has_these_names(name: str, tmp_path: Path) -> None:
    spec = VISION[MODELS[name]["family"]].model_validate(MODELS[name])
    built(spec).to_empty(device="cpu").save_pretrained(tmp_path)
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 (no mapping)
    assert stored_shapes(spec) == shapes


@pytest.mark.parametrize("name", ["bottleneck", "convnext", "vit", "clip"])
def test_vectors_positions_and_class_tokens_have_no_weight_decay(name: str) -> None:
    model = VISION[MODELS[name]["family"]].model_validate(MODELS[name])
    decayed = {each.name for each in model_parameters(model) if decays(each, OptimizerSpec())}
    left_out = ("norm", "bias", "position", "class_embedding", "cls_token", "logit_scale", "layer_scale", "layrnorm")
    expected = {each.name for each in model_parameters(model) if not any(part in each.name for part in left_out)}
    norms_by_number = {each for each in expected if "downsampling_layer.0" in each}
    assert decayed == expected - norms_by_number
    assert decayed
