"""The average of the weights over the run, kept beside the optimizer's and lent to the model for evaluation.

Each rank averages the fp32 weights that it updates. The statistics of BatchNorm are averaged in the same way, so that
they are those of activations under the averaged weights more nearly than the latest ones are.

Local SGD with an outer optimizer is DiLoCo (arXiv:2311.08105): groups of data-parallel ranks train alone, each with its
own inner optimizer, on their parts of the global batch. After every ``inner_steps`` steps, and after the last one, the
difference of the outer weights from the mean of the groups' weights is the gradient of an outer step, and all groups
continue from the new outer weights. Inner states stay with their group. All is done on the fp32 weights that a rank
updates, which are the same elements in every group.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from scaletrain_cli.engine.optim.deepspeed_optimizer import master_weights, use_master_weights
from scaletrain_cli.engine.parallel.mesh import Axis
from scaletrain_cli.spec.training import AveragingSpec, LocalSGDSpec, averaged_from


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
        places = [number for number, each in enumerate(self.buffers) if each is buffer]
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


class LocalSGD:
    """The outer weights of the elements that this rank updates, and the momentum of the outer optimizer.

    ``groups``: the ranks that update the same elements, one of each group. Costs eight bytes per element; four without
    momentum.
    """

    def __init__(
        self, engine: Any, settings: LocalSGDSpec, groups: Axis, total_steps: int, device: torch.device
    ) -> None:
        """Call it while all groups have the same weights. ``device``: that ranks communicate from."""
        self._engine, self._settings, self._total_steps, self._device = engine, settings, total_steps, device
        self.groups = groups
        weights = master_weights(engine)
        self.outer = [weight.detach().clone() for weight in weights]
        nesterov = settings.outer_optimizer == "nesterov"
        self.momentum = [torch.zeros_like(weight) for weight in weights] if nesterov else []

    @property
    def bytes(self) -> int:
        """Bytes of this rank's outer weights and momentum."""
        return sum(each.numel() * each.element_size() for each in (*self.outer, *self.momentum))

    def is_due(self, step: int) -> bool:
        """Return whether the groups meet after a step (1-based)."""
        return step % self._settings.inner_steps == 0 or step == self._total_steps

    @torch.no_grad()
    def after_step(self, step: int) -> bool:
        """Run the outer step if it is due after optimizer step ``step`` (1-based); return if it was. Collective."""
        if not self.is_due(step):
            return False
        rate, beta = self._settings.outer_learning_rate, self._settings.outer_momentum
        for index, (weight, outer) in enumerate(zip(master_weights(self._engine), self.outer, strict=True)):
            gradient = (outer - weight).to(self._device)
            if self.groups.group is not None:
                dist.all_reduce(gradient, group=self.groups.group)
                gradient.div_(self.groups.size)
            gradient = gradient.to(outer.device)
            if self.momentum:
                self.momentum[index].mul_(beta).add_(gradient)
                gradient.add_(self.momentum[index], alpha=beta)
            outer.add_(gradient, alpha=-rate)
            weight.copy_(outer)
        use_master_weights(self._engine)
        return True
