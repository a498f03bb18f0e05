"""Trials of a rehearsal: train a few steps, score batches, and go back to an earlier state."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaletrain_cli.diagnosis.case import Case
from scaletrain_cli.engine.checkpoint.flat_shards import ShardedState
from scaletrain_cli.engine.checkpoint.snapshot import counters, random_state, restore_random_state, set_counters
from scaletrain_cli.engine.optim.deepspeed_optimizer import use_master_weights
from scaletrain_cli.engine.optim.optimizers import set_rates
from scaletrain_cli.engine.process_group import RankConsensus
from scaletrain_cli.engine.trainer import Trainer

_MOST_SKIPPED = 40  # steps without an update in a row: the first descent of an fp16 loss scale takes about 17


class Trained(NamedTuple):
    """A step of a trial: the loss before its update, and the norm of its gradient."""

    loss: float
    norm: float


@dataclass
class StateCopy:
    """A copy in host memory of what training changes on this rank: weights, moments, buffers, counters, generators."""

    weights: list[Tensor]
    states: list[dict[str, Any]]
    buffers: list[Tensor]
    counters: dict[str, dict[str, float]]
    random: Tensor
    average: int
    adaptive_clip: dict[str, Any] | None
    micro_steps: int


def _host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _same(ours: Any, other: Any) -> bool:
    """Return whether two values of an optimizer's state are equal to the bit; NaN equals NaN."""
    if not isinstance(ours, Tensor):
        return bool(ours == other)
    first, second = ours.reshape(-1), _host(other).reshape(-1)
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


@dataclass
class Trials:
    """One rank's part in the trials. Methods are collective unless they say otherwise.

    ``budget_seconds``: of all items that train. ``step_seconds``: the median time of a step as far as it is measured,
    else the planned one; the same on every rank.
    """

    trainer: Trainer
    case: Case
    budget_seconds: float
    step_seconds: float
    suggested_rate: float | None = None  # by the range test
    _start: StateCopy = field(init=False)

    def __post_init__(self) -> None:
        self._start = self.copy()

    @property
    def consensus(self) -> RankConsensus:
        return self.trainer.context.consensus

    @property
    def peak_rate(self) -> float:
        return self.case.peak_rate

    def steps_in(self, share: float, least: int, most: int, relative: float = 1.0) -> int:
        """Return how many steps fit into a share of the budget; 0 if not even ``least`` fit into three times that.

        ``relative``: the time of such a step, relative to one of training.
        """
        seconds = max(1e-6, self.step_seconds * relative)
        fit = int(share * self.budget_seconds / seconds)
        if fit < least and least * seconds > 3 * share * self.budget_seconds:
            return 0
        return min(most, max(least, fit))

    def batches(self, number: int, following: Sequence[int] = ()) -> list[Any]:
        """Return this rank's micro-batches of a global batch (1-based), reading the ``following`` ones ahead."""
        numbers = [self.trainer.guard.batch_number(step) for step in (number, *following)]
        batches: list[Any] = self.trainer.loader.take(numbers[0], numbers[1:]).micro_batches()
        return batches

    def step(self, batches: Sequence[Any], rate: float) -> Trained:
        """Train one step at a learning rate, and return its figures, those of rank 0. fp16 may skip it."""
        trainer = self.trainer
        trainer.context.heartbeat.beat(0, "step", trainer.context.heartbeat.first_step_seconds)
        for _ in range(_MOST_SKIPPED):
            set_rates(trainer.composed.optimizer, 1, rate)
            result = trainer.stepper.train(batches)
            if not result.skipped:
                break
        values = self.consensus.on_values({"loss": float(result.loss), "norm": float(result.grad_norm)})
        return Trained(values["loss"], values["norm"])

    def loss(self, batches: Sequence[Any]) -> float:
        """Return the mean loss of micro-batches in evaluation, that of rank 0."""
        self.trainer.context.heartbeat.beat(0, "step", self.trainer.context.heartbeat.first_step_seconds)
        return self.consensus.on_values({"loss": float(self.trainer.stepper.validation_loss(batches))})["loss"]

    def largest(self, value: float) -> float:
        return -self.consensus.least(-value)

    def timed(self, work: Callable[[], Any]) -> tuple[Any, float]:
        """Return the result of work, and the seconds that the slowest rank took for it."""
        began = time.perf_counter()
        result = work()
        if self.trainer.context.device.type == "cuda":
            torch.cuda.synchronize(self.trainer.context.device)
        return result, self.largest(time.perf_counter() - began)

    @torch.no_grad()
    def copy(self) -> StateCopy:
        trainer, states = self.trainer, self._states
        weights, moments = [], []
        for shard in states.shards:
            with states.weight(shard) as weight:
                weights.append(_host(weight))
                moments.append({name: _host(value) for name, value in states.optimizer_states(weight).items()})
        clip = trainer.stepper.adaptive_clip
        return StateCopy(
            weights,
            moments,
            [_host(buffer.values) for buffer in states.buffers],
            counters(trainer.composed.engine),
            random_state(trainer.context.device),
            0 if trainer.average is None else trainer.average.taken,
            None if clip is None else clip.state_dict(),
            trainer.composed.engine.micro_steps,
        )

    @torch.no_grad()
    def differs_from(self, copy: StateCopy) -> list[str]:
        """Return the names of the kinds of state that differ from a copy on this rank. Not collective."""
        now, kinds = self.copy(), []
        for kind, ours, theirs in (("weights", now.weights, copy.weights), ("buffers", now.buffers, copy.buffers)):
            if not all(_same(one, other) for one, other in zip(ours, theirs, strict=True)):
                kinds.append(kind)
        for own, other in zip(now.states, copy.states, strict=True):
            names = own.keys() | other.keys()
            if any(name not in own or name not in other or not _same(own[name], other[name]) for name in names):
                kinds.append("moments")
                break
        if now.counters != copy.counters:
            kinds.append("counters")
        if not _same(now.random, copy.random):
            kinds.append("random generators")
        return kinds

    @torch.no_grad()
    def restore(self, copy: StateCopy | None = None) -> None:
        """Go back to a copy; None: to the state before the first step."""
        copy = copy or self._start
        trainer, states = self.trainer, self._states
        engine = trainer.composed.engine
        for shard, values, moments in zip(states.shards, copy.weights, copy.states, strict=True):
            with states.weight(shard) as weight:
                weight.copy_(values)
                own = states.optimizer_states(weight)
                for name in [name for name in own if name not in moments]:
                    del own[name]
                for name, value in moments.items():
                    if isinstance(value, Tensor) and isinstance(own.get(name), Tensor):
                        own[name].copy_(value)
                    else:
                        own[name] = value
        for buffer, values in zip(states.buffers, copy.buffers, strict=True):
            buffer.values.copy_(values)
        use_master_weights(engine)
        trainer.step_sync.state_check.forget(0)
        set_counters(engine, copy.counters)
        engine.micro_steps = copy.micro_steps
        if trainer.average is not None:
            trainer.average.taken = copy.average
        if trainer.stepper.adaptive_clip is not None and copy.adaptive_clip is not None:
            trainer.stepper.adaptive_clip.load_state_dict(copy.adaptive_clip)
        restore_random_state(copy.random, trainer.context.device)

    @property
    def _states(self) -> ShardedState:
        return self.trainer.checkpointer.states


def finite(value: float) -> float | None:
    """Return a figure with seven digits; None if it is not finite, which JSON has no number for."""
    return float(f"{value:.7g}") if math.isfinite(value) else None
