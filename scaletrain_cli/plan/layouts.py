"""Which layouts a spec allows: exact divisibility, pinned axes, what DeepSpeed rules out. Knows no sizes or times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt

from scaletrain_cli.errors import Problem
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.states import weight_bytes
from scaletrain_cli.spec import RunSpec

CHECKPOINTING = ("none", "selective", "full")
# Micro-batches tried; above the smallest few dozen nothing gets faster.
_MOST_MICRO_BATCHES = 24
# DeepSpeed offloads what ZeRO partitions, so it must partition it (zero/offload_config.py).
_OFFLOAD_STAGE = {"auto": 0, "none": 0, "optimizer": 1, "optimizer+params": 3}


@dataclass(frozen=True)
class Axes:
    """Degrees of parallelism, ``auto`` resolved: axes that the engine cannot run are 1 unless pinned."""

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


def resolve_axes(spec: RunSpec) -> Axes:
    """The degrees; data parallelism is what the others leave, at least 1, unless pinned."""
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


def division_problems(spec: RunSpec, axes: Axes) -> list[Problem]:
    """Everything that does not divide, with what would."""
    found = [*_degree_problems(spec, axes), *_batch_problems(spec, axes)]
    return [Problem("run spec", key, message, str(given), hint or None) for key, given, message, hint in found]


_Row = tuple[str, object, str, str]  # key, given, message, hint


def _degree_problems(spec: RunSpec, axes: Axes) -> Iterator[_Row]:
    model, world = spec.transformer, spec.world_size
    if axes.data * axes.model_parallel != world:
        parts = f"data {axes.data} x tensor {axes.tensor} x pipeline {axes.pipeline} x sequence {axes.sequence}"
        total = f"{parts} x context {axes.context} = {axes.data * axes.model_parallel} ranks"
        cluster = f"{spec.cluster.nodes} x {spec.cluster.gpus_per_node} = {world}"
        hint = f"Change the degrees so that their product divides {world}."
        if world % axes.model_parallel == 0:
            hint = f"Use {world // axes.model_parallel}, or auto."
        yield "layout.data_parallel", spec.layout.data_parallel, f"{total}, but the cluster has {cluster}.", hint
    kv_heads, heads = model.num_key_value_heads, model.num_attention_heads
    if kv_heads % axes.tensor and axes.tensor % kv_heads:
        message = f"must divide {kv_heads} key-value heads or be a multiple of them."
        yield "layout.tensor_parallel", axes.tensor, message, _near(heads, axes.tensor)
    inner = (model.moe_intermediate_size if model.num_experts else 0) or model.intermediate_size
    if inner % axes.tensor:
        message = f"must divide intermediate_size = {inner}."
        yield "layout.tensor_parallel", axes.tensor, message, _near(inner, axes.tensor)
    local_heads = max(1, heads // axes.tensor)
    if local_heads % axes.sequence:
        message = f"must divide the {local_heads} attention heads of a tensor rank."
        yield "layout.sequence_parallel", axes.sequence, message, _near(local_heads, axes.sequence)
    if model.seq_len % (axes.sequence * axes.context):
        message = f"must be a multiple of sequence x context parallel = {axes.sequence * axes.context}."
        yield "model.seq_len", model.seq_len, message, ""
    layers = model.num_hidden_layers
    if axes.virtual > 1 and (axes.pipeline == 1 or layers % (axes.pipeline * axes.virtual)):
        message = f"needs pipeline_parallel > 1 and {layers} layers that divide by pipeline x virtual."
        yield "layout.virtual_pipeline", axes.virtual, message, "Use 1."
    ranks = axes.data * axes.sequence
    if axes.expert > 1 and not model.num_experts:
        yield "layout.expert_parallel", axes.expert, "needs a model with experts.", "Use 1 or auto."
    elif ranks % axes.expert:
        message = f"must divide data x sequence parallel = {ranks}."
        yield "layout.expert_parallel", axes.expert, message, _near(ranks, axes.expert)
    stage = spec.layout.zero_stage
    if axes.pipeline > 1 and (stage in (2, 3) or spec.layout.offload == "optimizer+params"):
        yield "layout.zero_stage", stage, "DeepSpeed refuses it with pipeline parallelism.", "Use 1 or auto."
    needed = _OFFLOAD_STAGE[spec.layout.offload]
    if stage != "auto" and stage < needed:
        message = f"layout.offload = {spec.layout.offload} needs ZeRO-{needed} or higher."
        yield "layout.zero_stage", stage, message, f"Use {needed} or auto."


def _batch_problems(spec: RunSpec, axes: Axes) -> Iterator[_Row]:
    batch, micro_batch = spec.training.global_batch_size, spec.training.micro_batch_size
    per_rank = batch // axes.data
    if batch % axes.data:
        up = (per_rank + 1) * axes.data
        hint = f"Use {per_rank * axes.data} or {up}." if per_rank else f"Use {up}."
        message = f"must be a multiple of {axes.data} data-parallel ranks."
        yield "training.global_batch_size", batch, message, hint
    elif micro_batch != "auto" and per_rank % micro_batch:
        message = f"must divide the {per_rank} sequences per data-parallel rank ({batch} / {axes.data})."
        yield "training.micro_batch_size", micro_batch, message, _near(per_rank, micro_batch)


def zero_stages(spec: RunSpec, axes: Axes) -> list[int]:
    """Stages to try. DeepSpeed has no usable stage 0 for 16-bit weights, and only stage 1 beside a pipeline."""
    sixteen_bit = weight_bytes(spec.training.precision) == 2
    pinned = spec.layout.zero_stage
    if pinned != "auto":
        return [1] if pinned == 0 and (sixteen_bit or axes.pipeline > 1) else [pinned]
    lowest = max(_OFFLOAD_STAGE[spec.layout.offload], 1 if sixteen_bit or axes.pipeline > 1 else 0)
    if axes.pipeline > 1 or axes.data * axes.sequence * axes.context == 1:
        return [lowest]
    return list(range(lowest, 4))


def checkpointing_modes(spec: RunSpec) -> list[str]:
    """Activation checkpointing to try, cheapest in time first."""
    pinned = spec.layout.activation_checkpointing
    return list(CHECKPOINTING) if pinned == "auto" else [pinned]


def micro_batch_sizes(spec: RunSpec, axes: Axes) -> list[int]:
    """Micro-batches that divide a rank's share of the global batch, smallest first."""
    pinned = spec.training.micro_batch_size
    if pinned != "auto":
        return [pinned]
    return divisors(spec.training.global_batch_size // axes.data)[:_MOST_MICRO_BATCHES]


def build_layout(spec: RunSpec, axes: Axes, zero_stage: int, checkpointing: str, micro_batch: int) -> Layout:
    """The layout; requires that division_problems() found none."""
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
        offload="none" if spec.layout.offload == "auto" else spec.layout.offload,
    )


def divisors(number: int) -> list[int]:
    """Ascending. In time of the square root: a number of the spec is at most 1e9."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def _near(number: int, wanted: int) -> str:
    """The divisors of ``number`` on either side of what was asked for."""
    found = divisors(number) if number <= 10**12 else [1]
    below = max((n for n in found if n <= wanted), default=1)
    above = min((n for n in found if n > wanted), default=below)
    return f"Use {below}." if above == below else f"Use {below} or {above}."
