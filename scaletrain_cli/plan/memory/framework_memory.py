"""Bytes of a pipeline stage under Megatron-LM, nanotron or PyTorch FSDP.

``framework_stage_memory`` is the entry; this project's engine has its own, in engine_memory.py.

Activations are counted as in Korthikanti et al. (arXiv:2205.05198, section 4): each operation saves the tensors that
its backward pass needs, and a tensor that two operations need is counted once.

Deferred bytes are tensors that Python has freed, but that the caching allocator cannot reuse yet: a collective on
another CUDA stream still uses them (torch, ``Tensor.record_stream``). They matter with tensor parallelism when the GPU
is slower than the host. The host then runs ahead until the launch queue is full (about a thousand kernels), and all
tensors of the queued kernels stay reserved. The allocator could wait for them when memory runs short, but published
runs in that state crashed or became ten times slower, so deferred bytes count as needed memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

from scaletrain_cli.plan.architecture import Architecture, attention_matmul_flops, mlp_matmul_flops
from scaletrain_cli.plan.catalogue.hardware import HOPPER, Accelerator, near_ranks
from scaletrain_cli.plan.frameworks.profile import FrameworkProfile, MemoryProfile, Selective
from scaletrain_cli.plan.memory.activations import fuses_attention
from scaletrain_cli.plan.memory.block_activations import indexer_bytes, mamba_bytes
from scaletrain_cli.plan.memory.peak import PhaseMemory, outside_allocator_bytes, peak_memory
from scaletrain_cli.plan.memory.states import (
    MasterWeights,
    ModelStates,
    device_and_host_states,
    expert_tensor_parallel,
    gradient_bytes,
    saved_weight_bytes,
    weight_bytes,
)
from scaletrain_cli.plan.result import Layout, StageMemory
from scaletrain_cli.plan.stages import (
    Shard,
    Stage,
    chunks_in_flight,
    local_tokens,
    rank_architecture,
    stage_shard,
    zero_shards,
)
from scaletrain_cli.spec import ModelSpec, RunSpec

# Approximate rates, which decide whether host or GPU is faster: the share of the peak FLOP/s that matrix products
# reach, and the bytes/s of a rank's collectives within a node and across nodes.
_PRODUCT_SHARE = 0.45
_WITHIN_NODE = 300e9
_ACROSS_NODES = 250e9
# How full the launch queue is, as a share from 0 to 1; calibrated on the Ultra-Scale sweep. With a pipeline, the queue
# begins to fill when GPU time per block reaches 0.5 of the host time, and is full at 1.0. Without a pipeline the share
# is GPU time over host time. The other shares are constants: tensor parallelism across nodes without a pipeline;
# pipelines of 4 or more stages, whose warm-up issues several forward passes in a row; a lower limit, which also holds
# for pipelines with tensor parallelism of 32 or more.
_QUEUE_STARTS_AT, _QUEUE_FULL_AT = 0.5, 1.0
_FILL_ACROSS_NODES = 0.8
_FILL_LONG_PIPELINE = 0.85
_LONG_PIPELINE = 4
_WIDEST_TENSOR = 32
_LEAST_FILL = 0.05
# A step of a single micro-batch ends before the queue is full.
_SINGLE_MICRO_BATCH = 0.4


def _deferred_bytes(
    spec: RunSpec, layout: Layout, device: Accelerator, time: FrameworkProfile, deferred: int, tokens: int
) -> int:
    """Return the deferred bytes of one rank, as the module's docstring defines them; ``tokens``: per micro-batch."""
    element = weight_bytes(spec.training.precision)
    if not deferred or layout.tensor_parallel == 1:
        return 0
    share = _queue_fill(spec, layout, device, time, tokens, element)
    if layout.gradient_accumulation_steps == 1:
        share *= _SINGLE_MICRO_BATCH
    # Each collective uses a full-size tensor and one tensor rank's share of it.
    pairs = share * deferred * (1 + 1 / layout.tensor_parallel)
    return int(pairs * element * spec.transformer.hidden_size * tokens)


