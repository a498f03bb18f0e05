"""ResNet and ConvNeXt as operations, layer by layer as torchvision and transformers build them. Knows no device."""

from __future__ import annotations

from dataclasses import replace

from scaletrain_cli.plan.vision.layers import (
    activation,
    addition,
    batch_norm,
    convolution,
    depthwise_convolution,
    layer_norm,
    layer_scale,
    linear,
    max_pool,
)
from scaletrain_cli.plan.vision.operations import Block, Network, Operation
from scaletrain_cli.spec import ConvNextSpec, ResNetSpec

# Bottlenecks narrow to a quarter (arXiv:1512.03385, section 4.1); ConvNeXt's MLPs widen to four times.
_BOTTLENECK = 4
_EXPANSION = 4


def resnet(model: ResNetSpec) -> Network:
    """The 7 x 7 stem with its pooling, the stages, and the classifier."""
    width, side, last = model.embedding_size, _halved(model.image_size), model.memory_format == "channels_last"
    pooled = _halved(side)
    image = Operation(kept=model.num_channels * model.image_size**2)
    stem = (
        image,
        convolution(
            model.num_channels,
            width,
            7,
            model.image_size**2,
            side**2,
            bias=False,
            channels_last=last,
            of_images=True,
        ),
        batch_norm(width, side**2),
        activation(width * side**2),
        max_pool(width, side**2, pooled**2),
    )
    blocks, side, channels = [Block(stem)], pooled, width
    layer = _bottleneck if model.layer_type == "bottleneck" else _basic
    for index, (features, depth) in enumerate(zip(model.hidden_sizes, model.depths, strict=True)):
        out = side if index == 0 else _halved(side)
        blocks.append(Block(layer(channels, features, side, out, last), input=channels * side**2))
        if depth > 1:
            blocks.append(Block(layer(features, features, out, out, last), depth - 1, input=features * out**2))
        side, channels = out, features
    pooling = Operation(kept=channels, inputs=channels * side**2, outputs=channels, moved_back=channels * side**2)
    blocks.append(Block((pooling, linear(1, channels, model.num_labels, kept=False))))
    return Network(tuple(blocks), classes=model.num_labels)


def _conv_norm(
    channels: int, features: int, kernel: int, pixels: int, out: int, last: bool
) -> tuple[Operation, Operation]:
    dense = convolution(channels, features, kernel, pixels, out, bias=False, channels_last=last)
    return dense, batch_norm(features, out)


def _bottleneck(channels: int, features: int, side: int, out: int, last: bool) -> tuple[Operation, ...]:
    narrow, pixels, after = features // _BOTTLENECK, side**2, out**2
    return (
        *_conv_norm(channels, narrow, 1, pixels, pixels, last),
        activation(narrow * pixels),
        *_conv_norm(narrow, narrow, 3, pixels, after, last),
        activation(narrow * after),
        *_conv_norm(narrow, features, 1, after, after, last),
        *_joined(channels, features, pixels, after, last),
    )


def _basic(channels: int, features: int, side: int, out: int, last: bool) -> tuple[Operation, ...]:
    pixels, after = side**2, out**2
    return (
        *_conv_norm(channels, features, 3, pixels, after, last),
        activation(features * after),
        *_conv_norm(features, features, 3, after, after, last),
        *_joined(channels, features, pixels, after, last),
    )


def _joined(channels: int, features: int, pixels: int, after: int, last: bool) -> tuple[Operation, ...]:
    """The skip connection, projected where the shape changes."""
    same = channels == features and pixels == after
    shortcut = () if same else _conv_norm(channels, features, 1, pixels, after, last)
    return *shortcut, addition(features * after, kept=False), activation(features * after)


def convnext(model: ConvNextSpec, *, autocast: bool) -> Network:
    """The patches, the stages with a halving before all but the first, and the classifier."""
    side, channels = model.image_size // model.patch_size, model.hidden_sizes[0]
    image = Operation(kept=model.num_channels * model.image_size**2)
    patches = convolution(
        model.num_channels, channels, model.patch_size, model.image_size**2, side**2, bias=True, of_images=True
    )
    blocks = [Block((image, patches, layer_norm(channels, side**2, autocast=autocast)))]
    for index, (features, depth) in enumerate(zip(model.hidden_sizes, model.depths, strict=True)):
        if index:
            half = side // 2
            halving = convolution(channels, features, 2, side**2, half**2, bias=True)
            blocks.append(Block((layer_norm(channels, side**2, autocast=autocast), halving)))
            side = half
        layer = _convnext_layer(model, features, side**2, autocast)
        if index < len(model.depths) - 1:
            blocks.append(Block(layer, depth, input=features * side**2))
        else:  # nothing reads the last sum again: its mean does not
            blocks += [Block(layer, depth - 1, input=features * side**2)] if depth > 1 else []
            blocks.append(Block((*layer[:-1], replace(layer[-1], kept=0)), input=features * side**2))
        channels = features
    pooling = Operation(kept=channels, inputs=channels * side**2, outputs=channels, moved_back=channels * side**2)
    blocks.append(Block((pooling, layer_norm(channels, 1), linear(1, channels, model.num_labels, kept=False))))
    return Network(tuple(blocks), classes=model.num_labels)


def _convnext_layer(model: ConvNextSpec, channels: int, pixels: int, autocast: bool) -> tuple[Operation, ...]:
    wide, scaled = _EXPANSION * channels, model.layer_scale_init_value > 0
    return (
        depthwise_convolution(channels, 7, pixels),
        layer_norm(channels, pixels, autocast=autocast),
        linear(pixels, channels, wide),
        activation(wide * pixels),
        linear(pixels, wide, channels, kept=scaled),
        *((layer_scale(channels, pixels, autocast=autocast),) if scaled else ()),
        addition(channels * pixels, autocast=autocast, scaled=scaled),
    )


def _halved(side: int) -> int:
    """Pixels of a side after a convolution of stride 2 that pads by half its odd kernel."""
    return (side + 1) // 2
