"""ResNet, ConvNeXt, ViT and CLIP as lists of operations, as torchvision and transformers build them."""

from dataclasses import dataclass, replace
from functools import lru_cache

from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.result import ModelSize
from scaletrain_cli.plan.vision.operations import (
    Block,
    Operation,
    VisionNetwork,
    activation,
    addition,
    attention,
    batch_norm,
    convolution,
    depthwise_convolution,
    layer_norm,
    layer_scale,
    linear,
    max_pool,
    mean_pool,
)
from scaletrain_cli.plan.vision.parameters import BOTTLENECK, EXPANSION, parameter_counts
from scaletrain_cli.spec import ClipSpec, ConvNextSpec, LlavaSpec, ModelSpec, ResNetSpec, RunSpec, VitSpec
from scaletrain_cli.spec.vision_model import ClipTextSpec, ClipVisionSpec, VisionSpec


def resnet(model: ResNetSpec) -> VisionNetwork:
    """Return a ResNet: the 7 x 7 stem with its pooling, the stages, and the classifier."""
    width, side, last = model.embedding_size, _halved(model.image_size), model.memory_format == "channels_last"
    pooled = _halved(side)
    stem = (
        Operation(kept=model.num_channels * model.image_size**2),
        convolution(model.num_channels, width, 7, model.image_size**2, side**2, channels_last=last, of_images=True),
        batch_norm(width, side**2),
        activation(width * side**2),
        max_pool(width, side**2, pooled**2),
    )
    blocks, side, channels = [Block(stem)], pooled, width
    layer, number = _bottleneck if model.layer_type == "bottleneck" else _basic, 0
    for index, (features, depth) in enumerate(zip(model.hidden_sizes, model.depths, strict=True)):
        out = side if index == 0 else _halved(side)
        first = layer(channels, features, side, out, last)
        blocks.append(Block(first, input=channels * side**2, place="block", first=number))
        if depth > 1:
            others = layer(features, features, out, out, last)
            blocks.append(Block(others, depth - 1, features * out**2, "block", number + 1))
        side, channels, number = out, features, number + depth
    blocks.append(
        Block((mean_pool(channels, side**2), linear(1, channels, model.num_labels, kept=False)), place="closing")
    )
    return VisionNetwork(tuple(blocks), classes=model.num_labels, pooled=channels)


def _conv_norm(
    channels: int, features: int, kernel: int, pixels: int, out: int, last: bool
) -> tuple[Operation, Operation]:
    return convolution(channels, features, kernel, pixels, out, channels_last=last), batch_norm(features, out)


def _bottleneck(channels: int, features: int, side: int, out: int, last: bool) -> tuple[Operation, ...]:
    narrow, pixels, after = features // BOTTLENECK, side**2, out**2
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
    """Return the residual connection of a block, with a projection if the shape changes."""
    same = channels == features and pixels == after
    shortcut = () if same else _conv_norm(channels, features, 1, pixels, after, last)
    return *shortcut, addition(features * after, kept=False), activation(features * after)


def convnext(model: ConvNextSpec, *, autocast: bool) -> VisionNetwork:
    """Return a ConvNeXt: patches, stages with downsampling before all but the first, and the classifier."""
    side, channels = model.image_size // model.patch_size, model.hidden_sizes[0]
    image = Operation(kept=model.num_channels * model.image_size**2)
    patches = convolution(model.num_channels, channels, model.patch_size, model.image_size**2, side**2, of_images=True)
    blocks, number = [Block((image, patches, layer_norm(channels, side**2, autocast=autocast)))], 0
    for index, (features, depth) in enumerate(zip(model.hidden_sizes, model.depths, strict=True)):
        if index:
            half = side // 2
            halving = convolution(channels, features, 2, side**2, half**2)
            norm = layer_norm(channels, side**2, autocast=autocast)
            blocks.append(Block((norm, halving), place="block", first=number))
            side = half
        pixels = side**2
        wide, scaled = EXPANSION * features, model.layer_scale_init_value > 0
        layer = (
            depthwise_convolution(features, 7, pixels),
            layer_norm(features, pixels, autocast=autocast),
            linear(pixels, features, wide),
            activation(wide * pixels, before_linear=True),
            linear(pixels, wide, features, kept=scaled, scaled=scaled),
            *((layer_scale(features, pixels, autocast=autocast),) if scaled else ()),
            addition(features * pixels, autocast=autocast, scaled=scaled),
        )
        size = features * side**2
        if index < len(model.depths) - 1:
            blocks.append(Block(layer, depth, size, "block", number))
        else:  # no later operation saves the last residual sum
            blocks += [Block(layer, depth - 1, size, "block", number)] if depth > 1 else []
            blocks.append(Block((*layer[:-1], replace(layer[-1], kept=0)), 1, size, "block", number + depth - 1))
        channels, number = features, number + depth
    head = (mean_pool(channels, side**2), layer_norm(channels, 1), linear(1, channels, model.num_labels, kept=False))
    blocks.append(Block(head, place="closing"))
    return VisionNetwork(tuple(blocks), classes=model.num_labels, pooled=channels)


