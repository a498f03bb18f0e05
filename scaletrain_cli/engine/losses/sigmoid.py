"""SigLIP's sigmoid loss: every image with every text of all ranks is a yes-or-no question of its own.

The texts travel around a ring of ranks, each rank compares its images with one block at a time, and only its own block
has positives. Memory grows with the features of one rank. The backward pass runs the ring in the opposite direction:
each block goes home and collects its gradient on the way. Gradients of the texts are sums over the ranks, which the
average over ranks in DeepSpeed or DDP divides by their number again (see ``contrastive``).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from scaletrain_cli.engine.losses.classification import full_precision
from scaletrain_cli.engine.losses.contrastive import check_pairs, tiles
from scaletrain_cli.engine.parallel.mesh import Axis, RingShift


def sigmoid_loss(
    image: Tensor, text: Tensor, logit_scale: Tensor, logit_bias: Tensor, axis: Axis, chunk_size: int = 4096
) -> Tensor:
    """Return this rank's share of the sigmoid loss (arXiv:2303.15343, section 3.2), a scalar in nats.

    With s = exp(logit_scale), b = logit_bias, N pairs of all ranks, and z_ij = 1 for i = j and -1 otherwise, the mean
    over ranks is -(1 / N) sum_ij log sigmoid(z_ij (s x_i y_j + b)).

    image, text: [batch, size], normalized, pair i in row i of both; as many on every rank. logit_scale: scalar, a
    logarithm. logit_bias: scalar. Similarities are computed in tiles of at most ``chunk_size`` x ``chunk_size``, in
    fp32 also for features of 16 bits, and again in the backward pass. Collective along ``axis``, in both passes. Raises
    ValueError for other shapes.
    """
    check_pairs("sigmoid", image, text)
    scale, bias = full_precision(logit_scale).exp(), full_precision(logit_bias)
    images, texts = full_precision(image), full_precision(text)
    total = _Ring.apply(images, texts, scale, bias, axis, chunk_size, text.dtype)  # type: ignore[no-untyped-call]
    return total / len(image)  # type: ignore[no-any-return]


class _Ring(Function):
    """Keeps the features of this rank and the block that arrived last, where the way back begins."""

    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        text: Tensor,
        scale: Tensor,
        bias: Tensor,
        axis: Axis,
        chunk_size: int,
        dtype: torch.dtype,
    ) -> Tensor:
        total, block = image.new_zeros(()), text.to(dtype).contiguous()
        for hop in range(axis.size):
            waiting = RingShift([block], axis, 1) if hop + 1 < axis.size else None
            texts = block.to(text.dtype)
            for row, key in tiles(len(image), len(texts), chunk_size):
                logits = _wrong_way(image[row], texts[key], scale, bias, own=hop == 0 and row == key)
                total += F.softplus(logits).sum()
            if waiting is not None:
                (block,) = waiting.wait()
        ctx.axis, ctx.chunk_size = axis, chunk_size
        ctx.save_for_backward(image, text, scale, bias, block)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        image, text, scale, bias, block = ctx.saved_tensors
        axis: Axis = ctx.axis
        of_image, of_text = torch.zeros_like(image), torch.zeros_like(text)
        of_bias = torch.zeros_like(bias)
        for hop in reversed(range(axis.size)):
            waiting = RingShift([block], axis, -1) if hop > 1 else None  # the last block is this rank's own
            texts = text if hop == 0 else block.to(text.dtype)
            for row, key in tiles(len(image), len(texts), ctx.chunk_size):
                own = hop == 0 and row == key
                weights = _wrong_way(image[row], texts[key], scale, bias, own=own).sigmoid_()
                if own:
                    weights.diagonal().neg_()
                of_image[row].addmm_(weights, texts[key])
                of_text[key].addmm_(weights.T, image[row])
                of_bias += weights.sum()
            if hop > 0:
                (of_text,) = RingShift([of_text], axis, -1).wait()
            if waiting is not None:
                (block,) = waiting.wait()
        of_scale = (of_image * image).sum() * gradient
        factor = scale * gradient
        return of_image.mul_(factor), of_text.mul_(factor), of_scale, of_bias * gradient, None, None, None


def _wrong_way(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, *, own: bool) -> Tensor:
    """Return -z_ij (s x_i y_j + b) of a tile, whose softplus is the loss. ``own``: its diagonal has the positives."""
    logits = (image * scale) @ text.T
    logits += bias
    if own:
        logits.diagonal().neg_()
    return logits
