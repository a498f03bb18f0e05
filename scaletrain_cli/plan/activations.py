"""Bytes of activations that the backward pass needs, per operation of our own model. Knows no device and no schedule.

Counted like Korthikanti et al. (arXiv:2205.05198, section 4), for a model without dropout whose attention is fused
(scaled-dot-product attention saves its inputs, its output and one log-sum-exp per query and head, no s x s matrix).
For a GPT block in 16 bits that is 32 bytes per token and channel: their 34 without the two dropout masks.
"""

from __future__ import annotations

from dataclasses import dataclass

from scaletrain_cli.spec import ModelSpec

# Kept in fp32 whatever the precision: the log-sum-exp of attention, and one inverse root or mean per normalised row.
_STATISTIC_BYTES = 4


@dataclass(frozen=True)
class TokenActivations:
    """Bytes per token of one block on one rank."""

    saved: int  # without checkpointing
    block_input: int  # what a checkpointed block keeps
    working: int  # gradients that exist at once while one block runs backward


def token_activations(model: ModelSpec, element_bytes: int, tensor_parallel: int = 1) -> TokenActivations:
    """What one block keeps per token. Tensor parallelism divides all but the inputs and outputs of the two norms."""
    t, hidden = tensor_parallel, model.hidden_size
    heads = -(-model.num_attention_heads // t)
    queries = heads * model.head_dim
    keys = max(-(-model.num_key_value_heads // t), 1) * model.head_dim
    norms = 4 * hidden  # input and output of each; the outputs are the inputs of the projections
    attention = 2 * queries + 2 * keys  # q, k, v, and the output, which is also the input of its projection
    if model.qk_norm:
        attention += queries + keys
    if model.family == "gpt":
        inner = -(-model.intermediate_size // t)
        mlp, mlp_working = 2 * inner, inner  # before and after GELU
    elif model.num_experts:
        inner = -(-(model.moe_intermediate_size or model.intermediate_size) // t)
        per_expert = hidden + 4 * inner + hidden  # dispatched input, gate, up, activated gate, product, output
        mlp, mlp_working = model.num_experts_per_tok * per_expert, model.num_experts_per_tok * 3 * inner
    else:
        inner = -(-model.intermediate_size // t)
        mlp, mlp_working = 4 * inner, 3 * inner  # gate, up, activated gate, product; gradients of three of them
    statistics = (heads + 4) * _STATISTIC_BYTES
    statistics += 2 * model.num_experts * _STATISTIC_BYTES  # router logits and probabilities
    return TokenActivations(
        saved=element_bytes * (norms + attention + mlp) + statistics,
        block_input=element_bytes * hidden,
        working=element_bytes * (2 * hidden + mlp_working),
    )


def checkpointed_blocks(layers: int, checkpointing: str) -> int:
    """Blocks that keep only their input: none, every second one (selective), or all (full)."""
    return {"none": 0, "selective": layers // 2, "full": layers}[checkpointing]


def stage_activation_bytes(
    per_token: TokenActivations, tokens: int, layers: int, checkpointing: str, micro_batches_in_flight: int
) -> int:
    """Saved by ``layers`` blocks of one pipeline stage for the micro-batches whose backward has not run yet."""
    short = checkpointed_blocks(layers, checkpointing)
    per_micro_batch = short * per_token.block_input + (layers - short) * per_token.saved
    return tokens * per_micro_batch * micro_batches_in_flight


def block_backward_bytes(per_token: TokenActivations, tokens: int, layers: int, checkpointing: str) -> int:
    """Exists while one block runs backward: its gradients, and its activations again if they were not kept."""
    again = per_token.saved if checkpointed_blocks(layers, checkpointing) else 0
    return tokens * (per_token.working + again)


def loss_bytes(model: ModelSpec, element_bytes: int, tokens: int, tensor_parallel: int = 1) -> int:
    """Logits and what the loss makes of them: the logits, their fp32 copy, log-probabilities and fp32 gradient.

    16 bits: 2 (logits) + 4 (log-probabilities) + 4 (their gradient) + 2 (gradient of the logits); fp32 needs no
    second type: 4 + 4 + 4. Both are 12 bytes per entry of the vocabulary.
    """
    entries = tokens * -(-model.vocab_size // tensor_parallel)
    final_norm = 2 * model.hidden_size * element_bytes * tokens
    return 12 * entries + final_norm
