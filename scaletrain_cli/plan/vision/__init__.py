"""The planner's part for ResNet, ConvNeXt, ViT and CLIP: exact size, memory and time of a data-parallel rank."""

from scaletrain_cli.plan.vision.network import model_size, network, training_flops

__all__ = ["model_size", "network", "training_flops"]
