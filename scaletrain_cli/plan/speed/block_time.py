"""GPU seconds of one transformer block, the embedding and the head: one micro-batch on one rank, from their kernels.

Without communication, which communication.py adds.
"""

from dataclasses import dataclass
from functools import lru_cache

from scaletrain_cli.plan.architecture import window_keys
from scaletrain_cli.plan.block_graph import WHOLE, BlockTraining, backward_products, block_graph, linear_weights
from scaletrain_cli.plan.frameworks.profile import FrameworkProfile
from scaletrain_cli.plan.speed.kernels import (
    LinearSeconds,
    Rates,
    flash_3_speed,
    flash_attention_seconds,
    linear_products,
    materialized_attention_seconds,
    memory_seconds,
)
from scaletrain_cli.spec import ModelSpec


@dataclass(frozen=True)
class RankWork:
    """The work of one rank on a micro-batch: its tokens, the degrees that shard a block, and the kernels used."""

    tokens: int  # of one micro-batch on one sequence or context rank
    keys: int  # positions that a query may attend to: the sequence length
    tensor: int  # ranks that shard attention and MLP
    sequence: int  # Ulysses ranks, which shard heads further inside attention
    expert: int  # ranks that hold all experts between them
    expert_tensor: int  # ranks that shard the width of each expert
    sharded_norms: bool  # norms and residuals are sharded over the tensor ranks too
    flash: bool  # attention has a fused kernel
    compiled: bool  # torch.compile
    by_document: bool = False  # fused attention skips the scores outside documents and windows
    takes_mask: bool = False  # fused attention takes a mask in all layers, of documents or of earlier tokens
    flash_3: bool = False  # the fused kernel is FlashAttention-3
    masked_share: float = 1.0  # rate of the fused kernel that takes a mask, relative to the one without


@dataclass(frozen=True)
class PartTime:
    """GPU seconds of one part of a model, per micro-batch; the last two are parts of ``forward``."""

    forward: float
    backward: float
    attention_core_forward: float = 0.0  # scores, softmax and weighted sum
    attention_products_forward: float = 0.0  # query, key, value and output projections


# Bytes per element that the frozen weights of a quantized layer take, approximately; exact in memory/states.py.
_QUANTIZED_BYTES = {"int8": 1.0, "nf4": 0.5625, "nf4_double": 0.5159}


@lru_cache(maxsize=8192)
def block_time(
    model: ModelSpec,
    work: RankWork,
    profile: FrameworkProfile,
    rate: Rates,
    experts: bool,
    training: BlockTraining = WHOLE,
) -> PartTime:
    """Return the seconds of one block; ``experts``: its MLP is a mixture of experts; ``training``: what trains in it.

    Without a gradient of some inputs or weights, the products for the others take their share of the FLOPs. Of a hybrid
    model the mean over its blocks with experts, or without.
    """
    if model.block_types:
        return _hybrid_block_time(model, work, profile, rate, experts)
    projections, mlp, core, moved = _parts(model, work, profile, rate, experts)
    forward = projections.forward + mlp.forward
    scale = rate.element_bytes / 2
    forward += core[0] + memory_seconds(scale * moved[0], profile.small_kernels[0], rate)
    elementwise = memory_seconds(scale * moved[1], profile.small_kernels[1], rate)
    of_inputs, of_weights = projections.of_input + mlp.of_input, projections.of_weight + mlp.of_weight
    if training.is_whole:
        backward = of_inputs + of_weights + core[1] + elementwise
        return PartTime(forward, backward, core[0], projections.forward)
    back, every = backward_products(model, training, experts), linear_weights(model, experts)
    adapted = _adapter_seconds(model, work, rate, experts, training)
    # Quantized layers are converted to the compute dtype once per pass.
    stored = _QUANTIZED_BYTES.get(model.quantization)
    unpacked = 0.0 if stored is None else memory_seconds((stored + 2) * every / work.tensor, 7, rate)
    forward += adapted[0] + unpacked
    if not back.reached:
        return PartTime(forward, 0.0, core[0], projections.forward)
    backward = of_inputs * back.inputs / every + of_weights * back.weights / every
    backward += (core[1] if back.attention else 0.0) + elementwise + adapted[1] + unpacked
    return PartTime(forward, backward, core[0], projections.forward)


