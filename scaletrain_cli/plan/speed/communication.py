"""Communication on each axis of parallelism: seconds, and the bytes that one rank sends per optimizer step.

Volumes are those of ZeRO (arXiv:1910.02054, section 7), Megatron-LM (arXiv:1909.08053, arXiv:2104.04473,
arXiv:2205.05198) and Ulysses (arXiv:2309.14509), corrected for what each framework really sends (see comments).
"""

from dataclasses import dataclass

from scaletrain_cli.plan.adapters import trains_in_fp32
from scaletrain_cli.plan.catalogue.networks import Link
from scaletrain_cli.plan.frameworks.profile import FrameworkProfile
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.memory.buffers import PERSISTENT_ELEMENTS
from scaletrain_cli.plan.memory.engine_memory import gathered_on_rank, recomputation
from scaletrain_cli.plan.memory.parameter_groups import elements_in_small_tensors
from scaletrain_cli.plan.memory.states import gathered_weight_bytes, gradient_bytes, weight_bytes
from scaletrain_cli.plan.result import Layout, PerStepBytes
from scaletrain_cli.plan.speed.recompute import recomputed_forwards
from scaletrain_cli.plan.stages import Stage, local_tokens, replicas, zero_shards
from scaletrain_cli.spec import RunSpec

# Slow-down of compute while communication overlaps it: 12.56 % of the overlapped time, measured on A100
# (Hetu-Galvatron, overlap_coefficient.json: 1.1256).
CONTENTION = 0.1256
# Channels of a head are a multiple of this for the engine's attention kernels on a GPU (engine/parallel/sequence.py).
_HEAD_MULTIPLE = 8


@dataclass(frozen=True)
class BlockTraffic:
    """Seconds of communication of one block and micro-batch, without data parallelism."""

    forward: float
    backward: float
    experts: float  # dispatch and combine of one MoE block in one pass, forward or backward; not in the fields above


@dataclass(frozen=True)
class DataTraffic:
    """Seconds of gradient and weight traffic between the data-parallel ranks of one pipeline stage."""

    forward: float  # per micro-batch: all-gather of weights
    backward: float  # per micro-batch: all-gather of weights (ZeRO-3), reduction of gradients (ZeRO-2 and 3)
    reduce: float  # per step: reduction of gradients, beside the last backward pass
    gather: float  # per step: all-gather of updated weights, after the optimizer
    sent: int  # bytes that one rank sends per step


def block_traffic(spec: RunSpec, layout: Layout, link: Link, profile: FrameworkProfile) -> BlockTraffic:
    """Return the seconds of tensor, sequence, context and expert parallelism in one block, per micro-batch."""
    model = spec.transformer
    payload = _payload(spec, layout)
    t, sp, cp, ep = layout.tensor_parallel, layout.sequence_parallel, layout.context_parallel, layout.expert_parallel
    forward = backward = 0.0
    if t > 1:
        # Attention and MLP each all-gather their input and reduce-scatter their output, or all-reduce the output: these
        # are the same bytes.
        beside = 1 - profile.tensor_overlap
        if framework_of(spec).shards_norms(spec, layout):
            one = link.gather(payload, t) * beside
            forward, backward = profile.tensor_collectives[0] * one, profile.tensor_collectives[1] * one
        else:
            forward = backward = 2 * link.reduce(payload, t) * beside
    if sp > 1:
        forward += link.exchange(payload * _width(spec, t), sp, t)
        backward += link.exchange(payload * _width(spec, t), sp, t)
    if cp > 1:
        # Ring attention sends keys and values around the ring; half of that overlaps attention in the forward pass, of
        # this project's engine also in the backward pass.
        there, back = ring_bytes(spec, layout)
        others = cp / (cp - 1)
        forward += link.gather(there * others, cp, t * sp) / 2
        backward += link.gather(back * others, cp, t * sp) / (2 if framework_of(spec).is_engine else 1)
    experts = 0.0
    if model.num_experts and ep > 1:
        routed = payload * model.num_experts_per_tok / (t if framework_of(spec).shards_norms(spec, layout) else 1)
        experts = 2 * link.exchange(routed, ep, t, model.num_experts_per_tok if profile.sends_once_per_node else 1)
    return BlockTraffic(forward, backward, experts)


