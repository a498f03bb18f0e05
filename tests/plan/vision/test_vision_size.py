"""Vision networks: parameters and FLOPs against the authors' figures and against torch modules of the same shape."""

from typing import Any

import pytest

from scaletrain_cli.plan.vision.networks import network
from scaletrain_cli.plan.vision.parameters import parameter_counts
from scaletrain_cli.spec.presets import derived_dimensions, vision_presets
from scaletrain_cli.spec.vision_model import VISION
from tests.model_sizes import model_sizes

# Sums of the published weights: torchvision's and OpenAI's CLIP's own; ViT-S as timm has it.
PARAMETERS = {
    "resnet-18": 11_689_512,
    "resnet-34": 21_797_672,
    "resnet-50": 25_557_032,
    "resnet-101": 44_549_160,
    "resnet-152": 60_192_808,
    "convnext-tiny": 28_589_128,
    "convnext-small": 50_223_688,
    "convnext-base": 88_591_464,
    "convnext-large": 197_767_336,
    "vit-small-patch16": 22_050_664,
    "vit-base-patch16": 86_567_656,
    "vit-base-patch32": 88_224_232,
    "vit-large-patch16": 304_326_632,
    "vit-huge-patch14": 632_045_800,
    "clip-vit-base-patch32": 151_277_313,
    "clip-vit-base-patch16": 149_620_737,
    "clip-vit-large-patch14": 427_616_513,
}
# Billions of multiplications with addition per image of 224 x 224: torchvision's model page; ViT, with attention.
GMACS = {
    "resnet-18": 1.81,
    "resnet-50": 4.09,
    "resnet-152": 11.51,
    "convnext-tiny": 4.46,
    "convnext-large": 34.36,
    "vit-base-patch16": 17.56,
    "vit-large-patch16": 61.55,
}


def model_of(preset: str, **changes: Any) -> Any:
    given = vision_presets()[preset] | changes
    if given["family"] == "llava":
        given["text_config"] = derived_dimensions({"seq_len": 128, **given["text_config"]})
    return VISION[given["family"]].model_validate(given)


def test_every_preset_is_checked() -> None:
    sized = {name for name, given in vision_presets().items() if given["family"] != "llava"}
    assert sized == PARAMETERS.keys()


@pytest.mark.parametrize(("preset", "parameters"), PARAMETERS.items())
def test_parameters_are_those_of_the_published_weights(preset: str, parameters: int) -> None:
    assert parameter_counts(model_of(preset))[0] == parameters


@pytest.mark.parametrize(("preset", "gmacs"), GMACS.items())
def test_a_forward_pass_costs_what_the_authors_state(preset: str, gmacs: float) -> None:
    assert network(model_of(preset)).macs / 1e9 == pytest.approx(gmacs, abs=0.006)


# OpenCLIP's docs/model_profile.csv: billions of FLOPs per pair, two per multiplication.
@pytest.mark.parametrize(
    ("preset", "gflops"),
    [("clip-vit-base-patch32", 14.78), ("clip-vit-base-patch16", 41.09), ("clip-vit-large-patch14", 175.33)],
)
def test_clip_costs_what_openclip_counts(preset: str, gflops: float) -> None:
    assert 2 * network(model_of(preset)).macs / 1e9 == pytest.approx(gflops, abs=0.01)


def test_a_clip_that_is_no_preset_is_as_exact() -> None:
    given = {
        "family": "clip",
        "vision_config": {**model_sizes(hidden=1408, layers=40, heads=16, intermediate=6144), "patch_size": 14},
        "text_config": model_sizes(hidden=1024, layers=24, heads=16, intermediate=4096),
        "projection_dim": 1024,
    }
    giant = VISION["clip"].model_validate(given)
    assert parameter_counts(giant)[0] == 1_366_678_273  # OpenCLIP's ViT-g-14
    assert 2 * network(giant).macs / 1e9 == pytest.approx(581.15, abs=0.01)


def test_training_costs_six_operations_per_multiplication() -> None:
    model = model_of("resnet-50")
    assert network(model).training_flops == 6 * network(model).macs


def test_without_layer_scale_a_block_has_fewer_parameters() -> None:
    scaled, plain = model_of("convnext-tiny"), model_of("convnext-tiny", layer_scale_init_value=0)
    widths = sum(size * depth for size, depth in zip(scaled.hidden_sizes, scaled.depths, strict=True))
    assert parameter_counts(scaled)[0] - parameter_counts(plain)[0] == widths


def test_autocast_changes_no_parameter_and_no_product() -> None:
    for preset in PARAMETERS:
        plain, mixed = (network(model_of(preset), True, autocast) for autocast in (False, True))
        assert plain.macs == mixed.macs
