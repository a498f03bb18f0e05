"""Why a run cannot be laid out, in numbers, and what would make it fit, computed. Raises; decides nothing itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scaletrain_cli.errors import InfeasibleError, Problem
from scaletrain_cli.plan.estimate import plan_memory
from scaletrain_cli.plan.hardware import Accelerator, accelerator_names, find_accelerator
from scaletrain_cli.plan.layouts import (
    CHECKPOINTING,
    build_layout,
    checkpointing_modes,
    division_problems,
    divisors,
    micro_batch_sizes,
    resolve_axes,
    zero_stages,
)
from scaletrain_cli.plan.result import Layout, Memory, RunPlan
from scaletrain_cli.spec import RunSpec

_MOST_GPUS = 100_000


class PlanInfeasibleError(InfeasibleError):
    """No layout divides or fits (exit 3). ``plan`` is the smallest one sized, with ``fits`` false; None if none was."""

    def __init__(self, message: str, problems: tuple[Problem, ...] = (), plan: RunPlan | None = None) -> None:
        super().__init__(message, problems)
        self.plan = plan


def does_not_divide(spec: RunSpec, problems: list[Problem]) -> PlanInfeasibleError:
    """The error for degrees and batches that do not divide."""
    return PlanInfeasibleError(f"{_shown(spec.name)} cannot be laid out on {_gpus(spec)}", tuple(problems))


def does_not_fit(spec: RunSpec, device: Accelerator, plan: RunPlan) -> PlanInfeasibleError:
    """The error for a smallest layout that is too large: its parts against the device, and the ways out."""
    memory, layout = plan.memory, plan.layout
    parts = (
        ("weights", memory.parameters),
        ("gradients", memory.gradients),
        ("optimizer states", memory.optimizer_states),
        ("activations", memory.activations),
        ("logits and loss", memory.logits),
        ("communication buffers", memory.communication_buffers),
        ("framework", memory.framework),
        ("fragmentation", memory.fragmentation),
    )
    listed = " + ".join(f"{name} {_gb(size)}" for name, size in parts if size)
    problems = [
        Problem("needed", "memory", f"{listed} = {_gb(memory.peak)}; {device.name} has {_gb(memory.capacity)}."),
        Problem("smallest", "layout", f"{_layout(layout)}."),
        *ways_out(spec, device),
    ]
    return PlanInfeasibleError(
        f"{_shown(spec.name)} does not fit on {_gpus(spec)}: the smallest layout needs {_gb(memory.peak)} per rank "
        f"and a rank has {_gb(memory.capacity)}",
        tuple(problems),
        plan,
    )


def ways_out(spec: RunSpec, device: Accelerator) -> list[Problem]:
    """Changes that make the run fit, each computed: one setting, all settings, more GPUs, larger GPUs."""
    found = []
    for key, value in _single_changes(spec):
        sized = smallest_memory(_changed(spec, key, value), device)
        if sized and sized[1].fits:
            found.append(_would_fit(key, str(value), sized))
    relaxed = spec
    for key in ("layout.zero_stage", "layout.activation_checkpointing", "training.micro_batch_size"):
        relaxed = _changed(relaxed, key, "auto")
    if not found:
        sized = smallest_memory(relaxed, device)
        if sized and sized[1].fits:
            found.append(_would_fit("layout", _layout(sized[0]), sized))
    more = _fewest_gpus(relaxed, device)
    if more:
        gpus, sized = more
        found.append(_would_fit("cluster", f"{gpus} x {device.name}", sized))
    larger = _larger_device(relaxed, device)
    if larger:
        name, sized = larger
        found.append(_would_fit("cluster.gpu", name, sized))
    if not found:
        hint = "Use a smaller model or a shorter seq_len."
        found.append(Problem("no way out", "model", "more or larger GPUs do not make it fit.", None, hint))
    return found


def smallest_memory(spec: RunSpec, device: Accelerator) -> tuple[Layout, Memory] | None:
    """The layout with the least memory that the spec allows; None where nothing divides."""
    axes = resolve_axes(spec)
    if division_problems(spec, axes):
        return None
    micro_batch = micro_batch_sizes(spec, axes)[0]
    layouts = (
        build_layout(spec, axes, stage, checkpointing, micro_batch)
        for stage in zero_stages(spec, axes)
        for checkpointing in checkpointing_modes(spec)
    )
    sized = ((layout, plan_memory(spec, layout, device)) for layout in layouts)
    return min(sized, key=lambda pair: pair[1].peak)


def _single_changes(spec: RunSpec) -> Iterator[tuple[str, Any]]:
    if spec.training.micro_batch_size != "auto":
        for size in reversed(divisors(spec.training.micro_batch_size)[:-1]):
            yield "training.micro_batch_size", size
    if spec.layout.activation_checkpointing not in ("auto", "full"):
        for mode in CHECKPOINTING[CHECKPOINTING.index(spec.layout.activation_checkpointing) + 1 :]:
            yield "layout.activation_checkpointing", mode
    if spec.layout.zero_stage != "auto":
        for stage in range(spec.layout.zero_stage + 1, 4):
            yield "layout.zero_stage", stage
    if spec.training.precision in ("fp32", "tf32"):
        yield "training.precision", "bf16"
    elif spec.training.grad_dtype == "fp32":
        yield "training.grad_dtype", "bf16"


def _fewest_gpus(spec: RunSpec, device: Accelerator) -> tuple[int, tuple[Layout, Memory]] | None:
    """The smallest larger cluster of whole nodes over which the batch divides and a rank fits."""
    axes, per_node = resolve_axes(spec), spec.cluster.gpus_per_node
    spec = _changed(spec, "layout.data_parallel", "auto")
    counts = [
        data * axes.model_parallel
        for data in divisors(spec.training.global_batch_size)
        if spec.world_size < data * axes.model_parallel <= _MOST_GPUS and data * axes.model_parallel % per_node == 0
    ]

    def sized(gpus: int) -> tuple[Layout, Memory] | None:
        return smallest_memory(_changed(spec, "cluster.nodes", gpus // per_node), device)

    low, high = 0, len(counts)
    while low < high:  # memory per rank falls with the number of ranks
        middle = (low + high) // 2
        found = sized(counts[middle])
        low, high = (low, middle) if found and found[1].fits else (middle + 1, high)
    found = sized(counts[low]) if low < len(counts) else None
    return (counts[low], found) if found and found[1].fits else None


def _larger_device(spec: RunSpec, device: Accelerator) -> tuple[str, tuple[Layout, Memory]] | None:
    names = [name for name in accelerator_names() if name != "cpu"]
    devices = (find_accelerator(spec.cluster.model_copy(update={"gpu": name})) for name in names)
    for larger in sorted(devices, key=lambda d: (d.memory_bytes, d.name)):
        if larger.memory_bytes > device.memory_bytes and not device.is_cpu:
            sized = smallest_memory(spec, larger)
            if sized and sized[1].fits:
                return larger.name, sized
    return None


def _changed(spec: RunSpec, key: str, value: Any) -> RunSpec:
    section, field = key.split(".")
    return spec.model_copy(update={section: getattr(spec, section).model_copy(update={field: value})})


def _would_fit(key: str, value: str, sized: tuple[Layout, Memory]) -> Problem:
    layout, memory = sized
    return Problem("would fit", key, f"needs {_gb(memory.peak)} of {_gb(memory.capacity)} ({_layout(layout)}).", value)


def _layout(layout: Layout) -> str:
    return (
        f"ZeRO-{layout.zero_stage}, data parallel {layout.data_parallel}, micro-batch {layout.micro_batch_size}, "
        f"activation checkpointing {layout.activation_checkpointing}"
    )


def _gpus(spec: RunSpec) -> str:
    name = spec.cluster.gpu if isinstance(spec.cluster.gpu, str) else spec.cluster.gpu.name
    return f"{spec.cluster.nodes} x {spec.cluster.gpus_per_node} {_shown(name)}"


def _shown(text: str) -> str:
    return text.encode("unicode_escape").decode("ascii")[:80]


def _gb(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"
