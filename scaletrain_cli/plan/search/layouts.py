"""What a layout is made of, axis by axis: degrees, ZeRO stages, micro-batches and modes. Knows no sizes or times."""

from __future__ import annotations

from typing import NamedTuple

from scaletrain_cli.plan.catalogue.hardware import cuda_capability, memory_bytes
from scaletrain_cli.plan.memory.activations import chosen_cross_entropy
from scaletrain_cli.plan.memory.states import weight_bytes
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.search.engine_support import capabilities
from scaletrain_cli.plan.search.rejections import divisors
from scaletrain_cli.spec import ModelSpec, RunSpec

CHECKPOINTING = ("none", "selective", "full")
OFFLOAD = ("none", "optimizer", "optimizer+params")
# Micro-batches tried; above the smallest few dozen nothing gets faster.
_MOST_MICRO_BATCHES = 24
# Compiling takes about a minute at the start of each attempt; shorter runs are tries.
_STEPS_WORTH_COMPILING = 500
_TRITON_CAPABILITY = 8.0
_OFFLOAD_STAGE = {"auto": 0, "none": 0, "optimizer": 1, "optimizer+params": 3}


class Axes(NamedTuple):
    """Degrees of parallelism."""

    data: int
    tensor: int
    pipeline: int
    virtual: int
    sequence: int
    context: int
    expert: int

    @property
    def model_parallel(self) -> int:
        """Ranks that work on the same sequences."""
        return self.tensor * self.pipeline * self.sequence * self.context

    @property
    def shards(self) -> int:
        """Ranks that ZeRO may share states over."""
        return self.data * self.sequence * self.context