def data_traffic(
    spec: RunSpec,
    layout: Layout,
    link: Link,
    profile: FrameworkProfile,
    parameters: int,
    blocks: int,
    trained: int | None = None,
) -> DataTraffic:
    """Return the data-parallel traffic of a stage; a rank has ``parameters`` parameters, in ``blocks`` blocks.

    ``trained``: those that train (None: all). Only these have gradients, and only these are gathered after the update;
    ZeRO-3 gathers all in each pass. Both have 4 bytes per element for fp32 adapters.
    """
    ranks, stage, m = zero_shards(layout), layout.zero_stage, layout.gradient_accumulation_steps
    if ranks == 1:
        return DataTraffic(0.0, 0.0, 0.0, 0.0, 0)
    training = spec.training
    stride = layout.tensor_parallel
    learned = parameters if trained is None else trained
    element = weight_bytes(training.precision)
    own = 4 if trains_in_fp32(spec) else gathered_weight_bytes(spec)
    weights = learned * own + ((parameters - learned) * element if stage == 3 else 0)
    gradients = learned * _gradient_bytes(spec, profile)
    part = (ranks - 1) / ranks
    copies = replicas(layout) // ranks if layout.zero_shard_size else 1
    # Groups of ranks that shard by themselves then average the gradients of their shards (MiCS, arXiv:2205.00119).
    summed = learned * gradient_bytes(training.precision, training.grad_dtype) // ranks if copies > 1 else 0
    across, crossing = link.reduce(summed, copies, stride * ranks), 2 * summed * (copies - 1) / copies
    if stage == 0:
        return DataTraffic(0.0, 0.0, link.reduce(gradients, ranks, stride), 0.0, int(2 * gradients * part))
    gather = link.gather(weights, ranks, stride)
    framework = framework_of(spec)
    whole = framework.reduces_whole_gradients and stage <= 2
    reduce = link.reduce(gradients, ranks, stride) if whole else link.gather(gradients, ranks, stride)
    reduced = (2 if whole else 1) * gradients
    if stage == 1 or (layout.pipeline_parallel > 1 and framework.keeps_whole_in_pipeline):
        return DataTraffic(0.0, 0.0, reduce, gather, int((reduced + weights) * part))
    if stage == 2:
        # The gradients of every micro-batch are reduced.
        if framework.gathers_per_micro_batch:
            return DataTraffic(gather, reduce, 0.0, 0.0, int(m * (reduced + weights) * part))
        sent = (m * reduced + weights) * part + crossing
        return DataTraffic(0.0, reduce, 0.0, gather + across, int(sent))
    # ZeRO-3 gathers weights and scatters gradients block by block; each message has its own latency.
    pieces = blocks + 1
    gather = pieces * link.gather(weights / pieces, ranks, stride, profile.zero_3_most)
    reduce = pieces * link.gather(gradients / pieces, ranks, stride, profile.zero_3_most)
    passes, once = _gathers(spec, layout, parameters) if framework.is_engine else (2 * m, 0.0)
    if (size := layout.zero_secondary_shard_size) > 1:
        # The first pass of a step gathers over all ranks, the others from the second copy (hpZ, arXiv:2306.10209).
        inside = pieces * link.gather(weights / pieces, size, stride, profile.zero_3_most)
        sent = weights * (part + (passes - (1 - once)) * (size - 1) / size) + m * reduced * part
        return DataTraffic((gather + (m - 1) * inside) / m, inside + reduce, 0.0, 0.0, round(sent))
    sent = (weights * (passes + once) + m * reduced) * part + crossing
    return DataTraffic(gather, gather + reduce, 0.0, across, round(sent))


def _gathers(spec: RunSpec, layout: Layout, parameters: int) -> tuple[float, float]:
    """Return how many times a step gathers large weights in passes, and small ones after the update, in all weights.

    Small parameters (stage3_param_persistence_threshold) stay gathered from one update to the next.
    """
    small = elements_in_small_tensors(spec.transformer, layout.tensor_parallel, PERSISTENT_ELEMENTS)
    small = min(parameters, small)
    weights = gathered_on_rank(spec, layout, parameters)
    large = (parameters - small) * weights.gathered / max(1, weights.elements)
    return layout.gradient_accumulation_steps * large / parameters, small / parameters


