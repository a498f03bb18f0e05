"""The model section: dimensions of transformers and vision networks under their Hugging Face names."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema

from scaletrain_cli.plugins import MODEL_FAMILIES
from scaletrain_cli.spec.extensions import BUILT_IN_FAMILIES, base_family, model_family_extension, or_plugin
from scaletrain_cli.spec.quantities import Fraction, NonNegative, Positive, Text, Whole, WholeOrZero
from scaletrain_cli.spec.section import Section, used_when, where, where_not

# Keys of each kind besides factor; the first ones are required.
_NEEDED = {
    "linear": (),
    "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (),
}
_ALLOWED = {
    "linear": (),
    "llama3": _NEEDED["llama3"],
    "yarn": (
        *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale"),
        *("mscale_all_dim", "truncate"),
    ),
}


class RopeScalingSpec(Section):
    """RoPE scaling, with Hugging Face's keys. ``linear`` (arXiv:2306.15595), ``llama3`` (Llama 3.1 to 3.3), ``yarn``
    (arXiv:2309.00071).
    """

    rope_type: Literal["linear", "llama3", "yarn"]
    factor: Annotated[float, Field(ge=1, le=1e6)]
    original_max_position_embeddings: Whole | None = Field(
        default=None, description="context length before scaling; null: model.max_position_embeddings"
    )
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    attention_factor: Positive | None = Field(default=None, description="yarn; null: derived from factor and mscale")
    beta_fast: Positive | None = Field(default=None, description="yarn; null: 32")
    beta_slow: Positive | None = Field(default=None, description="yarn; null: 1")
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    truncate: bool | None = Field(default=None, description="yarn; round the ends of the ramp to whole channels")

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for keys that the kind requires, or does not use."""
        for key in _NEEDED[self.rope_type]:
            if getattr(self, key) is None:
                yield key, f"is required with rope_type: {self.rope_type}."
        for key in sorted(type(self).model_fields.keys() - {"rope_type", "factor"} - set(_ALLOWED[self.rope_type])):
            if getattr(self, key) is not None:
                yield key, f"has no effect with rope_type: {self.rope_type}. Remove it."
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.rope_type == "llama3" and low is not None and high is not None and low >= high:
            yield "low_freq_factor", f"must be below high_freq_factor = {high:g}."

    def to_hugging_face(self) -> dict[str, object]:
        """Return the section as in config.json."""
        return self.model_dump(exclude_none=True)


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


