"""Bytes of activations that the backward pass needs, per operation of our own model. Knows no device and no schedule.

Counted like Korthikanti et al. (arXiv:2205.05198, section 4), for models without dropout whose attention is fused: it
saves its inputs, its output and one log-sum-exp per query and head, no matrix of scores. For a GPT block in 16 bits
that is 32 bytes per token and channel: their 34 without the two dropout masks.
"""

from __future__ import annotations

from dataclasses import dataclass

from scaletrain_cli.plan.memory.block_activations import latent_attention
from scaletrain_cli.spec import ModelSpec

# Kept in fp32 whatever the precision: log-sum-exps, roots and means of normalised rows, unfused attention weights.
_FP32 = 4


@dataclass(frozen=True)
class TokenActivations:
    """Bytes per token of one block on one rank."""

    saved: int  # without checkpointing
    block_input: int  # what a checkpointed block keeps
    working: int  # gradients that exist at once while one block runs backward


def token_activations(
    model: ModelSpec,
    element_bytes: int,
    tensor_parallel: int = 1,
    fused_attention: bool = True,
    experts: bool | None = None,
) -> TokenActivations:
    """What one block keeps per token. Tensor parallelism divides all but the inputs and outputs of the two norms.

    ``experts``: whether the block's MLP is a mixture of experts; as the model says, unless given.
    """
    t, hidden = tensor_parallel, model.hidden_size
    attention = _attention(model, element_bytes, t, fused_attention)
    norms = 2 * _norm(model, element_bytes) + (2 * hidden if model.hidden_dropout else 0)  # a mask is a byte
    mlp, mlp_gradients = _mlp(model, -(-model.intermediate_size // t))
    if model.num_experts and experts is not False:
        routed = model.num_experts_per_tok  # each with its dispatched input and its output
        mlp, mlp_gradients = _mlp(model, -(-model.expert_size // t))
        mlp, mlp_gradients = routed * (mlp + 2 * hidden), routed * mlp_gradients
        mlp += _mlp(model, -(-model.shared_expert_intermediate_size // t))[0]
        attention += 2 * _FP32 * model.num_experts  # router logits and probabilities
    return TokenActivations(
        saved=norms + attention + element_bytes * mlp,
        block_input=element_bytes * hidden,
        working=element_bytes * (2 * hidden + mlp_gradients),
    )


def _attention(model: ModelSpec, element_bytes: int, t: int, fused: bool) -> int:
    heads = -(-model.num_attention_heads // t)
    if model.kv_lora_rank:
        kept, output = latent_attention(model, element_bytes, heads)
        attention = kept + output + _FP32 * heads
    else:
        queries = heads * model.head_dim
        keys = max(-(-model.num_key_value_heads // t), 1) * model.head_dim
        # q, k, v, and the output, which is also the input of its projection; and one log-sum-exp per head.
        attention = element_bytes * (2 * queries + 2 * keys) + _FP32 * heads
        if model.qk_norm:
            # Over each head: its output goes into the rotation, which saves nothing.
            attention += (queries + keys) * (_FP32 + element_bytes) + _FP32 * (queries + keys) // model.head_dim
    if not fused:
        attention += _FP32 * heads * model.seq_len  # the weights after softmax
        attention += heads * model.seq_len * (_FP32 + 1) if model.attention_dropout else 0  # after dropout; its mask
    return attention


def _mlp(model: ModelSpec, inner: int) -> tuple[int, int]:
    """Elements kept by an MLP of this width, and of gradients that exist at once."""
    if model.has_gated_mlp:
        return 4 * inner, 3 * inner  # gate, up, activated gate, product
    return 2 * inner, inner  # before and after GELU


def _norm(model: ModelSpec, element_bytes: int) -> int:
    if model.norm_kind == "rmsnorm":
        return _rms_norm(model.hidden_size, element_bytes)
    return element_bytes * 2 * model.hidden_size + 2 * _FP32  # LayerNorm: input, output, mean and root


def _rms_norm(size: int, element_bytes: int) -> int:
    """The engine's norm computes in fp32 and saves its fp32 input, the normalised value, its output and one root."""
    return size * (_FP32 + 2 * element_bytes) + _FP32


def checkpointed_blocks(layers: int, checkpointing: str) -> int:
    """Blocks that keep only their input: none, every second one from the first on (selective), or all (full)."""
    return {"none": 0, "selective": -(-layers // 2), "full": layers}[checkpointing]


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
    """The final norm, and per vocabulary entry three fp32 values: log-probability and the gradients of two losses.

    ``nll_loss`` and ``log_softmax`` each make a gradient of the full size while the log-probabilities still live. The
    forward pass stays below that: 16-bit logits, their fp32 copy and the log-probabilities are 10 bytes.
    """
    if model.norm_kind == "rmsnorm":
        norm = _rms_norm(model.hidden_size, element_bytes)
    else:
        norm = element_bytes * 2 * model.hidden_size
    return tokens * (3 * _FP32 * -(-model.vocab_size // tensor_parallel) + norm)
