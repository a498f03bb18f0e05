"""Change what trains during a run: at a step boundary the engine is built again around the same weights.

DeepSpeed fixes the trained parameters when it starts. The fp32 weights and the moments of parameters that go on are
kept by name in host memory; parameters that begin to train have no moments and a step count of 0; those that stop keep
their weights in the dtype of the forward pass.
"""

import gc
from dataclasses import dataclass
from pathlib import Path

import torch

from scaletrain_cli.engine.checkpoint.checkpointing import Checkpointer
from scaletrain_cli.engine.checkpoint.snapshot import random_state, restore_random_state
from scaletrain_cli.engine.compose import Composed, compose
from scaletrain_cli.engine.context import RankContext
from scaletrain_cli.engine.health.stragglers import Stragglers
from scaletrain_cli.engine.model.materialization import WeightsOfModel
from scaletrain_cli.engine.optim.optimizers import set_rates
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.engine.step import Stepper
from scaletrain_cli.plan.trained_parameters import Stage, trained_at


@dataclass
class StageSwitch:
    """Keeps the engine in the stage of the run. Methods are collective."""

    context: RankContext
    mesh: Mesh
    composed: Composed
    stepper: Stepper
    checkpointer: Checkpointer
    stragglers: Stragglers
    swap_folder: Path
    stage: Stage | None

    def enter(self, step: int, rate: float) -> None:
        """Prepare to train a step (1-based) with this scheduled learning rate."""
        if self.is_due(step):
            held = self.checkpointer.state_in_memory()
            generators = random_state(self.context.device)
            self._build(step)
            self.checkpointer.restore_from_memory(held)
            restore_random_state(generators, self.context.device)
        set_rates(self.composed.optimizer, step, rate)

    def is_due(self, step: int) -> bool:
        """Return True if this step is trained by another engine than the present one."""
        return self.stage is not None and not self.stage.first_step <= max(1, step) <= self.stage.last_step

    def summary(self) -> dict[str, int]:
        """Return the last step of the stage and the number of tensors that train in it, for an event."""
        assert self.stage is not None
        return {"last_step": self.stage.last_step, "tensors": len(self.stage.since)}

    def prepare_restore(self, step: int) -> None:
        """Build the engine that trained a step, if it is another one; its state is still to be restored."""
        if self.is_due(step):
            self.checkpointer.finish()
            self._build(step)

    def _build(self, step: int) -> None:
        """Replace the engine by that of another stage, with the present weights in the dtype of the forward pass."""
        self.stage = trained_at(self.context.spec, step)
        weights, composed, objective = WeightsOfModel(self.composed.model), self.composed, self.composed.objective
        # Stage 3 is referred to by parameters and hooks that are never collected.
        wrapper = composed.engine.optimizer
        composed.engine.destroy()
        for holder in (getattr(wrapper, "optimizer", None), wrapper, composed.engine):
            if holder is not None:
                vars(holder).clear()
        composed.engine = composed.optimizer = composed.stage = composed.model = None  # type: ignore[assignment]
        # The training loop has excluded older objects from collection.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        spec, layout, device = self.context.spec, self.context.layout, self.context.device
        built = compose(
            spec, layout, self.mesh, device, swap_folder=self.swap_folder, trained=self.stage, source=weights
        )
        built.objective.continue_from(objective)
        vars(composed).update(vars(built))  # all parts of the run hold this object
        self.stepper.engine_was_built()
        self.checkpointer.engine_was_built()
        self.stragglers.watch(composed.engine, self.context.layout)
