"""The parameters and buffers of vision networks under the names of Hugging Face's files, in order of the modules."""

import math
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from scaletrain_cli.plan.parameter import Parameter
from scaletrain_cli.spec import ClipSpec, ConvNextSpec, LlavaSpec, ResNetSpec, VitSpec
from scaletrain_cli.spec.vision_model import ClipTextSpec, ClipVisionSpec, VisionSpec

# A ResNet bottleneck has a quarter of the channels (arXiv:1512.03385, section 4.1), a ConvNeXt MLP four times as many.
BOTTLENECK = 4
EXPANSION = 4
_FP32_BYTES, _COUNTER_BYTES = 4, 8


class Buffer(NamedTuple):
    """One tensor that is saved and does not train."""

    name: str
    shape: tuple[int, ...]
    element_bytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Return the bytes, which no precision and no ZeRO stage changes."""
        return self.numel * self.element_bytes


class _Place(NamedTuple):
    place: str
    block: int | None
    below: int
    tower: str = ""


_HEAD = _Place("closing", None, 0)


@lru_cache(maxsize=64)
def vision_parameters(model: VisionSpec | LlavaSpec) -> tuple[Parameter, ...]:
    """Return all parameters of a network, in the order of the modules; of LLaVA without the language model."""
    match model:
        case ResNetSpec():
            return tuple(_resnet(model))
        case ConvNextSpec():
            return tuple(_convnext(model))
        case VitSpec():
            return tuple(_vit(model))
        case ClipSpec():
            return tuple(_clip(model))
        case LlavaSpec():
            return tuple(_llava(model))


@lru_cache(maxsize=64)
def parameter_counts(model: VisionSpec | LlavaSpec) -> tuple[int, int]:
    """Return the number of parameters that are computed with, and that of the largest block."""
    sizes = Counter[tuple[str, str, int | None]]()
    for parameter in vision_parameters(model):
        sizes[parameter.tower, parameter.place, parameter.block] += parameter.numel if parameter.trains else 0
    return sizes.total(), max(sizes.values())


@lru_cache(maxsize=64)
def vision_buffers(model: VisionSpec | LlavaSpec) -> tuple[Buffer, ...]:
    """Return the running statistics of all BatchNorms: mean and variance in fp32, and a counter of batches as int64."""
    if not isinstance(model, ResNetSpec) or model.norm == "group":
        return ()
    return tuple(
        buffer
        for parameter in _resnet(model)
        if parameter.name.endswith(".normalization.weight")
        for buffer in _statistics(parameter.name.removesuffix(".weight"), parameter.shape)
    )


def _statistics(norm: str, shape: tuple[int, ...]) -> Iterator[Buffer]:
    for name in ("running_mean", "running_var"):
        yield Buffer(f"{norm}.{name}", shape, _FP32_BYTES)
    yield Buffer(f"{norm}.num_batches_tracked", (), _COUNTER_BYTES)


def _resnet(model: ResNetSpec) -> Iterator[Parameter]:
    total = sum(model.depths)
    opening = _Place("opening", None, total + 1)
    yield from _conv_norm("resnet.embedder.embedder", model.num_channels, model.embedding_size, 7, opening)
    channels, number = model.embedding_size, 0
    for stage, (features, depth) in enumerate(zip(model.hidden_sizes, model.depths, strict=True)):
        for layer in range(depth):
            at = _Place("block", number, total - number)
            path = f"resnet.encoder.stages.{stage}.layers.{layer}"
            if channels != features or (stage and not layer):
                yield from _conv_norm(f"{path}.shortcut", channels, features, 1, at)
            narrow = features // BOTTLENECK
            shapes = [(channels, narrow, 1), (narrow, narrow, 3), (narrow, features, 1)]
            if model.layer_type == "basic":
                shapes = [(channels, features, 3), (features, features, 3)]
            for index, (inputs, outputs, kernel) in enumerate(shapes):
                yield from _conv_norm(f"{path}.layer.{index}", inputs, outputs, kernel, at)
            channels, number = features, number + 1
    yield from _linear("classifier.1", channels, model.num_labels, _HEAD)


def _convnext(model: ConvNextSpec) -> Iterator[Parameter]:
    total, channels = sum(model.depths), model.hidden_sizes[0]
    opening = _Place("opening", None, total + 1)
    path = "convnext.embeddings"
    yield from _convolution(f"{path}.patch_embeddings", model.num_channels, channels, model.patch_size, opening)
    yield from _norm(f"{path}.layernorm", channels, opening)
    number = 0
    for stage, (features, depth) in enumerate(zip(model.hidden_sizes, model.depths, strict=True)):
        path = f"convnext.encoder.stages.{stage}"
        if stage:
            first = _Place("block", number, total - number)
            yield from _norm(f"{path}.downsampling_layer.0", channels, first)
            yield from _convolution(f"{path}.downsampling_layer.1", channels, features, 2, first)
        for layer in range(depth):
            at = _Place("block", number, total - number)
            block = f"{path}.layers.{layer}"
            if model.layer_scale_init_value > 0:
                yield _parameter(f"{block}.layer_scale_parameter", (features,), at)
            yield from _convolution(f"{block}.dwconv", 1, features, 7, at)
            yield from _norm(f"{block}.layernorm", features, at)
            yield from _linear(f"{block}.pwconv1", features, EXPANSION * features, at)
            yield from _linear(f"{block}.pwconv2", EXPANSION * features, features, at)
            number += 1
        channels = features
    yield from _norm("convnext.layernorm", channels, _HEAD)
    yield from _linear("classifier", channels, model.num_labels, _HEAD)


def _vit(model: VitSpec) -> Iterator[Parameter]:
    hidden, total = model.hidden_size, model.num_hidden_layers
    opening, path = _Place("opening", None, total + 1), "vit.embeddings"
    tokens = (model.image_size // model.patch_size) ** 2 + 1
    yield _parameter(f"{path}.cls_token", (1, 1, hidden), opening, decays=False)
    yield _parameter(f"{path}.position_embeddings", (1, tokens, hidden), opening, decays=False)
    patches = f"{path}.patch_embeddings.projection"
    yield from _convolution(patches, model.num_channels, hidden, model.patch_size, opening)
    for layer in range(total):
        at, block = _Place("block", layer, total - layer), f"vit.encoder.layer.{layer}"
        for name in ("query", "key", "value"):
            yield from _linear(f"{block}.attention.attention.{name}", hidden, hidden, at, bias=model.qkv_bias)
        yield from _linear(f"{block}.attention.output.dense", hidden, hidden, at)
        yield from _linear(f"{block}.intermediate.dense", hidden, model.intermediate_size, at)
        yield from _linear(f"{block}.output.dense", model.intermediate_size, hidden, at)
        yield from _norm(f"{block}.layernorm_before", hidden, at)
        yield from _norm(f"{block}.layernorm_after", hidden, at)
    yield from _norm("vit.layernorm", hidden, _HEAD)
    yield from _linear("classifier", hidden, model.num_labels, _HEAD)


def _llava(model: LlavaSpec) -> Iterator[Parameter]:
    """Yield the parameters of the image tower and of the projector of LLaVA.

    The projector is as far from the head as the token embedding. Blocks after ``vision_feature_layer`` are in the files
    and not computed.
    """
    layers = model.text_config.num_hidden_layers
    depth, path = model.tower_depth, "vision_tower.vision_model"
    for tensor in vision_tower(model.vision_config, path, layers + 1 - (model.vision_config.num_hidden_layers - depth)):
        unused = tensor.place == "closing" or (tensor.block is not None and tensor.block >= depth)
        yield tensor._replace(below=max(0, tensor.below or 0), trains=not unused)
    at, hidden = _Place("closing", None, layers + 1, "image"), model.text_config.hidden_size
    yield from _linear("multi_modal_projector.linear_1", model.vision_config.hidden_size, hidden, at)
    yield from _linear("multi_modal_projector.linear_2", hidden, hidden, at)


def _clip(model: ClipSpec) -> Iterator[Parameter]:
    image, text = model.vision_config, model.text_config
    yield _parameter("logit_scale", (), _HEAD)
    if model.logit_bias_init_value is not None:
        yield _parameter("logit_bias", (), _HEAD)
    yield from _text_tower(text, "text_model")
    yield from vision_tower(image, "vision_model", 0)
    for name, tower, size in (("visual", "image", image.hidden_size), ("text", "text", text.hidden_size)):
        yield from _linear(f"{name}_projection", size, model.projection_dim, _HEAD._replace(tower=tower), bias=False)


def _text_tower(tower: ClipTextSpec, path: str) -> Iterator[Parameter]:
    hidden, total = tower.hidden_size, tower.num_hidden_layers
    table = _Place("embedding", None, total + 1, "text")
    yield _parameter(f"{path}.embeddings.token_embedding.weight", (tower.vocab_size, hidden), table)
    positions = (tower.max_position_embeddings, hidden)
    opening = table._replace(place="opening")
    yield _parameter(f"{path}.embeddings.position_embedding.weight", positions, opening, decays=False)
    yield from _clip_layers(tower, path, 0, "text")
    yield from _norm(f"{path}.final_layer_norm", hidden, _HEAD._replace(tower="text"))


def vision_tower(tower: ClipVisionSpec, path: str, below: int) -> Iterator[Parameter]:
    """Yield the parameters of CLIP's image tower under the name ``path``; ``below``: layers after its last block."""
    hidden = tower.hidden_size
    opening = _Place("opening", None, below + tower.num_hidden_layers + 1, "image")
    embeddings = f"{path}.embeddings"
    yield _parameter(f"{embeddings}.class_embedding", (hidden,), opening, decays=False)
    patches = f"{embeddings}.patch_embedding"
    yield from _convolution(patches, tower.num_channels, hidden, tower.patch_size, opening, bias=False)
    positions = ((tower.image_size // tower.patch_size) ** 2 + 1, hidden)
    yield _parameter(f"{embeddings}.position_embedding.weight", positions, opening, decays=False)
    yield from _norm(f"{path}.pre_layrnorm", hidden, opening)
    yield from _clip_layers(tower, path, below, "image")
    yield from _norm(f"{path}.post_layernorm", hidden, _Place("closing", None, below, "image"))


def _clip_layers(tower: ClipVisionSpec | ClipTextSpec, path: str, below: int, name: str) -> Iterator[Parameter]:
    hidden, total = tower.hidden_size, tower.num_hidden_layers
    for layer in range(total):
        at, block = _Place("block", layer, below + total - layer, name), f"{path}.encoder.layers.{layer}"
        for projection in ("k_proj", "v_proj", "q_proj", "out_proj"):
            yield from _linear(f"{block}.self_attn.{projection}", hidden, hidden, at)
        yield from _norm(f"{block}.layer_norm1", hidden, at)
        yield from _linear(f"{block}.mlp.fc1", hidden, tower.intermediate_size, at)
        yield from _linear(f"{block}.mlp.fc2", tower.intermediate_size, hidden, at)
        yield from _norm(f"{block}.layer_norm2", hidden, at)


def _parameter(name: str, shape: tuple[int, ...], at: _Place, *, decays: bool = True) -> Parameter:
    decays = decays and len(shape) > 1
    return Parameter(name, shape, at.place, at.block, None, name, below=at.below, decays=decays, tower=at.tower)


def _conv_norm(path: str, channels: int, features: int, kernel: int, at: _Place) -> Iterator[Parameter]:
    yield from _convolution(f"{path}.convolution", channels, features, kernel, at, bias=False)
    yield from _norm(f"{path}.normalization", features, at)


def _convolution(
    path: str, channels: int, features: int, kernel: int, at: _Place, *, bias: bool = True
) -> Iterator[Parameter]:
    yield _parameter(f"{path}.weight", (features, channels, kernel, kernel), at)
    if bias:
        yield _parameter(f"{path}.bias", (features,), at)


def _linear(path: str, inputs: int, outputs: int, at: _Place, *, bias: bool = True) -> Iterator[Parameter]:
    yield _parameter(f"{path}.weight", (outputs, inputs), at)
    if bias:
        yield _parameter(f"{path}.bias", (outputs,), at)


def _norm(path: str, size: int, at: _Place) -> Iterator[Parameter]:
    for name in ("weight", "bias"):
        yield _parameter(f"{path}.{name}", (size,), at)
