"""The model section: dimensions of transformers under their Hugging Face names."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema

from scaletrain_cli.plugins import MODEL_FAMILIES
from scaletrain_cli.spec.adapter import AdapterSpec
from scaletrain_cli.spec.extensions import BUILT_IN_FAMILIES, base_family, model_family_extension, or_plugin
from scaletrain_cli.spec.hub_files import ModelPath
from scaletrain_cli.spec.quantities import Fraction, NonNegative, Positive, Whole, WholeOrZero
from scaletrain_cli.spec.rope import RopeScalingSpec
from scaletrain_cli.spec.section import Section, used_when, where, where_not


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
    weights: ModelPath | None = Field(
        default=None,
        description="initial weights: folder of Hugging Face *.safetensors, or hf://org/name@revision; null: random",
    )
    adapter: AdapterSpec | None = Field(default=None, description="null: no adapter, the model itself is trained")
    quantization: Literal["none", "int8", "nf4", "nf4_double"] = Field(
        default="none", description="format of the frozen linear layers (bitsandbytes, on GPUs only)"
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
