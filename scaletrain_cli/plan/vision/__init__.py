"""The planner's part for ResNet, ConvNeXt, ViT and CLIP: exact size, memory and time of a data-parallel rank."""

from scaletrain_cli.plan.vision.networks import network, training_flops, vision_size

__all__ = ["network", "training_flops", "vision_size"]
