"""Exact parameter counts and FLOPs of a transformer: of the full model, or of the part that one rank holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from scaletrain_cli.spec import ModelSpec


@dataclass(frozen=True)
class Block:
    """Parameters of one transformer block: weight matrices by part, and ``vectors`` (norms and biases)."""

    attention: int
    dense_mlp: int  # the MLP of a dense block, or the shared experts of an MoE block
    router: int
    expert: int  # one routed expert, with its biases; 0 without experts
    experts: int  # number of routed experts
    vectors: int

    @property
    def shared(self) -> int:
        """Parameters that every token passes through."""
        return self.attention + self.dense_mlp + self.router + self.vectors

    @property
    def routed(self) -> int:
        """Parameters of the routed experts, of which each token uses only some."""
        return self.expert * self.experts

    @property
    def parameters(self) -> int:
        return self.shared + self.routed


@dataclass(frozen=True)
class Architecture:
    """Parameters of a transformer by part.

    ``table``: the token embedding; ``embedding``: with positions and norm. ``head`` is 0 if it is tied to the table.
    Of the ``layers`` blocks ``dense_blocks(first, count)`` are ``dense_block``; the others are ``block``, which may
    have experts.
    """

    embedding: int
    table: int
    block: Block
    dense_block: Block
    layers: int
    dense_blocks: Callable[[int, int], int]
    final_norm: int
    head: int

    @property
    def parameters(self) -> int:
        return self.embedding + self.blocks_parameters(0, self.layers) + self.final_norm + self.head

    def blocks_parameters(self, first: int, count: int) -> int:
        """Return the parameters of ``count`` consecutive blocks that begin with block ``first``."""
        dense = self.dense_blocks(first, count)
        return dense * self.dense_block.parameters + (count - dense) * self.block.parameters


@lru_cache(maxsize=1024)
def architecture(model: ModelSpec, tensor_parallel: int = 1, expert_parallel: int = 1) -> Architecture:
    """Return the parameters of each part that one rank holds under tensor and expert parallelism.

    Tensor parallelism shards matrices (column-parallel, then row-parallel), and embedding and head over the vocabulary.
    Norms, biases of row-parallel layers, learned positions and the router are replicated on every tensor rank. If there
    are fewer key-value heads than tensor ranks, they are replicated too (Megatron-LM, arXiv:1909.08053, section 3).
    """
    t, hidden = tensor_parallel, model.hidden_size
    norm = hidden * (2 if model.has_norm_bias else 1)
    attention, vectors = _attention(model, t)
    vectors += model.norms_per_block * norm
    dense_matrix, dense_bias = _mlp(model, _share(model.intermediate_size, t))
    dense = Block(attention, dense_matrix, 0, 0, 0, vectors + dense_bias)
    block = dense
    if model.num_experts:
        expert = sum(_mlp(model, _share(model.expert_size, t)))
        expert -= hidden - _share(hidden, t) if model.has_bias else 0  # ranks add columns of the second bias
        held = _share(model.num_experts, expert_parallel)
        shared, shared_bias = 0, 0
        if model.shared_expert_intermediate_size:
            shared, shared_bias = _mlp(model, _share(model.shared_expert_intermediate_size, t))
            shared += hidden if model.shared_expert_gate else 0
        shared_bias += model.num_experts if model.router_bias else 0
        block = Block(attention, shared, hidden * model.num_experts, expert, held, vectors + shared_bias)
    table = _share(model.vocab_size, t) * hidden
    positions = model.max_position_embeddings * hidden if model.positions == "learned" else 0
    return Architecture(
        table=table,
        embedding=table + positions + (norm if model.embedding_norm else 0),
        block=block,
        dense_block=dense,
        layers=model.num_hidden_layers,
        dense_blocks=model.dense_blocks,
        final_norm=norm,
        head=0 if model.tie_word_embeddings else table,
    )


def _attention(model: ModelSpec, t: int) -> tuple[int, int]:
    """Return the attention parameters of one of ``t`` tensor ranks: (in matrices, in vectors)."""
    hidden = model.hidden_size
    heads = _share(model.num_attention_heads, t)
    if model.kv_lora_rank:
        return _latent_attention(model, heads)
    queries = heads * model.head_dim
    keys = max(_share(model.num_key_value_heads, t), 1) * model.head_dim
    vectors = queries + 2 * keys if model.has_qkv_bias else 0
    vectors += hidden if model.has_output_bias else 0
    vectors += heads if model.attention_sinks else 0
    if model.qk_norm:  # over each head, with the same weight for all, or over all heads together
        vectors += 2 * model.head_dim if model.qk_norm_scope == "head" else queries + keys
    return hidden * (2 * queries + 2 * keys), vectors


def _latent_attention(model: ModelSpec, heads: int) -> tuple[int, int]:
    """Return the parameters of latent attention with ``heads`` heads on this rank: (in matrices, in vectors).

    DeepSeek-V2, arXiv:2405.04434, section 2.1. The down projections are replicated on every tensor rank.
    """
    hidden, query, latent = model.hidden_size, model.q_lora_rank, model.kv_lora_rank
    turned, value = model.qk_rope_head_dim, model.value_head_dim
    wide = heads * model.qk_head_dim
    matrices = hidden * query + query * wide if query else hidden * wide
    matrices += hidden * (latent + turned) + latent * heads * (model.head_dim + value) + heads * value * hidden
    return matrices, query + latent  # one RMSNorm after each down projection


def _mlp(model: ModelSpec, inner: int) -> tuple[int, int]:
    """Return the parameters of an MLP with intermediate size ``inner``: (in matrices, in biases)."""
    inputs = 2 if model.has_gated_mlp else 1
    bias = inputs * inner + model.hidden_size if model.has_bias else 0
    return (inputs + 1) * model.hidden_size * inner, bias


def parameter_count(model: ModelSpec) -> int:
    """Return the number of trainable parameters; a tied head is not counted again."""
    return architecture(model).parameters


def active_parameter_count(model: ModelSpec) -> int:
    """Return the parameters that one token uses: all but the routed experts that it is not routed to."""
    whole = architecture(model)
    idle = whole.block.experts - min(model.num_experts_per_tok, whole.block.experts)
    return whole.parameters - model.moe_layers * idle * whole.block.expert


def attention_matmul_flops(model: ModelSpec) -> int:
    """Return the forward FLOPs per token of one block's attention projections: 2 per weight."""
    return 2 * architecture(model).block.attention


