"""Dimensions of vision networks under their Hugging Face names."""

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from scaletrain_cli.spec.model import MOST_LAYERS, ModelSpec
from scaletrain_cli.spec.model_consistency import model_inconsistencies
from scaletrain_cli.spec.quantities import Fraction, NonNegative, Positive, Whole, WholeOrZero, not_a_switch
from scaletrain_cli.spec.section import Section, used_when, where_not
from scaletrain_cli.spec.shared_paths import ModelPath

# Bounded, so that a typing error does not create a network that takes minutes to size.
Widths = Annotated[tuple[Whole, ...], Field(min_length=1, max_length=16)]
Depth = Annotated[int, Field(strict=True, ge=1, le=1000)]
Depths = Annotated[tuple[Depth, ...], Field(min_length=1, max_length=16)]
ImageSize = Annotated[int, Field(strict=True, ge=1, le=8192)]
Activation = Literal["gelu", "gelu_pytorch_tanh", "quick_gelu"]
Number = Annotated[float, BeforeValidator(not_a_switch)]
# eos_token_id of CLIP configs before transformers 4.31. The largest token marks the end then, as in OpenAI's code.
OLD_EOS = 2
GROUPS = 32  # of channels, in GroupNorm (arXiv:1803.08494, section 4.1)


InitialWeights = Annotated[
    ModelPath | None,
    Field(description="initial weights: folder of Hugging Face *.safetensors, or hf://org/name@revision; null: random"),
]
NewClassifier = Annotated[
    bool,
    used_when(where_not("model.weights", None)),
    Field(description="random classifier in place of that of the weights, which may be of other classes"),
]
DropPathRate = Annotated[
    Fraction, Field(description="share of images that skip the last block; the first has 0, the others in between")
]


class ResNetSpec(Section):
    """A residual network (arXiv:1512.03385) with the stride in the 3 x 3 convolution (v1.5), as in torchvision."""

    family: Literal["resnet"]
    preset: str | None = None
    embedding_size: Whole = 64
    hidden_sizes: Widths
    depths: Depths
    layer_type: Literal["basic", "bottleneck"] = "bottleneck"
    norm: Literal["batch", "group"] = Field(
        default="batch",
        description="group: GroupNorm of 32 groups of channels, which does not depend on the batch; no Hugging Face "
        "model has it",
    )
    zero_init_residual: bool = Field(
        default=False, description="random first weights: the last norm of each block begins with weight 0"
    )
    memory_format: Literal["channels_last", "contiguous_format"] = Field(
        default="channels_last", description="memory format of torch; tensor cores need channels_last"
    )
    num_channels: Whole = 3
    num_labels: Whole = 1000
    image_size: ImageSize = 224
    weights: InitialWeights = None
    new_classifier: NewClassifier = False

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        yield from _stages(self.hidden_sizes, self.depths)
        reduction = 4 if self.layer_type == "bottleneck" else 1
        if any(size % reduction for size in self.hidden_sizes):
            yield "hidden_sizes", "must be multiples of 4, the channel reduction of a bottleneck."
        elif self.norm == "group":
            if any(size % (GROUPS * reduction) for size in self.hidden_sizes):
                inner = ", the groups of norm: group" + (" in a quarter of the channels" if reduction > 1 else "")
                yield "hidden_sizes", f"must be multiples of {GROUPS * reduction}{inner}."
            if self.embedding_size % GROUPS:
                yield "embedding_size", f"must be a multiple of {GROUPS}, the groups of norm: group."


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
    drop_path_rate: DropPathRate = 0.0
    layer_norm_eps: Positive = Field(default=1.0e-12, description="of the last norm; all others have 1e-6")
    initializer_range: Positive = Field(default=0.02, description="standard deviation of random first weights")
    num_channels: Whole = 3
    num_labels: Whole = 1000
    image_size: ImageSize = 224
    weights: InitialWeights = None
    new_classifier: NewClassifier = False

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        yield from _stages(self.hidden_sizes, self.depths)
        smallest = self.patch_size * 2 ** (len(self.depths) - 1)
        if self.image_size < smallest:
            yield "image_size", f"must be at least {smallest}, which the stages reduce to one pixel."


