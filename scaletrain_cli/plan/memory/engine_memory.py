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
    fuses_attention,
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

# Fragmentation, because the caching allocator rounds and splits blocks: a twentieth of what is allocated and freed in a
# step. An assumption, not measured. States are allocated once and do not fragment.
_FRAGMENTATION_DIVISOR = 20


class _FixedBytes(NamedTuple):
    """Bytes of a pipeline stage that do not depend on the number of micro-batches in flight."""

    states: ModelStates
    host: int  # states in the node's memory
    backward: int  # gradients and recomputed activations of one block's backward pass
    buffers: int  # communication
    step: int  # temporary memory of the optimizer's update


def saved_activation_bytes(spec: RunSpec, layout: Layout, device: Accelerator, stage: int) -> int:
    """Return the bytes that the blocks of a stage keep on the device for one micro-batch's backward pass."""
    return 0 if spec.layout.activation_offload else kept_activation_bytes(spec, layout, device, stage)


def kept_activation_bytes(spec: RunSpec, layout: Layout, device: Accelerator, stage: int) -> int:
    """Return the same bytes on whichever side they are kept: with activation offload in host memory."""
    tokens, recompute = local_tokens(spec, layout), recomputation(spec, layout)
    dense_block, moe_block = _per_token(spec, layout, device)
    held = next(each for each in engine_stages(spec.transformer, layout.pipeline_parallel) if each.position == stage)
    dense = stage_activation_bytes(dense_block, tokens, held.dense, recompute, 1)
    return dense + stage_activation_bytes(moe_block, tokens, held.blocks - held.dense, recompute, 1)


def recomputation(spec: RunSpec, layout: Layout) -> Recomputation:
    """Return what the engine's backward pass recomputes under this layout."""
    return Recomputation(layout.activation_checkpointing, spec.layout.selective_scope, spec.layout.selective_every)


def _per_token(spec: RunSpec, layout: Layout, device: Accelerator) -> tuple[TokenActivations, TokenActivations]:
    """Return the activations per token of (a dense block, an MoE block); both are the same without experts."""
    model = spec.transformer
    of_block = functools.partial(
        token_activations,
        model,
        weight_bytes(spec.training.precision),
        layout.tensor_parallel,
        fuses_attention(spec, device),
        sequence_parallel=layout.sequence_parallel,
        compiled=spec.training.compile is True,  # auto falls back to eager blocks, which must fit too
    )
    dense_block = of_block(experts=False)
    return dense_block, of_block() if model.num_experts else dense_block


def engine_stage_memory(
    spec: RunSpec, layout: Layout, device: Accelerator, per_rank: Architecture
) -> Callable[[Stage], StageMemory]:
    """Return a function from a pipeline stage of this layout to its bytes on one rank.

    ``per_rank``: the parameters that one rank holds under tensor and expert parallelism, of all stages.
    """
    training, model = spec.training, spec.transformer
    element, shards = weight_bytes(training.precision), zero_shards(layout)
    tokens, recompute = local_tokens(spec, layout), recomputation(spec, layout)
    dense_block, moe_block = _per_token(spec, layout, device)
    loss = loss_bytes(model, element, tokens, layout.tensor_parallel, layout.cross_entropy)
    offloaded = spec.layout.activation_offload
    grads = gradient_bytes(training.precision, training.grad_dtype)
    framework = outside_allocator_bytes(layout, spec.cluster.gpus_per_node, device.is_cpu)
    between = 0 if layout.pipeline_parallel == 1 else 2 * element * model.hidden_size * tokens

    def fixed_bytes(stage: Stage) -> _FixedBytes:
        """Return the bytes that do not depend on the micro-batches in flight."""
        shard = stage_shard(per_rank, stage)
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
        kind = moe_block if stage.dense < stage.blocks else dense_block
        backward = block_backward_bytes(kind, tokens, stage.blocks, recompute)
        if offloaded:  # a block's activations are copied back when it runs backward, or recomputed
            backward = max(backward, tokens * (kind.working + kind.saved))
        states, host = engine_states(spec, layout, stage)
        return _FixedBytes(states, host, backward, buffers, step)

    cache: dict[Stage, _FixedBytes] = {}

    def size(stage: Stage) -> StageMemory:
        """Return the bytes of the stage in its fullest phase: the loss, a backward pass, or the optimizer step."""
        alike = stage._replace(position=0)
        found = cache.get(alike)
        if found is None:
            found = cache[alike] = fixed_bytes(stage)
        states, host, backward, buffers, step = found
        chunks = chunks_in_flight(layout, stage.position)
        saved = stage_activation_bytes(dense_block, tokens, stage.dense, recompute, chunks)
        saved += stage_activation_bytes(moe_block, tokens, stage.blocks - stage.dense, recompute, chunks)
        saved //= layout.virtual_pipeline
        if offloaded:
            host, saved = host + saved, 0
        phases = (
            PhaseMemory(saved, loss if stage.last else 0, buffers, 0),
            PhaseMemory(saved + backward, 0, buffers, 0),
            PhaseMemory(0, 0, 0, step),
        )
        worst = max(phases, key=sum)
        return peak_memory(states, worst, sum(worst) // _FRAGMENTATION_DIVISOR, framework, host)

    return size
