"""Size, memory and step time of ResNet, ConvNeXt, ViT and CLIP on a data-parallel rank."""
