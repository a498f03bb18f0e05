"""Peak bytes per rank and pipeline stage, from model states, activations and buffers. Knows no time and no search.

A training step has few moments that can be its peak; the parts reported are those of the worst one, so they add up:
the loss (all activations saved, logits alive), one block's backward, and the optimizer step (no activations).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from scaletrain_cli.plan.architecture import Architecture, architecture
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.memory.engine_memory import engine_stage
from scaletrain_cli.plan.memory.framework_memory import FRAMEWORK_MEMORY
from scaletrain_cli.plan.memory.framework_stage_memory import framework_stages
from scaletrain_cli.plan.memory.out_of_memory import out_of_memory_probability, usable_bytes, verdict
from scaletrain_cli.plan.result import Layout, Memory, StageMemory
from scaletrain_cli.plan.stages import Stage, pipeline_stages
from scaletrain_cli.spec import ModelSpec, RunSpec


def plan_memory(spec: RunSpec, layout: Layout, device: Accelerator) -> Memory:
    """Memory of the worst rank against the device, and of each pipeline stage."""
    whole = _architecture(spec.transformer, layout.tensor_parallel, layout.expert_parallel)
    framework = spec.planner.framework
    size: Callable[[Stage], StageMemory]
    if framework in FRAMEWORK_MEMORY:
        size = framework_stages(spec, layout, device, whole)
    else:
        size = engine_stage(spec, layout, device, whole)
    stages = tuple(map(size, pipeline_stages(spec, layout.pipeline_parallel)))
    worst = max(stages, key=lambda stage: stage.peak)
    return against_device(worst, stages, framework, device)


def against_device(worst: StageMemory, stages: tuple[StageMemory, ...], framework: str, device: Accelerator) -> Memory:
    """The verdict on the fullest rank, and the stages."""
    capacity = usable_bytes(framework, device.memory_bytes, device.is_cpu)
    fits = worst.peak <= capacity
    probability = out_of_memory_probability(framework, worst.peak, capacity)
    return Memory(
        **vars(worst),
        capacity=capacity,
        fits=fits,
        by_stage=stages,
        verdict=verdict(fits, probability),
        out_of_memory_probability=probability,
    )


@lru_cache(maxsize=1024)
def _architecture(model: ModelSpec, tensor: int, expert: int) -> Architecture:
    return architecture(model, tensor, expert)
