"""Next-token prediction: cross-entropy over the labels that count, each with its weight."""

from __future__ import annotations

from torch import Tensor

from scaletrain_cli.engine.data.batches import MicroBatch
from scaletrain_cli.engine.model.causal_lm import CausalLM
from scaletrain_cli.engine.objectives.base import Objective


class NextToken(Objective):
    """Summed cross-entropy over the batch's divisor: the sum of the weights over all micro-batches of all ranks."""

    def loss(self, model: CausalLM, hidden: Tensor, batch: MicroBatch) -> Tensor:
        return model.loss(hidden, batch.labels, batch.divisor, batch.weights)
