"""Bytes of activations and of the loss that the backward pass needs, per operation of this project's engine.

Counted like Korthikanti et al. (arXiv:2205.05198, section 4). Attention is fused where it has no dropout: it saves its
inputs, its output and one log-sum-exp per query and head, no matrix of scores. For a GPT block in 16 bits that is 32
bytes per token and channel: their 34 without the two dropout masks. The bytes kept by a compiled block follow torch
2.13, whose partitioner minimizes the bytes kept between operations that it does not recompute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from scaletrain_cli.spec import ModelSpec, RunSpec

# Kept in fp32 whatever the precision: log-sum-exps, roots and means of normalized rows, unfused attention weights.
_FP32 = 4


@dataclass(frozen=True)
class TokenActivations:
    """Bytes per token of one block on one rank."""

    saved: int  # without activation checkpointing
    attention: int  # part of it that is recomputed if attention alone is; without its input, unless compiled
    block_input: int  # bytes that a checkpointed block keeps
    working: int  # gradients alive at once while one block runs backward


def token_activations(
    model: ModelSpec,
    element_bytes: int,
    tensor_parallel: int = 1,
    fused_attention: bool = True,
    *,
    experts: bool | None = None,
    sequence_parallel: int = 1,
    compiled: bool = False,
) -> TokenActivations:
    """Return what one block keeps per token. Tensor parallelism divides all but the inputs and outputs of the two
    norms.

    ``experts``: whether the block's MLP is a mixture of experts; as the model says, unless given.
    """
    t, hidden = tensor_parallel, model.hidden_size
    fused = fused_attention and not model.attention_dropout
    attention = _attention(model, element_bytes, t, fused, sequence_parallel, compiled)
    norms = 2 * _norm(model, element_bytes, compiled) + (2 * hidden if model.hidden_dropout else 0)  # a mask is a byte
    routing = 0
    mlp, mlp_gradients = _mlp(model, -(-model.intermediate_size // t), compiled)
    if model.num_experts and experts is not False:
        routed = model.num_experts_per_tok  # each with its dispatched input and its output
        mlp, mlp_gradients = _mlp(model, -(-model.expert_size // t), compiled)
        copies = 3 if compiled else 2  # compiled, the output also as it was before it went back to its token
        mlp, mlp_gradients = routed * (mlp + copies * hidden), routed * mlp_gradients
        mlp += _mlp(model, -(-model.shared_expert_intermediate_size // t), compiled)[0]
        routing = 2 * _FP32 * model.num_experts  # the router's logits and probabilities, and its fp32 input
        routing += _FP32 * hidden if element_bytes < _FP32 else 0
        if compiled and not model.shared_expert_intermediate_size and element_bytes < _FP32:
            norms -= element_bytes * hidden  # the router's input is all that is kept of the second norm
    return TokenActivations(
        saved=norms + attention + element_bytes * mlp + routing,
        attention=attention + (element_bytes * hidden if compiled else 0),
        block_input=element_bytes * hidden,
        working=element_bytes * (2 * hidden + mlp_gradients),
    )


def _attention(
    model: ModelSpec, element_bytes: int, t: int, fused: bool, sequence_parallel: int, compiled: bool
) -> int:
    heads = -(-model.num_attention_heads // t)
    if model.kv_lora_rank:
        kept, output = latent_attention(model, element_bytes, heads)
        attention = kept + output + _FP32 * heads
    else:
        queries = heads * model.head_dim
        keys = max(-(-model.num_key_value_heads // t), 1) * model.head_dim
        repeated = sequence_parallel > 1 and keys // model.head_dim % sequence_parallel  # divided over the tensor ranks
        # q, k, v, and the output, which is also the input of its projection; and one log-sum-exp per head.
        attention = element_bytes * (2 * queries + 2 * (queries if repeated else keys)) + _FP32 * heads
        attention += element_bytes * queries if sequence_parallel > 1 else 0  # exchanged, it is another tensor
        if model.qk_norm:
            # Over each head: its output goes into the rotation, which saves nothing.
            normalized = element_bytes if compiled else _FP32 + element_bytes
            attention += (queries + keys) * normalized + _FP32 * (queries + keys) // model.head_dim
    if not fused:
        attention += _FP32 * heads * model.seq_len  # the weights after softmax
        attention += heads * model.seq_len * (element_bytes + 1) if model.attention_dropout else 0  # dropped; the mask
    return attention


def _mlp(model: ModelSpec, inner: int, compiled: bool) -> tuple[int, int]:
    """Return the elements kept by an MLP of this width, and those of gradients alive at once."""
    if model.has_gated_mlp:
        return (3 if compiled else 4) * inner, 3 * inner  # gate, up, activated gate unless compiled, product
    return 2 * inner, inner  # before and after GELU


def _norm(model: ModelSpec, element_bytes: int, compiled: bool) -> int:
    if model.norm_kind == "rmsnorm" and compiled:
        return element_bytes * 2 * model.hidden_size + _FP32  # input, output and root
    if model.norm_kind == "rmsnorm":
        return rms_norm_bytes(model.hidden_size, element_bytes)
    return element_bytes * 2 * model.hidden_size + 2 * _FP32  # LayerNorm: input, output, mean and root


def rms_norm_bytes(size: int, element_bytes: int) -> int:
    """Return the bytes per token of an RMSNorm.

    It computes in fp32 and saves its fp32 input, the normalized value, its output and the root.
    """
    return size * (_FP32 + 2 * element_bytes) + _FP32


def latent_attention(model: ModelSpec, element: int, heads: int) -> tuple[int, int]:
    """Return (kept, output) bytes per token of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section
    2.1).

    The latents before and after their norms, queries and keys with and without their rotated part, and values.
    """
    turned, value = model.qk_rope_head_dim, model.v_head_dim or model.head_dim
    latents = 2 * (model.q_lora_rank + model.kv_lora_rank) + turned
    wide = heads * (2 * (model.head_dim + turned) + (model.head_dim + turned) + (model.head_dim + value) + value)
    return element * (latents + wide), element * heads * value


class Recomputation(NamedTuple):
    """The recomputation in the backward pass: ``mode`` is none, selective or full; see layout.selective_scope."""

    mode: str
    scope: str = "block"
    every: int = 2

    def blocks(self, layers: int) -> int:
        """Return the number of ``layers`` blocks that keep only their input: none, every n-th, or all."""
        if self.mode == "selective":
            return 0 if self.scope == "attention" else -(-layers // self.every)
        return layers if self.mode == "full" else 0

    @property
    def attention_only(self) -> bool:
        """Return whether each block recomputes its attention module and keeps all else."""
        return self.mode == "selective" and self.scope == "attention"


def stage_activation_bytes(
    per_token: TokenActivations, tokens: int, layers: int, again: Recomputation, micro_batches_in_flight: int
) -> int:
    """Return the bytes that ``layers`` blocks of a stage save for the micro-batches in flight."""
    short = again.blocks(layers)
    whole = per_token.saved - (per_token.attention if again.attention_only else 0)
    return tokens * (short * per_token.block_input + (layers - short) * whole) * micro_batches_in_flight


def block_backward_bytes(per_token: TokenActivations, tokens: int, layers: int, again: Recomputation) -> int:
    """Return the bytes of one block's backward pass: its gradients, and its recomputed activations."""
    made_again = per_token.saved if again.blocks(layers) else per_token.attention if again.attention_only else 0
    return tokens * (per_token.working + made_again)


