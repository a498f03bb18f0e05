"""Attention with a sink: one learned logit per head in the denominator of the softmax, without a value (GPT-OSS).

No fused kernel has sinks, but each returns the log-sum-exp L of a query's scores. With a sink s the denominator is
exp(L) + exp(s) = exp(J), so the output is multiplied by exp(L - J). A backward kernel computes exp(scores - L) and the
row sums D of gradient times output, and reads nothing else of the forward pass: given J for L and the output with the
sink, it returns the gradients of attention with a sink (FlashAttention-2, arXiv:2307.08691, algorithm 2). The gradient
of the sink itself is -exp(s - J) D, summed over batch and queries.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.attention import SDPBackend

_ops: Any = torch.ops.aten
# Masks of the memory-efficient kernel must begin each row at a multiple of 16 elements.
_MASK_MULTIPLE = 16


def fused_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> SDPBackend | None:
    """Return the fused kernel for attention with sinks, flash or memory-efficient; None if there is none.

    ``mask``: added to the scores, [batch or 1, 1, length, length]; None: causal attention.
    """
    cuda: Any = torch.backends.cuda
    if query.device.type not in ("cpu", "cuda"):
        return None
    if query.is_cuda and mask is None:
        params = cuda.SDPAParams(query, key, value, None, 0.0, True, query.shape[1] != key.shape[1])
        if cuda.can_use_flash_attention(params):
            return SDPBackend.FLASH_ATTENTION
    key, value = repeated(key, query), repeated(value, query)  # no other kernel has grouped queries
    if query.device.type == "cpu":
        choice = torch._fused_sdp_choice(query, key, value, mask, is_causal=mask is None)
        return SDPBackend.FLASH_ATTENTION if choice == SDPBackend.FLASH_ATTENTION.value else None
    if mask is not None and mask.shape[-1] % _MASK_MULTIPLE:
        return None
    params = cuda.SDPAParams(query, key, value, _expanded(mask, query), 0.0, mask is None, False)
    return SDPBackend.EFFICIENT_ATTENTION if cuda.can_use_efficient_attention(params) else None


def repeated(x: Tensor, query: Tensor) -> Tensor:
    """Return keys or values with one head for each head of the queries."""
    return x if x.shape[1] == query.shape[1] else torch.repeat_interleave(x, query.shape[1] // x.shape[1], dim=1)


def _expanded(mask: Tensor | None, query: Tensor) -> Tensor | None:
    return None if mask is None else mask.expand(*query.shape[:2], *mask.shape[-2:])


def fused_attention_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor | None:
    """Return attention, [batch, heads, length, head_dim], with a logit per head, [heads]; None without a fused kernel.

    ``scale``: factor of the scores, not of the sinks; None: 1 / sqrt(head_dim).
    """
    kernel = fused_kernel(query, key, value, mask)
    if kernel is None:
        return None
    if kernel is SDPBackend.EFFICIENT_ATTENTION or not query.is_cuda:
        key, value = repeated(key, query), repeated(value, query)
    return _Sinks.apply(query, key, value, sinks, mask, scale, kernel)  # type: ignore[no-any-return, no-untyped-call]


class _Sinks(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        mask: Tensor | None,
        scale: float | None,
        kernel: SDPBackend,
    ) -> Tensor:
        causal, of_kernel = mask is None, ()
        if kernel is SDPBackend.EFFICIENT_ATTENTION:
            output, sums, *of_kernel = _ops._scaled_dot_product_efficient_attention(
                query, key, value, _expanded(mask, query), True, 0.0, causal, scale=scale
            )
        elif query.device.type == "cuda":
            output, sums, *of_kernel, _ = _ops._scaled_dot_product_flash_attention(
                query, key, value, 0.0, causal, False, scale=scale
            )
        else:
            output, sums = _ops._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, causal, attn_mask=mask, scale=scale
            )
        # A copy, because ZeRO-3 empties a parameter after the forward pass. The memory-efficient kernel pads the sums.
        logits = sinks.to(sums.dtype, copy=True).view(1, -1, 1)
        joint = torch.logaddexp(sums, logits)
        output.mul_((sums - joint)[..., : query.shape[2]].exp_().unsqueeze(-1))
        ctx.save_for_backward(query, key, value, mask, output, joint, logits)
        ctx.scale, ctx.kernel, ctx.of_kernel, ctx.dtype = scale, kernel, of_kernel, sinks.dtype
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, output, joint, logits = ctx.saved_tensors
        saved = (gradient, query, key, value)
        causal = mask is None
        if ctx.kernel is SDPBackend.EFFICIENT_ATTENTION:
            wanted = [True, True, True, False]
            gradients = _ops._scaled_dot_product_efficient_attention_backward(
                *saved, _expanded(mask, query), output, joint, *ctx.of_kernel, 0.0, wanted, causal, scale=ctx.scale
            )[:3]
        elif query.device.type == "cuda":
            gradients = _ops._scaled_dot_product_flash_attention_backward(
                *saved, output, joint, *ctx.of_kernel[:4], 0.0, causal, *ctx.of_kernel[4:], scale=ctx.scale
            )
        else:
            gradients = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
                *saved, output, joint, 0.0, causal, attn_mask=mask, scale=ctx.scale
            )
        share = (logits - joint[..., : query.shape[2]]).exp_()
        of_sinks = -(share * (gradient.to(share.dtype) * output).sum(-1)).sum((0, 2))
        return (*gradients, of_sinks.to(ctx.dtype), None, None, None)
