"""Activation bytes of this project's engine: what autograd saves for the backward pass, and what the loss needs.

Counted operation by operation, as in Korthikanti et al. (arXiv:2205.05198, section 4). Fused attention, which the
engine uses without attention dropout, saves its inputs, its output and one fp32 log-sum-exp per query and head, but no
matrix of scores. A GPT block in 16 bits then saves 32 bytes per token and channel: the paper's 34 without two dropout
masks. Compiled blocks follow torch 2.13, whose min-cut partitioner saves as few bytes as possible between the
operations that it does not recompute.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from scaletrain_cli.plan.block_graph import WHOLE, BlockTraining, backward_products
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.memory.block_activations import (
    BlockBytes,
    BlockKernels,
    mamba_bytes,
    materializes_scores,
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


@lru_cache(maxsize=1024)
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
    # Frozen weights are counted without compilation, and with this engine's kernels.
    own = kernels if training.is_whole else replace(kernels, compiled=False, fused_norms=True, keeps_activated=False)
    products = backward_products(model, training, is_moe)
    if not products.reached:
        return TokenActivations(0, 0, 0, 0)  # no backward pass comes here
    hidden, element_bytes = model.hidden_size, kernels.element
    saved, attention = BlockBytes(model, training, is_moe, own).of_block()
    working = element_bytes * (2 * hidden + _mlp_gradients(model, kernels.tensor, is_moe))
    if products.attention and (not kernels.fused or model.kv_lora_rank or kernels.context > 1):
        gradients = _attention_gradients
        if kernels.fused:
            gradients = _latent_gradients if kernels.context == 1 else _ring_gradients
        # When the core of attention begins its backward pass, all that was saved after attention has been freed.
        of_norm = BlockBytes(model, WHOLE, is_moe, kernels).norm("norm", True, kept=True)
        freed = max(0, saved - attention - of_norm)
        working = max(working, gradients(model, element_bytes, kernels.tensor) - freed)
    if kernels.compiled and training.is_whole:
        attention += element_bytes * hidden
    elif kernels.compiled and not training.adapters:
        saved = min(saved, BlockBytes(model, WHOLE, is_moe, kernels).of_block()[0])
    return TokenActivations(saved, attention, block_input=element_bytes * hidden, working=working)


def _attention_gradients(model: ModelSpec, element_bytes: int, t: int) -> int:
    """Return the bytes per token of the gradients that are alive when unfused attention normalizes scores backward.

    Those of the scores, of the hidden states, and of the values and the output.
    """
    heads = -(-model.num_attention_heads // t)
    scores = heads * model.seq_len * score_gradient_bytes(model, element_bytes)
    return scores + element_bytes * (2 * model.hidden_size + 2 * heads * model.value_head_dim)


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


def _mlp_gradients(model: ModelSpec, t: int, experts: bool) -> int:
    """Return the elements per token of the gradients alive at once in an MLP, or in the routed experts."""
    width, times = (model.expert_size, model.num_experts_per_tok) if experts else (model.intermediate_size, 1)
    gated = model.has_gated_mlp or (experts and model.swiglu_limit)
    return times * (3 if gated else 1) * -(-width // t)


def _hybrid_activations(model: ModelSpec, kernels: BlockKernels, experts: bool) -> TokenActivations:
    """Return the mean activations per token of the blocks of a hybrid model with experts, or without.

    Each part of a block has a norm before it, whose output is its input. The gradients alive at once are those of the
    block that needs most.
    """
    t, hidden, element = kernels.tensor, model.hidden_size, kernels.element
    kinds = [kind for kind in model.parts_between(0, model.num_hidden_layers) if kind[0].experts == experts]
    block = BlockBytes(model, WHOLE, experts, kernels)
    (mixing, _), (inner, _) = block.attention(True), block.mlp(True)
    scan, of_norm = mamba_bytes(model, element, t), block.norm("norm", True, kept=True)
    saved = attention = working = blocks = 0
    for parts, times in kinds:
        own = parts.sublayers * of_norm + (mixing if parts.attention else 0)
        own += (scan[0] if parts.mamba else 0) + (inner if parts.mlp or parts.experts else 0)
        saved, blocks = saved + times * own, blocks + times
        attention += times * mixing if parts.attention else 0
        gradients = max(
            element * _mlp_gradients(model, t, experts) if parts.mlp or parts.experts else 0,
            scan[1] if parts.mamba else 0,
        )
        if parts.attention and not kernels.fused:
            gradients = max(gradients, _attention_gradients(model, element, t))
        working = max(working, 2 * element * hidden + gradients)
    count = max(blocks, 1)
    return TokenActivations(-(-saved // count), -(-attention // count), element * hidden, working)


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
# On a GPU the head multiplies with a copy of its weight whose rows are padded to a multiple of this number, if they are
# not one: the products of GPT-2's 50,257 rows reach half of the rate of 50,304 (see ``plan.speed.kernels``).
HEAD_MULTIPLE = 64
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
    statistics = _FP32 * (1 if model.norm_kind == "rmsnorm" else 2)  # an inverse root, and a mean
    kept = tokens * (2 * element_bytes * model.hidden_size + statistics)  # input and output of the norm
    entry = _ENTRY + (_FP32 if model.final_logit_softcapping else 0)  # tanh keeps its output
    if cross_entropy == "chunked":
        head = head if trains_head else 0
        logits = (entry + element_bytes) * min(tokens, LOSS_CHUNK_TOKENS) * entries
        return kept + element_bytes * hidden + (_FP32 + element_bytes) * head + logits
    if cross_entropy == "liger":
        return kept + (2 * element_bytes + _FP32) * hidden + (_FP32 + element_bytes) * head
    return kept + (entry if entry_bytes is None else entry_bytes) * tokens * entries


def padded_head_bytes(model: ModelSpec, element_bytes: int, tensor_parallel: int, cross_entropy: str) -> int:
    """Return the bytes of the padded copy of the head's weight on a GPU; 0 if no rank needs one."""
    rows = -(-model.vocab_size // tensor_parallel)
    unaligned = [size for size in (rows, model.vocab_size - rows * (tensor_parallel - 1)) if size % HEAD_MULTIPLE]
    padded = -(-max(unaligned, default=0) // HEAD_MULTIPLE) * HEAD_MULTIPLE
    return 0 if cross_entropy == "liger" else element_bytes * padded * model.hidden_size


def loss_chunks(model: ModelSpec, tokens: int, cross_entropy: str) -> int:
    """Return the number of chunks in which the loss adds to the head's gradient; 0 for a ``whole`` loss."""
    if cross_entropy == "chunked":
        return -(-tokens // LOSS_CHUNK_TOKENS)
    return -(-model.vocab_size // model.hidden_size) if cross_entropy == "liger" else 0