def _queue_fill(
    spec: RunSpec, layout: Layout, device: Accelerator, time: FrameworkProfile, tokens: int, element: int
) -> float:
    """Return how full the launch queue is, from 0 to 1."""
    model, tensor = spec.transformer, layout.tensor_parallel
    across = tensor > near_ranks(spec.cluster)
    pipelined = layout.pipeline_parallel > 1
    if not pipelined and across:
        return _FILL_ACROSS_NODES
    if pipelined and tensor >= _WIDEST_TENSOR:
        return _LEAST_FILL
    if layout.pipeline_parallel >= _LONG_PIPELINE:
        return _FILL_LONG_PIPELINE
    flops = 3 * tokens * (attention_matmul_flops(model) + mlp_matmul_flops(model, experts=False)) / tensor
    moved = 6 * element * tokens * model.hidden_size * (tensor - 1) / tensor
    gpu = flops / (_PRODUCT_SHARE * device.peak_flops(spec.training.precision))
    gpu += moved / (_ACROSS_NODES if across else _WITHIN_NODE)
    host = time.forward_host + time.backward_host + time.tensor_host
    if not pipelined:
        return min(1.0, gpu / host)
    if layout.world_size > near_ranks(spec.cluster):
        host += time.stage_stall * tensor
    return max(_LEAST_FILL, min(1.0, (gpu / host - _QUEUE_STARTS_AT) / (_QUEUE_FULL_AT - _QUEUE_STARTS_AT)))


_FP32 = 4


class BlockSharding(NamedTuple):
    """The sharding of one transformer block: degrees of parallelism, kernel, and element size.

    ``tensor``: ranks that shard attention and MLP. ``norm_ranks``: ranks that shard norms, dropout and residuals (equal
    to ``tensor`` with Megatron's sequence parallelism, otherwise 1). ``expert_tensor``: ranks that shard each expert.
    ``flash``: attention has a fused kernel. ``element``: bytes per activation element.
    """

    tensor: int
    norm_ranks: int
    expert_tensor: int
    flash: bool
    element: int


@dataclass(frozen=True)
class BlockActivations:
    """Bytes per token of one block on one rank."""

    attention: int  # saved by attention and its projections, without the matrix of scores
    scores: int  # saved scores, softmax weights and dropout masks of unfused attention
    norms: int  # saved by both norms, dropout and residual sums
    mlp: int  # saved by the MLP, or by router and experts
    block_input: int  # all that full activation checkpointing keeps
    products: int  # kept by torchtitan's selective checkpointing: block input, attention, every second matrix product
    attention_gradients: int  # gradients alive at once while attention runs backward
    mlp_gradients: int  # gradients alive at once while the MLP runs backward

    @property
    def saved(self) -> int:
        """Bytes per token that the forward pass saves without activation checkpointing."""
        return self.attention + self.scores + self.norms + self.mlp

    @property
    def working(self) -> int:
        """Bytes per token of the gradients alive at once in the backward pass."""
        return max(self.attention_gradients, self.mlp_gradients)


