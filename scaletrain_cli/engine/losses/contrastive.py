"""Contrastive losses with negatives from all ranks: info_nce for pairs (CLIP) and nt_xent for views (SimCLR).

Each rank has the rows of its own samples and compares them with the gathered features of all ranks. The backward pass
of the gather sums the gradients that all ranks have of a feature. DeepSpeed and DDP average gradients over the ranks,
which divides by their number again: the result is the gradient of the textbook loss of the global batch, of features,
towers and logit scale alike. All ranks must have as many samples.

Similarities are computed in tiles of at most ``chunk_size`` x ``chunk_size``, with a running log-sum-exp, and again in
the backward pass, so that memory grows with the number of features and not with its square. Features of 16 bits are
sent as they are and computed with in fp32, and so are their gradients until they leave the loss.

In SigLIP's sigmoid loss every image with every text of all ranks is a yes-or-no question of its own. The texts travel
around a ring of ranks, each rank compares its images with one block at a time, and only its own block has positives.
Memory grows with the features of one rank. The backward pass runs the ring in the opposite direction: each block goes
home and collects its gradient on the way. Gradients of the texts are sums over the ranks, which the average over ranks
in DeepSpeed or DDP divides by their number again.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from scaletrain_cli.engine.losses.classification import full_precision
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
                total += F.softplus(_wrong_way(image[row], texts[key], scale, bias, own=hop == 0 and row == key)).sum()
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


def info_nce(image: Tensor, text: Tensor, logit_scale: Tensor, axis: Axis, chunk_size: int = 4096) -> Tensor:
    """Return this rank's share of CLIP's symmetric cross-entropy (arXiv:2103.00020, figure 3), a scalar in nats.

    With s = exp(logit_scale) and N pairs of all ranks, the mean over ranks is
    (1 / 2N) sum_i [-log softmax_j(s x_i y_j)_i - log softmax_j(s y_i x_j)_i].

    image, text: [batch, size], normalized, pair i in row i of both. logit_scale: scalar, a logarithm. Collective along
    ``axis``, in both passes. Raises ValueError for other shapes.
    """
    check_pairs("info_nce", image, text)
    scale, first = full_precision(logit_scale).exp(), axis.rank * len(image)
    images, texts = full_precision(image), full_precision(text)
    to_text = row_losses(images, gather(texts, axis, text.dtype), scale, first, chunk_size)
    to_image = row_losses(texts, gather(images, axis, image.dtype), scale, first, chunk_size)
    return (to_text.mean() + to_image.mean()) / 2


def nt_xent(features: Tensor, temperature: float, axis: Axis, chunk_size: int = 4096) -> Tensor:
    """Return this rank's share of the normalized, temperature-scaled cross-entropy (arXiv:2002.05709, equation 1).

    With N samples of all ranks, each in two views, and cosine similarities c, the mean over ranks is
    (1 / 2N) sum_i -log [exp(c_ip / temperature) / sum_{j != i} exp(c_ij / temperature)], a scalar in nats, where p is
    the other view of the same sample.

    features: [2 * batch, size], the first views of all samples and then the second views, of any length. Collective
    along ``axis``, in both passes. Raises ValueError for an odd number of rows.
    """
    if features.dim() != 2 or len(features) % 2:
        raise ValueError(
            f"nt_xent: features {list(features.shape)}; allowed are two views of a batch, [2 * batch, size]"
        )
    batch, own = len(features) // 2, axis.rank * len(features)
    rows = F.normalize(full_precision(features), dim=1)
    keys, scale = gather(rows, axis), rows.new_tensor(1 / temperature)
    first = row_losses(rows[:batch], keys, scale, own + batch, chunk_size, excluded=own)
    second = row_losses(rows[batch:], keys, scale, own, chunk_size, excluded=own + batch)
    return (first.mean() + second.mean()) / 2


def row_losses(
    rows: Tensor, keys: Tensor, scale: Tensor, positive: int, chunk_size: int, excluded: int | None = None
) -> Tensor:
    """Return -log softmax_j(scale * rows_i keys_j) at key ``positive + i`` for each row i: [rows], in nats.

    rows: [rows, size]. keys: [keys, size]. ``excluded``: key ``excluded + i`` has no part in the softmax of row i. The
    gradient is exact and needs no similarities from the forward pass.
    """
    losses: Tensor = _RowLosses.apply(rows, keys, scale, positive, chunk_size, excluded)  # type: ignore[no-untyped-call]
    return losses


def gather(x: Tensor, axis: Axis, dtype: torch.dtype | None = None) -> Tensor:
    """Return the rows of all ranks in rank order; the gradient is the sum of those of all ranks. Collective.

    ``dtype``: in which the rows are sent, if they have no more precision than that. Gradients are sent as they are.
    """
    return x if axis.group is None else _Gather.apply(x, axis, dtype or x.dtype)  # type: ignore[no-untyped-call]


def tiles(rows: int, keys: int, chunk_size: int) -> Iterator[tuple[slice, slice]]:
    """Yield tiles of at most ``chunk_size`` rows and keys, row by row."""
    for row in range(0, rows, chunk_size):
        for key in range(0, keys, chunk_size):
            yield slice(row, min(row + chunk_size, rows)), slice(key, min(key + chunk_size, keys))


def check_pairs(name: str, image: Tensor, text: Tensor) -> None:
    """Raise ValueError unless image and text features are [batch, size] alike."""
    if image.dim() != 2 or image.shape != text.shape:
        raise ValueError(
            f"{name}: image features {list(image.shape)} and text features {list(text.shape)}; "
            f"allowed are two tensors [batch, size]"
        )


class _RowLosses(Function):
    """Keeps the largest similarity of each row, and the logarithm of the sum of exponentials relative to it.

    Both in one number would lose the digits of a loss that is small beside the similarities.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, keys: Tensor, scale: Tensor, positive: int, chunk_size: int, excluded: int | None
    ) -> Tensor:
        count = len(rows)
        largest = rows.new_full((count,), torch.finfo(rows.dtype).min)  # -inf would make NaN where all are excluded
        total, wanted = rows.new_zeros(count), rows.new_zeros(count)
        ctx.positive, ctx.chunk_size, ctx.excluded = positive, chunk_size, excluded
        for row, key in tiles(count, len(keys), chunk_size):
            logits = _logits(rows, keys, scale, row, key, excluded)
            at, diagonal = _diagonal(logits, row, key, positive)
            wanted[at] = diagonal
            before = largest[row]
            highest = torch.maximum(before, logits.amax(1))
            total[row] = total[row] * (before - highest).exp() + logits.sub_(highest.unsqueeze(1)).exp_().sum(1)
            largest[row] = highest
        total.log_()
        ctx.save_for_backward(rows, keys, scale, largest, total)
        return largest - wanted + total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, keys, scale, largest, total = ctx.saved_tensors
        of_rows = torch.zeros_like(rows)
        of_keys = torch.zeros_like(keys) if ctx.needs_input_grad[1] else None
        for row, key in tiles(len(rows), len(keys), ctx.chunk_size):
            weights = _logits(rows, keys, scale, row, key, ctx.excluded)
            weights.sub_(largest[row].unsqueeze(1)).sub_(total[row].unsqueeze(1)).exp_()  # the softmax
            _diagonal(weights, row, key, ctx.positive)[1].sub_(1)
            weights.mul_(gradient[row].unsqueeze(1))
            of_rows[row].addmm_(weights, keys[key])
            if of_keys is not None:
                of_keys[key].addmm_(weights.T, rows[row])
        of_scale = (of_rows * rows).sum() if ctx.needs_input_grad[2] else None
        return of_rows.mul_(scale), None if of_keys is None else of_keys.mul_(scale), of_scale, None, None, None


