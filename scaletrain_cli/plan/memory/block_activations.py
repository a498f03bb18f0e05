"""Bytes of activations that one block keeps for its backward pass, operation by operation, as other frameworks than
our engine run it. Knows no schedule and no device.

Counted like Korthikanti et al. (arXiv:2205.05198, section 4): every operation keeps what its gradient needs, and a
tensor that two operations need is counted once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from scaletrain_cli.plan.memory.framework_memory import FrameworkMemory
from scaletrain_cli.spec import ModelSpec

_FP32 = 4


class Cut(NamedTuple):
    """How a block is cut and run: ``norm_ranks`` share norms, dropout and residuals; ``element`` bytes each."""

    tensor: int
    norm_ranks: int
    expert_tensor: int
    flash: bool
    element: int


@dataclass(frozen=True)
class BlockActivations:
    """Bytes per token of one block on one rank."""

    attention: int  # kept by attention, its scores not included
    scores: int  # kept where attention is materialised
    norms: int  # of both norms, dropout and residual sums
    mlp: int
    block_input: int
    products: int  # the block's input, the attention's output and every second product
    attention_gradients: int  # alive while attention runs backward
    mlp_gradients: int

    @property
    def saved(self) -> int:
        return self.attention + self.scores + self.norms + self.mlp

    @property
    def working(self) -> int:
        return max(self.attention_gradients, self.mlp_gradients)


@lru_cache(maxsize=4096)
def block_activations(model: ModelSpec, habits: FrameworkMemory, cut: Cut, experts: bool) -> BlockActivations:
    """What a block keeps per token; ``experts``: a block whose MLP is a mixture of experts."""
    hidden, element = model.hidden_size, cut.element
    attention, scores, attention_gradients = _attention(model, habits, cut)
    statistics = _FP32 * (1 if model.norm_kind == "rmsnorm" else 2)
    # Input and output of each norm; the residual sum is the next norm's input. A mask is one byte per channel.
    norms = 2 * (2 * element * hidden + statistics) // cut.norm_ranks
    if model.hidden_dropout:
        norms += 2 * hidden // cut.norm_ranks
    residual = 2 * element * hidden // cut.norm_ranks
    mlp, mlp_gradients = (
        _experts(model, habits, cut) if experts else _dense(model, habits, cut, model.intermediate_size)
    )
    return BlockActivations(
        attention=attention,
        scores=scores,
        norms=norms,
        mlp=mlp,
        block_input=element * hidden // cut.norm_ranks,
        products=_products(model, cut, experts),
        attention_gradients=attention_gradients + residual,
        mlp_gradients=mlp_gradients + residual,
    )


def _products(model: ModelSpec, cut: Cut, experts: bool) -> int:
    """Outputs of the query, value, gate (or up) and, gated, down projection, of attention, and the block's input."""
    heads = -(-model.num_attention_heads // cut.tensor) * model.head_dim
    keys = max(-(-model.num_key_value_heads // cut.tensor), 1) * model.head_dim
    inner = model.num_experts_per_tok * model.expert_size if experts else model.intermediate_size
    ends = (2 if model.has_gated_mlp else 1) * model.hidden_size // cut.norm_ranks
    return cut.element * (2 * heads + keys + -(-inner // cut.tensor) + ends)


def _attention(model: ModelSpec, habits: FrameworkMemory, cut: Cut) -> tuple[int, int, int]:
    """(kept without scores, kept scores, gradients alive) of attention and its projections."""
    heads = -(-model.num_attention_heads // cut.tensor)
    element = cut.element
    if model.kv_lora_rank:
        kept, output = latent_attention(model, element, heads)
        gradients = kept + output
    else:
        queries = heads * model.head_dim
        keys = max(-(-model.num_key_value_heads // cut.tensor), 1) * model.head_dim
        kept = element * (queries + 2 * keys)
        if habits.keeps_projected and model.positions == "rotary":
            kept += element * (queries + keys)
        if habits.repeats_keys:
            kept += element * 2 * (queries - keys)
        if model.qk_norm:
            kept += element * (queries + keys)
        output = element * queries  # which is the input of its projection
        gradients = element * (queries + 2 * keys) + 2 * output
    if cut.flash:
        return kept + output + _FP32 * heads, 0, gradients
    # The weights after softmax; with dropout what it leaves, and its mask.
    row = heads * model.seq_len
    scores = row * (2 * element + 1 if model.attention_dropout else element)
    return kept + output, scores, gradients + row * 2 * element


def latent_attention(model: ModelSpec, element: int, heads: int) -> tuple[int, int]:
    """(Kept, output) bytes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) on some heads.

    The latents before and after their norms, queries and keys with and without their rotated part, and values.
    """
    turned, value = model.qk_rope_head_dim, model.v_head_dim or model.head_dim
    latents = 2 * (model.q_lora_rank + model.kv_lora_rank) + turned
    wide = heads * (2 * (model.head_dim + turned) + (model.head_dim + turned) + (model.head_dim + value) + value)
    return element * (latents + wide), element * heads * value


def _dense(model: ModelSpec, habits: FrameworkMemory, cut: Cut, inner: int) -> tuple[int, int]:
    """Kept by an MLP of width ``inner`` whose input the norm has kept, and its gradients alive at once."""
    width = -(-inner // cut.tensor)
    if model.has_gated_mlp:
        return habits.gated_mlp * cut.element * width, 3 * cut.element * width
    return 2 * cut.element * width, 2 * cut.element * width


def _experts(model: ModelSpec, habits: FrameworkMemory, cut: Cut) -> tuple[int, int]:
    """The router's logits and probabilities, each routed copy of a token, and the shared experts.

    A token's copies are kept as received and as they come back from the experts, not as sent: an all-to-all's gradient
    needs nothing. With balanced experts a rank receives as many as it sends. Tensor ranks share the tokens, unless
    they share the experts' width.
    """
    hidden, element = model.hidden_size, cut.element
    copies = model.num_experts_per_tok
    width = -(-model.expert_size // cut.expert_tensor)
    per_width = habits.gated_mlp if model.has_gated_mlp else 2
    routed = copies * cut.expert_tensor * element * (2 * hidden + per_width * width) // cut.norm_ranks
    router = 2 * _FP32 * model.num_experts // cut.norm_ranks
    gradients = copies * element * cut.expert_tensor * (2 * hidden + 3 * width) // cut.norm_ranks
    if model.shared_expert_intermediate_size:
        shared, shared_gradients = _dense(model, habits, cut, model.shared_expert_intermediate_size)
        return routed + router + shared, max(gradients, shared_gradients)
    return routed + router, gradients
