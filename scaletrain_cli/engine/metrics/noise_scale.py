"""The gradient noise scale in sequences (arXiv:1812.06162, appendix A): far beyond it a larger batch gains little.

From the squared norms of the gradient of one micro-batch of a rank, before it is reduced, and of that of the global
batch. Without new collectives: the first one is averaged over the replicas beside the loss.
"""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from scaletrain_cli.engine.objectives.base import Joined
from scaletrain_cli.engine.process_group import RankConsensus
from scaletrain_cli.plan.result import Layout

EVERY = 10  # steps at the start; the estimate is a mean over hundreds of steps, so that most need not be measured
_MOST_STEPS = 200  # between two measurements
LARGEST_SHARE = 0.0005  # of the time of training, once the estimate is given; calls of hooks come on top
_MEMORY = 0.95  # of a measurement in the means: they cover about 200 steps
_IGNORED = 10  # measurements at the start of an attempt: the gradients of a new model would outweigh those of 500 steps
_FEWEST = 20  # measurements, those included, before the estimate is given: 200 steps


class NoiseScale:
    """The estimate of one run. All ranks measure the same steps and have the same values.

    ``small``, ``large``: sequences in a micro-batch of a rank and in the global batch.
    """

    def __init__(self, small: int, large: int, device: torch.device) -> None:
        self._small, self._large, self._device = small, large, device
        self.begin_again()

    def begin_again(self) -> None:
        """Forget all measurements, as when other parameters begin to train."""
        device = self._device
        self._means = torch.zeros(2, dtype=torch.float64, device=device)  # of trace and squared gradient, apart
        self._measured = torch.zeros((), dtype=torch.float64, device=device)
        self._square = torch.zeros((), device=device)
        self.taken = 0  # measurements
        self.seconds = 0.0  # of the host, in the latest measurement

    @classmethod
    def of(cls, layout: Layout, objective: Any, device: torch.device) -> "NoiseScale | None":
        """Return None where it cannot be had: from one gradient, or where ranks or micro-batches have part of one.

        That is: one micro-batch per step in all; tensor, sequence, context, expert or pipeline parallelism; groups of
        local SGD; and losses that compare the samples of several micro-batches, whose gradients are no mean over these.
        """
        cuts = layout.tensor_parallel * layout.sequence_parallel * layout.context_parallel
        cuts *= layout.expert_parallel * layout.pipeline_parallel * layout.local_sgd_groups
        if cuts > 1 or isinstance(objective, Joined) or layout.micro_batch_size == layout.global_batch_size:
            return None
        return cls(layout.micro_batch_size, layout.global_batch_size, device)

    @contextmanager
    def measuring(self, parameters: Iterable[nn.Parameter], factor: float) -> Iterator[None]:
        """A context around the backward pass of one micro-batch, which measures its gradient as autograd returns it.

        In every stage of ZeRO that is before the gradient is reduced. ``factor``: by which it is too large.
        """
        norms: list[Tensor] = []
        clock = time.perf_counter
        seconds, began = 0.0, clock()

        def observe(gradient: Tensor) -> None:
            nonlocal seconds
            began = clock()
            norms.append(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32))
            seconds += clock() - began

        hooks = [
            parameter.register_hook(observe)  # type: ignore[no-untyped-call]
            for parameter in parameters
            if parameter.requires_grad
        ]
        seconds += clock() - began
        try:
            yield
        finally:
            began = clock()
            for hook in hooks:
                hook.remove()
        self._square = torch.stack(norms).square().sum() / factor**2 if norms else torch.zeros((), device=self._device)
        self.taken += 1
        self.seconds = seconds + clock() - began

    def take_square(self) -> Tensor:
        """Return the squared norm of this rank's gradient of the last micro-batch measured, a scalar; once."""
        square, self._square = self._square, torch.zeros((), device=self._device)
        return square

    @torch.no_grad()
    def add(self, mean_square: Tensor, norm: Tensor | float) -> Tensor:
        """Add a measurement; return the estimate, a scalar in sequences, NaN while it is unknown.

        ``mean_square``: of ``take_square`` over the replicas. ``norm``: of the gradient of the global batch, in host
        memory. A measurement that is not finite is ignored.
        """
        small, large = self._small, self._large
        of_small = mean_square.to(self._device, torch.float64)
        of_large = of_small.new_full((), float(norm)).square()
        gradient = (large * of_large - small * of_small) / (large - small)
        trace = (of_small - of_large) / (1 / small - 1 / large)
        estimates = torch.stack((trace, gradient))
        usable = torch.isfinite(estimates).all() & (of_small > 0)
        self._measured += usable
        weight = torch.where(usable & (self._measured > _IGNORED), 1 - _MEMORY, 0.0)
        self._means += weight * (torch.where(usable, estimates, 0.0) - self._means)
        known = (self._measured >= _FEWEST) & (self._means > 0).all()
        return torch.where(known, self._means[0] / self._means[1], torch.nan)


class NoiseSteps:
    """Chooses the steps that are measured, the same on every rank.

    Every 10th until the estimate is given, then every 10th to 200th: as many as take at most 0.05 % of the time.
    """

    def __init__(self, noise: NoiseScale, consensus: RankConsensus) -> None:
        self._noise, self._consensus = noise, consensus
        self._measures, self._usual = False, 0.0
        self._interval = EVERY

    def begin(self, step: int) -> bool:
        """Return whether step ``step`` (1-based), which begins, is measured."""
        self._measures = step % (self._interval if self._noise.taken >= _FEWEST else EVERY) == 0
        return self._measures

    def step_took(self, seconds: float) -> None:
        """Record how long a step took on this rank."""
        self._usual = seconds if not self._usual else 0.9 * self._usual + 0.1 * seconds

    def after_step(self) -> None:
        """Choose the interval after every 20th measurement. Collective there."""
        if self._measures and self._noise.taken % _FEWEST == 0:
            cost, usual = self._consensus.total([self._noise.seconds, self._usual])
            self._interval = min(_MOST_STEPS, max(EVERY, math.ceil(cost / max(usual, 1e-9) / LARGEST_SHARE)))