def _hybrid_block_time(
    model: ModelSpec, work: RankWork, profile: FrameworkProfile, rate: Rates, experts: bool
) -> PartTime:
    """Return the mean seconds of the blocks of a hybrid model with experts, or without.

    Attention and an MLP take the kernels of a whole block, of which each has half the norms; see ``_scan_seconds`` for
    state-space layers.
    """
    whole = model.model_copy(update={"block_types": (), "mamba": None, "planned_architecture": None})
    mixing, mlp, core, moved = _parts(whole, work, profile, rate, experts)
    scan = _scan_seconds(model, work, rate)
    scale, every = rate.element_bytes / 2, 0
    forward = backward = cores = products = 0.0
    for parts, times in model.parts_between(0, model.num_hidden_layers):
        if parts.experts != experts:
            continue
        every += times
        if parts.attention:
            cores, products = cores + times * core[0], products + times * mixing.forward
            forward += times * (core[0] + mixing.forward)
            backward += times * (core[1] + mixing.of_input + mixing.of_weight)
        if parts.mlp or parts.experts:
            forward, backward = forward + times * mlp.forward, backward + times * (mlp.of_input + mlp.of_weight)
        if parts.mamba:
            forward, backward = forward + times * scan[0], backward + times * scan[1]
        share = times * parts.sublayers / 2
        forward += memory_seconds(share * scale * moved[0], share * profile.small_kernels[0], rate)
        backward += memory_seconds(share * scale * moved[1], share * profile.small_kernels[1], rate)
    count = max(1, every)
    return PartTime(forward / count, backward / count, cores / count, products / count)


