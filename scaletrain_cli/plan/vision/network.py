"""The network of a vision model as operations, and its exact size. Knows nothing of memory or time."""

from __future__ import annotations

from functools import lru_cache

from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.result import ModelSize
from scaletrain_cli.plan.vision.convolutional import convnext, resnet
from scaletrain_cli.plan.vision.operations import Network
from scaletrain_cli.plan.vision.transformers import clip, vit
from scaletrain_cli.spec import ClipSpec, ConvNextSpec, ModelSpec, ResNetSpec, RunSpec, VitSpec
from scaletrain_cli.spec.vision import VisionSpec


@lru_cache(maxsize=64)
def network(model: VisionSpec, fused_attention: bool = True, autocast: bool = False) -> Network:
    """The operations of one sample; ``fused_attention``: whether a kernel keeps no matrix of scores."""
    match model:
        case ResNetSpec():
            return resnet(model)
        case ConvNextSpec():
            return convnext(model, autocast=autocast)
        case VitSpec():
            return vit(model, fused=fused_attention, autocast=autocast)
        case ClipSpec():
            return clip(model, fused=fused_attention, autocast=autocast)


def vision_model(spec: RunSpec) -> VisionSpec:
    """The model of a spec that the planner has found to be no transformer of text."""
    assert not isinstance(spec.model, ModelSpec)
    return spec.model


def planned_network(spec: RunSpec, device: Accelerator) -> Network:
    """The operations of one sample as the device would run them."""
    return network(vision_model(spec), _fuses_attention(spec, device), autocasts(spec))


def autocasts(spec: RunSpec) -> bool:
    """Whether torch.autocast picks the precision of each operation, over weights in fp32."""
    return spec.planner.autocast and spec.training.precision not in ("fp32", "tf32")


def _fuses_attention(spec: RunSpec, device: Accelerator) -> bool:
    """Whether attention keeps no matrix of scores: as the spec says, or what the device's kernels can."""
    if spec.planner.attention != "auto":
        return spec.planner.attention == "flash"
    model = spec.model
    tower = model.vision_config if isinstance(model, ClipSpec) else model
    if isinstance(tower, ResNetSpec | ConvNextSpec | ModelSpec):
        return True
    width = tower.hidden_size // tower.num_attention_heads
    return device.fuses_attention(spec.training.precision, width, grouped=False)


def training_flops(model: VisionSpec) -> int:
    """Forward and backward FLOPs of one sample: two per multiplication with addition, three passes."""
    return 6 * network(model).macs


@lru_cache(maxsize=64)
def vision_size(model: VisionSpec) -> ModelSize:
    """Parameters, and FLOPs per image or pair in place of tokens."""
    parameters = network(model).parameters
    return ModelSize(parameters, parameters, float(training_flops(model)))