class ModelSpec(Section):
    """Dimensions of a decoder-only transformer.

    ``llama``: RMSNorm, rotary positions, SwiGLU, no biases unless ``qkv_bias``. ``gpt``: LayerNorm, learned
    positions, GELU, biases everywhere. A key that is null follows the family; the properties below give the answer.
    ``preset`` only records where the dimensions came from.
    """

    family: Annotated[
        str,
        or_plugin(MODEL_FAMILIES, BUILT_IN_FAMILIES, model_family_extension),
        WithJsonSchema({"type": "string", "enum": [*BUILT_IN_FAMILIES]}),
    ]
    preset: str | None = None
    hidden_size: Whole
    num_hidden_layers: Whole
    num_attention_heads: Whole
    num_key_value_heads: Whole
    head_dim: Whole
    intermediate_size: Whole
    vocab_size: Whole
    seq_len: Whole
    max_position_embeddings: Whole
    tie_word_embeddings: bool = False
    qkv_bias: Annotated[bool, used_when(where("model.has_bias", False, setting="model.bias"))] = False
    qk_norm: bool = False
    rope_theta: Annotated[
        Positive, used_when(where("model.positions", "rotary", setting="model.position_embedding"))
    ] = 10000.0
    rope_scaling: RopeScalingSpec | None = Field(default=None, description="null: no scaling of rotary positions")
    norm_eps: Positive = 1.0e-5
    initializer_range: Positive = 0.02
    num_experts: WholeOrZero = 0
    num_experts_per_tok: WholeOrZero = 0
    moe_intermediate_size: WholeOrZero = Field(default=0, description="0: intermediate_size")
    shared_expert_intermediate_size: WholeOrZero = Field(default=0, description="total size of the shared experts")
    first_k_dense_replace: WholeOrZero = Field(default=0, description="number of leading blocks with a dense MLP")
    capacity_factor: NonNegative = Field(
        default=0.0, description="capacity of an expert, as a multiple of its even share of tokens; 0: unlimited"
    )
    router_aux_loss_coef: Annotated[NonNegative, used_when(where_not("model.num_experts", 0))] = Field(
        default=0.001, description="coefficient of the load-balancing loss"
    )
    router_z_loss_coef: NonNegative = Field(default=0.0, description="coefficient of the router z-loss")
    norm_topk_prob: bool = Field(default=False, description="normalize the weights of a token's experts to sum to 1")
    kv_lora_rank: WholeOrZero = Field(default=0, description="above 0: multi-head latent attention (DeepSeek-V2)")
    q_lora_rank: WholeOrZero = Field(default=0, description="0: no low-rank projection of queries")
    qk_rope_head_dim: WholeOrZero = Field(
        default=0, description="rotated channels in addition to head_dim; latent attention"
    )
    v_head_dim: WholeOrZero = Field(default=0, description="latent attention; 0: head_dim")
    gated_mlp: bool | None = None
    norm: Literal["rmsnorm", "layernorm"] | None = None
    norm_bias: bool | None = None
    bias: bool | None = Field(default=None, description="bias in all linear layers except the head")
    position_embedding: Literal["rotary", "learned", "alibi", "none"] | None = None
    embedding_norm: bool = False
    hidden_dropout: Fraction = 0.0
    attention_dropout: Fraction = 0.0
    weights: Text | None = Field(
        default=None, description="folder of Hugging Face *.safetensors with initial weights; null: random"
    )

    @property
    def base_family(self) -> str:
        """Return ``llama`` or ``gpt``: the family itself, or the built-in base of an extension's family."""
        return base_family(self.family)

    @property
    def has_gated_mlp(self) -> bool:
        """Return True if the MLP has SwiGLU's two input matrices (arXiv:2002.05202) instead of one."""
        return self.base_family == "llama" if self.gated_mlp is None else self.gated_mlp

    @property
    def norm_kind(self) -> str:
        """Return the norm: ``rmsnorm`` or ``layernorm``."""
        return self.norm or ("rmsnorm" if self.base_family == "llama" else "layernorm")

    @property
    def has_norm_bias(self) -> bool:
        """Return True if norms have a bias: LayerNorm has, unless switched off."""
        return self.norm_kind == "layernorm" if self.norm_bias is None else self.norm_bias

    @property
    def has_bias(self) -> bool:
        """Return True if attention and MLP projections have biases."""
        return self.base_family == "gpt" if self.bias is None else self.bias

    @property
    def has_fused_qkv(self) -> bool:
        """Return True if queries, keys and values are one matrix, with biases and norms in that order (GPT-2)."""
        return self.base_family == "gpt"

    @property
    def positions(self) -> str:
        """Return ``rotary``, ``learned``, ``alibi`` or ``none``."""
        return self.position_embedding or ("rotary" if self.base_family == "llama" else "learned")

    @property
    def moe_layers(self) -> int:
        """Return the number of blocks whose MLP is a mixture of experts."""
        return self.num_hidden_layers - self.first_k_dense_replace if self.num_experts else 0

    @property
    def expert_size(self) -> int:
        """Return the intermediate size of one routed expert."""
        return self.moe_intermediate_size or self.intermediate_size

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for each dimension that contradicts another one."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            yield "num_key_value_heads", f"must divide num_attention_heads = {heads}; use {divisors(heads)}."
        rotated = self.qk_rope_head_dim if self.kv_lora_rank else self.head_dim
        if self.positions == "rotary" and rotated % 2:
            key = "qk_rope_head_dim" if self.kv_lora_rank else "head_dim"
            yield key, "must be even, because rotary positions rotate pairs of channels."
        if self.positions == "learned" and self.seq_len > self.max_position_embeddings:
            yield "seq_len", f"must not exceed max_position_embeddings = {self.max_position_embeddings}."
        if self.rope_scaling is not None:
            if self.positions != "rotary":
                yield "rope_scaling", f"has no effect on {self.positions} positions. Remove it."
            yield from ((f"rope_scaling.{key}", message) for key, message in self.rope_scaling.inconsistencies())
        if not self.kv_lora_rank and (self.q_lora_rank or self.qk_rope_head_dim or self.v_head_dim):
            yield "kv_lora_rank", "must be at least 1 when q_lora_rank, qk_rope_head_dim or v_head_dim is set."
        if self.norm_bias and self.norm_kind == "rmsnorm":
            yield "norm_bias", "must be false with rmsnorm, which has no bias."
        if self.first_k_dense_replace > self.num_hidden_layers:
            yield "first_k_dense_replace", f"must not exceed num_hidden_layers = {self.num_hidden_layers}."
        if not self.num_experts and (self.shared_expert_intermediate_size or self.first_k_dense_replace):
            yield (
                "num_experts",
                "must be at least 1 when shared_expert_intermediate_size or first_k_dense_replace is set.",
            )
        if self.num_experts == 0 and (self.num_experts_per_tok or self.moe_intermediate_size):
            yield "num_experts", "must be at least 1 when num_experts_per_tok or moe_intermediate_size is set."
        if self.num_experts == 0 and (self.capacity_factor or self.router_z_loss_coef or self.norm_topk_prob):
            yield "num_experts", "must be at least 1 when capacity_factor, router_z_loss_coef or norm_topk_prob is set."
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            yield "num_experts_per_tok", f"must be between 1 and num_experts = {self.num_experts}."


def divisors(number: int) -> str:
    """Return the divisors of ``number`` as text: ``1, 2, 4 or 8``."""
    found = [str(n) for n in range(1, min(number, 4096) + 1) if number % n == 0]
    return found[0] if len(found) == 1 else ", ".join(found[:-1]) + f" or {found[-1]}"