# Tokens whose logits the chunked loss has at once: enough rows that its products still keep a GPU busy.
LOSS_CHUNK_TOKENS = 1024
# `auto` works in chunks where the loss of a whole micro-batch would take more of the device than this. Not always,
# because each chunk adds its gradient to that of the head, which costs memory traffic.
_LARGEST_SHARE = 0.15

# Per vocabulary entry three fp32 values: the log-probability and the gradients of two losses. ``nll_loss`` and
# ``log_softmax`` each make one of the full size while the log-probabilities still live. The forward pass stays below
# that: 16-bit logits, their fp32 copy and the log-probabilities are 10 bytes.
_ENTRY = 3 * _FP32


def chosen_cross_entropy(spec: RunSpec, micro_batch_tokens: int, tensor_parallel: int, device_bytes: int) -> str:
    """Return ``whole``, ``chunked`` or ``liger``, by the ``micro_batch_tokens`` of one rank."""
    wanted = spec.training.cross_entropy
    if wanted != "auto":
        return wanted
    whole = _ENTRY * micro_batch_tokens * -(-spec.transformer.vocab_size // tensor_parallel)
    return "chunked" if whole > _LARGEST_SHARE * device_bytes else "whole"


def loss_bytes(
    model: ModelSpec, element_bytes: int, tokens: int, tensor_parallel: int = 1, cross_entropy: str = "whole"
) -> int:
    """Return the bytes at the peak of the loss.

    In chunks, the gradients are made with the loss: that of the hidden states, that of the head summed in fp32 and
    that of one chunk's head beside it (engine/model/loss.py). Liger's kernel does the same with chunks of as many
    tokens as make logits of the hidden states' size, and no more of them at once (liger_kernel, fused_linear_
    cross_entropy_forward).
    """
    norm = rms_norm_bytes if model.norm_kind == "rmsnorm" else _layer_norm_bytes
    entries = -(-model.vocab_size // tensor_parallel)
    hidden, head = tokens * model.hidden_size, entries * model.hidden_size
    kept = tokens * norm(model.hidden_size, element_bytes)
    if cross_entropy == "chunked":
        logits = (_ENTRY + element_bytes) * min(tokens, LOSS_CHUNK_TOKENS) * entries
        return kept + element_bytes * hidden + (_FP32 + element_bytes) * head + logits
    if cross_entropy == "liger":
        return kept + (2 * element_bytes + _FP32) * hidden + (_FP32 + element_bytes) * head
    return kept + _ENTRY * tokens * entries


def loss_chunks(model: ModelSpec, tokens: int, cross_entropy: str) -> int:
    """Return the number of times that the loss accumulates a gradient of the head; 0 if it does not."""
    if cross_entropy == "chunked":
        return -(-tokens // LOSS_CHUNK_TOKENS)
    return -(-model.vocab_size // model.hidden_size) if cross_entropy == "liger" else 0


def _layer_norm_bytes(size: int, element_bytes: int) -> int:
    return 2 * element_bytes * size + 2 * _FP32
