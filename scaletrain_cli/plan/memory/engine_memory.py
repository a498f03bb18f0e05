"""Bytes of a pipeline stage as this project's engine runs it, on DeepSpeed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from scaletrain_cli.plan.architecture import Architecture
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.memory.activations import (
    Recomputation,
    TokenActivations,
    block_backward_bytes,
    loss_bytes,
    stage_activation_bytes,
    token_activations,
)
from scaletrain_cli.plan.memory.engine_states import engine_states, offload_step_bytes
from scaletrain_cli.plan.memory.peak import PhaseMemory, outside_allocator_bytes, peak_memory
from scaletrain_cli.plan.memory.states import (
    ModelStates,
    communication_buffer_bytes,
    gradient_bytes,
    second_gradient_bytes,
    step_temporary_bytes,
    weight_bytes,
)
from scaletrain_cli.plan.result import Layout, StageMemory
from scaletrain_cli.plan.stages import Stage, chunks_in_flight, engine_stages, local_tokens, stage_shard, zero_shards
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


def saved_activation_bytes(spec: RunSpec, layout: Layout, device: Accelerator, stage: int) -> int:
    """Return the bytes that the blocks of a stage keep on the device for the backward pass of one micro-batch."""
    return 0 if spec.layout.activation_offload else kept_activation_bytes(spec, layout, device, stage)


def kept_activation_bytes(spec: RunSpec, layout: Layout, device: Accelerator, stage: int) -> int:
    """Return the same bytes wherever they are: on the device, or in host memory with activation offload."""
    tokens, again = local_tokens(spec, layout), recomputation(spec, layout)
    plain, sparse = _per_token(spec, layout, device)
    held = next(each for each in engine_stages(spec.transformer, layout.pipeline_parallel) if each.position == stage)
    dense = stage_activation_bytes(plain, tokens, held.dense, again, 1)
    return dense + stage_activation_bytes(sparse, tokens, held.blocks - held.dense, again, 1)


def recomputation(spec: RunSpec, layout: Layout) -> Recomputation:
    """Return the recomputation in our engine's backward pass."""
    return Recomputation(layout.activation_checkpointing, spec.layout.selective_scope, spec.layout.selective_every)


def _per_token(spec: RunSpec, layout: Layout, device: Accelerator) -> tuple[TokenActivations, TokenActivations]:
    """Return the activations of a dense block, and of an MoE block if there are any."""
    model, precision, wanted = spec.transformer, spec.training.precision, spec.planner.attention
    grouped = model.num_key_value_heads != model.num_attention_heads
    fused = device.fuses_attention(precision, model.head_dim, grouped) if wanted == "auto" else wanted == "flash"
    of_block = functools.partial(
        token_activations,
        model,
        weight_bytes(precision),
        layout.tensor_parallel,
        fused,
        sequence_parallel=layout.sequence_parallel,
        compiled=spec.training.compile is True,  # auto runs what cannot be compiled eagerly, and that must fit too
    )
    plain = of_block(experts=False)
    return plain, of_block() if model.num_experts else plain


def engine_stage_memory(
    spec: RunSpec, layout: Layout, device: Accelerator, whole: Architecture
) -> Callable[[Stage], StageMemory]:
    """Return a function from a pipeline stage of this layout to its bytes on one rank."""
    training, model = spec.training, spec.transformer
    element, shards = weight_bytes(training.precision), zero_shards(layout)
    tokens, again = local_tokens(spec, layout), recomputation(spec, layout)
    plain, sparse = _per_token(spec, layout, device)
    loss = loss_bytes(model, element, tokens, layout.tensor_parallel, layout.cross_entropy)
    away = spec.layout.activation_offload
    grads = gradient_bytes(training.precision, training.grad_dtype)
    framework = outside_allocator_bytes(layout, spec.cluster.gpus_per_node, device.is_cpu)
    between = 0 if layout.pipeline_parallel == 1 else 2 * element * model.hidden_size * tokens

    def held_by(stage: Stage) -> _Held:
        shard = stage_shard(whole, stage)
        count, accumulation = shard.parameters, layout.gradient_accumulation_steps
        precision, grad_dtype, zero = training.precision, training.grad_dtype, layout.zero_stage
        buffers = between + communication_buffer_bytes(
            count, shard.largest_block, zero, element, grads, shards, pipeline=layout.pipeline_parallel > 1
        )
        buffers += second_gradient_bytes(count, precision, grad_dtype, zero, shards, accumulation)
        if layout.offload == "none":
            step = step_temporary_bytes(count, precision, grad_dtype, zero, shards, training.optimizer.name)
        else:
            step = offload_step_bytes(spec, layout, stage)
        kind = sparse if stage.dense < stage.blocks else plain
        backward = block_backward_bytes(kind, tokens, stage.blocks, again)
        if away:  # a block's activations come back when it runs backward, unless it makes them again
            backward = max(backward, tokens * (kind.working + kind.saved))
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
        saved = stage_activation_bytes(plain, tokens, stage.dense, again, chunks)
        saved += stage_activation_bytes(sparse, tokens, stage.blocks - stage.dense, again, chunks)
        saved //= layout.virtual_pipeline
        if away:
            host, saved = host + saved, 0
        moments = (
            PhaseMemory(saved, loss if stage.last else 0, buffers, 0),
            PhaseMemory(saved + backward, 0, buffers, 0),
            PhaseMemory(0, 0, 0, step),
        )
        worst = max(moments, key=sum)
        return peak_memory(states, worst, sum(worst) // _FRAGMENTATION_DIVISOR, framework, host)

    return size
