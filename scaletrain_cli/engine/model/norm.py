"""RMSNorm (arXiv:1910.07467), with a weight per channel or, as in Gemma, with the weight's difference from 1."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function


class RMSNorm(nn.Module):
    """Root-mean-square norm of the last dimension. ``zero_centered``: multiplies by 1 + weight."""

    def __init__(self, size: int, eps: float, *, zero_centered: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if zero_centered else torch.ones(size))
        self.eps, self.zero_centered = eps, zero_centered

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.zero_centered)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """Return the normalized last dimension, computed in fp32.

    The backward pass keeps the input and one inverse root per row. On a GPU torch's fused kernels compute it, except
    if it is zero-centered; torch.compile fuses the operations itself.
    """
    if torch.compiler.is_compiling():
        return _normalized(x, weight, eps, zero_centered)[0]
    return _RMSNorm.apply(x, weight, eps, zero_centered)  # type: ignore[no-any-return, no-untyped-call]


def scaled(normed: Tensor, weight: Tensor, dtype: torch.dtype, zero_centered: bool) -> Tensor:
    """Return fp32 values times the weight, or times 1 + weight in fp32 as Gemma does, in ``dtype``."""
    return (normed * (1.0 + weight.float())).to(dtype) if zero_centered else normed.to(dtype) * weight


def has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Return whether torch has fused kernels for this norm."""
    return x.is_cuda and weight.dtype == x.dtype


def _normalized(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """Return the norm, and the inverse root of each row, [..., 1] in fp32."""
    wide = x.float()
    root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return scaled(wide * root, weight, x.dtype, zero_centered), root


class _RMSNorm(Function):
    """Autograd's own formula would keep the fp32 input and the normalized value, and launch a kernel for each step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        ctx.fused = has_kernel(x, weight) and not zero_centered
        if ctx.fused:
            result, root = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)
        else:
            result, root = _normalized(x, weight, eps, zero_centered)
        ctx.save_for_backward(x, weight, root)
        ctx.zero_centered = zero_centered
        return result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, root = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:2])
        if ctx.fused:
            return *torch.ops.aten._fused_rms_norm_backward(gradient, x, weight.shape, root, weight, wanted), None, None
        normed, wide = x.float() * root, gradient.float()
        of_x = of_weight = None
        if wanted[1]:
            of_weight = (wide * normed).flatten(0, -2).sum(0).to(weight.dtype)
        if wanted[0]:
            inner = wide * (1.0 + weight.float() if ctx.zero_centered else weight.float())
            of_x = (root * (inner - normed * (inner * normed).mean(-1, keepdim=True))).to(x.dtype)
        return of_x, of_weight, None, None
