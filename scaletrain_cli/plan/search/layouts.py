"""Layouts: the values to try for each setting, the layout that they form, and the rules that degrees break."""

from collections.abc import Iterator

from scaletrain_cli.errors import Problem
from scaletrain_cli.plan.axes import Axes, Rule, divisors, nearest_divisors, offload_stage
from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.search.engine_support import capabilities
from scaletrain_cli.plan.workloads.registry import workload_of
from scaletrain_cli.spec import RunSpec

# Maximum number of micro-batch sizes to try; larger ones than the smallest few dozen are no faster.
_MOST_MICRO_BATCHES = 24
# Compiling takes about a minute at the start of each attempt; shorter runs do not benefit.
_STEPS_WORTH_COMPILING = 500
_TRITON_CAPABILITY = 8.0


def zero_stages(spec: RunSpec, axes: Axes, offload: str = "none") -> list[int]:
    """Return the ZeRO stages to try, lowest first."""
    framework, pipelined, pinned = framework_of(spec), axes.pipeline > 1, spec.layout.zero_stage
    least = framework.lowest_zero_stage(spec, pipelined)
    if pinned != "auto":
        return [max(pinned, least)] if pinned == 0 else [pinned]
    lowest = max(offload_stage(spec, offload), least)
    highest = framework.highest_zero_stage(spec, pipelined)
    stages = [stage for stage in capabilities(spec).zero_stages if lowest <= stage <= highest]
    if not stages and spec.layout.offload == offload:
        return [lowest]  # the spec sets a combination that the framework lacks; it is sized all the same
    return stages[:1] if axes.shards == 1 else stages


def checkpointing_modes(spec: RunSpec) -> list[str]:
    """Return the modes of activation checkpointing to try, the fastest first."""
    pinned = spec.layout.activation_checkpointing
    return list(workload_of(spec.model).checkpointing) if pinned == "auto" else [pinned]


def offload_modes(spec: RunSpec, axes: Axes) -> list[str]:
    """Return the offload modes to try, least first; only those that some ZeRO stage to try supports."""
    pinned = spec.layout.offload
    if pinned != "auto":
        return [pinned]
    if not workload_of(spec.model).offloads:
        return ["none"]
    return [mode for mode in capabilities(spec).offload if zero_stages(spec, axes, mode)]


