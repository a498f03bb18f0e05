"""Every layout that a search may try, in groups, and the reason for each degree that it may not. Sizes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from scaletrain_cli.plan.memory.states import weight_bytes
from scaletrain_cli.plan.search.engine_support import AXES, capabilities, engine_rules, is_ours, opened
from scaletrain_cli.plan.search.layout_rules import broken_rules
from scaletrain_cli.plan.search.layouts import (
    Axes,
    micro_batch_sizes,
    offload_modes,
    resolve_axes,
    zero_stages,
)
from scaletrain_cli.plan.search.rejections import Tally, divisors
from scaletrain_cli.spec import ModelSpec, RunSpec

# Fewer tokens than this on a rank do not fill one row of tiles of a matrix product (NVIDIA, Matrix Multiplication
# Background User's Guide: 128 x 256), so cutting a sequence further only adds traffic.
_FEWEST_TOKENS = 128
# More stages than a large machine ever used (Megatron-LM: 64, arXiv:2104.04473; GPT-MoE and Llama 3: 16).
_MOST_STAGES = 64
# Degrees tried per axis: a power of two has fewer divisors than this, and odd clusters must not take minutes.
_MOST_DEGREES = 16


class Group(NamedTuple):
    """Layouts that differ only in micro-batch, activation checkpointing and offload."""

    axes: Axes
    zero_stage: int
    offload: tuple[str, ...]
    micro_batches: tuple[int, ...]


def axes_to_try(spec: RunSpec, tally: Tally) -> list[Axes]:
    """All combinations of degrees that divide, plainest first; the others go into ``tally``, by rule."""
    spec = opened(spec)
    degrees = {axis: degrees_to_try(spec, axis, tally) for axis in AXES}
    found = []
    for axes in _combinations(spec, degrees, tally):
        rule = next(broken_rules(spec, axes), None)
        if rule is None:
            found.append(axes)
        else:
            tally.add(f"{rule.key}: {rule.message}", _spelled(axes))
    found = _runnable(spec, found, tally) if is_ours(spec) else found
    _tell_of_stages(spec, found, tally)
    return found


def _runnable(spec: RunSpec, all_axes: list[Axes], tally: Tally) -> list[Axes]:
    """Those that our engine can run; all of them where it can run none, which are then planned with a warning."""
    broken = {axes: next(engine_rules(spec, axes.tensor), None) for axes in all_axes}
    found = [axes for axes, rule in broken.items() if rule is None]
    for axes, rule in broken.items() if found else ():
        if rule is not None:
            tally.add(f"{rule.key}: {rule.message}", _spelled(axes))
    return found or all_axes


def _tell_of_stages(spec: RunSpec, all_axes: list[Axes], tally: Tally) -> None:
    """Count the ZeRO stages that zero_stages() leaves out, where the spec leaves the stage open."""
    framework = spec.planner.framework
    stages = capabilities(spec).zero_stages if spec.layout.zero_stage == "auto" else ()
    piped = [axes for axes in all_axes if axes.pipeline > 1]
    if piped:
        reason = f"zero_stage above 1: {framework} does not combine it with a pipeline"
        tally.add(reason, f"zero_stage 3, {_spelled(piped[0])}", len(piped) * sum(stage > 1 for stage in stages))
    if 0 in stages and framework == "deepspeed" and weight_bytes(spec.training.precision) == 2 and all_axes:
        reason = f"zero_stage 0: DeepSpeed has no usable one for {spec.training.precision}"
        tally.add(reason, f"zero_stage 0, {_spelled(all_axes[0])}", len(all_axes))
    flat = [axes for axes in all_axes if axes.pipeline == 1]
    if 3 in stages and framework == "deepspeed" and spec.training.precision == "fp8" and flat:
        reason = "zero_stage 3: fp8 products keep the weights that it gathers"
        tally.add(reason, f"zero_stage 3, {_spelled(flat[0])}", len(flat))


def groups(spec: RunSpec, all_axes: list[Axes]) -> Iterator[Group]:
    """All layouts, as groups."""
    allowed: dict[tuple[bool, bool], dict[int, tuple[str, ...]]] = {}  # offload by ZeRO stage, for kinds of degrees
    sizes: dict[tuple[int, int, int], tuple[int, ...]] = {}
    for axes in all_axes:
        kind = (axes.pipeline > 1, axes.shards > 1)
        if kind not in allowed:
            pairs = [(stage, mode) for mode in offload_modes(spec, axes) for stage in zero_stages(spec, axes, mode)]
            stages = sorted({stage for stage, _ in pairs})
            allowed[kind] = {stage: tuple(mode for at, mode in pairs if at == stage) for stage in stages}
        cut = (axes.data, axes.pipeline, axes.virtual)
        if cut not in sizes:
            sizes[cut] = tuple(micro_batch_sizes(spec, axes))
        micro_batches = sizes[cut]
        for stage, modes in allowed[kind].items() if micro_batches else ():
            yield Group(axes, stage, modes, micro_batches)


def degrees_to_try(spec: RunSpec, axis: str, tally: Tally) -> list[int]:
    """Degrees of one axis by themselves: the pinned one, or those that this model and cluster leave, smallest first."""
    pinned = getattr(spec.layout, axis)
    if pinned != "auto":
        return [int(pinned)]
    model, world = spec.model, spec.world_size
    if not isinstance(model, ModelSpec):
        return [1]
    if axis == "virtual_pipeline":
        wanted = divisors(model.num_hidden_layers) if model.num_hidden_layers <= 10_000 else [1]
    elif axis == "expert_parallel":
        wanted = divisors(model.num_experts) if model.num_experts else [1]
    else:
        wanted = divisors(world)
    if axis not in capabilities(spec).axes:
        tally.add(f"{axis} above 1: {_who(spec)} cannot run it", f"{axis} {max(wanted[:2])}", len(wanted[1:]))
        return [1]
    limits = {
        "tensor_parallel": (spec.cluster.gpus_per_node, f"reaches over a node of {spec.cluster.gpus_per_node} GPUs"),
        "pipeline_parallel": (
            min(_MOST_STAGES, model.num_hidden_layers),
            "more stages than layers, or than anyone ran",
        ),
        "virtual_pipeline": (model.num_hidden_layers, "more chunks than layers"),
        "sequence_parallel": (model.num_attention_heads, f"more ranks than {model.num_attention_heads} heads"),
        "context_parallel": (
            max(1, model.seq_len // _FEWEST_TOKENS),
            f"leaves a rank fewer than {_FEWEST_TOKENS} tokens of a sequence",
        ),
        "expert_parallel": (max(1, model.num_experts), "more ranks than experts"),
    }
    most, reason = limits[axis]
    for degree in wanted:
        if degree > most:
            tally.add(f"{axis}: {reason}", f"{axis} {degree}")
    kept = [degree for degree in wanted if degree <= most]
    tally.add(f"{axis}: more degrees than are tried", f"{axis} {kept[-1]}", len(kept[_MOST_DEGREES:]))
    return kept[:_MOST_DEGREES]


def _who(spec: RunSpec) -> str:
    return "this engine version" if spec.planner.framework == "deepspeed" else spec.planner.framework


def _combinations(spec: RunSpec, degrees: dict[str, list[int]], tally: Tally) -> Iterator[Axes]:
    """Those whose product divides the ranks; chunks of a pipeline only where they divide the layers."""
    world, pinned_data = spec.world_size, spec.layout.data_parallel
    layers = spec.model.num_hidden_layers if isinstance(spec.model, ModelSpec) else 1
    chunks = {pipeline: [1] for pipeline in degrees["pipeline_parallel"]}
    for pipeline in chunks:
        wanted = degrees["virtual_pipeline"]
        if spec.layout.virtual_pipeline == "auto":
            wanted = [
                virtual for virtual in wanted if virtual == 1 or (pipeline > 1 and layers % (pipeline * virtual) == 0)
            ]
            left_out = len(degrees["virtual_pipeline"]) - len(wanted)
            example = f"pipeline {pipeline} of {layers} layers"
            tally.add("virtual_pipeline: chunks do not divide the layers", example, left_out)
        chunks[pipeline] = wanted
    found = False
    for tensor in degrees["tensor_parallel"]:
        for sequence in _dividing(degrees["sequence_parallel"], world, tensor):
            for context in _dividing(degrees["context_parallel"], world, tensor * sequence):
                for pipeline in _dividing(degrees["pipeline_parallel"], world, tensor * sequence * context):
                    data = world // (tensor * sequence * context * pipeline)
                    if pinned_data not in ("auto", data):
                        continue
                    for virtual in chunks[pipeline]:
                        for expert in degrees["expert_parallel"]:
                            found = True
                            yield Axes(data, tensor, pipeline, virtual, sequence, context, expert)
    if not found:
        yield resolve_axes(spec)  # pinned degrees that make no cluster: its broken rules say why


def _dividing(degrees: Iterable[int], world: int, others: int) -> list[int]:
    return [degree for degree in degrees if world % (others * degree) == 0]


def _spelled(axes: Axes) -> str:
    return ", ".join(f"{name} {degree}" for name, degree in zip(axes._fields, axes, strict=True) if degree > 1)
