"""Causal attention, and the kernel that torch selects for it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from scaletrain_cli.engine.deepspeed_engine import forward_dtype
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.spec import RunSpec


def causal_attention(query: Tensor, key: Tensor, value: Tensor, samples: Tensor | None = None) -> Tensor:
    """Return scaled dot-product attention, [batch, heads, length, head_dim]; key and value may have fewer heads.

    ``samples`` [batch] is for variants with dropout.
    """
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])


_NAMES = {
    SDPBackend.MATH: "math",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
    SDPBackend.OVERRIDEABLE: "of the device",
}


def attention_kernel_of(spec: RunSpec, layout: Layout, device: torch.device) -> str:
    """Return the attention kernel for a rank's share of the heads over whole sequences."""
    model, cut = spec.transformer, layout.tensor_parallel * layout.sequence_parallel
    heads = model.num_attention_heads // cut
    return attention_kernel(
        device,
        forward_dtype(spec.training.precision),
        batch=layout.micro_batch_size,
        heads=heads,
        kv_heads=model.num_key_value_heads // cut if model.num_key_value_heads % cut == 0 else heads,
        length=model.seq_len,
        head_dim=model.head_dim,
        dropout=model.attention_dropout,
    )


def attention_kernel(
    device: torch.device,
    dtype: torch.dtype,
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    length: int,
    head_dim: int,
    dropout: float = 0.0,
) -> str:
    """Return flash, memory-efficient, cudnn or math (which materializes all scores), for one rank's share of the heads.

    ``unfused`` with dropout, which has its own attention. Allocates a query, a key and a value.
    """
    if dropout:
        return "unfused"
    query, key, value = (
        torch.empty(batch, n, length, head_dim, dtype=dtype, device=device, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    )
    # as scaled_dot_product_attention does; torch has no public name for it
    choice = torch._fused_sdp_choice(query, key, value, is_causal=True, enable_gqa=heads != kv_heads)
    return _NAMES[SDPBackend(choice)]