def resolve_axes(spec: RunSpec) -> Axes:
    """The plainest degrees: 1 unless pinned; data parallelism is what the others leave, at least 1."""
    layout = spec.layout
    tensor, pipeline, virtual, sequence, context, expert = (
        1 if degree == "auto" else degree
        for degree in (
            layout.tensor_parallel,
            layout.pipeline_parallel,
            layout.virtual_pipeline,
            layout.sequence_parallel,
            layout.context_parallel,
            layout.expert_parallel,
        )
    )
    others = tensor * pipeline * sequence * context
    data = max(1, spec.world_size // others) if layout.data_parallel == "auto" else layout.data_parallel
    return Axes(data, tensor, pipeline, virtual, sequence, context, expert)


def offload_stage(spec: RunSpec, offload: str) -> int:
    """The least ZeRO stage: DeepSpeed offloads what it partitions, and to NVMe in stage 3 (zero/offload_config.py)."""
    return 3 if spec.layout.offload_device == "nvme" and offload != "none" else _OFFLOAD_STAGE[offload]


def zero_stages(spec: RunSpec, axes: Axes, offload: str = "none") -> list[int]:
    """Stages to try, lowest first.

    DeepSpeed has no usable stage 0 for 16-bit weights, and beside a pipeline only stage 1; it runs 0 as 1 there. With
    fp8, stage 3 would keep what it gathers. The other frameworks have a stage 0, and combine a pipeline with 0 or 1.
    """
    own, pipeline = spec.planner.framework == "deepspeed", axes.pipeline > 1
    no_zero = own and (pipeline or weight_bytes(spec.training.precision) == 2)
    pinned = spec.layout.zero_stage
    if pinned != "auto":
        return [1] if pinned == 0 and no_zero else [pinned]
    lowest = max(offload_stage(spec, offload), 1 if no_zero else 0)
    highest = 1 if pipeline else 2 if own and spec.training.precision == "fp8" else 3
    stages = [stage for stage in capabilities(spec).zero_stages if lowest <= stage <= highest]
    if not stages and spec.layout.offload == offload:
        return [lowest]  # pinned to what the framework does not combine: sized all the same
    return stages[:1] if axes.shards == 1 else stages


def checkpointing_modes(spec: RunSpec) -> list[str]:
    """Activation checkpointing to try, cheapest in time first. Vision networks have no selective kind."""
    pinned = spec.layout.activation_checkpointing
    if pinned != "auto":
        return [pinned]
    return list(CHECKPOINTING) if isinstance(spec.model, ModelSpec) else ["none", "full"]


def offload_modes(spec: RunSpec, axes: Axes) -> list[str]:
    """What may move to the host, least first; parameters not beside a pipeline, which ZeRO-3 cannot join."""
    pinned = spec.layout.offload
    if pinned != "auto":
        return [pinned]
    if not isinstance(spec.model, ModelSpec):
        return ["none"]  # what offloading costs is modelled for transformers alone
    return [mode for mode in capabilities(spec).offload if zero_stages(spec, axes, mode)]


def is_contrastive(spec: RunSpec) -> bool:
    """Whether samples are told from all others of a micro-batch, so that accumulating changes what is learnt."""
    return spec.model.family == "clip"


def micro_batch_sizes(spec: RunSpec, axes: Axes) -> list[int]:
    """Micro-batches that divide a rank's share of the global batch, smallest first.

    An interleaved schedule runs them in rounds of one per stage (Megatron-LM, schedules.py).
    """
    pinned = spec.training.micro_batch_size
    if pinned != "auto":
        return [pinned]
    per_rank = spec.training.global_batch_size // axes.data
    found = divisors(per_rank)[:_MOST_MICRO_BATCHES]
    if is_contrastive(spec) and found[-1] != per_rank:
        found.append(per_rank)
    if axes.virtual > 1:
        found = [size for size in found if per_rank // size % axes.pipeline == 0]
    if spec.planner.framework == "nanotron":  # pipeline_parallel/engine.py asserts it
        found = [size for size in found if per_rank // size >= axes.pipeline - 1]
    return found


def build_layout(
    spec: RunSpec, axes: Axes, zero_stage: int, checkpointing: str, micro_batch: int, offload: str | None = None
) -> Layout:
    """The layout, of degrees that break no rule (layout_rules.py). ``offload``: as pinned, or none."""
    if offload is None:
        offload = "none" if spec.layout.offload == "auto" else spec.layout.offload
    tokens = micro_batch * -(-spec.units_per_sample // (axes.sequence * axes.context))
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
        cross_entropy=chosen_cross_entropy(spec, tokens, axes.tensor, memory_bytes(spec.cluster)),
        compile=chosen_compile(spec),
    )


def chosen_compile(spec: RunSpec) -> bool:
    """Return whether the blocks are compiled: ``training.compile``, or for ``auto`` where that can be relied on.

    That is this engine's dense transformer in a 16-bit or wider precision, in a run that is long enough to pay for the
    minute of compiling, on a CUDA device for which Triton generates code (compute capability 8.0 or later). Experts
    receive another number of tokens in each step, for which graphs are compiled again.
    """
    wanted = spec.training.compile
    if wanted != "auto":
        return wanted
    return (
        isinstance(spec.model, ModelSpec)
        and not spec.model.num_experts
        and spec.planner.framework == "deepspeed"
        and spec.training.precision != "fp8"
        and spec.total_steps >= _STEPS_WORTH_COMPILING
        and cuda_capability(spec.cluster) >= _TRITON_CAPABILITY
    )


def describe(layout: Layout) -> str:
    """One line: the degrees above 1, then what is sharded, recomputed and offloaded."""
    degrees = {
        "tensor": layout.tensor_parallel,
        "pipeline": layout.pipeline_parallel,
        "virtual": layout.virtual_pipeline,
        "sequence": layout.sequence_parallel,
        "context": layout.context_parallel,
        "expert": layout.expert_parallel,
    }
    parts = [f"ZeRO-{layout.zero_stage}", f"data parallel {layout.data_parallel}"]
    parts += [f"{name} parallel {degree}" for name, degree in degrees.items() if degree > 1]
    parts += [f"micro-batch {layout.micro_batch_size}"]
    parts += [f"activation checkpointing {layout.activation_checkpointing}"]
    parts += [f"offload {layout.offload}"] if layout.offload != "none" else []
    parts += [f"cross-entropy {layout.cross_entropy}"] if layout.cross_entropy != "whole" else []
    parts += ["compiled"] if layout.compile else []
    return ", ".join(parts)
