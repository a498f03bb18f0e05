"""Bytes of a pipeline stage under Megatron-LM, nanotron or PyTorch FSDP.

Activations are counted like Korthikanti et al. (arXiv:2205.05198, section 4): every operation keeps what its gradient
needs, and a tensor that two operations need is counted once.

Deferred bytes are free for the program but not yet for the allocator, because the host runs ahead of the GPU. A tensor
that a collective on another stream uses is freed by the host long before the GPU has finished with it; until then the
allocator cannot reuse it (torch, ``record_stream``). That matters where tensor-parallel collectives run beside the
products and the GPU, not the host, is the bottleneck: then the launch queue is full, and about as many tensors wait as
its thousand kernels use. The allocator could wait for them when memory runs short; the published runs that came that
far crashed or slowed down by an order of magnitude, so they count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from scaletrain_cli.plan.architecture import Architecture, attention_matmul_flops, mlp_matmul_flops
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.frameworks.profile import FrameworkProfile, MemoryProfile
from scaletrain_cli.plan.memory.activations import latent_attention
from scaletrain_cli.plan.memory.peak import PhaseMemory, outside_allocator_bytes, peak_memory
from scaletrain_cli.plan.memory.states import (
    ModelStates,
    device_and_host_states,
    expert_tensor_parallel,
    gradient_bytes,
    weight_bytes,
)
from scaletrain_cli.plan.result import Layout, StageMemory
from scaletrain_cli.plan.stages import Shard, Stage, chunks_in_flight, local_tokens, stage_shard, zero_shards
from scaletrain_cli.spec import ModelSpec, RunSpec

if TYPE_CHECKING:
    from scaletrain_cli.plan.frameworks.base import Framework, Selective

# Rough rates, for which of host and GPU is faster: share of the peak in products, and bytes/s that a rank's
# collectives reach within a node and, hierarchical, across nodes.
_PRODUCTS = 0.45
_WITHIN_NODE = 300e9
_ACROSS_NODES = 250e9
# Calibrated on the Ultra-Scale sweep: the queue begins to fill when the GPU needs half of the host's time; without a
# pipeline, where nothing waits for another stage, from the start. Filling a longer pipeline takes several
# forward passes in a row, which fill the queue too, but for the widest tensor parallelism.
_EMPTY, _FULL = 0.5, 1.0
_ACROSS = 0.8
_FILLING = 0.85
_FILLING_STAGES = 4
_WIDEST = 32
_LEAST = 0.05
# A step of a single micro-batch ends before the queue is full.
_SINGLE = 0.4


def deferred_bytes(
    spec: RunSpec,
    layout: Layout,
    device: Accelerator,
    profile: MemoryProfile,
    time: FrameworkProfile,
    tokens: int,
    element: int,
) -> int:
    """Return the bytes of whole tensors that wait for collectives, of one rank."""
    if not profile.deferred or layout.tensor_parallel == 1:
        return 0
    share = _share(spec, layout, device, time, tokens, element)
    if layout.gradient_accumulation_steps == 1:
        share *= _SINGLE
    # Each collective holds a whole tensor and one rank's share of it.
    pairs = share * profile.deferred * (1 + 1 / layout.tensor_parallel)
    return int(pairs * element * spec.transformer.hidden_size * tokens)


def _share(
    spec: RunSpec, layout: Layout, device: Accelerator, time: FrameworkProfile, tokens: int, element: int
) -> float:
    """Return how full the launch queue is, from 0 to 1."""
    model, tensor = spec.transformer, layout.tensor_parallel
    across = tensor > spec.cluster.gpus_per_node
    pipelined = layout.pipeline_parallel > 1
    if not pipelined and across:
        return _ACROSS
    if pipelined and tensor >= _WIDEST:
        return _LEAST
    if layout.pipeline_parallel >= _FILLING_STAGES:
        return _FILLING
    flops = 3 * tokens * (attention_matmul_flops(model) + mlp_matmul_flops(model, experts=False)) / tensor
    moved = 6 * element * tokens * model.hidden_size * (tensor - 1) / tensor
    gpu = flops / (_PRODUCTS * device.peak_flops(spec.training.precision))
    gpu += moved / (_ACROSS_NODES if across else _WITHIN_NODE)
    host = time.forward_host + time.backward_host + time.tensor_host
    if not pipelined:
        return min(1.0, gpu / host)
    if layout.world_size > spec.cluster.gpus_per_node:
        host += time.stage_stall * tensor
    return max(_LEAST, min(1.0, (gpu / host - _EMPTY) / (_FULL - _EMPTY)))


_FP32 = 4


class Cut(NamedTuple):
    """The sharding of a block: ``norm_ranks`` share norms, dropout and residuals; ``element``: bytes per element."""

    tensor: int
    norm_ranks: int
    expert_tensor: int
    flash: bool
    element: int


@dataclass(frozen=True)
class BlockActivations:
    """Bytes per token of one block on one rank."""

    attention: int  # kept by attention, without its scores
    scores: int  # scores kept by unfused attention
    norms: int  # of both norms, dropout and residual sums
    mlp: int
    block_input: int
    products: int  # the block's input, the attention's output and every second product
    attention_gradients: int  # alive while attention runs backward
    mlp_gradients: int

    @property
    def saved(self) -> int:
        return self.attention + self.scores + self.norms + self.mlp

    @property
    def working(self) -> int:
        return max(self.attention_gradients, self.mlp_gradients)


@lru_cache(maxsize=4096)
def block_activations(model: ModelSpec, profile: MemoryProfile, cut: Cut, experts: bool) -> BlockActivations:
    """Return what a block keeps per token; ``experts``: a block whose MLP is a mixture of experts."""
    hidden, element = model.hidden_size, cut.element
    attention, scores, attention_gradients = _attention(model, profile, cut)
    statistics = _FP32 * (1 if model.norm_kind == "rmsnorm" else 2)
    # Input and output of each norm; the residual sum is the next norm's input. A mask is one byte per channel.
    norms = 2 * (2 * element * hidden + statistics) // cut.norm_ranks
    if model.hidden_dropout:
        norms += 2 * hidden // cut.norm_ranks
    residual = 2 * element * hidden // cut.norm_ranks
    mlp, mlp_gradients = (
        _experts(model, profile, cut) if experts else _dense(model, profile, cut, model.intermediate_size)
    )
    return BlockActivations(
        attention=attention,
        scores=scores,
        norms=norms,
        mlp=mlp,
        block_input=element * hidden // cut.norm_ranks,
        products=_products(model, cut, experts),
        attention_gradients=attention_gradients + residual,
        mlp_gradients=mlp_gradients + residual,
    )


def _products(model: ModelSpec, cut: Cut, experts: bool) -> int:
    """Return the outputs of the query, value, gate (or up), down and attention projections, and the block's input."""
    heads = -(-model.num_attention_heads // cut.tensor) * model.head_dim
    keys = max(-(-model.num_key_value_heads // cut.tensor), 1) * model.head_dim
    inner = model.num_experts_per_tok * model.expert_size if experts else model.intermediate_size
    ends = (2 if model.has_gated_mlp else 1) * model.hidden_size // cut.norm_ranks
    return cut.element * (2 * heads + keys + -(-inner // cut.tensor) + ends)


def _attention(model: ModelSpec, profile: MemoryProfile, cut: Cut) -> tuple[int, int, int]:
    """Return (kept without scores, kept scores, gradients alive) of attention and its projections: bytes per token."""
    heads = -(-model.num_attention_heads // cut.tensor)
    element = cut.element
    if model.kv_lora_rank:
        kept, output = latent_attention(model, element, heads)
        gradients = kept + output
    else:
        queries = heads * model.head_dim
        keys = max(-(-model.num_key_value_heads // cut.tensor), 1) * model.head_dim
        kept = element * (queries + 2 * keys)
        if profile.keeps_projected and model.positions == "rotary":
            kept += element * (queries + keys)
        if profile.repeats_keys:
            kept += element * 2 * (queries - keys)
        if model.qk_norm:
            kept += element * (queries + keys)
        output = element * queries  # which is the input of its projection
        gradients = element * (queries + 2 * keys) + 2 * output
    if cut.flash:
        return kept + output + _FP32 * heads, 0, gradients
    # The weights after softmax; with dropout what it leaves, and its mask.
    row = heads * model.seq_len
    scores = row * (2 * element + 1 if model.attention_dropout else element)
    return kept + output, scores, gradients + row * 2 * element


def _dense(model: ModelSpec, profile: MemoryProfile, cut: Cut, inner: int) -> tuple[int, int]:
    """Return the bytes per token that an MLP of width ``inner`` keeps beside its input, and of its gradients alive at
    once.
    """
    width = -(-inner // cut.tensor)
    if model.has_gated_mlp:
        return profile.gated_mlp * cut.element * width, 3 * cut.element * width
    return 2 * cut.element * width, 2 * cut.element * width


def _experts(model: ModelSpec, profile: MemoryProfile, cut: Cut) -> tuple[int, int]:
    """Return the router's logits and probabilities, each routed copy of a token, and the shared experts.

    A token's copies are kept as received and as they come back from the experts, not as sent: an all-to-all's gradient
    needs nothing. With balanced experts a rank receives as many as it sends. Tensor ranks share the tokens, unless
    they share the experts' width.
    """
    hidden, element = model.hidden_size, cut.element
    copies = model.num_experts_per_tok
    width = -(-model.expert_size // cut.expert_tensor)
    per_width = profile.gated_mlp if model.has_gated_mlp else 2
    routed = copies * cut.expert_tensor * element * (2 * hidden + per_width * width) // cut.norm_ranks
    router = 2 * _FP32 * model.num_experts // cut.norm_ranks
    gradients = copies * element * cut.expert_tensor * (2 * hidden + 3 * width) // cut.norm_ranks
    if model.shared_expert_intermediate_size:
        shared, shared_gradients = _dense(model, profile, cut, model.shared_expert_intermediate_size)
        return routed + router + shared, max(gradients, shared_gradients)
    return routed + router, gradients


class _Held(NamedTuple):
    """Bytes of a stage that do not depend on how many micro-batches are in flight."""

    states: ModelStates
    host: int
    per_micro_batch: int
    logits: int
    buffers: int
    fresh: int
    step: int


def framework_stage_memory(
    spec: RunSpec,
    layout: Layout,
    device: Accelerator,
    whole: Architecture,
    framework: Framework,
    profile: MemoryProfile,
    time: FrameworkProfile,
) -> Callable[[Stage], StageMemory]:
    """Return a function from a pipeline stage of this layout to its bytes on one rank."""
    model, training = spec.transformer, spec.training
    selective = framework.selective(spec)
    element, tokens = weight_bytes(training.precision), local_tokens(spec, layout)
    norm_ranks = layout.tensor_parallel if framework.shards_norms(spec, layout) else 1
    expert_tensor = expert_tensor_parallel(spec, layout)
    cut = Cut(layout.tensor_parallel, norm_ranks, expert_tensor, _flash(spec, device), element)
    plain = block_activations(model, profile, cut, False)
    sparse = block_activations(model, profile, cut, True) if model.num_experts else plain
    kept_plain, kept_sparse = (_kept(block, selective, layout) for block in (plain, sparse))
    working = tokens * max(_working(block, selective, layout) for block in (plain, sparse))
    channels = element * model.hidden_size * tokens // norm_ranks
    # The embedding's output before its dropout, and the mask; the final norm's input is the last block's output.
    embedding = tokens * model.hidden_size // norm_ranks + channels if model.hidden_dropout else 0
    final_norm = 2 * channels
    sent = channels if profile.keeps_stage_output else 0
    gathered = profile.gathered * element * model.hidden_size * tokens if norm_ranks > 1 else 0
    logits_size = tokens * -(-model.vocab_size // layout.tensor_parallel)
    between = 2 * channels if layout.pipeline_parallel > 1 else 0
    waiting = deferred_bytes(spec, layout, device, profile, time, tokens, element)
    expert_share = layout.tensor_parallel / expert_tensor
    workspace = profile.workspace + (profile.hopper_workspace if _has_large_workspaces(device) else 0)

    def held_by(stage: Stage) -> _Held:
        shard = stage_shard(whole, stage, expert_share)
        per_micro_batch = tokens * (stage.dense * kept_plain + (stage.blocks - stage.dense) * kept_sparse)
        per_micro_batch += embedding if stage.first else 0
        per_micro_batch += final_norm if stage.last else sent
        step = profile.step_temporary * _updated(layout, shard)
        if layout.offload != "none" or training.optimizer.name not in ("adamw", "adam"):
            step = 0
        states, host = device_and_host_states(spec, layout, shard, framework.master_weights)
        return _Held(
            states=states,
            host=host,
            per_micro_batch=per_micro_batch,
            logits=profile.logits * logits_size if stage.last else 0,
            buffers=workspace + between + gathered + _reducer_bytes(spec, layout, profile, shard, whole),
            fresh=profile.fresh_gradient * shard.parameters,
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
            PhaseMemory(saved, held.logits, held.buffers, 0),
            PhaseMemory(saved + working, 0, held.buffers, 0),
            PhaseMemory(
                saved - per_micro_batch + working, 0, held.buffers + held.fresh, 0
            ),  # the last block's backward
            PhaseMemory(0, 0, workspace, held.step),
        )
        worst = max(moments, key=sum)
        # The gradients of a backward pass cannot all reuse the memory of freed activations, which are smaller blocks.
        fragmentation = int(profile.fragmentation * sum(worst)) + held.fresh // 2 + waiting
        return peak_memory(states, worst, fragmentation, outside, held.host)

    return size


def _flash(spec: RunSpec, device: Accelerator) -> bool:
    wanted, model = spec.planner.attention, spec.transformer
    if wanted != "auto":
        return wanted == "flash"
    grouped = model.num_key_value_heads != model.num_attention_heads
    return device.fuses_attention(spec.training.precision, model.head_dim, grouped)


def _has_large_workspaces(device: Accelerator) -> bool:
    """Return whether the device is Hopper or later (torch, CUDABlas.cpp; Transformer Engine, cuBLAS workspace size)."""
    major = device.compute_capability.split(".")[0]
    return major.isdigit() and int(major) >= 9


def _kept(block: BlockActivations, selective: Selective, layout: Layout) -> int:
    """Return the bytes per token that a block keeps; the average over blocks if every second one is recomputed."""
    mode = layout.activation_checkpointing
    if mode == "none":
        return block.saved
    if mode == "full":
        return block.block_input
    if selective == "operations":
        return min(block.products, block.saved)
    return (block.saved + block.block_input) // 2 if selective == "blocks" else block.saved - block.scores


def _working(block: BlockActivations, selective: Selective, layout: Layout) -> int:
    """Return the bytes per token of one block's backward pass: its gradients, and recomputed activations."""
    mode = layout.activation_checkpointing
    if mode == "none":
        return block.working
    if mode == "selective" and selective == "attention core":
        return block.working + block.scores
    return block.working + block.saved


def _updated(layout: Layout, shard: Shard) -> int:
    """Return the number of parameters that one rank's optimizer updates."""
    return shard.parameters if layout.zero_stage == 0 else -(-shard.parameters // zero_shards(layout))


def _reducer_bytes(spec: RunSpec, layout: Layout, profile: MemoryProfile, shard: Shard, whole: Architecture) -> int:
    """Return the gradient buckets; under ZeRO-2 and 3 also the gathered weights and unreduced gradients."""
    shards = zero_shards(layout)
    if shards == 1:
        return 0
    held = profile.bucket * shard.parameters
    if layout.zero_stage < 2:
        return held
    training = spec.training
    element = weight_bytes(training.precision)
    grads = gradient_bytes(training.precision, training.grad_dtype)
    blocks = profile.gathered_blocks * shard.largest_block
    ends = whole.embedding + whole.head
    weights = blocks + ends if layout.zero_stage == 3 else shard.parameters
    return held + element * min(weights, shard.parameters) + grads * min(blocks, shard.parameters)
