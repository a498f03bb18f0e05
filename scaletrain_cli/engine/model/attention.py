"""Causal attention over whole sequences: what stands between the projections of an attention module."""

import torch.nn.functional as F
from torch import Tensor


def causal_attention(query: Tensor, key: Tensor, value: Tensor, samples: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention, [batch, heads, length, head_dim]; key and value may have fewer heads.

    ``samples`` [batch] key the dropout of those variants that have any.
    """
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])
