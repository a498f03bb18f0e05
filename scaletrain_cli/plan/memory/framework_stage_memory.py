"""Bytes of a pipeline stage under Megatron-LM, nanotron or PyTorch FSDP. Knows nothing of our own engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from scaletrain_cli.plan.architecture import Architecture
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.memory.backlog import backlog_bytes
from scaletrain_cli.plan.memory.block_activations import BlockActivations, Cut, block_activations
from scaletrain_cli.plan.memory.framework_memory import FRAMEWORK_MEMORY, FrameworkMemory
from scaletrain_cli.plan.memory.outside_allocator import outside_allocator_bytes
from scaletrain_cli.plan.memory.peak import Moment, peak_memory
from scaletrain_cli.plan.memory.rank_states import device_and_host_states, expert_tensor_parallel
from scaletrain_cli.plan.memory.states import ModelStates, gradient_bytes, weight_bytes
from scaletrain_cli.plan.result import Layout, StageMemory
from scaletrain_cli.plan.speed.communication import shards_norms
from scaletrain_cli.plan.stages import Shard, Stage, chunks_in_flight, local_tokens, stage_shard, zero_shards
from scaletrain_cli.spec import RunSpec


class _Held(NamedTuple):
    """Bytes of a stage that do not depend on how many micro-batches are in flight."""

    states: ModelStates
    host: int
    per_micro_batch: int
    logits: int
    buffers: int
    fresh: int
    step: int


def framework_stages(
    spec: RunSpec, layout: Layout, device: Accelerator, whole: Architecture
) -> Callable[[Stage], StageMemory]:
    """What sizes one stage after another of this layout."""
    model, training = spec.transformer, spec.training
    habits = FRAMEWORK_MEMORY[spec.planner.framework]
    element, tokens = weight_bytes(training.precision), local_tokens(spec, layout)
    norm_ranks = layout.tensor_parallel if shards_norms(spec, layout) else 1
    expert_tensor = expert_tensor_parallel(spec, layout)
    cut = Cut(layout.tensor_parallel, norm_ranks, expert_tensor, _flash(spec, device), element)
    plain = block_activations(model, habits, cut, False)
    sparse = block_activations(model, habits, cut, True) if model.num_experts else plain
    kept_plain, kept_sparse = (_kept(block, habits, layout) for block in (plain, sparse))
    working = tokens * max(_working(block, habits, layout) for block in (plain, sparse))
    channels = element * model.hidden_size * tokens // norm_ranks
    # The embedding's output before its dropout, and the mask; the final norm's input is the last block's output.
    embedding = tokens * model.hidden_size // norm_ranks + channels if model.hidden_dropout else 0
    final_norm = 2 * channels
    sent = channels if habits.keeps_stage_output else 0
    gathered = habits.gathered * element * model.hidden_size * tokens if norm_ranks > 1 else 0
    logits_size = tokens * -(-model.vocab_size // layout.tensor_parallel)
    between = 2 * channels if layout.pipeline_parallel > 1 else 0
    waiting = backlog_bytes(spec, layout, device, habits, tokens, element)
    expert_share = layout.tensor_parallel / expert_tensor
    workspace = habits.workspace + (habits.hopper_workspace if _has_large_workspaces(device) else 0)

    def held_by(stage: Stage) -> _Held:
        shard = stage_shard(whole, stage, expert_share)
        per_micro_batch = tokens * (stage.dense * kept_plain + (stage.blocks - stage.dense) * kept_sparse)
        per_micro_batch += embedding if stage.first else 0
        per_micro_batch += final_norm if stage.last else sent
        step = habits.step_temporary * _updated(layout, shard)
        if layout.offload != "none" or training.optimizer.name not in ("adamw", "adam"):
            step = 0
        states, host = device_and_host_states(spec, layout, shard)
        return _Held(
            states=states,
            host=host,
            per_micro_batch=per_micro_batch,
            logits=habits.logits * logits_size if stage.last else 0,
            buffers=workspace + between + gathered + _reducer_bytes(spec, layout, habits, shard, whole),
            fresh=habits.fresh_gradient * shard.parameters,
            step=step,
        )

    outside = outside_allocator_bytes(layout, spec.cluster.gpus_per_node, device.is_cpu)
    known: dict[Stage, _Held] = {}

    def size(stage: Stage) -> StageMemory:
        alike = stage._replace(position=0)
        held = known.get(alike)
        if held is None:
            held = known[alike] = held_by(stage)
        states, per_micro_batch = held.states, held.per_micro_batch
        saved = per_micro_batch * chunks_in_flight(layout, stage.position) // layout.virtual_pipeline
        moments = (
            Moment(saved, held.logits, held.buffers, 0),
            Moment(saved + working, 0, held.buffers, 0),
            Moment(saved - per_micro_batch + working, 0, held.buffers + held.fresh, 0),  # the last block's backward
            Moment(0, 0, workspace, held.step),
        )
        worst = max(moments, key=sum)
        # Gradients of a whole backward pass cannot all take the place of freed activations, which are smaller pieces.
        fragmentation = int(habits.fragmentation * sum(worst)) + held.fresh // 2 + waiting
        return peak_memory(states, worst, fragmentation, outside, held.host)

    return size


def _flash(spec: RunSpec, device: Accelerator) -> bool:
    wanted, model = spec.planner.attention, spec.transformer
    if wanted != "auto":
        return wanted == "flash"
    grouped = model.num_key_value_heads != model.num_attention_heads
    return device.fuses_attention(spec.training.precision, model.head_dim, grouped)


def _has_large_workspaces(device: Accelerator) -> bool:
    """From Hopper on (torch, CUDABlas.cpp _getWorkspaceSize; Transformer Engine, get_cublas_workspace_size_bytes)."""
    major = device.compute_capability.split(".")[0]
    return major.isdigit() and int(major) >= 9


def _kept(block: BlockActivations, habits: FrameworkMemory, layout: Layout) -> int:
    """Bytes per token that a block keeps, on average over blocks where every second one is recomputed."""
    mode = layout.activation_checkpointing
    if mode == "none":
        return block.saved
    if mode == "full":
        return block.block_input
    if habits.selective == "operations":
        return min(block.products, block.saved)
    return (block.saved + block.block_input) // 2 if habits.selective == "blocks" else block.saved - block.scores


def _working(block: BlockActivations, habits: FrameworkMemory, layout: Layout) -> int:
    """Bytes per token of one block's backward: its gradients, and what it has to compute again."""
    mode = layout.activation_checkpointing
    if mode == "none":
        return block.working
    if mode == "selective" and habits.selective == "attention":
        return block.working + block.scores
    return block.working + block.saved


def _updated(layout: Layout, shard: Shard) -> int:
    """Parameters that one rank's optimizer updates."""
    return shard.parameters if layout.zero_stage == 0 else -(-shard.parameters // zero_shards(layout))


def _reducer_bytes(spec: RunSpec, layout: Layout, habits: FrameworkMemory, shard: Shard, whole: Architecture) -> int:
    """Gradient buckets; under ZeRO-2 and 3 the weights and gradients that are whole for a moment."""
    shards = zero_shards(layout)
    if shards == 1:
        return 0
    held = habits.bucket * shard.parameters
    if layout.zero_stage < 2:
        return held
    training = spec.training
    element = weight_bytes(training.precision)
    grads = gradient_bytes(training.precision, training.grad_dtype)
    blocks = habits.gathered_blocks * shard.largest_block
    ends = whole.embedding + whole.head
    weights = blocks + ends if layout.zero_stage == 3 else shard.parameters
    return held + element * min(weights, shard.parameters) + grads * min(blocks, shard.parameters)
