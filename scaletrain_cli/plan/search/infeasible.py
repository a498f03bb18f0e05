"""Errors for runs that no layout fits or divides, and the changes that would make them fit."""

from collections.abc import Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any

from scaletrain_cli.errors import InfeasibleError, Problem
from scaletrain_cli.plan.axes import CHECKPOINTING, Axes, divisors, resolve_axes
from scaletrain_cli.plan.catalogue.hardware import Accelerator, accelerator_names, find_accelerator
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.result import SCHEMA, Layout, RunPlan
from scaletrain_cli.plan.search.engine_support import capabilities, searches_engine, unsupported
from scaletrain_cli.plan.search.layout_search import Sized
from scaletrain_cli.plan.search.layouts import build_layout, describe
from scaletrain_cli.plan.search.least_memory import smallest_memory, splits_by_memory
from scaletrain_cli.plan.search.search_space import RejectionCounts, degrees_to_try
from scaletrain_cli.plan.workloads.registry import workload_of
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.text import bytes_text

_MOST_GPUS = 100_000


def suggestions(spec: RunSpec, layout: Layout) -> list[Problem]:
    """Return changes that make the run fit: one or more settings, context ranks, more GPUs, larger GPUs.

    ``layout``: the smallest one of the spec, which does not fit.
    """
    device = find_accelerator(spec.cluster)
    problems = []
    for key, value in _single_changes(spec):
        changed = _changed(spec, key, value)
        sized = smallest_memory(changed, device)
        if not (sized and sized.memory.fits) and not spec.layout.pipeline_split:
            changed, sized = next(splits_by_memory(changed, device), (changed, None))
        if sized and sized.memory.fits and not _is_refused(spec, layout, changed, sized.layout):
            problems.append(_would_fit(changed, device, key, str(value), sized))
    if spec.layout.pipeline_split:
        for changed, sized in islice(splits_by_memory(spec, device), 1):
            split = list(changed.layout.pipeline_split)
            problems.append(_would_fit(changed, device, "layout.pipeline_split", str(split), sized))
    relaxed, freed = spec, list[str]()
    keys = ("layout.data_parallel", "layout.zero_stage", "layout.activation_checkpointing", "training.micro_batch_size")
    for key in keys:
        if attrgetter(key)(spec) != "auto":
            relaxed, freed = _changed(relaxed, key, "auto"), [*freed, key]
    least = smallest_memory(relaxed, device)
    fitting = least if least and least.memory.fits else next(splits_by_memory(relaxed, device), (relaxed, None))[1]
    if not problems and fitting:
        problems.append(_would_fit(relaxed, device, "layout", describe(fitting.layout), fitting))
    fits_here = bool(problems)
    for ways in (_context_ranks, _fewest_gpus, _larger_device):
        more = list(ways(spec, device))
        # Where settings could be freed on this cluster, another one with them freed is no advice.
        if not more and freed and not fits_here:
            for problem in ways(relaxed, device):
                reason = Reason("plan.with-settings-freed", {"cause": problem.reason, "keys": freed})
                more.append(Problem.because(problem.where, problem.key, reason, problem.given))
        problems += more
    if not problems:
        problems.append(Problem.because("no change helps", "model", Reason("plan.nothing-fits")))
    return problems


def _single_changes(spec: RunSpec) -> Iterator[tuple[str, Any]]:
    if spec.training.micro_batch_size != "auto":
        for size in reversed(divisors(spec.training.micro_batch_size)[:-1]):
            yield "training.micro_batch_size", size
    if spec.layout.activation_checkpointing not in ("auto", "full"):
        for mode in CHECKPOINTING[CHECKPOINTING.index(spec.layout.activation_checkpointing) + 1 :]:
            if mode in workload_of(spec.model).checkpointing:
                yield "layout.activation_checkpointing", mode
    if spec.layout.zero_stage != "auto":
        for stage in range(spec.layout.zero_stage + 1, 4):
            yield "layout.zero_stage", stage
    if spec.layout.offload == "none":
        for offload in capabilities(spec).offload[1:]:
            yield "layout.offload", offload
    if framework_of(spec).is_engine and not spec.layout.activation_offload:
        yield "layout.activation_offload", True
    if spec.training.precision in ("fp32", "tf32"):
        yield "training.precision", "bf16"
    elif spec.training.grad_dtype == "fp32":
        yield "training.grad_dtype", "fp16" if spec.training.precision == "fp16" else "bf16"


