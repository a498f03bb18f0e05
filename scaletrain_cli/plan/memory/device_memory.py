"""Peak bytes per rank and pipeline stage, from model states, activations and buffers. Knows no time and no search.

A training step has few moments that can be its peak; the parts reported are those of the worst one, so they add up:
the loss (all activations saved, logits alive), one block's backward, and the optimizer step (no activations).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from scaletrain_cli.plan.architecture import Architecture, architecture
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.memory.engine_memory import engine_stage
from scaletrain_cli.plan.memory.framework_memory import FRAMEWORK_MEMORY
from scaletrain_cli.plan.memory.framework_stages import framework_stages
from scaletrain_cli.plan.result import Layout, Memory, StageMemory
from scaletrain_cli.plan.stages import Stage, pipeline_stages
from scaletrain_cli.spec import ModelSpec, RunSpec

# What a framework can use of a device, and how likely a layout is to run out of it.


# Share of the device that a run can fill. Without measured crashes: a margin for NCCL and fragmentation; our own
# engine's is in its parts.
_USABLE = {"nanotron": 0.91, "megatron": 0.95, "fsdp": 0.95, "deepspeed": 1.0}
# Standard deviation of the logarithm: measured on crashes for nanotron; for the others what the estimates miss the
# peaks of Megatron-LM's tests and of torchtitan's runs by, and for our own engine, which has no published runs, too.
SPREAD = {"nanotron": 0.12, "megatron": 0.08, "fsdp": 0.08, "deepspeed": 0.08}
# A layout more likely than this to fail is called tight.
_TIGHT = 0.1


def usable_bytes(framework: str, device_bytes: int, is_cpu: bool = False) -> int:
    """Bytes that a process can use of a device, its context included."""
    return device_bytes if is_cpu else int(_USABLE[framework] * device_bytes)


def out_of_memory_probability(framework: str, peak: int, capacity: int) -> float:
    """Between 0 and 1, rounded to 1e-4; one half where the peak is just the capacity."""
    if peak <= 0:
        return 0.0
    distance = math.log(peak / max(capacity, 1)) / SPREAD[framework]
    return round(0.5 * math.erfc(-distance / math.sqrt(2)), 4)


def verdict(fits: bool, probability: float) -> str:
    """``fits``, ``tight`` or ``does not fit``."""
    if not fits:
        return "does not fit"
    return "tight" if probability > _TIGHT else "fits"


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
