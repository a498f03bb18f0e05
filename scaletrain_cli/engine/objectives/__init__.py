"""Training objectives: what a batch holds, and how it becomes a loss and measures. One registry, ``OBJECTIVES``."""

from __future__ import annotations

from scaletrain_cli.engine.objectives.base import Objective
from scaletrain_cli.engine.objectives.dpo import DPO
from scaletrain_cli.engine.objectives.next_token import NextToken
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.spec import TrainingSpec

# Names of training.objective. sft has the loss of causal_lm: which tokens count, and how much, is in its rows.
OBJECTIVES: dict[str, type[Objective]] = {"causal_lm": NextToken, "sft": NextToken, "dpo": DPO}


def build_objective(training: TrainingSpec, mesh: Mesh) -> Objective:
    """Return the objective of the run."""
    return OBJECTIVES[training.objective](training, mesh)