def _logits(rows: Tensor, keys: Tensor, scale: Tensor, row: slice, key: slice, excluded: int | None) -> Tensor:
    logits = (rows[row] * scale) @ keys[key].T
    if excluded is not None:
        _diagonal(logits, row, key, excluded)[1].fill_(-torch.inf)
    return logits


def _diagonal(tile: Tensor, row: slice, key: slice, first: int) -> tuple[slice, Tensor]:
    """Return the rows i whose key ``first + i`` is in a tile, and a view of these elements."""
    start = max(row.start, key.start - first)
    stop = max(start, min(row.stop, key.stop - first))
    view = tile[start - row.start :, max(0, first + start - key.start) :].diagonal()[: stop - start]
    return slice(start, stop), view


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dtype: torch.dtype) -> Tensor:
        ctx.axis = axis
        mine = x.to(dtype).contiguous()
        every = mine.new_empty(axis.size, *mine.shape)
        dist.all_gather(list(every.unbind()), mine, group=axis.group)
        return every.flatten(0, 1).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        axis: Axis = ctx.axis
        if dist.get_backend(axis.group) == "nccl":
            parts = [part.contiguous() for part in gradient.chunk(axis.size)]
            mine = torch.empty_like(parts[0])
            dist.reduce_scatter(mine, parts, group=axis.group)
            return mine, None, None
        gradient = gradient.clone(memory_format=torch.contiguous_format)  # gloo has no reduce_scatter of its own
        dist.all_reduce(gradient, group=axis.group)
        return gradient.chunk(axis.size)[axis.rank], None, None
