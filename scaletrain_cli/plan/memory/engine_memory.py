"""Bytes of a pipeline stage as our own engine runs it, on DeepSpeed. Knows no other framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from scaletrain_cli.plan.architecture import Architecture
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.memory.activations import (
    block_backward_bytes,
    loss_bytes,
    stage_activation_bytes,
    token_activations,
)
from scaletrain_cli.plan.memory.engine_states import engine_states
from scaletrain_cli.plan.memory.moments import Moment, peak_memory
from scaletrain_cli.plan.memory.outside_allocator import outside_allocator_bytes
from scaletrain_cli.plan.memory.states import (
    ModelStates,
    gradient_bytes,
    second_gradient_bytes,
    step_temporary_bytes,
    weight_bytes,
)
from scaletrain_cli.plan.memory.zero_buffers import communication_buffer_bytes
from scaletrain_cli.plan.result import Layout, StageMemory
from scaletrain_cli.plan.stages import Stage, chunks_in_flight, local_tokens, stage_shard, zero_shards
from scaletrain_cli.spec import RunSpec

# The caching allocator rounds and splits blocks. States are allocated once and do not fragment; what comes and goes
# does. Stated, not measured: a twentieth of it.
_FRAGMENTATION_DIVISOR = 20


class _Held(NamedTuple):
    """Bytes of a stage that do not depend on how many micro-batches are in flight."""

    states: ModelStates
    host: int
    backward: int
    buffers: int
    step: int


def engine_stage(
    spec: RunSpec, layout: Layout, device: Accelerator, whole: Architecture
) -> Callable[[Stage], StageMemory]:
    """What sizes one stage after another of this layout."""
    training, model, mode = spec.training, spec.transformer, layout.activation_checkpointing
    element, shards = weight_bytes(training.precision), zero_shards(layout)
    tokens = local_tokens(spec, layout)
    wanted = spec.planner.attention
    grouped = model.num_key_value_heads != model.num_attention_heads
    fused = (
        device.fuses_attention(training.precision, model.head_dim, grouped) if wanted == "auto" else wanted == "flash"
    )
    plain = token_activations(model, element, layout.tensor_parallel, fused, experts=False)
    sparse = token_activations(model, element, layout.tensor_parallel, fused) if model.num_experts else plain
    loss = loss_bytes(model, element, tokens, layout.tensor_parallel)
    grads = gradient_bytes(training.precision, training.grad_dtype)
    framework = outside_allocator_bytes(layout, spec.cluster.gpus_per_node, device.is_cpu)
    between = 0 if layout.pipeline_parallel == 1 else 2 * element * model.hidden_size * tokens

    def held_by(stage: Stage) -> _Held:
        shard = stage_shard(whole, stage)
        count, accumulation = shard.parameters, layout.gradient_accumulation_steps
        precision, grad_dtype, zero = training.precision, training.grad_dtype, layout.zero_stage
        buffers = between + communication_buffer_bytes(count, shard.largest_block, zero, element, grads, shards)
        buffers += second_gradient_bytes(count, precision, grad_dtype, zero, shards, accumulation)
        step = 0
        if layout.offload == "none":
            step = step_temporary_bytes(count, precision, grad_dtype, zero, shards, training.optimizer.name)
        backward = block_backward_bytes(sparse if stage.dense < stage.blocks else plain, tokens, stage.blocks, mode)
        states, host = engine_states(spec, layout, stage)
        return _Held(states, host, backward, buffers, step)

    known: dict[Stage, _Held] = {}

    def size(stage: Stage) -> StageMemory:
        alike = stage._replace(position=0)
        found = known.get(alike)
        if found is None:
            found = known[alike] = held_by(stage)
        states, host, backward, buffers, step = found
        chunks = chunks_in_flight(layout, stage.position)
        saved = stage_activation_bytes(plain, tokens, stage.dense, mode, chunks)
        saved += stage_activation_bytes(sparse, tokens, stage.blocks - stage.dense, mode, chunks)
        saved //= layout.virtual_pipeline
        moments = (
            Moment(saved, loss if stage.last else 0, buffers, 0),
            Moment(saved + backward, 0, buffers, 0),
            Moment(0, 0, 0, step),
        )
        worst = max(moments, key=sum)
        return peak_memory(states, worst, sum(worst) // _FRAGMENTATION_DIVISOR, framework, host)

    return size