def outer_traffic(spec: RunSpec, layout: Layout, link: Link, trained: int) -> tuple[float, int]:
    """Return the mean seconds and bytes per step of the outer steps of local SGD; ``trained``: parameters of a rank.

    Ranks at the same place of each group all-reduce the fp32 elements that they update, once in ``inner_steps`` steps;
    nothing overlaps it.
    """
    groups, stride = layout.local_sgd_groups, layout.world_size // layout.local_sgd_groups
    size = 4 * (trained if layout.zero_stage == 0 else -(-trained // zero_shards(layout)))
    every = min(spec.training.local_sgd.inner_steps, spec.total_steps)
    return link.reduce(size, groups, stride) / every, int(2 * size * (groups - 1) / groups / every)


def tied_seconds(spec: RunSpec, layout: Layout, link: Link, profile: FrameworkProfile, table: int) -> float:
    """Return the seconds per step in which first and last stage all-reduce the gradients of a tied embedding.

    ``table``: parameters of the embedding on one tensor rank.
    """
    model, p = spec.transformer, layout.pipeline_parallel
    if p == 1 or not model.tie_word_embeddings:
        return 0.0
    return link.reduce(table * _gradient_bytes(spec, profile), 2, layout.world_size // p * (p - 1))


def boundary_seconds(spec: RunSpec, layout: Layout, link: Link) -> float:
    """Return the seconds to send the activations of one micro-batch to the next stage; 0 without a pipeline."""
    if layout.pipeline_parallel == 1:
        return 0.0
    return link.send(_boundary_bytes(spec, layout), layout.world_size // layout.pipeline_parallel)


def boundary_gathers(spec: RunSpec, layout: Layout, stage: Stage) -> int:
    """Return how often the tensor ranks of a stage gather whole activations per micro-batch, of which each has a share.

    DeepSpeed's pipeline sends shares (``pipe/engine.py``, PartitionedTensor): a stage gathers what arrives in the
    forward pass, and in the backward pass its own output and the gradient of that.
    """
    if not framework_of(spec).is_engine or layout.pipeline_parallel == 1 or layout.tensor_parallel == 1:
        return 0
    return (not stage.first) + 2 * (not stage.last)


def boundary_gather_seconds(spec: RunSpec, layout: Layout, link: Link, stage: Stage) -> float:
    """Return the seconds of ``boundary_gathers`` per micro-batch."""
    return boundary_gathers(spec, layout, stage) * link.gather(_payload(spec, layout), layout.tensor_parallel)


def stall_seconds(layout: Layout, link: Link) -> float:
    """Return the seconds per step that stalled sends between nodes add to a pipeline's slowest stage; 0 without one.

    A stage in the middle sends and receives in both passes; with two stages each does half of that. Measured on one
    network (catalogue/networks.json), where a stalled message takes the same time whatever its size.
    """
    stages = layout.pipeline_parallel
    if stages == 1 or layout.world_size <= link.per_node:
        return 0.0
    messages = (2 if stages == 2 else 4) * layout.virtual_pipeline
    return layout.gradient_accumulation_steps * messages * link.stall_seconds


def sent_bytes(spec: RunSpec, layout: Layout, stage: Stage, data: int) -> PerStepBytes:
    """Return the bytes per step by axis that a rank of a pipeline stage sends; ``data``: its data-parallel bytes."""
    blocks, again = stage.blocks, recomputed_forwards(spec, layout)
    model, m = spec.transformer, layout.gradient_accumulation_steps
    payload, tokens = _payload(spec, layout), local_tokens(spec, layout)
    t, sp, ep = layout.tensor_parallel, layout.sequence_parallel, layout.expert_parallel
    # Two all-reduces forward and two backward per block; recomputation repeats those of the forward pass.
    reductions, loss = int((4 + 2 * again) * blocks * m), 0
    if framework_of(spec).is_engine:
        # Recomputation ends before the sum that ends a block or its attention module, which no backward pass needs
        # (torch/utils/checkpoint.py, early stop). The embedding sums its output, the head the gradient of its input,
        # and the loss four fp32 values per token.
        whole = not recomputation(spec, layout).attention_only
        reductions = int((4 + again * whole) * blocks * m) + (stage.first + stage.last) * m
        loss = stage.last * m * ring_share(16 * tokens, t)
    gathers = boundary_gathers(spec, layout, stage) * m
    exchanged = int(
        (2 + _recomputed_attention(spec, layout)) * blocks * m * ring_share(int(payload * _width(spec, t)), sp)
    )
    there, back = ring_bytes(spec, layout)
    gathered = int(blocks * m * (there * (1 + _recomputed_attention(spec, layout)) + back))
    routed = 4 * blocks * m * ring_share(payload * max(1, model.num_experts_per_tok), ep) if model.num_experts else 0
    pipeline = 0
    if layout.pipeline_parallel > 1:
        ends = 2 if layout.virtual_pipeline > 1 else (not stage.first) + (not stage.last)
        pipeline = ends * m * _boundary_bytes(spec, layout) * layout.virtual_pipeline
    return PerStepBytes(
        tensor=2 * (reductions * ring_share(payload, t) + loss) + gathers * ring_share(payload, t),
        pipeline=pipeline,
        data=data,
        sequence=exchanged + gathered,
        expert=routed,
    )


def ring_bytes(spec: RunSpec, layout: Layout) -> tuple[int, int]:
    """Return the bytes that a context rank sends per block and micro-batch, (forward, backward); 0 for one rank.

    Keys and values travel once in each pass. Those of this project's engine (engine/parallel/sequence.py) have equal
    channels, with Ulysses the heads of its share of the queries if there are fewer key-value heads than ranks, and in
    the backward pass their gradients travel too, in fp32.
    """
    model, hops, t = spec.transformer, layout.context_parallel - 1, layout.tensor_parallel
    element, tokens = weight_bytes(spec.training.precision), local_tokens(spec, layout)
    if not hops:
        return 0, 0
    if not framework_of(spec).is_engine:
        sent = hops * tokens * (2 * model.num_key_value_heads * model.head_dim // t) * element
        return sent, sent
    heads = model.num_key_value_heads // t
    if heads % layout.sequence_parallel:
        heads = model.num_attention_heads // t
    channels = max(model.qk_head_dim, model.value_head_dim)
    if spec.cluster.gpu != "cpu":
        channels = -(-channels // _HEAD_MULTIPLE) * _HEAD_MULTIPLE
    elements = hops * 2 * tokens * heads * channels  # Ulysses divides the heads, and multiplies the tokens
    return elements * element, elements * (element + 4)


def _recomputed_attention(spec: RunSpec, layout: Layout) -> float:
    """Return how many forward passes of attention the backward pass of a block recomputes, on average over blocks."""
    selective = layout.activation_checkpointing == "selective"
    if selective and framework_of(spec).selective(spec) == "attention module":
        return 1.0
    return recomputed_forwards(spec, layout) if framework_of(spec).is_engine else 0.0


def exposed(communication: float, compute: float, overlap: float) -> float:
    """Return the seconds that communication adds to a step if a share ``overlap`` of it may overlap ``compute``.

    That is what does not overlap, and the slow-down of the overlapped part by contention.
    """
    beside = min(communication * overlap, compute)
    return communication - beside + CONTENTION * beside


def _gradient_bytes(spec: RunSpec, profile: FrameworkProfile) -> int:
    """Return the bytes of one gradient element when it is reduced.

    Gradients of fp32 adapters are not converted: DeepSpeed has no 16-bit type configured then (engine.py
    ``communication_data_type``).
    """
    if trains_in_fp32(spec):
        return 4
    given = gradient_bytes(spec.training.precision, spec.training.grad_dtype)
    if profile.gradient_reduced is None:
        return given
    return min(4, profile.gradient_reduced) if weight_bytes(spec.training.precision) == 2 else 4


def _payload(spec: RunSpec, layout: Layout) -> int:
    """Return the bytes of the hidden states of one micro-batch on a rank."""
    return local_tokens(spec, layout) * spec.transformer.hidden_size * weight_bytes(spec.training.precision)


def _boundary_bytes(spec: RunSpec, layout: Layout) -> int:
    """Return the bytes of one micro-batch that one rank sends to the next stage.

    Unless the framework sends the full activation, each tensor rank sends its share (arXiv:2104.04473, section 4.1).
    """
    framework = framework_of(spec)
    whole = framework.sends_whole_boundary and not framework.shards_norms(spec, layout)
    return _payload(spec, layout) // (1 if whole else layout.tensor_parallel)


def _width(spec: RunSpec, tensor: int) -> float:
    """Return the width of queries, keys, values and output on one tensor rank, relative to the hidden size."""
    model = spec.transformer
    queries, keys = model.num_attention_heads, model.num_key_value_heads
    width = (queries + keys) * (model.qk_head_dim + model.value_head_dim)
    return width / tensor / model.hidden_size


def ring_share(count: int, ranks: int) -> int:
    """Return the bytes of a buffer that each of n ranks sends in a ring: (n - 1) / n of it."""
    return count * (ranks - 1) // ranks
