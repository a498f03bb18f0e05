"""Peak bytes per rank and pipeline stage, from model states, activations and buffers. Knows no time and no search.

A training step has three moments that can be its peak; the parts reported are those of the worst one, so they add up:
the loss (all activations saved, logits alive), one block's backward, and the optimizer step (no activations).
"""

from __future__ import annotations

from dataclasses import dataclass

from scaletrain_cli.plan.activations import (
    block_backward_bytes,
    loss_bytes,
    stage_activation_bytes,
    token_activations,
)
from scaletrain_cli.plan.architecture import Architecture, architecture
from scaletrain_cli.plan.hardware import Accelerator
from scaletrain_cli.plan.result import Layout, Memory, StageMemory
from scaletrain_cli.plan.states import (
    ModelStates,
    gradient_bytes,
    model_state_bytes,
    second_gradient_bytes,
    step_temporary_bytes,
    weight_bytes,
)
from scaletrain_cli.plan.zero_buffers import communication_buffer_bytes
from scaletrain_cli.spec import ModelSpec, RunSpec

# CUDA context, loaded kernels, cuBLAS and NCCL workspaces: 1 to 2 GB on current GPUs (Ultra-Scale Playbook, section
# "Memory usage in transformers"). A CPU rank: the interpreter with torch and DeepSpeed, 250 MB, and its arenas.
_GPU_FRAMEWORK_BYTES = 1_500_000_000
_CPU_FRAMEWORK_BYTES = 500_000_000
# The caching allocator rounds and splits blocks. States are allocated once and do not fragment; what comes and goes
# does. Stated, not measured: a twentieth of it.
_FRAGMENTATION_DIVISOR = 20
# Stages beyond these are sized by the first, second and last alone: nobody runs them, and a typing slip must end soon.
_MOST_STAGES = 64


@dataclass(frozen=True)
class Shard:
    """Parameters that one rank computes with, by how ZeRO shares them: dense over all ranks, experts over fewer."""

    dense: int
    experts: int
    largest_block: int

    @property
    def parameters(self) -> int:
        return self.dense + self.experts


def plan_memory(spec: RunSpec, layout: Layout, device: Accelerator) -> Memory:
    """Memory of the worst rank against the device, and of each pipeline stage."""
    whole = architecture(spec.transformer, layout.tensor_parallel, layout.expert_parallel)
    stages = tuple(_stage(spec, layout, device, whole, index) for index in _stage_indices(layout.pipeline_parallel))
    worst = max(stages, key=lambda stage: stage.peak)
    fits = worst.peak <= device.memory_bytes
    return Memory(
        **vars(worst),
        capacity=device.memory_bytes,
        fits=fits,
        by_stage=stages,
        verdict="fits" if fits else "does not fit",
        out_of_memory_probability=0.0 if fits else 1.0,
    )


def stage_layers(layers: int, stages: int, index: int) -> int:
    """Blocks on one pipeline stage; the first ones take what does not divide."""
    return layers // stages + (1 if index < layers % stages else 0)


def zero_shards(layout: Layout) -> int:
    """Ranks that ZeRO shares dense parameters over: sequence and context ranks look like data-parallel ones."""
    return layout.data_parallel * layout.sequence_parallel * layout.context_parallel