class VitSpec(Section):
    """A vision transformer (arXiv:2010.11929) with a class token, learned positions and LayerNorm first."""

    family: Literal["vit"]
    preset: str | None = None
    hidden_size: Whole
    num_hidden_layers: Depth
    num_attention_heads: Whole
    intermediate_size: Whole
    image_size: ImageSize = 224
    patch_size: Whole = 16
    num_channels: Whole = 3
    num_labels: Whole = 1000
    qkv_bias: bool = True
    hidden_act: Activation = "gelu"
    layer_norm_eps: Positive = 1.0e-12
    initializer_range: Positive = Field(default=0.02, description="standard deviation of random first weights")
    drop_path_rate: DropPathRate = 0.0
    weights: InitialWeights = None
    new_classifier: NewClassifier = False

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        yield from _heads(self.hidden_size, self.num_attention_heads)
        yield from _patches(self.image_size, self.patch_size)


class ClipVisionSpec(Section):
    """The image tower of CLIP: a vision transformer without a classifier."""

    hidden_size: Whole
    num_hidden_layers: Depth
    num_attention_heads: Whole
    intermediate_size: Whole
    image_size: ImageSize = 224
    patch_size: Whole = 32
    num_channels: Whole = 3
    hidden_act: Activation = "quick_gelu"
    layer_norm_eps: Positive = 1.0e-5
    initializer_range: Positive = Field(
        default=0.02, description="standard deviation of random first patches and positions"
    )

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        yield from _heads(self.hidden_size, self.num_attention_heads)
        yield from _patches(self.image_size, self.patch_size)


class ClipTextSpec(Section):
    """The text tower of CLIP: a causal transformer with learned positions."""

    hidden_size: Whole
    num_hidden_layers: Depth
    num_attention_heads: Whole
    intermediate_size: Whole
    vocab_size: Whole = 49408
    max_position_embeddings: Whole = 77
    hidden_act: Activation = "quick_gelu"
    layer_norm_eps: Positive = 1.0e-5
    eos_token_id: WholeOrZero = Field(
        default=49407,
        description="the token whose first place in a caption has its features; 2, of configs before transformers 4.31:"
        " the place of the largest token",
    )

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        yield from _heads(self.hidden_size, self.num_attention_heads)
        if self.eos_token_id >= self.vocab_size:
            yield "eos_token_id", f"must be below vocab_size = {self.vocab_size}."


class ClipSpec(Section):
    """Contrastive language-image pre-training (arXiv:2103.00020): two towers, one shared space."""

    family: Literal["clip"]
    preset: str | None = None
    vision_config: ClipVisionSpec
    text_config: ClipTextSpec
    projection_dim: Whole = 512
    logit_scale_init_value: Number = Field(
        default=2.6592, description="first value of the logarithm of the factor of similarities; 2.6592: ln(1 / 0.07)"
    )
    max_logit_scale: Number | None = Field(
        default=math.log(100), description="largest value of that logarithm, applied after each step; null: no limit"
    )
    logit_bias_init_value: Number | None = Field(
        default=None, description="first value of a learned bias of similarities, for loss: sigmoid (-10); null: none"
    )
    weights: InitialWeights = None

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        yield from _inner(self)
        if self.max_logit_scale is not None and self.logit_scale_init_value > self.max_logit_scale:
            yield "logit_scale_init_value", f"must not exceed max_logit_scale = {self.max_logit_scale:.6g}."


