"""RMSNorm (arXiv:1910.07467), with a weight per channel or, as in Gemma, with the weight's difference from 1."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square norm of the last dimension. ``zero_centered``: multiplies by 1 + weight."""

    def __init__(self, size: int, eps: float, *, zero_centered: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if zero_centered else torch.ones(size))
        self.eps, self.zero_centered = eps, zero_centered

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.zero_centered)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """Return the normalized last dimension, computed in fp32."""
    wide = x.float()
    return scaled(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps), weight, x.dtype, zero_centered)


def scaled(normed: Tensor, weight: Tensor, dtype: torch.dtype, zero_centered: bool) -> Tensor:
    """Return fp32 values times the weight, or times 1 + weight in fp32 as Gemma does, in ``dtype``."""
    if zero_centered:
        return (normed * (1.0 + weight.float())).to(dtype)
    return normed.to(dtype) * weight