def stage_shard(whole: Architecture, layout: Layout, index: int) -> Shard:
    """The parameters of one rank of one stage; ``whole`` is already cut by tensor and expert parallelism."""
    stages = layout.pipeline_parallel
    layers = stage_layers(whole.layers, stages, index)
    first = index * (whole.layers // stages) + min(index, whole.layers % stages)
    plain = max(0, min(first + layers, whole.dense_layers) - first)
    dense = plain * whole.dense_block.shared + (layers - plain) * whole.block.shared
    if index == 0:
        dense += whole.embedding
    if index == stages - 1:
        dense += whole.final_norm + whole.head
        if not whole.head and stages > 1:
            dense += whole.embedding  # a tied head on another stage than the embedding needs a copy
    return Shard(dense, (layers - plain) * whole.block.routed, whole.block.parameters)


def rank_states(spec: RunSpec, layout: Layout, shard: Shard) -> ModelStates:
    """Weights, gradients and optimizer states on one rank, offloaded parts left out."""
    training, stage, shards = spec.training, layout.zero_stage, zero_shards(layout)
    per_group = (
        model_state_bytes(shard.dense, training.precision, training.grad_dtype, stage, shards),
        model_state_bytes(
            shard.experts, training.precision, training.grad_dtype, stage, max(1, shards // layout.expert_parallel)
        ),
    )
    parameters, gradients, optimizer_states = (sum(parts) for parts in zip(*per_group, strict=True))
    if layout.offload != "none":
        # zero/stage_1_and_2.py and stage3.py move the optimizer's partition and its gradients to the host.
        optimizer_states = 0
        gradients = 0 if stage >= 2 else gradients
    if layout.offload == "optimizer+params":
        parameters = 0
    return ModelStates(parameters, gradients, optimizer_states)


def _stage(spec: RunSpec, layout: Layout, device: Accelerator, whole: Architecture, index: int) -> StageMemory:
    training, model = spec.training, spec.transformer
    element, shards = weight_bytes(training.precision), zero_shards(layout)
    shard = stage_shard(whole, layout, index)
    states = rank_states(spec, layout, shard)
    tokens = local_tokens(spec, layout)
    layers = stage_layers(whole.layers, layout.pipeline_parallel, index)
    fused = device.fuses_attention(training.precision, model.head_dim, grouped_queries(model))
    per_token = token_activations(model, element, layout.tensor_parallel, fused)
    in_flight = micro_batches_in_flight(layout, index)
    saved = stage_activation_bytes(per_token, tokens, layers, layout.activation_checkpointing, in_flight)
    backward = block_backward_bytes(per_token, tokens, layers, layout.activation_checkpointing)
    last = index == layout.pipeline_parallel - 1
    logits = loss_bytes(model, element, tokens, layout.tensor_parallel) if last else 0
    grads = gradient_bytes(training.precision, training.grad_dtype)
    buffers = communication_buffer_bytes(
        shard.parameters, shard.largest_block, layout.zero_stage, element, grads, shards
    ) + second_gradient_bytes(
        shard.parameters,
        training.precision,
        training.grad_dtype,
        layout.zero_stage,
        shards,
        layout.gradient_accumulation_steps,
    )
    buffers += 0 if layout.pipeline_parallel == 1 else 2 * element * model.hidden_size * tokens
    step = 0
    if layout.offload == "none":
        step = step_temporary_bytes(
            shard.parameters, training.precision, training.grad_dtype, layout.zero_stage, shards
        )
    # (activations, logits, buffers, step temporaries) at each of the three moments
    moments = ((saved, logits, buffers, 0), (saved + backward, 0, buffers, 0), (0, 0, 0, step))
    activations, logits, buffers, step = max(moments, key=sum)
    framework = _CPU_FRAMEWORK_BYTES if device.is_cpu else _GPU_FRAMEWORK_BYTES
    fragmentation = (activations + logits + buffers + step) // _FRAGMENTATION_DIVISOR
    parts = {
        "parameters": states.parameters,
        "gradients": states.gradients,
        "optimizer_states": states.optimizer_states + step,
        "activations": activations,
        "logits": logits,
        "communication_buffers": buffers,
        "framework": framework,
        "fragmentation": fragmentation,
    }
    peak = sum(parts.values())
    reserved = peak - framework
    return StageMemory(**parts, peak=peak, allocated=reserved - fragmentation, reserved=reserved)


def grouped_queries(model: ModelSpec) -> bool:
    """Whether several query heads share one key-value head."""
    return model.num_key_value_heads != model.num_attention_heads


def local_tokens(spec: RunSpec, layout: Layout) -> int:
    """Tokens of one micro-batch on one rank."""
    cut = layout.sequence_parallel * layout.context_parallel
    return layout.micro_batch_size * -(-spec.transformer.seq_len // cut)


def micro_batches_in_flight(layout: Layout, index: int) -> int:
    """Micro-batches whose activations a stage holds at once under 1F1B (SC21, arXiv:2104.04473, section 2.2.1).

    Interleaving adds (p - 1) / (p v) of a stage's activations.
    """
    stages, chunks = layout.pipeline_parallel, layout.virtual_pipeline
    held = min(layout.gradient_accumulation_steps, stages - index)
    if chunks > 1 and stages > 1:
        held += -(-held * (stages - 1) // (stages * chunks))
    return held


def _stage_indices(stages: int) -> list[int]:
    return list(range(stages)) if stages <= _MOST_STAGES else [0, 1, stages - 1]
