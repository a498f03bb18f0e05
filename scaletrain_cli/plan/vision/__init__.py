"""Sizes, memory and time of ResNet, ConvNeXt, ViT and CLIP on a data-parallel rank."""
