"""Activation bytes of this project's engine: what autograd saves for the backward pass, and what the loss needs.

Counted operation by operation, as in Korthikanti et al. (arXiv:2205.05198, section 4). Fused attention, which the
engine uses without attention dropout, saves its inputs, its output and one fp32 log-sum-exp per query and head, but no
matrix of scores. A GPT block in 16 bits then saves 32 bytes per token and channel: the paper's 34 without two dropout
masks. Compiled blocks follow torch 2.13, whose min-cut partitioner saves as few bytes as possible between the
operations that it does not recompute.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from scaletrain_cli.plan.block_graph import WHOLE, BlockTraining, backward_products
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.memory.frozen_activations import (
    BlockKernels,
    frozen_activation_bytes,
    indexer_bytes,
    latent_core_bytes,
    latent_view_bytes,
    mamba_bytes,
    materializes_scores,
    norm_over_ranks_bytes,
    score_bytes,
    score_gradient_bytes,
)
from scaletrain_cli.spec import ModelSpec, RunSpec

# Saved in fp32 at every precision: log-sum-exps, means and inverse roots of normalized rows, unfused attention weights.
_FP32 = 4


def has_documents(spec: RunSpec) -> bool:
    """Return whether a row of a batch holds several documents, within which attention stays."""
    return spec.data.packing != "none"


_LARGEST_HEAD = 256  # FlashAttention 2


def attends_by_document(spec: RunSpec, device: Accelerator) -> bool:
    """Return whether the engine computes attention within documents and windows without a mask of all pairs.

    As engine/model/document_attention.py ``is_supported``: on the CPU, and on CUDA of compute capability 8 in 16 bits;
    not with dropout, a cap of scores or sinks. Devices that the spec describes count as CUDA.
    """
    model = spec.transformer
    if materializes_scores(model) or model.attention_sinks:
        return False
    if device.is_cpu:
        return True
    has_kernel = not device.compute_capability.startswith("gfx") and not 0 < device.cuda_capability < 8.0
    head = max(model.qk_head_dim, model.value_head_dim)
    fits = head % 8 == 0 and head <= _LARGEST_HEAD
    return has_kernel and fits and spec.training.precision not in ("fp32", "tf32")


def fuses_attention(spec: RunSpec, device: Accelerator) -> bool:
    """Return whether attention without dropout has a fused kernel: by planner.attention, or for auto by the device.

    Where attention within documents and windows takes a mask: of torch's kernels, the memory-efficient one takes a
    mask, but no grouped heads, and flash attention takes no mask (torch 2.13,
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). The engine repeats keys and values for it (``repeats_keys``).
    """
    model, wanted = spec.transformer, spec.planner.attention
    if wanted != "auto":
        return wanted != "materialised"
    grouped = model.num_key_value_heads != model.num_attention_heads
    grouped = grouped and not _has_mask(spec, device) and not model.attention_sinks
    return device.fuses_attention(spec.training.precision, max(model.qk_head_dim, model.value_head_dim), grouped)


def repeats_keys(spec: RunSpec, device: Accelerator) -> bool:
    """Return whether the engine repeats keys and values for a kernel without grouped queries.

    That is so for a mask on a GPU, and with sinks for every kernel but flash attention on a GPU. With sliding windows
    it is so in some layers, and counted in all. Attention without a fused kernel of torch repeats none.
    """
    model = spec.transformer
    if materializes_scores(model):
        return False
    if model.attention_sinks and (
        device.is_cpu or not device.fuses_attention(spec.training.precision, model.head_dim, True)
    ):
        return True
    return _has_mask(spec, device) and not device.is_cpu


def _has_mask(spec: RunSpec, device: Accelerator) -> bool:
    wanted = has_documents(spec) or spec.transformer.windowed_layers > 0
    return wanted and not attends_by_document(spec, device)


@dataclass(frozen=True)
class TokenActivations:
    """Bytes per token of one block on one rank."""

    saved: int  # without activation checkpointing
    attention: int  # the part of ``saved`` that is not kept if only the attention module is recomputed
    block_input: int  # all that a recomputed block keeps
    working: int  # gradients alive at once while the block runs backward


def token_activations(
    model: ModelSpec, kernels: BlockKernels, *, experts: bool | None = None, training: BlockTraining = WHOLE
) -> TokenActivations:
    """Return the activation bytes per token of one transformer block on one rank.

    Tensor parallelism divides everything except the inputs and outputs of the two norms. ``experts``: whether the
    block's MLP is a mixture of experts (None: if the model has experts). ``training``: what trains in the block. Of a
    hybrid model the bytes of a block with experts, or without, are the mean over those of its layers.
    """
    is_moe = bool(model.num_experts) and experts is not False
    if materializes_scores(model):
        kernels = replace(kernels, fused=False)
    if model.block_types:
        return _hybrid_activations(model, kernels, is_moe)
    t, hidden, element_bytes, compiled = kernels.tensor, model.hidden_size, kernels.element, kernels.compiled
    of_norm, attention = _norm(model, kernels), _attention(model, kernels)
    # Beside their norms, attention and MLP save their inputs: the outputs of norms before them, or the hidden states.
    norms = 2 * of_norm + (2 * hidden if model.hidden_dropout else 0)  # a mask is a byte
    if model.norm_position == "pre_and_post":
        norms += 2 * (of_norm - element_bytes * hidden)
    routing = 0
    mlp, mlp_gradients = _mlp(model, -(-model.intermediate_size // t), kernels)
    if is_moe:
        mlp, mlp_gradients, routing = _experts(model, kernels)
        if compiled and not model.shared_expert_intermediate_size and element_bytes < _FP32:
            norms -= element_bytes * hidden  # of the second norm's output only the router's fp32 copy is saved
    saved = norms + attention + element_bytes * mlp + routing

    def working(saved: int, attention: int, *, mixes: bool) -> int:
        """Return the gradients alive at once; ``mixes``: the core of attention has a backward pass.

        When it begins, all that was saved after attention has been freed.
        """
        in_mlp = element_bytes * (2 * hidden + mlp_gradients)
        if not mixes or (kernels.fused and not model.kv_lora_rank and kernels.context == 1):
            return in_mlp
        gradients = _attention_gradients
        if kernels.fused:
            gradients = _latent_gradients if kernels.context == 1 else _ring_gradients
        freed = max(0, saved - attention - of_norm)
        return max(in_mlp, gradients(model, element_bytes, t) - freed)

    whole = TokenActivations(
        saved=saved,
        attention=attention + (element_bytes * hidden if compiled else 0),
        block_input=element_bytes * hidden,
        working=working(saved, attention, mixes=True),
    )
    if training.is_whole:
        return whole
    products = backward_products(model, training, is_moe)
    if not products.reached:
        return TokenActivations(0, 0, 0, 0)  # no backward pass comes here
    saved, attention = frozen_activation_bytes(model, training, is_moe, kernels)
    return TokenActivations(
        saved=min(saved, whole.saved) if compiled and not training.adapters else saved,
        attention=attention,
        block_input=whole.block_input,
        working=working(saved, attention, mixes=products.attention),
    )


def _attention_gradients(model: ModelSpec, element_bytes: int, t: int) -> int:
    """Return the bytes per token of the gradients that are alive when unfused attention normalizes scores backward.

    Those of the scores, of the hidden states, and of the values and the output.
    """
    heads = -(-model.num_attention_heads // t)
    value = model.value_head_dim
    scores = heads * model.seq_len * score_gradient_bytes(model, element_bytes)
    return scores + element_bytes * (2 * model.hidden_size + 2 * heads * value)


def _attention(model: ModelSpec, kernels: BlockKernels) -> int:
    element_bytes, t, sequence_parallel = kernels.element, kernels.tensor, kernels.sequence
    heads = -(-model.num_attention_heads // t)
    if model.kv_lora_rank:
        attention = latent_core_bytes(model, element_bytes, heads, sequence_parallel, kept=True)
        for size in (model.q_lora_rank, model.kv_lora_rank):
            attention += rms_norm_bytes(size, element_bytes) if size else 0
        attention += 0 if kernels.compiled else latent_view_bytes(model, element_bytes)
        attention += indexer_bytes(model, element_bytes)
    else:
        queries = heads * model.head_dim
        keys = max(-(-model.num_key_value_heads // t), 1) * model.head_dim
        # for attention with a mask, or to divide the heads of a tensor rank over the sequence ranks
        repeated = kernels.repeats or (sequence_parallel > 1 and keys // model.head_dim % sequence_parallel)
        # Query, key, value, the output (which is the input of the output projection), one log-sum-exp per head.
        attention = element_bytes * (2 * queries + 2 * (queries if repeated else keys)) + _FP32 * heads
        attention += element_bytes * queries if sequence_parallel > 1 else 0  # Ulysses' all-to-all copies the output
        if model.qk_norm:
            # RMSNorm saves its input. Its output goes into the rotary embedding, which saves nothing.
            over_ranks = t > 1 and model.qk_norm_scope == "projection" and not kernels.compiled
            normalized = norm_over_ranks_bytes(model, element_bytes) if over_ranks else element_bytes
            rows = (queries + keys) // model.head_dim if model.qk_norm_scope == "head" else 2
            attention += (queries + keys) * normalized + _FP32 * rows
    return attention if kernels.fused else attention + score_bytes(model, element_bytes, heads)


def _latent_gradients(model: ModelSpec, element_bytes: int, t: int) -> int:
    """Return the bytes per token of the gradients alive at once in fused latent attention.

    Those of the hidden states, and of queries, keys, values and output. Other attention has fewer than the MLP.
    """
    heads = -(-model.num_attention_heads // t)
    return element_bytes * (2 * model.hidden_size + 4 * heads * max(model.qk_head_dim, model.value_head_dim))


def _ring_gradients(model: ModelSpec, element_bytes: int, t: int) -> int:
    """Return the bytes per token alive at once when ring attention runs backward (engine/parallel/sequence.py).

    The gradients of the hidden states and of the output; that of the queries summed in fp32, and that of one block;
    keys and values of this block and of the next one; their gradients in fp32: this rank's, those of the block that it
    sends, and of the block that arrives.
    """
    channels = max(model.qk_head_dim, model.value_head_dim)
    queries = -(-model.num_attention_heads // t) * channels
    pairs = 2 * max(-(-model.num_key_value_heads // t), 1) * channels
    gradients = element_bytes * (2 * model.hidden_size + 2 * queries) + _FP32 * queries
    return gradients + (2 * element_bytes + 3 * _FP32) * pairs


def _mlp(model: ModelSpec, inner: int, kernels: BlockKernels) -> tuple[int, int]:
    """Return the elements per token of an MLP of width ``inner``: (saved, gradients alive at once)."""
    if model.has_gated_mlp:  # gate, up, product, and the activated gate
        return (4 if kernels.keeps_activated and not kernels.compiled else 3) * inner, 3 * inner
    return 2 * inner, inner  # before and after GELU


def _experts(model: ModelSpec, kernels: BlockKernels) -> tuple[int, int, int]:
    """Return elements per token of routed and shared experts, (saved, gradients alive at once), and router bytes."""
    routed, hidden, t = model.num_experts_per_tok, model.hidden_size, kernels.tensor
    inner = -(-model.expert_size // t)
    mlp, gradients = (3 * inner, 3 * inner) if model.swiglu_limit else _mlp(model, inner, kernels)
    copies = 3 if kernels.compiled else 2  # dispatched input and output; compiled: also the output before its return
    mlp, gradients = routed * (mlp + copies * hidden), routed * gradients
    mlp += _mlp(model, -(-model.shared_expert_intermediate_size // t), kernels)[0]
    mlp += hidden + 1 if model.shared_expert_gate else 0  # both factors
    routing = 2 * _FP32 * model.num_experts  # the router's logits and probabilities, and its fp32 input
    return mlp, gradients, routing + (_FP32 * hidden if kernels.element < _FP32 else 0)


def _hybrid_activations(model: ModelSpec, kernels: BlockKernels, experts: bool) -> TokenActivations:
    """Return the mean activations per token of the blocks of a hybrid model with experts, or without.

    Each part of a block has a norm before it, whose output is its input. The gradients alive at once are those of the
    block that needs most.
    """
    t, hidden, element = kernels.tensor, model.hidden_size, kernels.element
    kinds = [kind for kind in model.parts_between(0, model.num_hidden_layers) if kind[0].experts == experts]
    mixing, scan, of_norm = _attention(model, kernels), mamba_bytes(model, element, t), _norm(model, kernels)
    mlp, of_mlp = _mlp(model, -(-model.intermediate_size // t), kernels)
    sparse, of_sparse, routing = _experts(model, kernels) if model.num_experts else (0, 0, 0)
    saved = attention = working = blocks = 0
    for parts, times in kinds:
        own = parts.sublayers * of_norm + (mixing if parts.attention else 0)
        own += (scan[0] if parts.mamba else 0) + (element * mlp if parts.mlp else 0)
        own += element * sparse + routing if parts.experts else 0
        saved, blocks = saved + times * own, blocks + times
        attention += times * mixing if parts.attention else 0
        inner = element * max(of_mlp if parts.mlp else 0, of_sparse if parts.experts else 0)
        gradients = max(inner, scan[1] if parts.mamba else 0)
        if parts.attention and not kernels.fused:
            gradients = max(gradients, _attention_gradients(model, element, t))
        working = max(working, 2 * element * hidden + gradients)
    count = max(blocks, 1)
    return TokenActivations(-(-saved // count), -(-attention // count), element * hidden, working)


def _norm(model: ModelSpec, kernels: BlockKernels) -> int:
    of_rms_norm = rms_norm_bytes(model.hidden_size, kernels.element)
    if model.norm_kind != "rmsnorm":
        return of_rms_norm + _FP32  # LayerNorm: also the mean
    # Beside its output, one that is not fused saves the fp32 input and the normalized value.
    return of_rms_norm + (0 if kernels.fused_norms or kernels.compiled else _FP32 * model.hidden_size)


def rms_norm_bytes(size: int, element_bytes: int) -> int:
    """Return the bytes per token that an RMSNorm over ``size`` channels saves: input, output and inverse root."""
    return 2 * element_bytes * size + _FP32


class Recomputation(NamedTuple):
    """The recomputation in the backward pass: ``mode`` is none, selective or full; the rest is for selective.

    ``scope`` and ``every`` are layout.selective_scope and layout.selective_every.
    """

    mode: str
    scope: str = "block"
    every: int = 2

    def blocks(self, layers: int, first: int = 0) -> int:
        """Return how many of ``layers`` blocks keep only their input and are recomputed: none, every n-th, or all.

        ``first``: place of the first of them on its pipeline stage.
        """
        if self.mode == "selective":
            return 0 if self.scope == "attention" else -(-(first + layers) // self.every) - -(-first // self.every)
        return layers if self.mode == "full" else 0

    @property
    def attention_only(self) -> bool:
        """Return whether each block recomputes its attention module and saves everything else."""
        return self.mode == "selective" and self.scope == "attention"


def stage_activation_bytes(
    per_token: TokenActivations,
    tokens: int,
    layers: int,
    recompute: Recomputation,
    micro_batches_in_flight: int,
    first: int = 0,
) -> int:
    """Return the bytes that ``layers`` blocks save for the backward passes of the micro-batches in flight.

    ``tokens``: of one micro-batch on one rank; ``first``: place of the first block on its pipeline stage.
    """
    short = recompute.blocks(layers, first)
    whole = per_token.saved - (per_token.attention if recompute.attention_only else 0)
    return tokens * (short * per_token.block_input + (layers - short) * whole) * micro_batches_in_flight


def block_backward_bytes(per_token: TokenActivations, tokens: int, layers: int, recompute: Recomputation) -> int:
    """Return the bytes that exist only while one block runs backward: its gradients and recomputed activations."""
    made_again = per_token.saved if recompute.blocks(layers) else per_token.attention if recompute.attention_only else 0
    return tokens * (per_token.working + made_again)


# Tokens per chunk of the chunked loss, whose logits exist at once: enough rows for efficient matrix products.
LOSS_CHUNK_TOKENS = 1024
# `auto` uses chunks if the loss of the whole micro-batch would take more than this share of the device. Otherwise it
# does not, because each chunk adds its gradient to that of the head, which costs memory traffic.
_LARGEST_SHARE = 0.15

# Bytes per token and vocabulary entry at the peak of the loss: three fp32 values. The backward passes of ``nll_loss``
# and ``log_softmax`` each allocate a gradient of full size while the log-probabilities are still alive. The forward
# pass needs less, 10 bytes: 16-bit logits, their fp32 copy, and the log-probabilities.
_ENTRY = 3 * _FP32


def chosen_cross_entropy(spec: RunSpec, micro_batch_tokens: int, tensor_parallel: int, device_bytes: int) -> str:
    """Return how the loss is computed: ``whole``, ``chunked`` or ``liger``; for ``auto`` by the size of the logits.

    ``micro_batch_tokens``: tokens of a micro-batch on one rank.
    """
    wanted = spec.training.cross_entropy
    if wanted != "auto":
        return wanted
    whole = _ENTRY * micro_batch_tokens * -(-spec.transformer.vocab_size // tensor_parallel)
    return "chunked" if whole > _LARGEST_SHARE * device_bytes else "whole"


def loss_bytes(
    model: ModelSpec,
    element_bytes: int,
    tokens: int,
    tensor_parallel: int = 1,
    cross_entropy: str = "whole",
    *,
    trains_head: bool = True,
    entry_bytes: int | None = None,
) -> int:
    """Return the bytes of one rank at the peak of the loss, with the final norm's activations.

    ``entry_bytes``: bytes per token and vocabulary entry of another program's whole loss; None: of this project's.

    ``chunked`` computes the gradients together with the loss, chunk by chunk (engine/model/loss.py): the gradient of
    the hidden states, the head's gradient summed in fp32, and beside it the head's gradient of one chunk; the last two
    only if the head trains (``trains_head``). ``liger`` does the same with chunks of such a size that the logits of one
    take as many bytes as the hidden states (liger_kernel, fused_linear_cross_entropy_forward).
    """
    entries = -(-model.vocab_size // tensor_parallel)
    hidden, head = tokens * model.hidden_size, entries * model.hidden_size
    kept = tokens * (2 * element_bytes * model.hidden_size + 2 * _FP32)
    if model.norm_kind == "rmsnorm":
        kept = tokens * rms_norm_bytes(model.hidden_size, element_bytes)
    entry = _ENTRY + (_FP32 if model.final_logit_softcapping else 0)  # tanh keeps its output
    if cross_entropy == "chunked":
        head = head if trains_head else 0
        logits = (entry + element_bytes) * min(tokens, LOSS_CHUNK_TOKENS) * entries
        return kept + element_bytes * hidden + (_FP32 + element_bytes) * head + logits
    if cross_entropy == "liger":
        return kept + (2 * element_bytes + _FP32) * hidden + (_FP32 + element_bytes) * head
    return kept + (entry if entry_bytes is None else entry_bytes) * tokens * entries


def loss_chunks(model: ModelSpec, tokens: int, cross_entropy: str) -> int:
    """Return the number of chunks in which the loss adds to the head's gradient; 0 for a ``whole`` loss."""
    if cross_entropy == "chunked":
        return -(-tokens // LOSS_CHUNK_TOKENS)
    return -(-model.vocab_size // model.hidden_size) if cross_entropy == "liger" else 0
