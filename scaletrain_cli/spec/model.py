"""The model section: dimensions of transformers under their Hugging Face names."""

from itertools import groupby
from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema

from scaletrain_cli.plugins import MODEL_FAMILIES
from scaletrain_cli.spec.adapter import AdapterSpec
from scaletrain_cli.spec.extensions import BUILT_IN_FAMILIES, base_family, model_family_extension, or_plugin
from scaletrain_cli.spec.hybrid import DENSE_BLOCK, SPARSE_BLOCK, BlockParts, BlockType, MambaSpec, parts_of
from scaletrain_cli.spec.quantities import Fraction, NonNegative, Positive, Whole, WholeOrZero
from scaletrain_cli.spec.rope import RopeScalingSpec
from scaletrain_cli.spec.section import Section, used_when, where, where_not
from scaletrain_cli.spec.shared_paths import ModelPath

MOST_LAYERS = 4096  # of a model whose blocks are looked at one by one
# A share of a whole, without zero.
Share = Annotated[float, Field(strict=True, gt=0, le=1)]
AttentionKind = Literal["full_attention", "sliding_attention", "chunked_attention"]
# ``model_type``s of Hugging Face whose blocks are planned, but not built by the engine.
PlannedArchitecture = Literal[
    "cohere",
    "cohere2",
    "deepseek_v32",
    "falcon",
    "glm4",
    "glm4_moe",
    "gpt_neox",
    "granite",
    "jamba",
    "llama4_text",
    "minimax_m2",
    "nemotron",
    "nemotron_h",
    "smollm3",
    "starcoder2",
]
_ROTARY = where("model.positions", "rotary", setting="model.position_embedding")
_EXPERTS = used_when(where_not("model.num_experts", 0))
_GROUPS = used_when(where_not("model.topk_method", "greedy"))
_INDEXER = used_when(where_not("model.index_topk", 0))