def _is_refused(spec: RunSpec, layout: Layout, changed: RunSpec, other: Layout) -> bool:
    """Return whether the engine cannot run the changed spec for a reason that it has not against the spec itself."""
    before, after = ({rule.code for rule in unsupported(*run)} for run in ((spec, layout), (changed, other)))
    return searches_engine(spec) and not after <= before


def _context_ranks(spec: RunSpec, device: Accelerator) -> Iterator[Problem]:
    """Yield the lowest degree of context parallelism with which the run would fit; the search leaves it at 1."""
    key, auto = "layout.context_parallel", spec.with_changes("layout", context_parallel="auto")
    if spec.layout.context_parallel != 1 or "context_parallel" not in capabilities(spec).axes:
        return
    for degree in degrees_to_try(auto, "context_parallel", RejectionCounts())[1:]:
        changed = _changed(spec, key, degree)
        sized = smallest_memory(changed, device)
        if sized and sized.memory.fits and not any(rule.key == key for rule in unsupported(changed, sized.layout)):
            yield _would_fit(changed, device, key, str(degree), sized)
            break


def _fewest_gpus(spec: RunSpec, device: Accelerator) -> Iterator[Problem]:
    """Yield the smallest larger cluster over which the batch divides and on which the run fits."""
    split, per_node = resolve_axes(spec).model_parallel, spec.cluster.gpus_per_node
    counts = [
        data * split
        for data in divisors(spec.training.global_batch_size)
        if spec.world_size < data * split <= _MOST_GPUS and data * split % per_node == 0
    ]

    def sized(gpus: int) -> Sized | None:
        return smallest_memory(spec.with_changes("cluster", nodes=gpus // per_node), device)

    low, high = 0, len(counts)
    while low < high:  # binary search: memory per rank decreases with the number of ranks
        middle = (low + high) // 2
        smallest = sized(counts[middle])
        low, high = (low, middle) if smallest and smallest.memory.fits else (middle + 1, high)
    smallest = sized(counts[low]) if low < len(counts) else None
    if smallest and smallest.memory.fits:
        larger = spec.with_changes("cluster", nodes=counts[low] // per_node)
        yield _would_fit(larger, device, "cluster", f"{counts[low]} x {device.name}", smallest)


def _larger_device(spec: RunSpec, device: Accelerator) -> Iterator[Problem]:
    """Yield the GPU of the catalogue with the least memory on which the smallest layout fits."""
    least = smallest_memory(spec, device)
    if least is None or device.is_cpu:
        return
    small, precision = least.layout, spec.training.precision
    changes = [spec.with_changes("cluster", gpu=name) for name in accelerator_names() if name != "cpu"]
    devices = ((find_accelerator(changed.cluster), changed) for changed in changes)
    for larger, changed in sorted(devices, key=lambda pair: (pair[0].memory_bytes, pair[0].name)):
        if larger.memory_bytes > device.memory_bytes and (precision in larger.flops or precision not in device.flops):
            # Compilation and the kernel of the cross-entropy may be others on that GPU.
            modes = (small.zero_stage, small.activation_checkpointing, small.micro_batch_size, small.offload)
            layout = build_layout(changed, Axes.of(small), *modes)
            memory = workload_of(spec.model).memory(changed, layout, larger)
            if memory.fits and not _is_refused(spec, small, changed, layout):
                yield _would_fit(changed, larger, "cluster.gpu", larger.name, Sized(layout, memory))
                return


def _changed(spec: RunSpec, key: str, value: Any) -> RunSpec:
    section, field = key.split(".")
    return spec.with_changes(section, **{field: value})


def _would_fit(spec: RunSpec, device: Accelerator, key: str, value: str, sized: Sized) -> Problem:
    """Return the problem entry of a change, with the memory and step time that it leads to."""
    memory, step = sized.memory, workload_of(spec.model).time(spec, sized.layout, device)[0].step
    params = {"key": key, "value": value, "peak": memory.peak, "capacity": memory.capacity, "step": step}
    reason = Reason("plan.would-fit", {**params, "layout": describe(sized.layout)})
    return Problem.because("would fit", key, reason, value)


class PlanInfeasibleError(InfeasibleError):
    """No layout divides or fits (exit 3). ``plan``: the plan of the smallest layout; None if no layout divides."""

    def __init__(self, reason: Reason, problems: tuple[Problem, ...] = (), plan: RunPlan | None = None) -> None:
        super().__init__(reason, problems)
        self.plan = plan


def why_no_plan(error: PlanInfeasibleError) -> Reason:
    """Return in one reason what does not fit, or does not divide: the first problem of the error."""
    first = error.problems[0]
    what = f"{first.key} = {first.given}: {first.message}" if first.given else first.message
    cause = {"problem": None if first.reason is None else first.reason.code, "what": what.rstrip(".")}
    return Reason("plan.cluster-does-not-fit" if error.plan else "plan.cluster-does-not-divide", cause)


def infeasible_json(error: InfeasibleError) -> dict[str, Any]:
    """Return the JSON object of a run without a plan: ``feasible`` and ``problems`` as in a plan."""
    return {"schema": SCHEMA, "feasible": False, "problems": [problem.to_json() for problem in error.problems]}


def does_not_divide(spec: RunSpec, problems: list[Problem]) -> PlanInfeasibleError:
    """Return the error for a run whose degrees or batch do not divide."""
    reason = Reason("plan.no-layout-divides", {"name": _shown(spec.name), "gpus": _gpus(spec)})
    return PlanInfeasibleError(reason, tuple(problems))


def does_not_fit(
    spec: RunSpec, device: Accelerator, plan: RunPlan, changes: Sequence[Problem] = ()
) -> PlanInfeasibleError:
    """Return the error for a run whose smallest layout does not fit: its memory by part, and ``changes`` that help."""
    memory, layout = plan.memory, plan.layout
    parts = (
        ("weights", memory.parameters),
        ("gradients", memory.gradients),
        ("optimizer states", memory.optimizer_states),
        ("optimizer step", memory.step_temporaries),
        ("activations", memory.activations),
        ("logits and loss", memory.logits),
        ("communication buffers", memory.communication_buffers),
        ("framework", memory.framework),
        ("fragmentation", memory.fragmentation),
    )
    listed = " + ".join(f"{name} {bytes_text(size)}" for name, size in parts if size)
    needed = {"parts": listed, "peak": memory.peak, "device": device.name, "capacity": memory.capacity}
    problems = [
        Problem.because("needed", "memory", Reason("plan.needed-memory", needed)),
        Problem.because("smallest", "layout", Reason("plan.smallest-layout", {"layout": describe(layout)})),
        *changes,
    ]
    sizes = {"peak": memory.peak, "capacity": memory.capacity}
    reason = Reason("plan.run-does-not-fit", {"name": _shown(spec.name), "gpus": _gpus(spec), **sizes})
    return PlanInfeasibleError(reason, tuple(problems), plan)


def _gpus(spec: RunSpec) -> str:
    return f"{spec.cluster.nodes} x {spec.cluster.gpus_per_node} {_shown(spec.cluster.gpu_name)}"


def _shown(text: str) -> str:
    return text.encode("unicode_escape").decode("ascii")[:80]
