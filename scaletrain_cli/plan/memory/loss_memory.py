"""Bytes that the final norm, the logits and the loss of a micro-batch take in our engine, and whether all logits of it
exist at once. Knows no blocks and no schedule.
"""

from __future__ import annotations

from scaletrain_cli.plan.memory.activations import rms_norm_bytes
from scaletrain_cli.spec import ModelSpec, RunSpec

# Tokens whose logits the chunked loss has at once: enough rows that its products still keep a GPU busy.
LOSS_CHUNK_TOKENS = 1024
# `auto` works in chunks where the loss of a whole micro-batch would take more of the device than this. Not always,
# because each chunk adds its gradient to that of the head, which costs memory traffic.
_LARGEST_SHARE = 0.15

_FP32 = 4
# Per vocabulary entry three fp32 values: the log-probability and the gradients of two losses. ``nll_loss`` and
# ``log_softmax`` each make one of the full size while the log-probabilities still live. The forward pass stays below
# that: 16-bit logits, their fp32 copy and the log-probabilities are 10 bytes.
_ENTRY = 3 * _FP32


def chosen_cross_entropy(spec: RunSpec, micro_batch_tokens: int, tensor_parallel: int, device_bytes: int) -> str:
    """``whole``, ``chunked`` or ``liger``; ``micro_batch_tokens`` of one rank."""
    wanted = spec.training.cross_entropy
    if not isinstance(spec.model, ModelSpec) or spec.planner.framework != "deepspeed":
        return "whole"  # others as their own code has it
    if wanted != "auto":
        return wanted
    whole = _ENTRY * micro_batch_tokens * -(-spec.model.vocab_size // tensor_parallel)
    return "chunked" if whole > _LARGEST_SHARE * device_bytes else "whole"


def loss_bytes(
    model: ModelSpec, element_bytes: int, tokens: int, tensor_parallel: int = 1, cross_entropy: str = "whole"
) -> int:
    """At the fullest moment of the loss.

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
    """How often the loss adds up a gradient of the head; 0 where it does not."""
    if cross_entropy == "chunked":
        return -(-tokens // LOSS_CHUNK_TOKENS)
    return -(-model.vocab_size // model.hidden_size) if cross_entropy == "liger" else 0


def _layer_norm_bytes(size: int, element_bytes: int) -> int:
    return 2 * element_bytes * size + 2 * _FP32
