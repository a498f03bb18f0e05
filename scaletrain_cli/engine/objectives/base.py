"""The interface of a training objective."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from scaletrain_cli.engine.data.batches import MicroBatch
from scaletrain_cli.engine.model.causal_lm import CausalLM
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.spec import TrainingSpec


class RowLosses(NamedTuple):
    """Losses of the sequences of a micro-batch, each tensor [rows].

    ``sources``: number of the source of each sequence. ``losses``: summed over its labels. ``counted``: number of
    labels in the loss. On a sequence-parallel rank the last two cover its part of the sequence.
    """

    sources: Tensor
    losses: Tensor
    counted: Tensor


class Objective(ABC):
    """Turns the hidden states of a micro-batch into a loss.

    ``reads_pairs``: its batches hold preference pairs, and the log-probabilities of their answers under the first
    weights are computed before step 1 (``objectives.reference``).
    """

    reads_pairs = False

    def __init__(self, training: TrainingSpec, mesh: Mesh) -> None:
        self.training, self.mesh = training, mesh
        self.row_losses: list[RowLosses] | None = None  # of the micro-batches so far; None: they are not kept

    @abstractmethod
    def loss(self, model: CausalLM, hidden: Tensor, batch: MicroBatch) -> Tensor:
        """Return the loss of a micro-batch from the hidden states after the last block; the run minimizes its mean.

        The mean is over the micro-batches of all data- and sequence-parallel ranks. Where a pipeline has several
        stages, only the last one calls this.
        """

    def take_measures(self) -> dict[str, Tensor]:
        """Return scalars of the losses since the last call, the same on every rank, by name. Collective.

        Their names must not depend on the rank.
        """
        return {}
