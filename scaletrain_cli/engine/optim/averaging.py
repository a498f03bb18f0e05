"""The average of the weights over the run, kept beside the optimizer's and lent to the model for evaluation.

Each rank averages the fp32 weights that it updates. The statistics of BatchNorm are averaged in the same way, so that
they are those of activations under the averaged weights more nearly than the latest ones are.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from scaletrain_cli.engine.optim.deepspeed_optimizer import master_weights, use_master_weights
from scaletrain_cli.spec.training import AveragingSpec, averaged_from


class WeightAverage:
    """``ema``: exponential; ``checkpoints``: equal, over the last quarter of the run. Both include every n-th step.

    The first weights included are the average until the next ones. Costs four bytes per weight that the rank updates.
    ``buffers``: fp32 values that are averaged beside the weights; every rank has the same.
    """

    def __init__(self, engine: Any, spec: AveragingSpec, total_steps: int, buffers: Sequence[Tensor] = ()) -> None:
        """Call it after DeepSpeed has partitioned the weights."""
        self._engine, self._every, self.buffers = engine, spec.every, list(buffers)
        self.taken = 0
        exponential = spec.name == "ema"
        self._first = 1 if exponential else averaged_from(total_steps)
        self._add = (
            get_ema_multi_avg_fn(spec.decay)  # type: ignore[no-untyped-call]
            if exponential
            else get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
        )
        self.averages: list[Tensor] = []  # empty until ``taken`` is above 0
        self.buffer_averages: list[Tensor] = []

    @property
    def weights(self) -> list[Tensor]:
        """The weights that are averaged, in the order of ``averages``."""
        return master_weights(self._engine)

    @property
    def bytes(self) -> int:
        """Bytes of this rank's averages once the first weights are included."""
        return sum(weight.numel() * weight.element_size() for weight in (*self.weights, *self.buffers))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Include the weights after optimizer step ``step`` (1-based), if that step is included."""
        if step < self._first or step % self._every:
            return
        weights = self.weights
        if self.taken == 0:
            self.averages = [weight.detach().clone() for weight in weights]
            self.buffer_averages = [buffer.clone() for buffer in self.buffers]
        else:
            self._add(self.averages, weights, self.taken)
            if self.buffers:
                self._add(self.buffer_averages, self.buffers, self.taken)
        self.taken += 1

    def average_of(self, buffer: Tensor) -> Tensor | None:
        """Return the average of a buffer; None if it is not averaged, or not yet."""
        places = [number for number, averaged in enumerate(self.buffers) if averaged is buffer]
        return self.buffer_averages[places[0]] if places and self.taken else None

    @contextmanager
    def in_use(self) -> Generator[None]:
        """A context in which the model computes with the averages, if any, and must not be trained. Collective."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        if self.taken == 0:
            return
        averages = (*self.averages, *self.buffer_averages)
        for weight, average in zip((*self.weights, *self.buffers), averages, strict=True):
            kept = weight.detach().clone()
            weight.copy_(average)
            average.copy_(kept)
        use_master_weights(self._engine)