def micro_batch_sizes(spec: RunSpec, axes: Axes) -> list[int]:
    """Return the micro-batch sizes that divide a rank's share of the global batch, smallest first.

    An interleaved schedule needs a multiple of the stages as number of micro-batches (Megatron-LM, schedules.py).
    """
    pinned = spec.training.micro_batch_size
    if pinned != "auto":
        return [pinned]
    per_rank = spec.training.global_batch_size // axes.data
    sizes = divisors(per_rank)[:_MOST_MICRO_BATCHES]
    if workload_of(spec.model).contrastive(spec) and sizes[-1] != per_rank:
        sizes.append(per_rank)
    multiple = workload_of(spec.model).micro_batch_multiple(spec)
    sizes = [size for size in sizes if size % multiple == 0] or sizes
    if axes.virtual > 1:
        sizes = [size for size in sizes if per_rank // size % axes.pipeline == 0]
    fewest = framework_of(spec).fewest_micro_batches(axes.pipeline)
    return [size for size in sizes if per_rank // size >= fewest]


def build_layout(
    spec: RunSpec, axes: Axes, zero_stage: int, checkpointing: str, micro_batch: int, offload: str | None = None
) -> Layout:
    """Return the layout with these degrees, which must break no rule. ``offload``: by default as in the spec."""
    if offload is None:
        offload = "none" if spec.layout.offload == "auto" else spec.layout.offload
    tokens = micro_batch * -(-spec.units_per_sample // (axes.sequence * axes.context))
    wanted, device_bytes = spec.layout.zero_shard_size or axes.shards, find_accelerator(spec.cluster).memory_bytes
    return Layout(
        world_size=spec.world_size,
        data_parallel=axes.data,
        tensor_parallel=axes.tensor,
        pipeline_parallel=axes.pipeline,
        virtual_pipeline=axes.virtual,
        sequence_parallel=axes.sequence,
        context_parallel=axes.context,
        expert_parallel=axes.expert,
        zero_stage=zero_stage,
        micro_batch_size=micro_batch,
        gradient_accumulation_steps=spec.training.global_batch_size // (axes.data * micro_batch),
        global_batch_size=spec.training.global_batch_size,
        activation_checkpointing=checkpointing,
        offload=offload,
        cross_entropy=workload_of(spec.model).cross_entropy(spec, tokens, axes.tensor, device_bytes),
        compile=chosen_compile(spec),
        local_sgd_groups=spec.training.local_sgd.groups,
        # 0: over all ranks.
        zero_shard_size=0 if zero_stage < 2 or wanted == axes.shards else wanted,
        zero_secondary_shard_size=spec.layout.zero_secondary_shard_size if zero_stage == 3 else 1,
        pipeline_split=spec.layout.pipeline_split if axes.pipeline > 1 else (),
    )


def chosen_compile(spec: RunSpec) -> bool:
    """Return whether the blocks are compiled: ``training.compile``, or for ``auto`` whether that is reliable and
    faster.

    ``auto`` compiles the dense transformers of this project's engine, in every precision but fp8, if the run is long
    enough to pay for a minute of compiling, on CUDA devices that Triton supports (compute capability 8.0 or later).
    Experts receive another number of tokens in each step, which would recompile their graphs.
    """
    wanted = spec.training.compile
    if wanted != "auto":
        return wanted
    return (
        workload_of(spec.model).compiled_by_default(spec)
        and framework_of(spec).compiles_blocks
        and spec.training.precision not in ("fp8", "fp4")
        and spec.total_steps >= _STEPS_WORTH_COMPILING
        and find_accelerator(spec.cluster).cuda_capability >= _TRITON_CAPABILITY
    )


def describe(layout: Layout) -> str:
    """Return a layout as one line: ZeRO stage, degrees above 1, micro-batch, recomputation and offload."""
    degrees = {
        "tensor": layout.tensor_parallel,
        "pipeline": layout.pipeline_parallel,
        "virtual": layout.virtual_pipeline,
        "sequence": layout.sequence_parallel,
        "context": layout.context_parallel,
        "expert": layout.expert_parallel,
    }
    groups = layout.local_sgd_groups
    parts = [f"ZeRO-{layout.zero_stage}", f"data parallel {layout.data_parallel}"]
    parts += [f"{name} parallel {degree}" for name, degree in degrees.items() if degree > 1]
    parts += [f"blocks {list(layout.pipeline_split)}"] if layout.pipeline_split else []
    parts += [f"{groups} groups of local SGD"] if groups > 1 else []
    parts += [f"micro-batch {layout.micro_batch_size}"]
    parts += [f"activation checkpointing {layout.activation_checkpointing}"]
    parts += [f"offload {layout.offload}"] if layout.offload != "none" else []
    parts += [f"cross-entropy {layout.cross_entropy}"] if layout.cross_entropy != "whole" else []
    parts += ["compiled"] if layout.compile else []
    parts += [f"sharded over {layout.zero_shard_size} ranks"] if layout.zero_shard_size else []
    size = layout.zero_secondary_shard_size
    parts += [f"second copy of weights over {size} ranks"] if size > 1 else []
    return ", ".join(parts)


def division_problems(spec: RunSpec, axes: Axes) -> list[Problem]:
    """Return a problem with valid values for each rule that these degrees break."""
    return [rule.problem(spec.where(rule.key)) for rule in broken_rules(spec, axes)]


def broken_rules(spec: RunSpec, axes: Axes) -> Iterator[Rule]:
    """Yield the rules of cluster, model, framework and batch that these degrees break."""
    if axes.data * axes.model_parallel != spec.world_size:
        yield _wrong_product(spec, axes)
    yield from workload_of(spec.model).rules(spec, axes)
    yield from framework_of(spec).rules(spec, axes)
    size = spec.layout.zero_shard_size
    if size is not None and (size == 1 or axes.shards % size):
        yield Rule("layout.zero_shard_size", size, "shard-group-divides", {"ranks": axes.shards})
    stage, offload = spec.layout.zero_stage, spec.layout.offload
    needed = 0 if offload == "auto" else offload_stage(spec, offload)
    if stage != "auto" and stage < needed:
        yield Rule("layout.zero_stage", stage, "offload-zero-stage", {"offload": offload, "needed": needed})
    batch, micro_batch = spec.training.global_batch_size, spec.training.micro_batch_size
    per_rank = batch // axes.data
    if batch % axes.data:
        fix = {"allowed": [size for size in (per_rank * axes.data, (per_rank + 1) * axes.data) if size]}
        yield Rule("training.global_batch_size", batch, "batch-multiple-of-ranks", {"ranks": axes.data}, fix)
    elif micro_batch != "auto" and per_rank % micro_batch:
        params = {"per_rank": per_rank, "batch": batch, "ranks": axes.data}
        fix = {"allowed": list(nearest_divisors(per_rank, micro_batch))}
        yield Rule("training.micro_batch_size", micro_batch, "micro-batch-divides-share", params, fix)
    yield from _group_rules(spec, axes)


def _group_rules(spec: RunSpec, axes: Axes) -> Iterator[Rule]:
    """Yield what groups of local SGD rule out: each is a run of its own with data parallelism."""
    key, groups = "training.local_sgd.groups", spec.training.local_sgd.groups
    if groups == 1:
        return
    if axes.data % groups:
        yield Rule(key, groups, "local-sgd-divides-data", {"data_parallel": axes.data})
    for name, degree in (("pipeline_parallel", axes.pipeline), ("expert_parallel", axes.expert)):
        if degree > 1:
            yield Rule(f"layout.{name}", degree, "local-sgd-axis", {"groups": groups})


def _wrong_product(spec: RunSpec, axes: Axes) -> Rule:
    world = spec.world_size
    params = {**axes._asdict(), "ranks": axes.data * axes.model_parallel, "world_size": world}
    params |= {"nodes": spec.cluster.nodes, "gpus_per_node": spec.cluster.gpus_per_node}
    if world % axes.model_parallel == 0:
        fix = {"allowed": [world // axes.model_parallel]}
        return Rule("layout.data_parallel", spec.layout.data_parallel, "wrong-product", params, fix)
    return Rule("layout.data_parallel", spec.layout.data_parallel, "product-does-not-divide", params)