class LlavaSpec(Section):
    """A vision-language model (arXiv:2310.03744): CLIP's image tower, a projector, and a language model."""

    family: Literal["llava"]
    preset: str | None = None
    vision_config: ClipVisionSpec
    text_config: ModelSpec
    projector_hidden_act: Activation = "gelu"
    vision_feature_layer: Annotated[int, Field(strict=True)] = Field(
        default=-2, description="block of the tower whose output is projected, counted as hidden states: -1 is the last"
    )
    vision_feature_select_strategy: Literal["default", "full"] = Field(
        default="default", description="default: patches only; full: the class token too"
    )
    image_token_index: WholeOrZero = Field(
        default=32000, description="token that is replaced by a feature of an image; it may lie above the vocabulary"
    )
    weights: InitialWeights = None
    vision_weights: ModelPath | None = Field(
        default=None, description="initial weights of the tower alone: those of a CLIP, of its image tower, or a LLaVA"
    )
    text_weights: ModelPath | None = Field(
        default=None,
        description="initial weights of the language model alone; rows of tokens that they lack are the mean of theirs",
    )

    @property
    def tower_depth(self) -> int:
        """Return the number of blocks of the tower that are computed."""
        layers, layer = self.vision_config.num_hidden_layers, self.vision_feature_layer
        return layer if layer >= 0 else layers + 1 + layer

    @property
    def num_experts(self) -> int:
        """Return the number of routed experts in a block of the language model."""
        return self.text_config.num_experts

    @property
    def tokens_per_image(self) -> int:
        """Return the number of features of an image, each of which replaces a token."""
        patches = (self.vision_config.image_size // self.vision_config.patch_size) ** 2
        return patches if self.vision_feature_select_strategy == "default" else patches + 1

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        yield from _inner(self)
        layers = self.vision_config.num_hidden_layers
        if not 0 <= self.tower_depth <= layers:
            yield "vision_feature_layer", f"must be between {-layers - 1} and {layers}, with {layers} blocks."
        if self.tokens_per_image > self.text_config.seq_len:
            yield "text_config.seq_len", f"must be at least {self.tokens_per_image}, the tokens of one image."
        if self.text_config.base_family != "llama":
            yield "text_config.family", "must be llama: transformers has no LLaVA with another language model."
        if self.text_config.num_hidden_layers > MOST_LAYERS:
            yield "text_config.num_hidden_layers", f"must not exceed {MOST_LAYERS} in a llava."
        if self.text_config.final_logit_softcapping is not None:
            yield "text_config.final_logit_softcapping", "must be null: transformers caps no logits of a LLaVA."
        for key in ("vision_weights", "text_weights"):
            if self.weights is not None and getattr(self, key) is not None:
                yield key, "must be null with model.weights, which has all parts."
        for key, usual in (("weights", None), ("adapter", None), ("quantization", "none")):
            if getattr(self.text_config, key) != usual:
                yield f"text_config.{key}", f"has no effect in family: llava. Remove it{_MOVED.get(key, '')}."


_MOVED = {"weights": ", and set model.text_weights"}
VisionSpec = ResNetSpec | ConvNextSpec | VitSpec | ClipSpec
# Families of models of images, by name.
VISION: dict[str, type[Section]] = {
    "resnet": ResNetSpec,
    "convnext": ConvNextSpec,
    "vit": VitSpec,
    "clip": ClipSpec,
    "llava": LlavaSpec,
}
# The objectives of each family, its default first.
OBJECTIVES_OF: dict[str, tuple[str, ...]] = {
    "resnet": ("classification", "regression", "contrastive"),
    "convnext": ("classification", "regression", "contrastive"),
    "vit": ("classification", "regression", "contrastive"),
    "clip": ("contrastive",),
    "llava": ("sft",),
}


def _inner(model: ClipSpec | LlavaSpec) -> Iterator[tuple[str, str]]:
    yield from ((f"vision_config.{key}", message) for key, message in model.vision_config.inconsistencies())
    text = model.text_config
    problems = model_inconsistencies(text) if isinstance(text, ModelSpec) else text.inconsistencies()
    yield from ((f"text_config.{key}", message) for key, message in problems)


def image_channels(model: VisionSpec | LlavaSpec) -> int:
    """Return the channels of the images of a network."""
    return model.vision_config.num_channels if isinstance(model, ClipSpec | LlavaSpec) else model.num_channels


def _stages(hidden_sizes: tuple[int, ...], depths: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    if len(hidden_sizes) != len(depths):
        yield "depths", f"must have {len(hidden_sizes)} items, one per stage in hidden_sizes."


def _heads(hidden_size: int, heads: int) -> Iterator[tuple[str, str]]:
    if hidden_size % heads:
        yield "num_attention_heads", f"must divide hidden_size = {hidden_size}."


def _patches(image_size: int, patch_size: int) -> Iterator[tuple[str, str]]:
    if image_size % patch_size:
        yield "patch_size", f"must divide image_size = {image_size}."