class ModelSpec(Section):
    """Dimensions of a decoder-only transformer.

    ``llama``: RMSNorm, rotary positions, SwiGLU, no biases unless a key sets them. ``gpt``: LayerNorm, learned
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
    attention_bias: Annotated[bool, used_when(where("model.has_bias", False, setting="model.bias"))] = Field(
        default=False, description="biases of the query, key, value and output projections"
    )
    fused_projections: bool = Field(
        default=False, description="one matrix qkv_proj for queries, keys and values, and one gate_up_proj, as in Phi-3"
    )
    qk_norm: bool = Field(default=False, description="RMSNorm of queries and keys")
    qk_norm_scope: Annotated[Literal["head", "projection", "unweighted"], used_when(where("model.qk_norm", True))] = (
        Field(
            default="head",
            description="head: each head is normalized; projection: all heads together, as in OLMo 2; unweighted: each "
            "head, without a weight, as in Llama 4",
        )
    )
    query_pre_attn_scalar: Positive | None = Field(
        default=None, description="attention scores are divided by its square root; null: head_dim"
    )
    attn_logit_softcapping: Positive | None = Field(
        default=None, description="attention scores x become cap * tanh(x / cap); null: no cap"
    )
    final_logit_softcapping: Positive | None = Field(
        default=None, description="logits x become cap * tanh(x / cap); null: no cap"
    )
    attention_sinks: bool = Field(
        default=False, description="one learned logit per head in the denominator of attention's softmax, as in GPT-OSS"
    )
    sliding_window: Whole | None = Field(
        default=None, description="tokens that a token attends to, itself included; null: full attention"
    )
    attention_chunk_size: Whole | None = Field(
        default=None,
        description="tokens of the chunks within which layers with chunked_attention attend, as in Llama 4; null: none",
    )
    layer_types: tuple[AttentionKind, ...] = Field(
        default=(), description="kinds of attention, repeated over the layers; []: sliding_window in every layer"
    )
    rope_theta: Annotated[Positive, used_when(_ROTARY)] = 10000.0
    rope_local_base_freq: Annotated[Positive | None, used_when(_ROTARY)] = Field(
        default=None,
        description="rope_theta of layers with sliding_attention, which then have no rope_scaling; null: no difference",
    )
    partial_rotary_factor: Annotated[Share, used_when(_ROTARY)] = Field(
        default=1.0, description="share of the channels of each head that are rotated, the first ones"
    )
    rope_scaling: RopeScalingSpec | None = Field(default=None, description="null: no scaling of rotary positions")
    scale_embedding: bool = Field(default=False, description="multiply token embeddings by the root of hidden_size")
    norm_eps: Positive = 1.0e-5
    norm_position: Literal["pre", "post", "pre_and_post", "shared"] = Field(
        default="pre",
        description="norms before attention and MLP, after them before the residual sum (OLMo 2), both (Gemma), or one "
        "before attention and MLP beside each other (Command R; planned only)",
    )
    zero_centered_norm: bool = Field(
        default=False, description="RMSNorm multiplies by 1 + weight, as in Gemma, and weights start at 0"
    )
    initializer_range: Positive = 0.02
    num_experts: WholeOrZero = 0
    num_experts_per_tok: WholeOrZero = 0
    moe_intermediate_size: WholeOrZero = Field(default=0, description="0: intermediate_size")
    shared_expert_intermediate_size: WholeOrZero = Field(default=0, description="total size of the shared experts")
    shared_expert_gate: bool = Field(
        default=False, description="multiply the output of the shared expert by a sigmoid gate, as in Qwen2-MoE"
    )
    first_k_dense_replace: WholeOrZero = Field(default=0, description="number of leading blocks with a dense MLP")
    decoder_sparse_step: Annotated[Whole, _EXPERTS] = Field(
        default=1, description="a block has experts if its number, counted from 1, is a multiple of this"
    )
    mlp_only_layers: Annotated[tuple[WholeOrZero, ...], _EXPERTS] = Field(
        default=(), description="numbers, from 0, of further blocks with a dense MLP"
    )
    capacity_factor: NonNegative = Field(
        default=0.0, description="capacity of an expert, as a multiple of its even share of tokens; 0: unlimited"
    )
    router_aux_loss_coef: Annotated[NonNegative, _EXPERTS] = Field(
        default=0.001, description="coefficient of the load-balancing loss"
    )
    router_z_loss_coef: NonNegative = Field(default=0.0, description="coefficient of the router z-loss")
    swiglu_limit: Positive | None = Field(
        default=None,
        description="experts compute g sigmoid(1.702 g) (u + 1) from gates g up to this limit and u within it on both "
        "sides, as in GPT-OSS; null: silu(g) u",
    )
    norm_topk_prob: bool = Field(default=False, description="normalize the weights of a token's experts to sum to 1")
    scoring_func: Annotated[Literal["softmax", "sigmoid"], _EXPERTS] = Field(
        default="softmax", description="scores of experts; GPT-OSS's softmax over the chosen ones is norm_topk_prob"
    )
    topk_method: Annotated[Literal["greedy", "group_limited_greedy", "noaux_tc"], _EXPERTS] = Field(
        default="greedy",
        description="choice of experts: highest scores; highest scores in the best groups (DeepSeek-V2); or by the "
        "scores plus e_score_correction_bias, in the best groups (DeepSeek-V3)",
    )
    n_group: Annotated[Whole, _GROUPS] = Field(default=1, description="number of groups of experts")
    topk_group: Annotated[Whole, _GROUPS] = Field(
        default=1, description="number of groups that a token's experts may be in"
    )
    routed_scaling_factor: Annotated[Positive, _EXPERTS] = Field(
        default=1.0, description="factor of the weights of a token's experts"
    )
    bias_update_speed: Annotated[NonNegative, used_when(where("model.topk_method", "noaux_tc"))] = Field(
        default=0.0,
        description="change of e_score_correction_bias per step, towards even loads of experts (DeepSeek-V3); 0: none",
    )
    router_bias: Annotated[bool, _EXPERTS] = Field(default=False, description="bias of the router, as in GPT-OSS")
    kv_lora_rank: WholeOrZero = Field(default=0, description="above 0: multi-head latent attention (DeepSeek-V2)")
    q_lora_rank: WholeOrZero = Field(default=0, description="0: no low-rank projection of queries")
    qk_rope_head_dim: WholeOrZero = Field(
        default=0, description="rotated channels in addition to head_dim; latent attention"
    )
    v_head_dim: WholeOrZero = Field(default=0, description="latent attention; 0: head_dim")
    rope_interleave: Annotated[bool, used_when(where_not("model.kv_lora_rank", 0))] = Field(
        default=True, description="latent attention rotates neighboring channels together; false: both halves"
    )
    index_topk: WholeOrZero = Field(
        default=0,
        description="above 0: tokens that a token attends to, chosen by an indexer (DeepSeek-V3.2); latent attention",
    )
    index_n_heads: Annotated[WholeOrZero, _INDEXER] = Field(default=0, description="query heads of the indexer")
    index_head_dim: Annotated[WholeOrZero, _INDEXER] = Field(default=0, description="channels of an indexer's head")
    gated_mlp: bool | None = None
    hidden_activation: Literal["silu", "gelu_pytorch_tanh", "relu2"] | None = Field(
        default=None, description="activation of the MLP; null: silu (llama), gelu_pytorch_tanh (gpt)"
    )
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

    block_types: Annotated[tuple[BlockType, ...], Field(max_length=MOST_LAYERS)] = Field(
        default=(), description="parts of each block, repeated over the blocks; []: attention and an MLP, or experts"
    )
    mamba: MambaSpec | None = Field(default=None, description="state-space layers of block_types with mamba")
    planned_architecture: PlannedArchitecture | None = Field(
        default=None,
        description="model_type of a config.json whose blocks only the planner knows; null: those of the family",
    )
    text_of: Literal["gemma3", "llama4"] | None = Field(
        default=None, description="model_type of the multimodal config.json of which this is the language model"
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
    def has_qkv_bias(self) -> bool:
        """Return True if the query, key and value projections have biases."""
        return self.has_bias or self.qkv_bias or self.attention_bias

    @property
    def has_output_bias(self) -> bool:
        """Return True if the output projection of attention has a bias."""
        return self.has_bias or self.attention_bias

    @property
    def has_fused_qkv(self) -> bool:
        """Return True if queries, keys and values are one matrix, with biases and norms in that order (GPT-2)."""
        return self.base_family == "gpt"

    @property
    def activation(self) -> str:
        """Return the activation of the MLP: ``silu`` or ``gelu_pytorch_tanh``."""
        return self.hidden_activation or ("silu" if self.base_family == "llama" else "gelu_pytorch_tanh")

    @property
    def block_norms(self) -> tuple[str, ...]:
        """Return the names of the norms of hidden states in a block of ``llama``, as in Hugging Face's files."""
        after = ("post_attention_layernorm", "post_feedforward_layernorm")
        return {
            "pre": ("input_layernorm", "post_attention_layernorm"),
            "post": after,
            "pre_and_post": ("input_layernorm", after[0], "pre_feedforward_layernorm", after[1]),
            "shared": ("input_layernorm",),
        }[self.norm_position]

    @property
    def rotary_dim(self) -> int:
        """Return the number of rotated channels of a head."""
        return self.qk_rope_head_dim if self.kv_lora_rank else int(self.head_dim * self.partial_rotary_factor)

    @property
    def qk_head_dim(self) -> int:
        """Return the channels of a query or key head: in latent attention with the rotated ones."""
        return self.head_dim + self.qk_rope_head_dim if self.kv_lora_rank else self.head_dim

    @property
    def value_head_dim(self) -> int:
        """Return the channels of a value head."""
        return (self.v_head_dim or self.head_dim) if self.kv_lora_rank else self.head_dim

    @property
    def attention_scale(self) -> float:
        """Return the factor of attention scores: 1 / sqrt(query_pre_attn_scalar or qk_head_dim).

        In latent attention times the square of YaRN's growth by ``mscale_all_dim``, if the scaling has it.
        """
        scale = float((self.query_pre_attn_scalar or self.qk_head_dim) ** -0.5)
        scaling = self.rope_scaling
        if self.kv_lora_rank and scaling is not None and scaling.mscale_all_dim:
            scale *= scaling.attention_growth(scaling.mscale_all_dim) ** 2
        return scale

    def slides(self, layer: int) -> bool:
        """Return True if layer number ``layer`` has sliding attention."""
        if self.sliding_window is None:
            return False
        return not self.layer_types or self.layer_types[layer % len(self.layer_types)] == "sliding_attention"

    @property
    def local_span(self) -> int | None:
        """Return the tokens of a sliding window, or of a chunk of attention; None without either."""
        return self.sliding_window or self.attention_chunk_size

    def is_local(self, layer: int) -> bool:
        """Return True if layer number ``layer`` attends within a window or chunk."""
        if self.local_span is None:
            return False
        return not self.layer_types or self.layer_types[layer % len(self.layer_types)] != "full_attention"

    @property
    def windowed_layers(self) -> int:
        """Return the number of layers whose window or chunk is shorter than seq_len, so that it changes attention."""
        if self.local_span is None or self.local_span >= self.seq_len:
            return 0
        pattern = self.layer_types or ("sliding_attention",)
        repeats, rest = divmod(self.num_hidden_layers, len(pattern))
        local = [kind != "full_attention" for kind in pattern]
        return repeats * sum(local) + sum(local[:rest])

    @property
    def positions(self) -> str:
        """Return ``rotary``, ``learned``, ``alibi`` or ``none``."""
        return self.position_embedding or ("rotary" if self.base_family == "llama" else "learned")

    def parts(self, block: int) -> BlockParts:
        """Return what block number ``block`` consists of."""
        if self.block_types:
            return parts_of(self.block_types[block % len(self.block_types)])
        return SPARSE_BLOCK if self.has_experts(block) else DENSE_BLOCK

    def parts_between(self, first: int, count: int) -> tuple[tuple[BlockParts, int], ...]:
        """Return how many of ``count`` blocks from block ``first`` on consist of which parts."""
        if not self.block_types:
            dense = self.dense_blocks(first, count)
            by_parts = {DENSE_BLOCK: dense, SPARSE_BLOCK: count - dense}
        else:
            by_parts, pattern = {}, self.block_types
            repeats, rest = divmod(count, len(pattern))
            for place, kind in enumerate(pattern):
                times = repeats + ((place - first) % len(pattern) < rest)
                by_parts[parts_of(kind)] = by_parts.get(parts_of(kind), 0) + times
        return tuple((parts, times) for parts, times in by_parts.items() if times)

    def layers_with(self, part: str) -> int:
        """Return the number of blocks with a part: ``attention``, ``mamba``, ``mlp`` or ``experts``."""
        if not self.block_types and part in ("attention", "mamba"):
            return self.num_hidden_layers if part == "attention" else 0
        return sum(times for parts, times in self.parts_between(0, self.num_hidden_layers) if getattr(parts, part))

    @property
    def sublayers_per_block(self) -> float:
        """Return the mean number of modules per block that have a norm and a residual sum: 2 without block_types."""
        if not self.block_types:
            return 2.0
        return sum(parts_of(kind).sublayers for kind in self.block_types) / len(self.block_types)

    @property
    def moe_layers(self) -> int:
        """Return the number of blocks whose MLP is a mixture of experts."""
        return self.num_hidden_layers - self.dense_blocks(0, self.num_hidden_layers)

    def has_experts(self, block: int) -> bool:
        """Return True if the MLP of block number ``block`` is a mixture of experts."""
        if self.block_types:
            return parts_of(self.block_types[block % len(self.block_types)]).experts
        sparse = self.num_experts > 0 and (block + 1) % self.decoder_sparse_step == 0
        return sparse and block >= self.first_k_dense_replace and block not in self.mlp_only_layers

    def dense_blocks(self, first: int, count: int) -> int:
        """Return how many of ``count`` blocks from block ``first`` on have no experts."""
        return sum(blocks for experts, blocks in self.block_runs(first, count) if not experts)

    def block_runs(self, first: int, count: int) -> tuple[tuple[bool, int], ...]:
        """Return ``count`` blocks from block ``first`` on, as runs of blocks of one kind: (has experts, blocks)."""
        if not self.num_experts:
            return ((False, count),) if count else ()
        if self.has_pattern:
            blocks = map(self.has_experts, range(first, first + count))
            return tuple((experts, sum(1 for _ in run)) for experts, run in groupby(blocks))
        dense = max(0, min(first + count, self.first_k_dense_replace) - first)
        return tuple(run for run in ((False, dense), (True, count - dense)) if run[1])

    @property
    def shared_expert_name(self) -> str:
        """Return the name of the module of the shared experts in Hugging Face's files."""
        return "shared_expert" if self.shared_expert_gate else "shared_experts"

    @property
    def has_pattern(self) -> bool:
        """Return True if there are dense blocks between blocks with experts."""
        return self.decoder_sparse_step > 1 or bool(self.mlp_only_layers) or bool(self.block_types)

    @property
    def expert_size(self) -> int:
        """Return the intermediate size of one routed expert."""
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def has_interleaved_experts(self) -> bool:
        """Return True if the outputs of gates and ups of experts alternate in Hugging Face's files, as in GPT-OSS."""
        return self.swiglu_limit is not None
