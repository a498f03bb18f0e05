"""Parts of ViT and of both towers of CLIP: attention over heads, activations, learned positions of patches."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from scaletrain_cli.engine.model.linear import gelu_tanh


def quick_gelu(x: Tensor) -> Tensor:
    """Return x sigmoid(1.702 x), the approximation of GELU of arXiv:1606.08415, section 2."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
}


def attention_of_heads(query: Tensor, key: Tensor, value: Tensor, heads: int, *, causal: bool) -> Tensor:
    """Return scaled dot-product attention; all tensors are [batch, length, hidden], heads side by side."""
    batch, length, hidden = query.shape
    query, key, value = (x.view(batch, length, heads, hidden // heads).transpose(1, 2) for x in (query, key, value))
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    return mixed.transpose(1, 2).reshape(batch, length, hidden)


def resized_positions(table: Tensor, positions: int) -> Tensor:
    """Return learned positions of another number of patches, [..., ``positions``, hidden], fp32.

    ``table``: [..., 1 + rows ** 2, hidden], the class token first. The grid of patches is resized by bicubic
    interpolation without antialiasing, as in transformers (``interpolate_pos_encoding``). Raises ValueError if either
    number of patches is not a square.
    """
    *leading, stored, hidden = table.shape
    before, after = round((stored - 1) ** 0.5), round((positions - 1) ** 0.5)
    if before**2 != stored - 1 or after**2 != positions - 1:
        raise ValueError(f"{stored} and {positions} positions are not a class token and a square grid each")
    whole = table.reshape(stored, hidden).float()
    grid = whole[1:].view(1, before, before, hidden).permute(0, 3, 1, 2)
    resized = F.interpolate(grid, size=(after, after), mode="bicubic", align_corners=False)
    patches = resized.permute(0, 2, 3, 1).reshape(after**2, hidden)
    return torch.cat((whole[:1], patches)).view(*leading, positions, hidden)
