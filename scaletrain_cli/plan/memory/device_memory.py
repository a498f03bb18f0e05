"""Peak bytes per rank and pipeline stage against the device, and the probability of running out of memory.

``plan_memory`` is the entry. It sizes each stage by the framework's ``stage_memory``.

The ratio of needed to estimated bytes is modeled as log-normal, with a median of 1 and the framework's
``estimate_spread``. Usable share and spread of nanotron are calibrated on the Ultra-Scale sweep; either half of its
panels gives the same values. Of its runs estimated at 0.85 of the device's memory a quarter ran out of memory, at 0.9
six of ten, at 0.95 three of four, and above 1.15 all. Runs fail before the estimate reaches 1 because the fullest of
many ranks decides, and because NCCL and the allocator need memory. A few percent of much smaller runs failed too, for
other reasons. Nothing comparable is published for other frameworks.
"""

import math

from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.frameworks.base import Framework
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.result import Layout, Memory, StageMemory
from scaletrain_cli.plan.stages import first_alike
from scaletrain_cli.plan.trained_parameters import names_what_trains
from scaletrain_cli.spec import RunSpec

# A layout that fits is called tight above this probability of running out of memory.
_TIGHT = 0.1


def usable_bytes(framework: Framework, device_bytes: int, is_cpu: bool = False) -> int:
    """Return the bytes of a device that one process can use, including its CUDA context."""
    return device_bytes if is_cpu else int(framework.usable_memory * device_bytes)


def out_of_memory_probability(framework: Framework, peak: int, capacity: int) -> float:
    """Return the probability of running out of memory, rounded to 1e-4; 0.5 if the peak equals the capacity.

    It is the normal distribution function of log(peak / capacity) / estimate_spread.
    """
    if peak <= 0:
        return 0.0
    distance = math.log(peak / max(capacity, 1)) / framework.estimate_spread
    return round(0.5 * math.erfc(-distance / math.sqrt(2)), 4)


def comfortable_bytes(framework: Framework, device: Accelerator) -> int:
    """Return the largest peak in bytes whose verdict on a device is ``fits``, by bisection."""
    capacity = usable_bytes(framework, device.memory_bytes, device.is_cpu)
    low, high = 0, capacity + 1
    while high - low > 1:
        middle = (low + high) // 2
        probability = out_of_memory_probability(framework, middle, capacity)
        low, high = (middle, high) if verdict(True, probability) == "fits" else (low, middle)
    return low


def verdict(fits: bool, probability: float) -> str:
    """Return ``fits``, ``tight`` or ``does not fit``."""
    if not fits:
        return "does not fit"
    return "tight" if probability > _TIGHT else "fits"


def plan_memory(
    spec: RunSpec, layout: Layout, device: Accelerator, framework: Framework | None = None, *, every_stage: bool = True
) -> Memory:
    """Return the memory of the worst rank against the device, and of each pipeline stage.

    ``framework``: None for the one that ``planner.framework`` names. ``every_stage=False`` leaves out stages that
    cannot be the worst: of equal stages the first has the most micro-batches in flight (1F1B, arXiv:2104.04473, section
    2.2).
    """
    framework = framework or framework_of(spec)
    size = framework.stage_memory(spec, layout, device)
    held = framework.pipeline_stages(spec.transformer, layout.pipeline_parallel, layout.pipeline_split)
    if not every_stage and has_equal_blocks(spec):
        held = tuple(held[place] for place in dict.fromkeys(first_alike(held)))
    stages = tuple(map(size, held))
    return against_device(max(stages, key=lambda stage: stage.peak), stages, framework, device)


def has_equal_blocks(spec: RunSpec) -> bool:
    """Return whether two blocks need equal memory if both have experts or neither has."""
    model = spec.transformer
    return not (model.has_pattern or model.windowed_layers or names_what_trains(spec))


def against_device(
    worst: StageMemory, stages: tuple[StageMemory, ...], framework: Framework, device: Accelerator
) -> Memory:
    """Return the bytes of the fullest rank with the device's capacity, the verdict and the probability of an OOM."""
    capacity = usable_bytes(framework, device.memory_bytes, device.is_cpu)
    fits = worst.peak <= capacity
    probability = out_of_memory_probability(framework, worst.peak, capacity)
    return Memory(
        **{**vars(worst), "cached": max(worst.peak, min(worst.cached, capacity))},
        capacity=capacity,
        fits=fits,
        by_stage=stages,
        verdict=verdict(fits, probability),
        out_of_memory_probability=probability,
    )
