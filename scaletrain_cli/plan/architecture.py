"""Exact parameter counts and FLOPs of a transformer, whole or one rank's share. Knows nothing of memory or time."""

from __future__ import annotations

from dataclasses import dataclass

from scaletrain_cli.spec import ModelSpec


@dataclass(frozen=True)
class Block:
    """Parameters of one transformer block: matrices that multiply tokens, and vectors (norms and biases)."""

    attention: int
    dense_mlp: int
    router: int
    expert: int  # of one expert; 0 without experts
    experts: int  # how many of them are held
    vectors: int

    @property
    def shared(self) -> int:
        """Parameters that every token passes through."""
        return self.attention + self.dense_mlp + self.router + self.vectors

    @property
    def routed(self) -> int:
        """Parameters in experts, of which a token sees some."""
        return self.expert * self.experts

    @property
    def parameters(self) -> int:
        return self.shared + self.routed


@dataclass(frozen=True)
class Architecture:
    """Parameters by part; ``head`` is 0 where it is tied to the embedding."""

    embedding: int
    block: Block
    layers: int
    final_norm: int
    head: int

    @property
    def parameters(self) -> int:
        return self.embedding + self.layers * self.block.parameters + self.final_norm + self.head


def architecture(model: ModelSpec, tensor_parallel: int = 1, expert_parallel: int = 1) -> Architecture:
    """Parameters that one rank holds of each part, under tensor and expert parallelism.

    Matrices are cut over the tensor ranks (column- then row-parallel, the embedding and head over the vocabulary);
    norms, biases of row-parallel layers, learned positions and the router are whole on every rank. Key and value
    heads fewer than tensor ranks are repeated (Megatron-LM, arXiv:1909.08053, section 3).
    """
    t = tensor_parallel
    hidden, dim = model.hidden_size, model.head_dim
    queries = _share(model.num_attention_heads, t) * dim
    keys = max(_share(model.num_key_value_heads, t), 1) * dim
    attention = hidden * (2 * queries + 2 * keys)
    if model.family == "gpt":
        inner = _share(model.intermediate_size, t)
        biases = queries + 2 * keys + hidden + inner + hidden
        norm = 2 * hidden  # LayerNorm: weight and bias
        block = Block(attention, 2 * hidden * inner, 0, 0, 0, biases + 2 * norm)
        positions = model.max_position_embeddings * hidden
    else:
        norm, positions = hidden, 0
        vectors = 2 * norm
        vectors += queries + 2 * keys if model.qkv_bias else 0
        vectors += 2 * dim if model.qk_norm else 0
        if model.num_experts:
            expert = 3 * hidden * _share(model.moe_intermediate_size or model.intermediate_size, t)
            held = _share(model.num_experts, expert_parallel)
            block = Block(attention, 0, hidden * model.num_experts, expert, held, vectors)
        else:
            block = Block(attention, 3 * hidden * _share(model.intermediate_size, t), 0, 0, 0, vectors)
    table = _share(model.vocab_size, t) * hidden
    return Architecture(
        embedding=table + positions,
        block=block,
        layers=model.num_hidden_layers,
        final_norm=norm,
        head=0 if model.tie_word_embeddings else table,
    )


def parameter_count(model: ModelSpec) -> int:
    """Every trainable parameter, a tied head counted once."""
    return architecture(model).parameters


def active_parameter_count(model: ModelSpec) -> int:
    """Parameters that one token passes through: of the experts, only those it is routed to."""
    whole = architecture(model)
    idle = whole.block.experts - min(model.num_experts_per_tok, whole.block.experts)
    return whole.parameters - whole.layers * idle * whole.block.expert


def block_matmul_flops(model: ModelSpec) -> int:
    """Forward matrix FLOPs of one block and token, attention scores apart: two per weight that the token meets."""
    block = architecture(model).block
    active = min(model.num_experts_per_tok, block.experts) * block.expert
    return 2 * (block.attention + block.dense_mlp + block.router + active)


def block_attention_flops(model: ModelSpec) -> int:
    """Forward FLOPs of scores and weighted sum of one block and token, counted as if nothing were masked.

    4 s a d per token: the convention of PaLM (arXiv:2204.02311, appendix B) and Megatron-LM (arXiv:2104.04473).
    """
    return 4 * model.seq_len * model.num_attention_heads * model.head_dim


def head_flops(model: ModelSpec) -> int:
    """Forward FLOPs of the projection to the vocabulary, tied or not, per token."""
    return 2 * model.vocab_size * model.hidden_size


def training_flops_per_token(model: ModelSpec) -> int:
    """Forward and backward (three times the forward), no recomputation: 6 N + 12 l s a d. N: weights in matrices."""
    block = block_matmul_flops(model) + block_attention_flops(model)
    return 3 * (model.num_hidden_layers * block + head_flops(model))


def _share(count: int, ranks: int) -> int:
    return -(-count // ranks)
