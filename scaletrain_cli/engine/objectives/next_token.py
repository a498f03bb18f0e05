"""Next-token prediction: cross-entropy over the labels that count, each with its weight."""

from __future__ import annotations

import torch
from torch import Tensor

from scaletrain_cli.engine.data.batches import MicroBatch
from scaletrain_cli.engine.model.causal_lm import CausalLM
from scaletrain_cli.engine.model.loss import NOT_COUNTED
from scaletrain_cli.engine.objectives.base import Objective, RowLosses


class NextToken(Objective):
    """Summed cross-entropy over the batch's divisor: the sum of the weights over all micro-batches of all ranks."""

    def loss(self, model: CausalLM, hidden: Tensor, batch: MicroBatch) -> Tensor:
        head = model.lm_head
        # a kernel that sums tokens itself has no loss of each
        if self.row_losses is None or batch.sources is None or head.token_losses is None:
            return model.loss(hidden, batch.labels, batch.divisor, batch.weights)
        head.kept_losses = []
        try:
            loss = model.loss(hidden, batch.labels, batch.divisor, batch.weights)
            losses = torch.cat(head.kept_losses).view(batch.labels.shape).sum(1)
        finally:
            head.kept_losses = None
        counted = (batch.labels != NOT_COUNTED).float() if batch.weights is None else batch.weights
        self.row_losses.append(RowLosses(batch.sources, losses.float(), counted.sum(1)))
        return loss
