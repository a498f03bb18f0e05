"""Exact parameter counts and FLOPs of a transformer: of the full model, or of the part that one rank holds."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from scaletrain_cli.plan.parameters import block_tensors, end_tensors
from scaletrain_cli.spec import ModelSpec
from scaletrain_cli.spec.hybrid import DENSE_BLOCK, SPARSE_BLOCK, BlockParts


@dataclass(frozen=True)
class Block:
    """Parameters of one transformer block: weight matrices by part, and ``vectors`` (norms and biases)."""

    attention: int  # or of a state-space layer, which is in the place of attention
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


@dataclass(frozen=True, eq=False)  # compared by identity, so that it is a cheap cache key
class Architecture:
    """Parameters of a transformer by part. ``embedding``: with positions and norm. ``head`` is 0 if it is tied to it.

    ``blocks``: the kinds of block that ``model`` has, by their parts.
    """

    model: ModelSpec
    embedding: int
    blocks: Mapping[BlockParts, Block]
    final_norm: int
    head: int

    @property
    def parameters(self) -> int:
        blocks = sum(times * block.parameters for block, times in self.kinds(0, self.model.num_hidden_layers))
        return self.embedding + blocks + self.final_norm + self.head

    @cached_property
    def block(self) -> Block:
        """The first kind of block with experts, or without any the first kind."""
        return next((block for block in self.blocks.values() if block.experts), next(iter(self.blocks.values())))

    def kinds(self, first: int, count: int) -> list[tuple[Block, int]]:
        """Return the ``count`` blocks from block ``first`` on, as (block, how many)."""
        return [(self.blocks[parts], times) for parts, times in self.model.parts_between(first, count)]


@lru_cache(maxsize=1024)
def architecture(model: ModelSpec, tensor_parallel: int = 1, expert_parallel: int = 1) -> Architecture:
    """Return the parameters of each part that one rank holds under tensor and expert parallelism.

    Tensor parallelism shards matrices (column-parallel, then row-parallel), and embedding and head over the vocabulary.
    Norms, biases of row-parallel layers, learned positions and the router are replicated on every tensor rank. If there
    are fewer key-value heads than tensor ranks, they are replicated too (Megatron-LM, arXiv:1909.08053, section 3).
    """
    opening, closing = end_tensors(model)
    kinds = model.parts_between(0, model.num_hidden_layers)
    return Architecture(
        model,
        embedding=sum(tensor.on_rank(tensor_parallel, 1) for tensor in opening),
        blocks={parts: _block(model, parts, tensor_parallel, expert_parallel) for parts, _ in kinds},
        final_norm=sum(tensor.elements for tensor in closing if not tensor.is_matrix),
        head=sum(tensor.on_rank(tensor_parallel, 1) for tensor in closing if tensor.is_matrix),
    )


def _block(model: ModelSpec, parts: BlockParts, tensor: int, expert: int) -> Block:
    """Return the parameters that one rank holds of a block that consists of ``parts``."""
    by_kind: Counter[str] = Counter()
    held = 0
    for weight in block_tensors(model, parts):
        kind = "vectors"
        if weight.experts:
            kind, held = "experts", -(-weight.experts // expert)
        elif weight.is_matrix:
            kind = (
                "router"
                if weight.name == "mlp.gate.weight"
                else "mlp"
                if weight.name.startswith("mlp.")
                else "attention"
            )
        by_kind[kind] += weight.on_rank(tensor, expert)
    of_expert = by_kind["experts"] // held if held else 0
    return Block(by_kind["attention"], by_kind["mlp"], by_kind["router"], of_expert, held, by_kind["vectors"])


def mamba_flops(model: ModelSpec) -> int:
    """Return the forward FLOPs per token of one state-space layer; 0 without any.

    2 per weight of the projections, and 7 d n for the scan of d channels with n states, as Megatron-LM counts it
    (training/training.py mamba_layer_flops).
    """
    mamba = model.mamba
    if mamba is None:
        return 0
    projected = model.hidden_size * (mamba.projected_size + mamba.inner_size)
    if mamba.dt_rank:
        projected += mamba.inner_size * (2 * mamba.dt_rank + 2 * mamba.state_size)
    return 2 * projected + 7 * mamba.inner_size * mamba.state_size


def mean_block_flops(model: ModelSpec) -> int:
    """Return the forward FLOPs per token of a block of a hybrid model, the mean over its layers."""
    return (training_flops_per_token(model) // 3 - head_flops(model)) // model.num_hidden_layers


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
    matrices = (tensor for tensor in block_tensors(model, DENSE_BLOCK) if tensor.is_matrix)
    return 2 * sum(matrix.elements for matrix in matrices if not matrix.name.startswith("mlp."))


@lru_cache(maxsize=256)
def mlp_matmul_flops(model: ModelSpec, experts: bool) -> int:
    """Return the forward FLOPs per token of one block's MLP: 2 per active weight; ``experts``: for an MoE block."""
    weights = 0
    for tensor in block_tensors(model, SPARSE_BLOCK if experts else DENSE_BLOCK):
        if tensor.is_matrix and tensor.name.startswith("mlp."):
            idle = max(0, tensor.experts - model.num_experts_per_tok)
            weights += tensor.elements - (tensor.elements // tensor.experts * idle if tensor.experts else 0)
    return 2 * weights


def attention_flops(model: ModelSpec) -> int:
    """Return the forward FLOPs per token of all blocks' attention scores and weighted sums, without causal masking.

    4 s a d per token and block, for sequence length s and a heads of size d: the convention of PaLM (arXiv:2204.02311,
    appendix B) and Megatron-LM (arXiv:2104.04473). It counts twice the scores within the causal mask; so does this for
    a window of w < s tokens, whose layers have s w - w^2 / 2 of them per sequence: 4 (2 w - w^2 / s) a d per token.
    A chunk of c tokens has c^2 / 2 of them. An indexer of DeepSeek-V3.2 limits a token to the best w tokens, after it
    has scored all of them, without a weighted sum.
    """
    narrow, keys = model.windowed_layers, model.layers_with("attention") * model.seq_len
    if model.index_topk:
        narrow = model.num_hidden_layers
    if narrow:
        keys -= narrow * (model.seq_len - window_keys(model))
    scores = 2 * keys * model.num_attention_heads * (model.qk_head_dim + model.value_head_dim)
    indexer = 2 * model.seq_len * model.index_n_heads * model.index_head_dim if model.index_topk else 0
    return scores + model.num_hidden_layers * indexer


def window_keys(model: ModelSpec) -> int:
    """Return twice the mean number of tokens that a token attends to, where that is not the whole sequence.

    2 w - w^2 / s in a sliding window of w tokens, or with an indexer that chooses w of them; the mean of c^2 over the
    chunks, the last of which may be shorter, for chunks of c tokens.
    """
    length = model.seq_len
    if model.attention_chunk_size is not None:
        chunk = min(model.attention_chunk_size, length)
        whole, rest = divmod(length, chunk)
        return (whole * chunk * chunk + rest * rest) // length
    window = min(model.index_topk or model.sliding_window or length, length)
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
    dense, sparse = model.layers_with("mlp"), model.moe_layers
    blocks = model.layers_with("attention") * attention_matmul_flops(model) + attention_flops(model)
    blocks += dense * mlp_matmul_flops(model, experts=False) + model.layers_with("mamba") * mamba_flops(model)
    blocks += sparse * mlp_matmul_flops(model, experts=True) if sparse else 0
    return 3 * (blocks + head_flops(model))
