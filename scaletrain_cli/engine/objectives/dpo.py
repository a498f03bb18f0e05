"""Direct preference optimization (arXiv:2305.18290): the chosen answer of a pair should gain on the rejected one.

A micro-batch holds all chosen answers, then all rejected ones, with the summed log-probabilities of the labels of each
answer under the reference model. A pair stays within one micro-batch.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from scaletrain_cli.engine.data.batches import MicroBatch
from scaletrain_cli.engine.data.rows import NOT_COUNTED
from scaletrain_cli.engine.model.base import CausalLM
from scaletrain_cli.engine.objectives.base import Objective, RowLosses
from scaletrain_cli.engine.parallel.mesh import Axis
from scaletrain_cli.spec.training import DPOSpec

MEASURES = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)


def preference_loss(settings: DPOSpec, chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return the loss of each pair from the log-ratios of its answers to the reference, [pairs]; see ``DPOSpec``.

    With ``ipo`` or ``length_normalized`` they are means over the tokens of the answer, otherwise sums.
    """
    delta, smoothing = chosen - rejected, settings.label_smoothing
    if settings.loss == "ipo":
        return (delta - 1 / (2 * settings.beta)) ** 2
    right, swapped = -F.logsigmoid(settings.beta * delta), -F.logsigmoid(-settings.beta * delta)
    if settings.loss == "sigmoid":
        return right
    if settings.loss == "conservative":
        return (1 - smoothing) * right + smoothing * swapped
    return ((1 - smoothing) * right - smoothing * swapped) / (1 - 2 * smoothing)


def first_loss(settings: DPOSpec) -> float:
    """Return the loss of a model that equals its reference."""
    return 1 / (4 * settings.beta**2) if settings.loss == "ipo" else math.log(2)


class DPO(Objective):
    """The mean of ``preference_loss`` over the pairs of a batch."""

    reads_pairs = True
    _sums: Tensor | None = None
    _micro_batches = 0

    def loss(self, model: CausalLM, hidden: Tensor, batch: MicroBatch) -> Tensor:
        assert batch.reference is not None, "computed before the first step"
        settings = self.training.dpo
        policy = self.log_probabilities(model, hidden, batch)
        ratios = policy - batch.reference
        self._measure(policy.detach(), settings.beta * ratios.detach())
        if settings.loss == "ipo" or settings.length_normalized:
            # The labels of each row that count over its whole length, at least 1.
            counted = (batch.labels != NOT_COUNTED).sum(1).float()
            if self.mesh.parts.group is not None:
                dist.all_reduce(counted, group=self.mesh.parts.group)
            ratios = ratios / counted.clamp(min=1)
        losses = preference_loss(settings, *ratios.chunk(2))
        if self.row_losses is not None and batch.sources is not None:
            self.row_losses.append(RowLosses(batch.sources, losses.detach(), torch.ones_like(losses)))
        return losses.mean()

    def log_probabilities(self, model: CausalLM, hidden: Tensor, batch: MicroBatch) -> Tensor:
        """Return the summed log-probabilities of the labels of each row over its whole length, [rows] in fp32."""
        own = model.row_log_probabilities(hidden, batch.labels)
        if self.mesh.parts.group is None:
            return own
        # Ranks with parts of a sequence compute the same loss of it. DeepSpeed takes them for data-parallel ones and
        # averages their gradients, each of its own part of the length; so the gradient is multiplied by their number.
        return _SumOverParts.apply(own, self.mesh.parts)  # type: ignore[no-any-return,no-untyped-call]

    def take_measures(self) -> dict[str, Tensor]:
        device = self._sums.device if self._sums is not None else self.mesh.pipeline.device
        measures = torch.zeros(len(MEASURES), device=device)
        if self._sums is not None:
            measures = self._sums / (self._micro_batches * self.mesh.replicas.size)
            self._sums, self._micro_batches = None, 0
        for axis in (self.mesh.replicas, self.mesh.pipeline):  # stages before the last one have zeros
            if axis.group is not None:
                dist.all_reduce(measures, group=axis.group)
        return dict(zip(MEASURES, measures.unbind(), strict=True))

    def _measure(self, policy: Tensor, rewards: Tensor) -> None:
        chosen, rejected = rewards.chunk(2)
        values = (chosen, rejected, chosen - rejected, (chosen > rejected).float(), *policy.chunk(2))
        means = torch.stack([value.mean() for value in values])
        self._sums = means if self._sums is None else self._sums + means
        self._micro_batches += 1


class _SumOverParts(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.size = axis.size
        x = x.clone()
        dist.all_reduce(x, group=axis.group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.size, None