def _parts(
    model: ModelSpec, work: RankWork, profile: FrameworkProfile, rate: Rates, experts: bool
) -> tuple[LinearSeconds, LinearSeconds, tuple[float, float], tuple[float, float]]:
    """Return the seconds of attention's projections, of the MLP and of the attention core, and the bytes ``_moved``."""
    heads = -(-model.num_attention_heads // work.tensor)
    dense = _mlp_products(model, work.tokens, model.intermediate_size, work.tensor)
    return (
        _products_seconds(_attention_products(model, work.tokens, heads, work.tensor), work, rate),
        _products_seconds(_expert_products(model, work) if experts else dense, work, rate),
        _attention_core(model, work, profile, heads, rate),
        _moved(model, work, profile, heads, experts),
    )


def _scan_seconds(model: ModelSpec, work: RankWork, rate: Rates) -> tuple[float, float]:
    """Return the (forward, backward) seconds of a state-space layer: projections, convolution, scan and gated norm.

    Mamba-2 computes chunks of c tokens as products (arXiv:2405.21060, section 6): c (n g + d) + 4 d n FLOPs per token
    for d channels, n states and g groups with causal halves, at the rate of fused attention; the backward pass computes
    them again, and twice as many for gradients. Mamba's scan is bound by memory. An estimate: no published runs.
    """
    mamba = model.mamba
    if mamba is None:
        return 0.0, 0.0
    t, tokens, hidden = work.tensor, work.tokens, model.hidden_size
    inner, projected, conv = (-(-n // t) for n in (mamba.inner_size, mamba.projected_size, mamba.conv_size))
    products: list[_Product] = [(1, tokens, hidden, projected), (1, tokens, inner, hidden)]
    flops = 0.0
    if mamba.dt_rank:
        products += [(1, tokens, inner, mamba.dt_rank + 2 * mamba.state_size), (1, tokens, mamba.dt_rank, inner)]
    else:
        chunk, state = mamba.chunk_size, mamba.state_size
        flops = 1.0 * tokens * (chunk * (state * -(-mamba.groups // t) + inner) + 4 * inner * state)
    linear = _products_seconds(products, work, rate)
    # Read and written: channels of the convolution, gate, channels before and after the scan and after the norm.
    moved = 1.0 * tokens * rate.element_bytes * (2 * conv + 6 * inner)
    kernels = memory_seconds(moved, 8, rate)
    forward = linear.forward + kernels + flops / rate.attention_forward
    return forward, linear.of_input + linear.of_weight + 2.5 * kernels + 3 * flops / rate.attention_backward


def _adapter_seconds(
    model: ModelSpec, work: RankWork, rate: Rates, experts: bool, training: BlockTraining
) -> tuple[float, float]:
    """Return the (forward, backward) seconds of the low-rank adapters of a block.

    Beside two thin products, the forward pass scales the update and adds it to the layer's output (5 reads and writes
    of that); the backward pass scales the gradient and adds the input's two gradients.
    """
    forward = backward = 0.0
    for layer in block_graph(model, experts).linears if training.adapters else ():
        if not (rank := training.rank(layer.name)):
            continue
        by_rows = layer.name.endswith(_SHARDED_INPUTS)
        inputs = -(-layer.inputs // work.tensor) if by_rows else layer.inputs
        outputs = layer.outputs if by_rows else -(-layer.outputs // work.tensor)
        rows = work.tokens * layer.copies
        for inner, columns in ((inputs, rank), (rank, outputs)):
            there, of_input, of_weight = linear_products(rows, inner, columns, work.compiled, rate)
            forward, backward = forward + there, backward + of_input + of_weight
        size = 1.0 * rate.element_bytes * rows
        forward += memory_seconds(5 * size * outputs, 2, rate)
        backward += memory_seconds(2 * size * outputs + 3 * size * inputs, 2, rate)
    return forward, backward


_SHARDED_INPUTS = ("o_proj", "down_proj", "c_proj")


@lru_cache(maxsize=8192)
def head_time(
    model: ModelSpec,
    work: RankWork,
    profile: FrameworkProfile,
    rate: Rates,
    trained: bool = True,
    arriving: bool = True,
) -> PartTime:
    """Return the seconds of the projection to the vocabulary and the loss.

    ``trained``: the head's weight trains; ``arriving``: the hidden states need a gradient.
    """
    columns, hidden = -(-model.vocab_size // work.tensor), model.hidden_size
    padded = columns if rate.is_cpu else -(-columns // profile.head_multiple) * profile.head_multiple
    forward, of_input, of_weight = linear_products(work.tokens, hidden, padded, work.compiled, rate)
    entries = 1.0 * work.tokens * columns
    copied = 2.0 * padded * hidden * rate.element_bytes if padded > columns else 0.0
    # The gradient of the logits is copied between zeros: written twice and read once.
    spread = copied + 3.0 * entries * rate.element_bytes if padded > columns else 0.0
    return PartTime(
        forward + memory_seconds(profile.loss[0] * entries + copied, 10, rate),
        of_input * arriving + of_weight * trained + memory_seconds(profile.loss[1] * entries + spread, 5, rate),
    )


def embedding_time(model: ModelSpec, work: RankWork, rate: Rates, trained: bool = True) -> PartTime:
    """Return the seconds of the embedding lookup, and of summing its gradients into the full table if it trains."""
    rows = 1.0 * work.tokens * model.hidden_size * rate.element_bytes
    table = -(-model.vocab_size // work.tensor) * model.hidden_size * rate.element_bytes
    return PartTime(memory_seconds(3 * rows, 3, rate), memory_seconds(3 * rows + table, 5, rate) if trained else 0.0)


_Product = tuple[int, int, int, int]  # number of such products, and (rows x inner) by (inner x columns)


def _products_seconds(products: list[_Product], work: RankWork, rate: Rates) -> LinearSeconds:
    """Return the seconds of these matrix products, with the casts of fp8."""
    forward = of_input = of_weight = 0.0
    for count, rows, inner, columns in products:
        there, back, own = linear_products(rows, inner, columns, work.compiled, rate)
        forward += count * there + memory_seconds(1.0 * count * rows * inner * rate.cast_bytes, 0, rate)
        of_input += count * back + memory_seconds(1.0 * count * rows * columns * rate.cast_bytes, 0, rate)
        of_weight += count * own
    return LinearSeconds(forward, of_input, of_weight)


def _attention_products(model: ModelSpec, tokens: int, heads: int, t: int) -> list[_Product]:
    hidden = model.hidden_size
    if not model.kv_lora_rank:
        keys = max(-(-model.num_key_value_heads // t), 1) * model.head_dim
        queries = heads * model.head_dim
        return [(1, tokens, hidden, queries + 2 * keys), (1, tokens, queries, hidden)]
    # Latent attention (arXiv:2405.04434, section 2.1): down projections to latents, up projections to heads, output.
    turned, value, latent = model.qk_rope_head_dim, model.value_head_dim, model.kv_lora_rank
    wide = heads * model.qk_head_dim
    query = (
        [(1, tokens, hidden, model.q_lora_rank), (1, tokens, model.q_lora_rank, wide)]
        if model.q_lora_rank
        else [(1, tokens, hidden, wide)]
    )
    return [
        *query,
        (1, tokens, hidden, latent + turned),
        (1, tokens, latent, heads * (model.head_dim + value)),
        (1, tokens, heads * value, hidden),
    ]


def _mlp_products(model: ModelSpec, tokens: int, inner: int, t: int) -> list[_Product]:
    width = -(-inner // t)
    return [
        (1, tokens, model.hidden_size, width * (2 if model.has_gated_mlp else 1)),
        (1, tokens, width, model.hidden_size),
    ]


def _expert_products(model: ModelSpec, work: RankWork) -> list[_Product]:
    """Return the products of router, shared experts and the routed experts on this rank, with a balanced load.

    All tensor ranks have the same micro-batch, and ``expert`` x ``expert_tensor`` ranks hold all experts once. Together
    these process expert x expert_tensor / tensor micro-batches, so a rank's experts process tokens x top-k x
    expert_tensor / tensor rows.
    """
    held = -(-model.num_experts // work.expert)
    routed = work.tokens * model.num_experts_per_tok * work.expert_tensor // work.tensor
    per_expert = max(1, -(-routed // held))
    gates = model.num_experts + (1 if model.shared_expert_gate else 0)
    products: list[_Product] = [(1, work.tokens, model.hidden_size, gates)]
    if model.shared_expert_intermediate_size:
        products += _mlp_products(model, work.tokens, model.shared_expert_intermediate_size, work.tensor)
    one = _mlp_products(model, per_expert, model.expert_size, work.expert_tensor)
    return products + [(held, rows, inner, columns) for _, rows, inner, columns in one]


def _attention_core(
    model: ModelSpec, work: RankWork, profile: FrameworkProfile, heads: int, rate: Rates
) -> tuple[float, float]:
    """Return the (forward, backward) seconds of scores, softmax and weighted sum, with the fused kernel or without."""
    # Ulysses' all-to-all gives each rank all queries of some heads, instead of some queries of all heads.
    local = max(1, heads // work.sequence)
    queries = work.tokens * work.sequence
    scores, values = model.qk_head_dim, model.value_head_dim
    if work.flash:
        biased = model.positions == "alibi"
        forward, backward = flash_attention_seconds(queries, work.keys, local, scores, values, biased, rate)
        factor = _mask_factor(model, work, profile)
        if model.index_topk:  # all scores of the indexer, as one key head of the same size
            size = model.index_head_dim
            scored = flash_attention_seconds(queries, work.keys, model.index_n_heads, size, 0, False, rate)
            forward, backward = forward * factor + scored[0], backward * factor + scored[1]
            factor = 1.0
        there, back = flash_3_speed(scores) if work.flash_3 else (profile.attention_speed, profile.attention_speed)
        return forward * factor / there, backward * factor / back
    dropout = model.attention_dropout > 0
    return materialized_attention_seconds(queries, work.keys, local, scores, values, profile.scores, dropout, rate)


def _mask_factor(model: ModelSpec, work: RankWork, profile: FrameworkProfile) -> float:
    """Return the mean time of fused attention over the layers, over that of full causal attention.

    A kernel with windows skips the scores outside; one that takes them as a mask computes all scores, also those that
    full causal attention skips, and may have another rate. Documents that are skipped count as full causal attention,
    because their lengths are unknown: an upper bound. The kernel of sparse attention is assumed to compute only the
    tokens that the indexer chooses.
    """
    if model.index_topk:
        return window_keys(model) / model.seq_len
    share, masked = model.windowed_layers / model.num_hidden_layers, 2.0 / work.masked_share
    windowed = window_keys(model) / model.seq_len if profile.skips_windows or work.by_document else masked
    return (1 - share) * (masked if work.takes_mask else 1.0) + share * windowed


def _moved(
    model: ModelSpec, work: RankWork, profile: FrameworkProfile, heads: int, experts: bool
) -> tuple[float, float]:
    """Return the bytes that one block's element-wise kernels read and write, (forward, backward), in 16 bits."""
    t, tokens = work.tensor, work.tokens
    hidden = model.hidden_size / (t if work.sharded_norms else 1)
    inner = model.intermediate_size / t
    extra = 0.0
    if experts:
        routed = model.num_experts_per_tok
        inner = (routed * model.expert_size + model.shared_expert_intermediate_size) / t
        extra = 6.0 * routed * model.hidden_size / t  # dispatch, permute and combine tokens
    activation = profile.gated if model.has_gated_mlp else profile.plain
    rotated = 0.0
    if model.positions == "rotary":
        rotated = (heads + max(1, model.num_key_value_heads // t)) * model.head_dim
    dropped = 3.0 * hidden if model.hidden_dropout else 0.0
    forward = profile.norm_forward * hidden + activation[0] * inner + profile.rotary[0] * rotated + extra + dropped
    backward = profile.norm_backward * hidden + activation[1] * inner + profile.rotary[1] * rotated + extra + dropped
    return tokens * forward, tokens * backward
