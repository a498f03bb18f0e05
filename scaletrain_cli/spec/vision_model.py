"""Dimensions of vision networks under their Hugging Face names; planned, not trained by this engine."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from scaletrain_cli.spec.quantities import NonNegative, Whole
from scaletrain_cli.spec.section import Section

# Bounded, so that a typing error does not create a network that takes minutes to size.
Widths = Annotated[tuple[Whole, ...], Field(min_length=1, max_length=16)]
Depths = Annotated[tuple[Annotated[int, Field(strict=True, ge=1, le=1000)], ...], Field(min_length=1, max_length=16)]
ImageSize = Annotated[int, Field(strict=True, ge=1, le=8192)]


class ResNetSpec(Section):
    """A residual network (arXiv:1512.03385) with the stride in the 3 x 3 convolution (v1.5), as in torchvision."""

    family: Literal["resnet"]
    preset: str | None = None
    embedding_size: Whole = 64
    hidden_sizes: Widths
    depths: Depths
    layer_type: Literal["basic", "bottleneck"] = "bottleneck"
    memory_format: Literal["channels_last", "contiguous_format"] = Field(
        default="channels_last", description="memory format of torch; tensor cores need channels_last"
    )
    num_channels: Whole = 3
    num_labels: Whole = 1000
    image_size: ImageSize = 224

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for each dimension that contradicts another one."""
        yield from _stages(self.hidden_sizes, self.depths)
        if self.layer_type == "bottleneck" and any(size % 4 for size in self.hidden_sizes):
            yield "hidden_sizes", "must be multiples of 4, the channel reduction of a bottleneck."


class ConvNextSpec(Section):
    """A ConvNeXt (arXiv:2201.03545): patches, then 7 x 7 depthwise convolutions and pointwise MLPs."""

    family: Literal["convnext"]
    preset: str | None = None
    hidden_sizes: Widths
    depths: Depths
    patch_size: Whole = 4
    layer_scale_init_value: NonNegative = Field(
        default=1.0e-6, description="initial value of the learned scale per channel; 0: none"
    )
    num_channels: Whole = 3
    num_labels: Whole = 1000
    image_size: ImageSize = 224

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for each dimension that contradicts another one."""
        yield from _stages(self.hidden_sizes, self.depths)
        smallest = self.patch_size * 2 ** (len(self.depths) - 1)
        if self.image_size < smallest:
            yield "image_size", f"must be at least {smallest}, which the stages reduce to one pixel."


class VitSpec(Section):
    """A vision transformer (arXiv:2010.11929) with a class token, learned positions and LayerNorm first."""

    family: Literal["vit"]
    preset: str | None = None
    hidden_size: Whole
    num_hidden_layers: Whole
    num_attention_heads: Whole
    intermediate_size: Whole
    image_size: ImageSize = 224
    patch_size: Whole = 16
    num_channels: Whole = 3
    num_labels: Whole = 1000
    qkv_bias: bool = True

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for each dimension that contradicts another one."""
        yield from _heads(self.hidden_size, self.num_attention_heads)
        yield from _patches(self.image_size, self.patch_size)


class ClipVisionSpec(Section):
    """The image tower of CLIP: a vision transformer without a classifier."""

    hidden_size: Whole
    num_hidden_layers: Whole
    num_attention_heads: Whole
    intermediate_size: Whole
    image_size: ImageSize = 224
    patch_size: Whole = 32
    num_channels: Whole = 3

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for each dimension that contradicts another one."""
        yield from _heads(self.hidden_size, self.num_attention_heads)
        yield from _patches(self.image_size, self.patch_size)


class ClipTextSpec(Section):
    """The text tower of CLIP: a causal transformer with learned positions."""

    hidden_size: Whole
    num_hidden_layers: Whole
    num_attention_heads: Whole
    intermediate_size: Whole
    vocab_size: Whole = 49408
    max_position_embeddings: Whole = 77

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for each dimension that contradicts another one."""
        yield from _heads(self.hidden_size, self.num_attention_heads)


class ClipSpec(Section):
    """Contrastive language-image pre-training (arXiv:2103.00020): two towers, one shared space."""

    family: Literal["clip"]
    preset: str | None = None
    vision_config: ClipVisionSpec
    text_config: ClipTextSpec
    projection_dim: Whole = 512

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for each dimension that contradicts another one."""
        for name in ("vision_config", "text_config"):
            for key, message in getattr(self, name).inconsistencies():
                yield f"{name}.{key}", message


VisionSpec = ResNetSpec | ConvNextSpec | VitSpec | ClipSpec
VISION: dict[str, type[Section]] = {
    "resnet": ResNetSpec,
    "convnext": ConvNextSpec,
    "vit": VitSpec,
    "clip": ClipSpec,
}


def _stages(hidden_sizes: tuple[int, ...], depths: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    if len(hidden_sizes) != len(depths):
        yield "depths", f"must have {len(hidden_sizes)} items, one per stage in hidden_sizes."


def _heads(hidden_size: int, heads: int) -> Iterator[tuple[str, str]]:
    if hidden_size % heads:
        yield "num_attention_heads", f"must divide hidden_size = {hidden_size}."


def _patches(image_size: int, patch_size: int) -> Iterator[tuple[str, str]]:
    if image_size % patch_size:
        yield "patch_size", f"must divide image_size = {image_size}."