def _halved(side: int) -> int:
    """Return the side length after a convolution of stride 2 with padding of half its odd kernel."""
    return (side + 1) // 2


def vit(model: VitSpec, *, fused: bool, autocast: bool) -> VisionNetwork:
    """Return a ViT: patches with class token and learned positions, blocks, norm, classifier of the class token."""
    hidden, side = model.hidden_size, model.image_size // model.patch_size
    tokens = side**2 + 1
    build = _Builder(fused, autocast)
    layer = build.layer(model, tokens, bias=model.qkv_bias)
    return VisionNetwork(
        (
            Block(build.patches(model)),
            Block(layer, model.num_hidden_layers, tokens * hidden * build.stream, "block"),
            Block((build.norm(hidden, 1), linear(1, hidden, model.num_labels, kept=False)), place="closing"),
        ),
        classes=model.num_labels,
        pooled=hidden,
    )


def clip(model: ClipSpec, *, fused: bool, autocast: bool) -> VisionNetwork:
    """Return a CLIP: image tower, text tower, and a projection of each; without dropout, with QuickGELU.

    arXiv:2103.00020, and its code.
    """
    image, text, joint = model.vision_config, model.text_config, model.projection_dim
    tokens, words = (image.image_size // image.patch_size) ** 2 + 1, text.max_position_embeddings
    build = _Builder(fused, autocast, quick_gelu=True)
    table = Operation(
        kept=words * text.hidden_size * build.stream,  # the sum with the positions, saved by the first norm
        kept_bytes=8 * words,  # token ids, as int64
        inputs=2 * words * text.hidden_size,
        outputs=words * text.hidden_size,
        moved_back=2 * words * text.hidden_size,
    )
    seen, read = build.layer(image, tokens), build.layer(text, words)
    ends = (
        (build.norm(image.hidden_size, 1), linear(1, image.hidden_size, joint, bias=False, kept=False)),
        (build.norm(text.hidden_size, 1), linear(1, text.hidden_size, joint, bias=False, kept=False)),
    )
    return VisionNetwork(
        (
            Block((*build.patches(image), build.norm(image.hidden_size, tokens)), tower="image"),
            Block(seen, image.num_hidden_layers, tokens * image.hidden_size * build.stream, "block", tower="image"),
            Block(ends[0], place="closing", tower="image"),
            Block((table,), tower="text"),
            Block(read, text.num_hidden_layers, words * text.hidden_size * build.stream, "block", tower="text"),
            Block(ends[1], place="closing", tower="text"),
        ),
        features=2 * joint,
    )


@lru_cache(maxsize=64)
def llava_tower(model: LlavaSpec) -> VisionNetwork:
    """Return the part of LLaVA that computes the features of one image: the tower up to its layer, and the projector.

    Attention has a fused kernel, or its causal language model would need one first.
    """
    image, text = model.vision_config, model.text_config
    build = _Builder(fused=True, autocast=False, quick_gelu=image.hidden_act == "quick_gelu")
    tokens = (image.image_size // image.patch_size) ** 2 + 1
    rows = model.tokens_per_image
    projector = (
        linear(rows, image.hidden_size, text.hidden_size),
        activation(rows * text.hidden_size, before_linear=True),
        linear(rows, text.hidden_size, text.hidden_size, kept=False),
    )
    opening = Block((*build.patches(image), build.norm(image.hidden_size, tokens)), tower="image")
    blocks = Block(build.layer(image, tokens), model.tower_depth, tokens * image.hidden_size, "block", tower="image")
    return VisionNetwork((opening, blocks, Block(projector, place="closing", tower="image")))


@dataclass(frozen=True)
class _Builder:
    """Builds the layers of a transformer tower; ``fused``: attention has a fused kernel."""

    fused: bool
    autocast: bool
    quick_gelu: bool = False

    @property
    def stream(self) -> int:
        """16-bit elements per value of the residual stream: 2 if it is fp32."""
        return 2 if self.autocast else 1

    def norm(self, hidden: int, rows: int) -> Operation:
        return layer_norm(hidden, rows, autocast=self.autocast)

    def patches(self, tower: VitSpec | ClipVisionSpec) -> tuple[Operation, ...]:
        """Return the image, the patches as a convolution, and the sum with class token and positions."""
        channels, hidden, patch = tower.num_channels, tower.hidden_size, tower.patch_size
        pixels, tokens = tower.image_size**2, (tower.image_size // patch) ** 2
        embedded = (tokens + 1) * hidden
        return (
            Operation(kept=channels * pixels),
            convolution(channels, hidden, patch, pixels, tokens, of_images=True, kept=False),
            Operation(kept=embedded * self.stream, inputs=2 * embedded, outputs=2 * embedded, moved_back=embedded),
        )

    def layer(
        self, tower: VitSpec | ClipVisionSpec | ClipTextSpec, rows: int, *, bias: bool = True
    ) -> tuple[Operation, ...]:
        """Return a pre-norm transformer block; ``bias`` is that of the query, key and value projections."""
        hidden, heads, inner = tower.hidden_size, tower.num_attention_heads, tower.intermediate_size
        joined = addition(rows * hidden, autocast=self.autocast)
        return (
            self.norm(hidden, rows),
            linear(rows, hidden, 3 * hidden, bias=bias),
            *attention(rows, heads, hidden // heads, fused=self.fused, autocast=self.autocast),
            linear(rows, hidden, hidden, kept=False),
            joined,
            self.norm(hidden, rows),
            linear(rows, hidden, inner),
            activation(rows * inner, 2 if self.quick_gelu else 1, before_linear=True),
            linear(rows, inner, hidden, kept=False),
            joined,
        )


@lru_cache(maxsize=64)
def network(model: VisionSpec, fused_attention: bool = True, autocast: bool = False) -> VisionNetwork:
    """Return the operations of one sample; ``fused_attention``: the kernel stores no matrix of scores."""
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
    """Return the model section of a spec with a vision network."""
    assert not isinstance(spec.model, ModelSpec | LlavaSpec)
    return spec.model


def planned_network(spec: RunSpec, device: Accelerator) -> VisionNetwork:
    """Return the operations of one sample; attention is fused as planner.attention says, or for auto by the device."""
    model, fused = vision_model(spec), spec.planner.attention != "materialised"
    tower = model.vision_config if isinstance(model, ClipSpec) else model
    if spec.planner.attention == "auto" and not isinstance(tower, ResNetSpec | ConvNextSpec):
        width = tower.hidden_size // tower.num_attention_heads
        fused = device.fuses_attention(spec.training.precision, width, grouped=False)
    return network(model, fused, autocasts(spec))


def autocasts(spec: RunSpec) -> bool:
    """Return whether the run uses torch.autocast over fp32 weights."""
    return spec.planner.autocast and spec.training.precision not in ("fp32", "tf32")


@lru_cache(maxsize=64)
def vision_size(model: VisionSpec) -> ModelSize:
    """Return parameters, and training FLOPs per image, or per pair of image and text."""
    parameters, _ = parameter_counts(model)
    return ModelSize(parameters, parameters, float(network(model).training_flops))