@lru_cache(maxsize=4096)
def block_activations(
    model: ModelSpec, profile: MemoryProfile, sharding: BlockSharding, experts: bool
) -> BlockActivations:
    """Return the activation bytes per token of one block; ``experts``: the block's MLP is a mixture of experts.

    Of a hybrid model the mean over its blocks with experts, or without; gradients are those of the block with most.
    """
    if model.block_types:
        return _hybrid_activations(model, profile, sharding, experts)
    hidden, element = model.hidden_size, sharding.element
    attention, scores, attention_gradients = _attention(model, profile, sharding)
    statistics = _FP32 * (1 if model.norm_kind == "rmsnorm" else 2)
    # Input and output of each norm; the residual sum is the next norm's input. A dropout mask is one byte per channel.
    norms = 2 * (2 * element * hidden + statistics) // sharding.norm_ranks
    if model.hidden_dropout:
        norms += 2 * hidden // sharding.norm_ranks
    residual = 2 * element * hidden // sharding.norm_ranks
    mlp, mlp_gradients = (
        _experts(model, profile, sharding) if experts else _dense(model, profile, sharding, model.intermediate_size)
    )
    # torchtitan's selective checkpointing (activation_checkpoint.py) keeps the block's input, the attention output, and
    # the outputs of every second matrix product: query, value, gate (or up) and down projection.
    heads = -(-model.num_attention_heads // sharding.tensor) * model.head_dim
    keys = max(-(-model.num_key_value_heads // sharding.tensor), 1) * model.head_dim
    inner = model.num_experts_per_tok * model.expert_size if experts else model.intermediate_size
    ends = (2 if model.has_gated_mlp else 1) * model.hidden_size // sharding.norm_ranks
    return BlockActivations(
        attention=attention,
        scores=scores,
        norms=norms,
        mlp=mlp,
        block_input=element * hidden // sharding.norm_ranks,
        products=sharding.element * (2 * heads + keys + -(-inner // sharding.tensor) + ends),
        attention_gradients=attention_gradients + residual,
        mlp_gradients=mlp_gradients + residual,
    )


def _hybrid_activations(
    model: ModelSpec, profile: MemoryProfile, sharding: BlockSharding, experts: bool
) -> BlockActivations:
    """Return the mean bytes per token of the blocks of a hybrid model with experts, or without."""
    kinds = [kind for kind in model.parts_between(0, model.num_hidden_layers) if kind[0].experts == experts]
    blocks = max(1, sum(times for _, times in kinds))
    mixing, scan = sum(n for p, n in kinds if p.attention), sum(n for p, n in kinds if p.mamba)
    whole = block_activations(model.model_copy(update={"block_types": (), "mamba": None}), profile, sharding, experts)
    saved, gradients = mamba_bytes(model, sharding.element, sharding.tensor)
    has_mlp = sum(n for p, n in kinds if p.mlp or p.experts)
    norms = sum(parts.sublayers * times for parts, times in kinds)
    return BlockActivations(
        attention=(mixing * whole.attention + scan * saved) // blocks,
        scores=mixing * whole.scores // blocks,
        norms=norms * whole.norms // (2 * blocks),
        mlp=has_mlp * whole.mlp // blocks,
        block_input=whole.block_input,
        products=whole.products * (mixing + scan + has_mlp) // (2 * blocks),
        attention_gradients=max(whole.attention_gradients if mixing else 0, gradients if scan else 0),
        mlp_gradients=whole.mlp_gradients if has_mlp else 0,
    )


def _attention(model: ModelSpec, profile: MemoryProfile, sharding: BlockSharding) -> tuple[int, int, int]:
    """Return the bytes per token of attention and its projections: (saved without scores, scores, gradients)."""
    heads = -(-model.num_attention_heads // sharding.tensor)
    element = sharding.element
    if model.kv_lora_rank:
        # The latents before and after their norms, queries and keys with and without their rotary part, and values
        # (DeepSeek-V2, arXiv:2405.04434, section 2.1).
        turned, wide, value = model.qk_rope_head_dim, model.qk_head_dim, model.value_head_dim
        latents = 2 * (model.q_lora_rank + model.kv_lora_rank) + turned
        channels = heads * (3 * wide + (model.head_dim + value) + value)
        kept, output = element * (latents + channels) + indexer_bytes(model, element), element * heads * value
        gradients = kept + output
    else:
        queries = heads * model.head_dim
        keys = max(-(-model.num_key_value_heads // sharding.tensor), 1) * model.head_dim
        kept = element * (queries + 2 * keys)
        if profile.keeps_projected and model.positions == "rotary":
            kept += element * (queries + keys)
        if profile.repeats_keys:
            kept += element * 2 * (queries - keys)
        if model.qk_norm:
            kept += element * (queries + keys)
        output = element * queries  # which is the input of its projection
        gradients = element * (queries + 2 * keys) + 2 * output
    if sharding.flash:
        return kept + output + _FP32 * heads, 0, gradients
    # Unfused: the weights after softmax; with dropout also the weights after dropout, and the mask (one byte each).
    row = heads * model.seq_len
    scores = row * (2 * element + 1 if model.attention_dropout else element)
    return kept + output, scores, gradients + row * 2 * element


def _dense(model: ModelSpec, profile: MemoryProfile, sharding: BlockSharding, inner: int) -> tuple[int, int]:
    """Return the bytes per token of an MLP of width ``inner``: (saved, without its input; gradients alive at once)."""
    width = -(-inner // sharding.tensor)
    if model.has_gated_mlp:
        return profile.gated_mlp * sharding.element * width, 3 * sharding.element * width
    return 2 * sharding.element * width, 2 * sharding.element * width


def _experts(model: ModelSpec, profile: MemoryProfile, sharding: BlockSharding) -> tuple[int, int]:
    """Return the bytes per token of a mixture of experts: (saved, gradients alive at once).

    Saved are the router's fp32 logits and probabilities, the shared experts, and for each of the top-k experts of a
    token its input (as received by the all-to-all), its inner activations and its output. What the all-to-all sends
    is not saved, because its backward pass needs no input. The load is assumed balanced: a rank receives as many tokens
    as it sends. Tensor ranks divide the tokens between them, unless they shard the width of each expert.
    """
    hidden, element = model.hidden_size, sharding.element
    copies = model.num_experts_per_tok
    width = -(-model.expert_size // sharding.expert_tensor)
    per_width = profile.gated_mlp if model.has_gated_mlp else 2
    routed = copies * sharding.expert_tensor * element * (2 * hidden + per_width * width) // sharding.norm_ranks
    router = 2 * _FP32 * model.num_experts // sharding.norm_ranks
    gradients = copies * element * sharding.expert_tensor * (2 * hidden + 3 * width) // sharding.norm_ranks
    if model.shared_expert_intermediate_size:
        shared, shared_gradients = _dense(model, profile, sharding, model.shared_expert_intermediate_size)
        shared += element * (hidden // sharding.norm_ranks + 1) if model.shared_expert_gate else 0
        return routed + router + shared, max(gradients, shared_gradients)
    return routed + router, gradients


class _FixedBytes(NamedTuple):
    """Bytes of a pipeline stage that do not depend on the number of micro-batches in flight."""

    states: ModelStates
    host: int
    per_micro_batch: int  # activations saved for one micro-batch
    logits: int
    buffers: int
    fresh: int  # gradients of one backward pass, before they are added to the accumulated ones
    step: int  # temporary memory of the optimizer's step


def framework_stage_memory(
    spec: RunSpec,
    layout: Layout,
    device: Accelerator,
    profile: MemoryProfile,
    time: FrameworkProfile,
    *,
    selective: Selective,
    shards_norms: bool,
    master_weights: MasterWeights,
) -> Callable[[Stage], StageMemory]:
    """Return a function from a pipeline stage of this layout to its bytes on one rank."""
    model, training, per_rank = spec.transformer, spec.training, rank_architecture(spec, layout)
    element, tokens = weight_bytes(training.precision), local_tokens(spec, layout)
    norm_ranks = layout.tensor_parallel if shards_norms else 1
    expert_tensor = expert_tensor_parallel(spec, layout)
    sharding = BlockSharding(layout.tensor_parallel, norm_ranks, expert_tensor, fuses_attention(spec, device), element)
    dense_block = block_activations(model, profile, sharding, False)
    moe_block = block_activations(model, profile, sharding, True) if model.num_experts else dense_block
    kept_dense, kept_moe = (_kept(block, selective, layout) for block in (dense_block, moe_block))
    working = tokens * max(_working(block, selective, layout) for block in (dense_block, moe_block))
    channels = element * model.hidden_size * tokens // norm_ranks
    # The embedding saves its output for its dropout, and the mask; the final norm saves its input and output.
    embedding = tokens * model.hidden_size // norm_ranks + channels if model.hidden_dropout else 0
    final_norm = 2 * channels
    stage_output = channels if profile.keeps_stage_output else 0
    gathered = profile.gathered * element * model.hidden_size * tokens if norm_ranks > 1 else 0
    logits_size = tokens * -(-model.vocab_size // layout.tensor_parallel)
    between = 2 * channels if layout.pipeline_parallel > 1 else 0
    deferred = _deferred_bytes(spec, layout, device, time, profile.deferred, tokens)
    expert_share = layout.tensor_parallel / expert_tensor
    workspace = profile.workspace + (profile.hopper_workspace if device.cuda_capability >= HOPPER else 0)

    @cache
    def fixed_bytes(stage: Stage) -> _FixedBytes:
        """Return the bytes that do not depend on the micro-batches in flight."""
        shard = stage_shard(per_rank, stage, expert_share)
        per_micro_batch = tokens * (stage.dense * kept_dense + (stage.blocks - stage.dense) * kept_moe)
        per_micro_batch += embedding if stage.first else 0
        per_micro_batch += final_norm if stage.last else stage_output
        step = profile.step_temporary * (
            shard.parameters if layout.zero_stage == 0 else -(-shard.parameters // zero_shards(layout))
        )
        if layout.offload != "none" or training.optimizer.name not in ("adamw", "adam"):
            step = 0
        states, host = device_and_host_states(spec, layout, shard, master_weights)
        states = states._replace(parameters=states.parameters - saved_weight_bytes(spec, layout, stage))
        return _FixedBytes(
            states=states,
            host=host,
            per_micro_batch=per_micro_batch,
            logits=profile.logits * logits_size if stage.last else 0,
            buffers=workspace + between + gathered + _reducer_bytes(spec, layout, profile, shard, per_rank),
            fresh=profile.fresh_gradient * shard.parameters,
            step=step,
        )

    outside = outside_allocator_bytes(layout, spec.cluster.gpus_per_node, device.is_cpu)

    def size(stage: Stage) -> StageMemory:
        """Return the bytes of the stage in its fullest phase: the loss, a backward pass, or the optimizer step."""
        fixed = fixed_bytes(stage._replace(position=0))
        states, per_micro_batch = fixed.states, fixed.per_micro_batch
        saved = per_micro_batch * chunks_in_flight(layout, stage.position) // layout.virtual_pipeline
        phases = (
            PhaseMemory(saved, fixed.logits, fixed.buffers, 0),
            PhaseMemory(saved + working, 0, fixed.buffers, 0),
            PhaseMemory(
                saved - per_micro_batch + working, 0, fixed.buffers + fixed.fresh, 0
            ),  # backward pass of the first block, when all gradients of this micro-batch exist
            PhaseMemory(0, 0, workspace, fixed.step),
        )
        worst = max(phases, key=sum)
        # Half of the new gradients cannot reuse the memory of freed activations, which are in smaller blocks.
        fragmentation = int(profile.fragmentation * sum(worst)) + fixed.fresh // 2 + deferred
        return peak_memory(states, worst, fragmentation, outside, fixed.host)

    return size


def _kept(block: BlockActivations, selective: Selective, layout: Layout) -> int:
    """Return the saved bytes per token of one block under the layout's checkpointing; with "blocks", the average."""
    mode = layout.activation_checkpointing
    if mode == "none":
        return block.saved
    if mode == "full":
        return block.block_input
    if selective == "operations":
        return min(block.products, block.saved)
    return (block.saved + block.block_input) // 2 if selective == "blocks" else block.saved - block.scores


def _working(block: BlockActivations, selective: Selective, layout: Layout) -> int:
    """Return the bytes per token of one block's backward pass: its gradients, and its recomputed activations."""
    mode = layout.activation_checkpointing
    if mode == "none":
        return block.working
    if mode == "selective" and selective == "attention core":
        return block.working + block.scores
    return block.working + block.saved


def _reducer_bytes(spec: RunSpec, layout: Layout, profile: MemoryProfile, shard: Shard, per_rank: Architecture) -> int:
    """Return the bytes of gradient buckets, and under ZeRO-2 and 3 of gathered weights and unreduced gradients."""
    if zero_shards(layout) == 1:
        return 0
    buckets = profile.bucket * shard.parameters
    if layout.zero_stage < 2:
        return buckets
    training = spec.training
    element = weight_bytes(training.precision)
    grads = gradient_bytes(training.precision, training.grad_dtype)
    blocks = min(profile.gathered_blocks * shard.largest_block, shard.parameters)
    weights = min(blocks + per_rank.embedding + per_rank.head, shard.parameters)
    # Until the last micro-batch of a pipeline, torch reshards no weights and reduces no gradients, which accumulate in
    # the dtype of their reduction (torch/distributed/pipelining/stage.py backward_maybe_with_nosync;
    # fsdp/_fully_shard/_fsdp_param.py to_accumulated_grad_if_needed).
    pipelined = layout.pipeline_parallel > 1
    if layout.zero_stage == 2 or pipelined:
        weights = shard.parameters
    if layout.gradient_accumulation_steps > 1 and (pipelined or profile.accumulates_unsharded):
        blocks += shard.parameters
    return buckets + element * weights + grads * blocks
