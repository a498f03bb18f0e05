"""Compose a model with the ways it is cut and run, in the one order that works: stage, tensor, sequence, weights,
activation checkpointing, compile, DeepSpeed. Knows no data and no training loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scaletrain_cli.engine.deepspeed_engine import (
    ModelParallelUnit,
    deepspeed_config,
    prepare_deepspeed,
    start_deepspeed,
)
from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.causal_lm import CausalLM
from scaletrain_cli.engine.model.recompute import recompute_activations
from scaletrain_cli.engine.optimization.optimizers import build_optimizer
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.engine.parallel.pipeline import PipelineStage, keep_stage, pipeline_module
from scaletrain_cli.engine.parallel.sequence import attend_over_sequence_ranks
from scaletrain_cli.engine.parallel.tensor import cut_over_tensor_ranks
from scaletrain_cli.engine.weights.initialise import ScaledInitialisation
from scaletrain_cli.engine.weights.materialise import materialise, zero3_partition
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.spec import RunSpec


@dataclass(frozen=True)
class Composed:
    """What trains: this rank's part of the model, DeepSpeed's engine around it, and the optimizer inside that."""

    model: CausalLM
    engine: Any
    optimizer: torch.optim.Optimizer
    stage: PipelineStage | None  # with a pipeline


def compose(spec: RunSpec, layout: Layout, mesh: Mesh, device: torch.device, swap_folder: Path) -> Composed:
    """Build this rank's part of the model and start DeepSpeed around it. Collective.

    ``swap_folder``: on a disk of the node, for what NVMe offload takes off the device.
    """
    prepare_deepspeed(device)
    model = outline(spec.transformer)
    keep_stage(model, mesh.pipeline)
    cut_over_tensor_ranks(model, mesh.tensor)
    attend_over_sequence_ranks(model, mesh.sequence)
    unit = ModelParallelUnit.of(mesh)
    config = deepspeed_config(spec, layout, sum(parameter.numel() for parameter in model.parameters()), swap_folder)
    partition = zero3_partition(config, unit, _forward_dtype(spec)) if layout.zero_stage == 3 else None
    materialise(model, _weights(spec, model, device), device, partition)
    recompute_activations(model, spec.layout, layout.activation_checkpointing, pin_memory=device.type == "cuda")
    if spec.training.compile:
        for block in model.blocks.values():  # each compiles once and serves all; the head's tied weight stays outside
            block.compile()
    stage = None
    if layout.pipeline_parallel > 1:
        stage = PipelineStage(model, mesh.pipeline)
    module = model if stage is None else pipeline_module(stage, mesh)
    optimizer = build_optimizer(spec, model, layout, device)
    engine = start_deepspeed(config, module, optimizer, unit)
    return Composed(model, engine, optimizer, stage)


def _weights(spec: RunSpec, model: CausalLM, device: torch.device) -> ScaledInitialisation:
    own = spec.transformer
    return ScaledInitialisation(
        spec.training.seed, own.initializer_range, own.num_hidden_layers, model.residual_projections, device
    )


def _forward_dtype(spec: RunSpec) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}.get(
        spec.training.precision, torch.float32
    )