def mlp_matmul_flops(model: ModelSpec, experts: bool) -> int:
    """Return the forward FLOPs per token of one block's MLP: 2 per active weight; ``experts``: for an MoE block."""
    if not experts:
        return 2 * _mlp(model, model.intermediate_size)[0]
    shared = _mlp(model, model.shared_expert_intermediate_size)[0] if model.shared_expert_intermediate_size else 0
    routed = min(model.num_experts_per_tok, model.num_experts) * _mlp(model, model.expert_size)[0]
    gates = model.num_experts + (1 if model.shared_expert_gate else 0)
    return 2 * (shared + routed + model.hidden_size * gates)


def attention_flops(model: ModelSpec) -> int:
    """Return the forward FLOPs per token of all blocks' attention scores and weighted sums, without causal masking.

    4 s a d per token and block, for sequence length s and a heads of size d: the convention of PaLM (arXiv:2204.02311,
    appendix B) and Megatron-LM (arXiv:2104.04473). It counts twice the scores within the causal mask; so does this for
    a window of w < s tokens, whose layers have s w - w^2 / 2 of them per sequence: 4 (2 w - w^2 / s) a d per token.
    """
    narrow, keys = model.windowed_layers, model.num_hidden_layers * model.seq_len
    if narrow:
        keys -= narrow * (model.seq_len - window_keys(model))
    return 2 * keys * model.num_attention_heads * (model.qk_head_dim + model.value_head_dim)


def window_keys(model: ModelSpec) -> int:
    """Return twice the mean number of tokens that a token sees within the sliding window: 2 w - w^2 / s."""
    window, length = min(model.sliding_window or model.seq_len, model.seq_len), model.seq_len
    return (2 * window * length - window * window) // length


def block_attention_flops(model: ModelSpec) -> int:
    """Return ``attention_flops`` of one block; with sliding windows in some layers, the mean over the layers."""
    return attention_flops(model) // model.num_hidden_layers


def head_flops(model: ModelSpec) -> int:
    """Return the forward FLOPs per token of the projection to the vocabulary, tied or not."""
    return 2 * model.vocab_size * model.hidden_size


@lru_cache(maxsize=64)
def training_flops_per_token(model: ModelSpec) -> int:
    """Return the FLOPs per token of forward and backward pass, without recomputation: 6 N + 12 l s a d.

    N: weights in matrices; l: layers; s: sequence length; a, d: number and size of heads (arXiv:2204.02311, appendix
    B).
    """
    layers, sparse = model.num_hidden_layers, model.moe_layers
    blocks = layers * attention_matmul_flops(model) + attention_flops(model)
    blocks += (layers - sparse) * mlp_matmul_flops(model, experts=False)
    blocks += sparse * mlp_matmul_flops(model, experts=True) if sparse else 0
    return 3 * (blocks + head_flops(model))


def _share(count: int, ranks: int) -> int:
    return -(-count // ranks)
