"""The network of a vision model as operations, and its exact size. Knows nothing of memory or time."""

from __future__ import annotations

from functools import lru_cache

from scaletrain_cli.plan.result import ModelSize
from scaletrain_cli.plan.vision.convolutional import convnext, resnet
from scaletrain_cli.plan.vision.operations import Network
from scaletrain_cli.plan.vision.transformers import clip, vit
from scaletrain_cli.spec import ClipSpec, ConvNextSpec, ResNetSpec, VitSpec
from scaletrain_cli.spec.vision import VisionSpec


@lru_cache(maxsize=64)
def network(model: VisionSpec, fused_attention: bool = True) -> Network:
    """The operations of one sample; ``fused_attention``: whether a kernel keeps no matrix of scores."""
    match model:
        case ResNetSpec():
            return resnet(model)
        case ConvNextSpec():
            return convnext(model)
        case VitSpec():
            return vit(model, fused=fused_attention)
        case ClipSpec():
            return clip(model, fused=fused_attention)


def training_flops(model: VisionSpec) -> int:
    """Forward and backward FLOPs of one sample: two per multiplication with addition, three passes."""
    return 6 * network(model).macs


def model_size(model: VisionSpec) -> ModelSize:
    """Parameters, and FLOPs per image or pair in place of tokens."""
    parameters = network(model).parameters
    return ModelSize(parameters, parameters, float(training_flops(model)))
