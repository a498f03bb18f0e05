"""Run one optimizer step or one evaluation with DeepSpeed, with and without a pipeline."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from scaletrain_cli.engine.compose import Composed
from scaletrain_cli.engine.data.batches import MicroBatch
from scaletrain_cli.engine.metrics.noise_scale import NoiseScale
from scaletrain_cli.engine.metrics.profiler import profiled
from scaletrain_cli.engine.metrics.step_split import Phase, StepSplit
from scaletrain_cli.engine.metrics.trace import UPDATE
from scaletrain_cli.engine.model.base import CausalLM
from scaletrain_cli.engine.model.moe import scale_router_losses, update_correction_biases
from scaletrain_cli.engine.model.vision.batch_norm import average_statistics
from scaletrain_cli.engine.objectives.base import Inputs, Joined, RowLosses
from scaletrain_cli.engine.objectives.dpo import DPO
from scaletrain_cli.engine.optim.clipping import AdaptiveClip, clip, clip_elements, gradient_norm
from scaletrain_cli.engine.optim.deepspeed_optimizer import loss_scale, step_was_skipped
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.spec import TrainingSpec


class StepResult(NamedTuple):
    """Scalars, the same on every rank: mean loss over the global batch in nats, gradient norm before clipping.

    The norm is in host memory, except with groups of local SGD, over which it is a mean on the device. An update with a
    gradient that is not finite is not applied. ``skipped``: because of an fp16 overflow. ``measures``: those of the
    objective.
    """

    loss: Tensor
    grad_norm: Tensor | float
    skipped: bool
    measures: dict[str, Tensor]


class Stepper(ABC):
    """Runs steps. Every method is collective."""

    def __init__(self, composed: Composed, training: TrainingSpec, mesh: Mesh) -> None:
        self._composed, self._mesh = composed, mesh
        self._source_losses: dict[str, Tensor] = {}  # of the last step, by the name of the measure
        self._noise: dict[str, Tensor] = {}  # the estimate of the last step, if that was measured
        self._fp16 = training.precision == "fp16"
        self._by_norm = training.gradient_clipping if training.gradient_clipping_by == "norm" else 0.0
        self._by_value = training.gradient_clipping if training.gradient_clipping_by == "value" else 0.0
        self.split: StepSplit | None = None  # gets the beginning of each phase of a step
        self.noise_scale: NoiseScale | None = None
        self.measures_noise = False  # in the next step
        self.before_update: Callable[[], None] = lambda: None
        self.largest_norm = 0.0  # of the last update; 0: not limited
        self.engine_was_built()
        adaptive = training.gradient_clipping_by == "adaptive"
        self.adaptive_clip = AdaptiveClip(training.gradient_clipping) if adaptive else None

    @property
    def _engine(self) -> Any:
        return self._composed.engine

    def engine_was_built(self) -> None:
        """Train with the present engine from now on."""
        if self._by_value > 0:
            clip_elements(self._composed.optimizer, self._by_value)
        if self.noise_scale is not None:
            self.noise_scale.begin_again()

    def train(self, batches: Sequence[MicroBatch], *, nan_gradient: bool = False, factor: float = 1.0) -> StepResult:
        """Run forward and backward passes and the update over one global batch.

        Fault injection: ``nan_gradient`` makes this rank's gradient NaN, ``factor`` multiplies the loss on all ranks.
        """
        model = self._composed.model
        language = model.language
        experts = language is not None and language.spec.num_experts > 0
        if experts:
            scale_router_losses(model, self.loss_scale / len(batches))
        self.largest_norm = self._by_norm if self.adaptive_clip is None else self.adaptive_clip.threshold()
        if self._engine.zero_optimization_stage() > 0:  # DeepSpeed clips to it
            self._engine.optimizer.clip_grad = self.largest_norm
        loss, norm = self._train(batches, nan_gradient, factor)
        if self._mesh.groups.group is not None:  # root mean square over the groups, as the guard needs one value
            square = torch.as_tensor(norm, dtype=torch.float32, device=loss.device).square()
            norm = _mean(square.reshape(()), self._mesh.groups.group).sqrt()
        if self._composed.averages_statistics:
            average_statistics(model, self._mesh.data)
        skipped = self._fp16 and step_was_skipped(self._engine)
        if language is not None and experts and language.spec.bias_update_speed:
            update_correction_biases(model, float(not skipped and math.isfinite(norm)))
        if self.adaptive_clip is not None:
            self.adaptive_clip.observe(float(norm))
        return StepResult(loss, norm, skipped, self.take_measures() | self._source_losses | self._noise)

    def _enter(self, phase: Phase) -> None:
        if self.split is not None:
            self.split.enter(phase)

    def take_measures(self) -> dict[str, Tensor]:
        """Return the measures of the objective since the last call, the same on every rank."""
        return self._composed.objective.take_measures()

    @property
    def loss_scale(self) -> float:
        """Factor of the next loss before its backward pass; 1 without fp16."""
        return loss_scale(self._engine) if self._fp16 else 1.0

    @abstractmethod
    def _train(self, batches: Sequence[MicroBatch], nan_gradient: bool, factor: float) -> tuple[Tensor, Any]:
        """Return mean loss and gradient norm."""

    @abstractmethod
    def validation_loss(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Return the mean loss of micro-batches over all replicas, on every rank, without training."""

    @abstractmethod
    def outputs_of(self, batch: MicroBatch) -> list[Tensor]:
        """Return the outputs for a micro-batch before the loss, without dropout or training.

        Of a pipeline only the last stage has them; others return an empty list.
        """

    @abstractmethod
    def log_probabilities(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the log-probabilities of the answers of each micro-batch, [rows], without dropout or training.

        Of a pipeline only the last stage has them; others return an empty list.
        """

    @property
    def _preferences(self) -> DPO:
        objective = self._composed.objective
        assert isinstance(objective, DPO)
        return objective


def build_stepper(
    composed: Composed, mesh: Mesh, device: torch.device, training: TrainingSpec, sources: Sequence[str] = ()
) -> Stepper:
    """Return the stepper for the composed model. ``sources``: their names, if there are several."""
    if composed.stage is not None:
        return PipelineStepper(composed, training, mesh)
    return ModelStepper(composed, training, mesh, device, sources)


class ModelStepper(Stepper):
    """Every rank runs all layers: ZeRO 0 to 3, with tensor or sequence parallelism.

    With several sources the measures of a step have the loss of each, ``loss/<source>``: the mean over its labels in
    the global batch, NaN if it has none. A cross-entropy kernel that sums over tokens has no such losses.
    """

    def __init__(
        self, composed: Composed, training: TrainingSpec, mesh: Mesh, device: torch.device, sources: Sequence[str] = ()
    ) -> None:
        super().__init__(composed, training, mesh)
        self._device, self._sources = device, tuple(sources)

    def _train(self, batches: Sequence[Any], nan_gradient: bool, factor: float) -> tuple[Tensor, Any]:
        total, norm = torch.zeros((), device=self._device), 0.0
        objective = self._composed.objective
        if isinstance(objective, Joined) and len(batches) > 1:
            return self._train_joined(objective, batches, torch.nan if nan_gradient else factor)
        objective.row_losses = [] if self._sources else None
        noise = self.noise_scale if self.measures_noise else None
        for index, batch in enumerate(batches):
            self._enter("forward")
            loss = self._loss(batch)
            if nan_gradient or factor != 1:
                loss = loss * (torch.nan if nan_gradient else factor)
            total += loss.detach()
            self._enter("backward")
            if noise is not None and index == 0:
                with noise.measuring(self._engine.module.parameters(), factor * self.loss_scale / len(batches)):
                    self._engine.backward(loss)
            else:
                self._engine.backward(loss)
            norm = self._end_micro_batch()
        rows, objective.row_losses = objective.row_losses, None
        self._enter("other")
        square = torch.zeros((), device=self._device) if noise is None else noise.take_square()
        loss, square = self._mean_of_step(total / len(batches), square, rows or [])
        self._noise = {} if noise is None else {"noise_scale": noise.add(square, norm)}
        return loss, norm

    def _train_joined(self, objective: Joined, batches: Sequence[Any], factor: float) -> tuple[Tensor, Any]:
        """Train on a loss that compares the samples of all micro-batches; ``factor``: of the loss, for faults."""
        from scaletrain_cli.engine.losses.grad_cache import cached_backward

        norm = 0.0

        def forward(batch: Any) -> Any:
            self._enter("forward")
            return self._forward(objective.prepared(batch), objective.features)

        def loss(features: Sequence[Any]) -> Tensor:
            self._enter("forward")
            value = objective.joined_loss(features)
            return value if factor == 1 else value * factor

        def backward(scalar: Tensor) -> None:
            nonlocal norm
            self._enter("backward")
            self._engine.backward(scalar, scale_wrt_gas=False)
            norm = self._end_micro_batch()

        total = cached_backward(forward, batches, loss, backward, self._device)
        self._enter("other")
        return _mean(total, self._mesh.replicas.group), norm

    def _end_micro_batch(self) -> Any:
        """Update the weights after the last micro-batch of a step; return the norm of the gradient, else 0."""
        self._enter("optimizer")
        if self._engine.is_gradient_accumulation_boundary():
            with profiled(UPDATE):
                return self._update()
        self._engine.step()  # only counts the micro-batch
        return 0.0

    def _mean_of_step(self, loss: Tensor, square: Tensor, rows: Sequence[RowLosses]) -> tuple[Tensor, Tensor]:
        """Return the means of loss and ``square`` over all replicas; in the same all-reduce, find each source's loss.

        ``square`` is reduced in every step, also where it is 0, because the order of a sum over ranks depends on its
        place in the tensor: the loss is the same with and without it.
        """
        group = self._mesh.replicas.group
        pair = torch.stack((loss.float(), square.float()))
        if not rows:
            return _mean(pair, group).unbind()  # type: ignore[return-value]
        count = len(self._sources)
        sums = torch.zeros(2, count, device=self._device)
        sums.index_add_(
            1,
            torch.cat([row.sources for row in rows]),
            torch.stack([torch.cat([row.losses for row in rows]), torch.cat([row.counted for row in rows])]),
        )
        reduced = _mean(torch.cat([pair, sums.flatten()]), group)
        losses = reduced[2 : 2 + count] / reduced[2 + count :]
        self._source_losses = {f"loss/{name}": mean for name, mean in zip(self._sources, losses.unbind(), strict=True)}
        return reduced[0], reduced[1]

    def _update(self) -> Any:
        """Clip and apply the accumulated gradient unless it is not finite; return its norm before clipping.

        From stage 1 on DeepSpeed does both; in stage 0 with fp32 it neither checks nor reports.
        """
        self.before_update()
        engine = self._engine
        if engine.zero_optimization_stage() > 0:
            engine.step()
            return engine.get_global_grad_norm()
        parameters = list(engine.module.parameters())
        on_device = gradient_norm(parameters, self._mesh)
        norm = on_device.cpu()  # the only wait for the device in the step
        if torch.isfinite(norm):
            clip(parameters, on_device, self.largest_norm)
            engine.step()
        else:
            engine.zero_grad()  # a rollback to a checkpoint must not start with this gradient
            engine.micro_steps += 1
        return norm

    @torch.no_grad()
    def validation_loss(self, batches: Sequence[MicroBatch]) -> Tensor:
        self._engine.eval()
        loss = sum((self._loss(batch) for batch in batches), torch.zeros((), device=self._device))
        self._engine.train()
        return _mean(loss / len(batches), self._mesh.replicas.group)

    @torch.no_grad()
    def outputs(self, *inputs: Tensor | None) -> Any:
        """Return the outputs of the model for its inputs, in evaluation."""
        self._engine.eval()
        outputs = self._engine(*inputs)
        self._engine.train()
        return outputs

    @torch.no_grad()
    def outputs_of(self, batch: Any) -> list[Tensor]:
        self._engine.eval()
        tree = self._forward(self._composed.objective.prepared(batch), lambda model, outputs, inputs: outputs)
        self._engine.train()
        return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]

    def _loss(self, batch: Any) -> Tensor:
        objective = self._composed.objective
        return self._forward(objective.prepared(batch), objective.loss)  # type: ignore[no-any-return]

    @torch.no_grad()
    def log_probabilities(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        self._engine.eval()
        values = [self._forward(batch, self._preferences.log_probabilities) for batch in batches]
        self._engine.train()
        return values

    def _forward(self, batch: Inputs, output: Callable[[Any, Any, Any], Any]) -> Any:
        return self._engine(*batch.inputs, output=lambda model, outputs: output(model, outputs, batch))


# By the names of deepspeed.runtime.pipe.schedule.
_PHASE_OF_INSTRUCTION: dict[str, Phase] = {
    "ForwardPass": "forward",
    "BackwardPass": "backward",
    "ReduceGrads": "backward",
    "ReduceTiedGrads": "backward",
    "OptimizerStep": "optimizer",
    "SendActivation": "communication",
    "RecvActivation": "communication",
    "SendGrad": "communication",
    "RecvGrad": "communication",
}


class PipelineStepper(Stepper):
    """Every rank runs its pipeline stage, one forward and one backward pass in turn (1F1B), under ZeRO-1."""

    _shape: torch.Size | None = None  # of the tokens that the stages last sent each other

    def engine_was_built(self) -> None:
        super().engine_was_built()
        engine = self._engine  # whose class maps each kind of instruction of the schedule to a method
        engine._INSTRUCTION_MAP = {
            kind: self._split(method, _PHASE_OF_INSTRUCTION.get(kind.__name__, "other"))
            for kind, method in type(engine)._INSTRUCTION_MAP.items()
        }

    def _split(self, method: Callable[..., None], phase: Phase) -> Callable[..., None]:
        """Return the method, which enters the phase before it runs."""

        def in_phase(engine: Any, *arguments: Any, **named: Any) -> None:
            self._enter(phase)
            if phase == "optimizer":
                self.before_update()
            method(engine, *arguments, **named)
            self._enter("other")

        return in_phase

    def _train(self, batches: Sequence[MicroBatch], nan_gradient: bool, factor: float) -> tuple[Tensor, Any]:
        assert self._composed.stage is not None
        self._composed.stage.nan_gradient, self._composed.stage.loss_factor = nan_gradient, factor
        return self._engine.train_batch(self._feed(batches)), self._engine.get_global_grad_norm()

    def validation_loss(self, batches: Sequence[MicroBatch]) -> Tensor:
        loss: Tensor = self._engine.eval_batch(self._feed(batches), num_micro_batches=len(batches))
        return loss.reshape(())  # a tensor of one element with a single replica

    def outputs_of(self, batch: MicroBatch) -> list[Tensor]:
        return self._kept([batch], lambda model, hidden, batch: hidden)

    def log_probabilities(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        return self._kept(batches, self._preferences.log_probabilities)

    def _kept(self, batches: Sequence[MicroBatch], output: Callable[[Any, Tensor, Any], Tensor]) -> list[Tensor]:
        """Return what ``output`` makes of the last hidden states of each micro-batch, on the last stage."""
        kept: list[Tensor] = []

        def keep(model: CausalLM, hidden: Tensor, batch: MicroBatch) -> Tensor:
            kept.append(output(model, hidden, batch))
            return kept[-1].new_zeros(())  # DeepSpeed averages a loss

        stage = self._composed.stage
        assert stage is not None
        stage.output = keep  # type: ignore[assignment]
        self._engine.eval_batch(self._feed(batches), num_micro_batches=len(batches))
        stage.output = self._composed.objective.loss
        return kept

    def _feed(self, batches: Sequence[MicroBatch]) -> Iterator[tuple[Any, Any]]:
        """Return what DeepSpeed passes on: tokens for the first stage and labels for the last; see ``expect``.

        All micro-batches must have the same shape.
        """
        assert self._composed.stage is not None
        shape = batches[0].tokens.shape
        if shape != self._shape:  # DeepSpeed tells the next stage the shape only once
            self._engine.reset_activation_shape()
            self._shape = shape
        self._composed.stage.expect(batches)
        return iter([(batch.tokens, batch.labels) for batch in batches])


def _mean(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the mean over the ranks of a group, in place; tensor ranks of a replica have the same value."""
    if group is None:
        return values
    dist.all_reduce(values, group=group)
    return values.div_(dist.get_world_size(group))
