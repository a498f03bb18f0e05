"""Peak bytes per rank and pipeline stage against the device, and the probability of running out.

The ratio of needed to estimated bytes is taken as log-normal, with a median of one and the spread of the framework.
Usable share and spread are calibrated on the Ultra-Scale sweep (nanotron), and halves of its panels give the same: of
runs estimated at 0.85 of the device a quarter crashed, at 0.9 six of ten, at 0.95 three of four, beyond 1.15 all. Runs
crash before the memory is full, because the fullest of many ranks is decisive, and NCCL and the allocator need memory;
a few percent of smaller runs crashed too, for other reasons. Nothing comparable is published for other frameworks.
"""

from __future__ import annotations

import math
from functools import lru_cache

from scaletrain_cli.plan.architecture import Architecture, architecture
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.frameworks.base import Framework
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.result import Layout, Memory, StageMemory
from scaletrain_cli.spec import ModelSpec, RunSpec

# A layout with a higher probability of running out of memory is called tight.
_TIGHT = 0.1


def usable_bytes(framework: Framework, device_bytes: int, is_cpu: bool = False) -> int:
    """Return the bytes that a process can use of a device, its context included."""
    return device_bytes if is_cpu else int(framework.usable_memory * device_bytes)


def out_of_memory_probability(framework: Framework, peak: int, capacity: int) -> float:
    """Return the probability of running out of memory, rounded to 1e-4; 0.5 where the peak is the capacity."""
    if peak <= 0:
        return 0.0
    distance = math.log(peak / max(capacity, 1)) / framework.estimate_spread
    return round(0.5 * math.erfc(-distance / math.sqrt(2)), 4)


def verdict(fits: bool, probability: float) -> str:
    """Return ``fits``, ``tight`` or ``does not fit``."""
    if not fits:
        return "does not fit"
    return "tight" if probability > _TIGHT else "fits"


def plan_memory(spec: RunSpec, layout: Layout, device: Accelerator) -> Memory:
    """Return the memory of the worst rank against the device, and of each pipeline stage."""
    whole = _architecture(spec.transformer, layout.tensor_parallel, layout.expert_parallel)
    framework = framework_of(spec)
    size = framework.stage_memory(spec, layout, device, whole)
    stages = tuple(map(size, framework.pipeline_stages(spec, layout.pipeline_parallel)))
    worst = max(stages, key=lambda stage: stage.peak)
    return against_device(worst, stages, framework, device)


def against_device(
    worst: StageMemory, stages: tuple[StageMemory, ...], framework: Framework, device: Accelerator
) -> Memory:
    """Return the fullest rank against the device: capacity, verdict and probability of running out."""
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
