"""Compare the plan with the run: measure one step of each attempt, and store the figures beside the planned ones."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from scaletrain_cli.engine.compose import Composed
from scaletrain_cli.engine.context import RankContext
from scaletrain_cli.engine.metrics.memory_measurement import (
    forget_peak_memory,
    watching_activations,
    watching_model_states,
)
from scaletrain_cli.engine.metrics.out_of_memory import forget_allocations
from scaletrain_cli.engine.optim.averaging import WeightAverage
from scaletrain_cli.engine.optim.local_sgd import LocalSGD
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.plan.memory.engine_memory import saved_activation_bytes
from scaletrain_cli.plan.memory.engine_states import engine_states
from scaletrain_cli.plan.result import Layout, StageMemory
from scaletrain_cli.plan.stages import stages_in
from scaletrain_cli.plan.trained_parameters import trained_at
from scaletrain_cli.plan.trained_stages import stage_of_step, trained_stages
from scaletrain_cli.plan.vision.llava import saved_llava_bytes
from scaletrain_cli.plan.vision.memory import saved_vision_bytes
from scaletrain_cli.plan.vision.states import vision_states
from scaletrain_cli.rundir.measured import Figure, Measured, StageFigures, write_measured
from scaletrain_cli.spec import LlavaSpec, ModelSpec, RunSpec

_MODEL_STATES_AND_HOST = ("parameters", "gradients", "optimizer_states", "host")


@dataclass
class PlanCheck:
    """One rank's part in the measurement of its attempt."""

    context: RankContext
    composed: Composed
    kept_beside: WeightAverage | LocalSGD | None  # weights beside the optimizer's
    mesh: Mesh
    _done: bool = field(default=False, init=False)
    _updates: int | None = field(default=None, init=False)  # updates of the weights before this attempt's first step

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[None]:
        """A context around each training step that measures the first step after an update of this attempt. Collective.

        The first update allocates the optimizer's states and the allocator's first blocks; fp16 may skip steps before
        it. The figures are gathered and stored on rank 0.
        """
        updates = self.composed.engine.global_steps - self.composed.engine.skipped_steps
        if self._updates is None:
            self._updates = updates
        if self._done or updates == self._updates:
            yield
            return
        on_gpu = self.context.device.type == "cuda"
        if on_gpu:
            forget_peak_memory(self.context.device)
        with watching_model_states(self.composed.engine) as states, watching_activations(self.composed.model) as saved:
            yield
        forget_allocations(self.context.device)
        if states.bytes is None:  # no rank has updated anything: the gradient is not finite
            return
        self._done = True
        held = {name: getattr(states.bytes, name) for name in _MODEL_STATES_AND_HOST}
        if self.kept_beside is not None:
            offloaded = self.context.layout.offload != "none"
            held["host" if offloaded else "optimizer_states"] += self.kept_beside.bytes
        if saved.bytes is not None:
            held["activations"] = saved.bytes
        if on_gpu:
            held["allocated"] = torch.cuda.max_memory_allocated(self.context.device)
            held["reserved"] = torch.cuda.max_memory_reserved(self.context.device)
        gathered = self.context.consensus.gather((self.mesh.pipeline.rank, held))
        if gathered is not None:
            self._store(step, gathered)

    def _store(self, step: int, gathered: list[tuple[int, dict[str, int]]]) -> None:
        planned = self.context.record.plan.memory.by_stage
        measured = Measured(
            attempt=self.context.attempt,
            step=step,
            ranks=len(gathered),
            device=self.context.device.type,
            worst=max(range(len(planned)), key=lambda stage: planned[stage].peak),
            stages=tuple(
                self._figures(step, stage, [held for at, held in gathered if at == stage])
                for stage in range(len(planned))
            ),
        )
        states = measured.model_states
        with contextlib.suppress(OSError):  # a full disk loses the figures and does not stop the run
            write_measured(self.context.run, measured)
        sizes = {"model_states": states.measured, "planned": states.planned}
        self.context.report("measured", step=step, attempt=self.context.attempt, **sizes)

    def _figures(self, step: int, stage: int, ranks: list[dict[str, int]]) -> StageFigures:
        planned = _planned(
            self.context.spec, self.context.layout, step, stage, self.context.record.plan.memory.by_stage[stage]
        )
        worst = {name: max(held[name] for held in ranks) for name in ranks[0]}
        return StageFigures(
            stage, {name: Figure(planned[name], size) for name, size in worst.items() if size or planned[name]}
        )


def _planned(spec: RunSpec, layout: Layout, step: int, stage: int, memory: StageMemory) -> dict[str, Any]:
    """Return the planned bytes of a pipeline stage at a step; ``memory`` is for the steps that need most."""
    if not isinstance(spec.model, ModelSpec):
        trained = trained_at(spec, step)
        changing = {} if trained is None else vision_states(spec, layout, trained)._asdict()
        saved_bytes = saved_llava_bytes if isinstance(spec.model, LlavaSpec) else saved_vision_bytes
        saved = saved_bytes(spec, layout, find_accelerator(spec.cluster), step)
        return vars(memory) | changing | {"activations": saved, "host": 0}
    held = next(candidate for candidate in stages_in(spec, layout) if candidate.position == stage)
    states, host = engine_states(spec, layout, held, trained=stage_of_step(spec, step))
    changing = states._asdict() if len(trained_stages(spec)) > 1 else {}
    return (
        vars(memory)
        | changing
        | {
            "activations": saved_activation_bytes(spec, layout, find_accelerator(spec.cluster), stage, step),
            "host": host,  # without offloaded activations, which are not counted
        }
    )
