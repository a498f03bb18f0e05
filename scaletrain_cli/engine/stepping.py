"""One optimizer step and one validation loss, with and without a pipeline: the two ways in which DeepSpeed is driven.

Knows what a micro-batch is, and neither where it comes from nor what is decided between steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from scaletrain_cli.engine.compose import Composed
from scaletrain_cli.engine.feeding.batches import MicroBatch
from scaletrain_cli.engine.parallel.gradient_norm import clip, gradient_norm
from scaletrain_cli.engine.parallel.mesh import Mesh


class Stepped(NamedTuple):
    """Scalars, the same on every rank: mean loss over the global batch in nats, gradient norm before clipping.

    An update whose gradient is not finite was not applied.
    """

    loss: Tensor
    grad_norm: Tensor | float


class Stepper(Protocol):
    """How a step is run. Every method is collective."""

    def train(self, batches: Sequence[MicroBatch], *, poisoned: bool = False) -> Stepped:
        """Forward, backward and update over one global batch. ``poisoned``: make this rank's gradient NaN."""

    def validation_loss(self, batch: MicroBatch) -> Tensor:
        """Mean loss of one micro-batch over all replicas, on every rank."""


def stepper(composed: Composed, mesh: Mesh, device: torch.device, max_norm: float) -> Stepper:
    """What drives the composed model; ``max_norm`` is what gradients are clipped to, 0 for not at all."""
    if composed.stage is not None:
        return Pipelined(composed)
    return WholeModel(composed, mesh, device, max_norm)


class WholeModel:
    """Every rank runs all layers: DeepSpeed with ZeRO 0 to 3, and tensor or sequence parallelism within them."""

    def __init__(self, composed: Composed, mesh: Mesh, device: torch.device, max_norm: float) -> None:
        self._engine, self._mesh, self._device, self._max_norm = composed.engine, mesh, device, max_norm

    def train(self, batches: Sequence[MicroBatch], *, poisoned: bool = False) -> Stepped:
        total = torch.zeros((), device=self._device)
        norm: Tensor | float = 0.0
        for batch in batches:
            loss = self._loss(batch)
            if poisoned:
                loss = loss * torch.nan
            total += loss.detach()
            self._engine.backward(loss)
            if self._engine.is_gradient_accumulation_boundary():
                norm = self._update()
            else:
                self._engine.step()  # which only counts
        return Stepped(_mean(total / len(batches), self._mesh.replicas.group), norm)

    def _update(self) -> Tensor | float:
        """Clip and apply the accumulated gradient; its norm before clipping. One that is not finite is not applied.

        DeepSpeed sees to that from stage 1 on; stage 0 in fp32 neither looks nor reports.
        """
        engine = self._engine
        if engine.zero_optimization_stage() > 0:
            engine.step()
            return engine.get_global_grad_norm()  # type: ignore[no-any-return]
        parameters = list(engine.module.parameters())
        norm = gradient_norm(parameters, self._mesh)
        if torch.isfinite(norm):
            clip(parameters, norm, self._max_norm)
            engine.step()
        return norm

    def validation_loss(self, batch: MicroBatch) -> Tensor:
        self._engine.eval()
        loss = self._loss(batch)
        self._engine.train()
        return _mean(loss, self._mesh.replicas.group)

    def _loss(self, batch: MicroBatch) -> Tensor:
        return self._engine(batch.tokens, batch.labels, batch.positions, batch.samples, batch.divisor)  # type: ignore[no-any-return]


class Pipelined:
    """Every rank runs its stage of the layers, one forward and one backward in turn, under ZeRO-1."""

    def __init__(self, composed: Composed) -> None:
        assert composed.stage is not None
        self._engine, self._stage = composed.engine, composed.stage

    def train(self, batches: Sequence[MicroBatch], *, poisoned: bool = False) -> Stepped:
        self._stage.poisoned = poisoned
        loss = self._engine.train_batch(self._feed(batches))
        return Stepped(loss, self._engine.get_global_grad_norm())

    def validation_loss(self, batch: MicroBatch) -> Tensor:
        return self._engine.eval_batch(self._feed([batch]), num_micro_batches=1)  # type: ignore[no-any-return]

    def _feed(self, batches: Sequence[MicroBatch]) -> Iterator[tuple[Any, Any]]:
        """Tokens for the first stage and labels for the last, which DeepSpeed asks for; every stage knows the rest."""
        self._stage.expect(batches)
        return iter([(batch.tokens, (batch.labels, _divisor(batch))) for batch in batches])


def _divisor(batch: MicroBatch) -> Tensor:
    """What the model would take for itself: DeepSpeed's pipeline passes tensors only."""
    return torch.tensor(float(batch.labels.numel())) if batch.divisor is None else batch.divisor


def _mean(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Over the ranks of a group, in place; tensor ranks of a replica hold the same value already."""
    if group is None:
        return values
    dist.all_reduce(values, group=group)
    return values.div_(dist.get_world_size(group))
