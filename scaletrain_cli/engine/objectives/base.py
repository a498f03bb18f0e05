"""The interface of a training objective, and the prediction of the next token."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from scaletrain_cli.engine.data.batches import MicroBatch
from scaletrain_cli.engine.data.rows import NOT_COUNTED
from scaletrain_cli.engine.evaluation.measures import Figures
from scaletrain_cli.engine.model.base import CausalLM
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.spec import RunSpec


class RowLosses(NamedTuple):
    """Losses of the sequences or preference pairs of a micro-batch, each tensor [rows].

    ``sources``: number of the source of each sequence. ``losses``: summed over its labels. ``counted``: number of
    labels in the loss; a pair counts 1. On a rank with a part of the sequence the last two cover that.
    """

    sources: Tensor
    losses: Tensor
    counted: Tensor


class Inputs(Protocol):
    """A micro-batch as the forward pass of a model takes it."""

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The arguments of the forward pass, before ``output``."""


class Objective(ABC):
    """Turns what the forward pass of a micro-batch gives ``output`` into a loss.

    ``reads_pairs``: its batches hold preference pairs, and the log-probabilities of their answers under the first
    weights are computed before step 1 (``objectives.reference``).
    ``masks_samples``: in the last round of a validation, micro-batches may lack samples.
    """

    reads_pairs = False
    masks_samples = False

    def __init__(self, spec: RunSpec, mesh: Mesh) -> None:
        self.training, self.mesh = spec.training, mesh
        self.row_losses: list[RowLosses] | None = None  # of the micro-batches so far; None: they are not kept

    def continue_from(self, other: "Objective") -> None:
        """Take over what was learned of the data by the objective of the stage before, of the same run."""
        return

    def prepared(self, batch: Any) -> Inputs:
        """Return a micro-batch with the inputs of the model and the targets of the loss, on its device."""
        return batch  # type: ignore[no-any-return]

    @abstractmethod
    def loss(self, model: Any, outputs: Any, batch: Any) -> Tensor:
        """Return the loss of a prepared micro-batch; the run minimizes its mean. ``outputs``: of the forward pass.

        Of a language model these are the hidden states after the last block.

        The mean is over the micro-batches of all data-, context- and sequence-parallel ranks. Where a pipeline has
        several stages, only the last one calls this.
        """

    def begin_validation(self) -> None:
        """Observe the micro-batches from now on, until ``end_validation``."""
        return

    def take_validation_loss(self) -> float | None:
        """Return the mean loss of the samples of a source since the last call; None: the mean over micro-batches is it.

        Collective.
        """
        return None

    def end_validation(self) -> Figures:
        """Return what was observed since ``begin_validation``, the same on every rank. Collective."""
        return Figures({}, {})

    def take_measures(self) -> dict[str, Tensor]:
        """Return scalars of the losses since the last call, the same on every rank, by name. Collective.

        Their names must not depend on the rank.
        """
        return {}


class Joined(Objective):
    """An objective whose loss compares all samples of a step, so that it is no mean over micro-batches."""

    @abstractmethod
    def features(self, model: Any, outputs: Any, batch: Any) -> tuple[Tensor | None, ...]:
        """Return what the loss reads of the outputs of a micro-batch: a row for each sample, and scalars."""

    @abstractmethod
    def joined_loss(self, features: Sequence[tuple[Tensor | None, ...]]) -> Tensor:
        """Return the loss over the features of all micro-batches of a step. Collective."""


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
