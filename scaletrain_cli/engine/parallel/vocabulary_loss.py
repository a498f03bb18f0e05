"""Cross-entropy over a vocabulary that is cut over the tensor ranks: no rank ever holds all logits of a token.

The maximum, the sum of exponentials and the label's own logit cross the ranks, three numbers per token (Megatron-LM,
arXiv:1909.08053, section 3), and with label smoothing the sum of the logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from scaletrain_cli.engine.model.loss import NOT_COUNTED
from scaletrain_cli.engine.parallel.collectives import copy_to_ranks
from scaletrain_cli.engine.parallel.mesh import Axis


class VocabularyLoss:
    """The head's token_loss where its weight holds this rank's share of the vocabulary."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Summed cross-entropy of tokens: hidden [tokens, size], weight [vocab / ranks, size], labels [tokens]."""
        logits = F.linear(copy_to_ranks(hidden, self._axis), weight).float()
        return _CrossEntropy.apply(logits, labels, self._axis, label_smoothing)  # type: ignore[no-any-return, no-untyped-call]


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, axis: Axis, smoothing: float) -> Tensor:
        held = logits.shape[1]
        vocabulary = held * axis.size
        highest = logits.amax(dim=1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=axis.group)
        logits = logits - highest.unsqueeze(1)
        counted, rows = labels != NOT_COUNTED, labels - axis.rank * held
        here = counted & (rows >= 0) & (rows < held)
        rows = rows.masked_fill(~here, 0)
        own = logits.gather(1, rows.unsqueeze(1)).squeeze(1).masked_fill(~here, 0.0)
        exponentials = logits.exp()
        sums = torch.stack([own, exponentials.sum(dim=1), logits.sum(dim=1)])
        dist.all_reduce(sums, group=axis.group)
        own, total, everything = sums
        losses = total.log() - (1 - smoothing) * own - smoothing / vocabulary * everything
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(1)), rows, here, counted)
        ctx.smoothing, ctx.vocabulary = smoothing, vocabulary
        summed: Tensor = losses.masked_fill(~counted, 0.0).sum()
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, rows, here, counted = ctx.saved_tensors
        change = probabilities - ctx.smoothing / ctx.vocabulary
        label = here.to(change.dtype).mul_(ctx.smoothing - 1).unsqueeze(1)
        change.scatter_add_(1, rows.unsqueeze(1), label)
        return change.mul_((gradient * counted).unsqueeze(1)), None, None, None
