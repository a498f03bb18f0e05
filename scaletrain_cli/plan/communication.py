"""Bytes that one rank sends per optimizer step on each axis, and how long that takes. Knows no compute time.

Volumes: ZeRO (arXiv:1910.02054, section 7), Megatron-LM (arXiv:1909.08053, arXiv:2104.04473), Ulysses
(arXiv:2309.14509); corrected for what DeepSpeed 0.19 really sends, as the comments say.
"""

from __future__ import annotations

from dataclasses import dataclass

from scaletrain_cli.plan.hardware import Accelerator
from scaletrain_cli.plan.memory import Shard, local_tokens, zero_shards
from scaletrain_cli.plan.result import Layout, PerStepBytes
from scaletrain_cli.plan.states import gradient_bytes, weight_bytes
from scaletrain_cli.spec import RunSpec

# Share of the link rate that large collectives reach: NVLink 366 of 450 GB/s on H100 (ml-engineering, network
# benchmarks). Between nodes the published runs spread from 0.4 to 0.9; stated, not measured.
_INTRA_EFFICIENCY = 0.8
_INTER_EFFICIENCY = 0.7
# One hop of a small message (NCCL, order of magnitude); a collective takes about log2(n) of them.
_INTRA_LATENCY_SECONDS = 5e-6
_INTER_LATENCY_SECONDS = 20e-6
# Share of the gradient traffic that DeepSpeed's stages 2 and 3 hide behind compute; stated, not measured.
OVERLAP = 0.7


@dataclass(frozen=True)
class Traffic:
    """Bytes sent per rank and step, and seconds of it that compute does and does not hide."""

    sent: PerStepBytes
    blocking_seconds: float
    overlapping_seconds: float


def step_traffic(spec: RunSpec, layout: Layout, device: Accelerator, shard: Shard, layers: int) -> Traffic:
    """Traffic of the busiest rank: one with ``shard`` parameters and ``layers`` blocks."""
    micro_batches = layout.gradient_accumulation_steps
    element = weight_bytes(spec.training.precision)
    tokens, hidden = local_tokens(spec, layout), spec.transformer.hidden_size
    payload = tokens * hidden * element
    link = _Link(spec, device)
    t, p = layout.tensor_parallel, layout.pipeline_parallel
    sp, cp, ep = layout.sequence_parallel, layout.context_parallel, layout.expert_parallel

    # Two all-reduces forward and two backward per block; recomputation repeats the forward ones.
    reductions = {"none": 4, "selective": 5, "full": 6}[layout.activation_checkpointing] * layers * micro_batches
    tensor = reductions * 2 * _part(payload, t)
    tensor_seconds = link.seconds(tensor, t, 1, reductions)

    # Queries, keys, values and output change hands, forward and backward; each all-to-all sends (n - 1) / n.
    heads = spec.transformer.num_attention_heads, spec.transformer.num_key_value_heads
    width = (2 * heads[0] + 2 * heads[1]) * spec.transformer.head_dim // t
    exchanged = 2 * layers * micro_batches * _part(tokens * width * element, sp)
    # Context parallelism gathers keys and values of all ranks, and scatters their gradients.
    keys = 2 * heads[1] * spec.transformer.head_dim // t
    gathered = 2 * layers * micro_batches * tokens * keys * element * (cp - 1)
    sequence = exchanged + gathered
    sequence_seconds = link.seconds(exchanged, sp, t, 8 * layers * micro_batches) + link.seconds(
        gathered, cp, t * sp, 4 * layers * micro_batches
    )

    # Each routed token travels to its experts and back, forward and backward.
    routed = 4 * layers * micro_batches * _part(payload * max(1, spec.transformer.num_experts_per_tok), ep)
    expert = routed if spec.transformer.num_experts else 0
    expert_seconds = link.seconds(expert, ep, t, 4 * layers * micro_batches)

    # One boundary each way and micro-batch, for every chunk of layers.
    pipeline = 2 * micro_batches * payload * layout.virtual_pipeline if p > 1 else 0
    pipeline_seconds = link.seconds(pipeline, p, t * sp * cp * layout.data_parallel, 2 * micro_batches)

    data, messages = _data_bytes(spec, layout, shard)
    data_seconds = link.seconds(data, zero_shards(layout), t, messages)
    overlaps = layout.zero_stage >= 2
    return Traffic(
        sent=PerStepBytes(tensor=tensor, pipeline=pipeline, data=data, sequence=sequence, expert=expert),
        blocking_seconds=tensor_seconds
        + sequence_seconds
        + expert_seconds
        + pipeline_seconds
        + (0.0 if overlaps else data_seconds),
        overlapping_seconds=data_seconds if overlaps else 0.0,
    )


def _data_bytes(spec: RunSpec, layout: Layout, shard: Shard) -> tuple[int, int]:
    """Bytes for gradients and weights over the ZeRO ranks, and how many collectives carry them."""
    ranks, micro_batches = zero_shards(layout), layout.gradient_accumulation_steps
    training = spec.training
    weights = _part(shard.parameters * weight_bytes(training.precision), ranks)
    gradients = _part(shard.parameters * gradient_bytes(training.precision, training.grad_dtype), ranks)
    buckets = 1 + shard.parameters // 200_000_000
    if layout.zero_stage == 0:
        return 2 * gradients, buckets  # one all-reduce of the accumulated gradients
    if layout.zero_stage == 1:
        # An all-reduce in the weights' type whatever grad_dtype is (engine.py communication_data_type), then a gather.
        return 2 * weights + weights, 2 * buckets
    if layout.zero_stage == 2:
        # Every micro-batch is reduced, in the weights' type, and by an all-reduce: use_multi_rank_bucket_allreduce.
        return 2 * weights * micro_batches + weights, buckets * (micro_batches + 1)
    # Gathered forward, gathered backward, scattered: once per micro-batch, one block after another.
    return 3 * weights * micro_batches, 3 * spec.transformer.num_hidden_layers * micro_batches


class _Link:
    """Time of a collective among ``ranks`` that lie ``stride`` ranks apart."""

    def __init__(self, spec: RunSpec, device: Accelerator) -> None:
        self.per_node = spec.cluster.gpus_per_node
        self.intra = device.intra_node_bandwidth * _INTRA_EFFICIENCY
        given = spec.cluster.inter_node_bandwidth
        self.inter = (50e9 if given == "auto" else max(given, 1.0)) * _INTER_EFFICIENCY

    def seconds(self, sent_bytes: int, ranks: int, stride: int, messages: int) -> float:
        """A group with k ranks per node drives k network cards, so its rate is k times one card's, or NVLink's."""
        if ranks <= 1 or not sent_bytes:
            return 0.0
        hops = (ranks - 1).bit_length()
        if ranks * stride <= self.per_node:
            return sent_bytes / self.intra + messages * hops * _INTRA_LATENCY_SECONDS
        in_node = max(1, self.per_node // stride)
        rate = min(self.intra, self.inter * in_node) if in_node > 1 else self.inter
        return sent_bytes / rate + messages * hops * _INTER_LATENCY_SECONDS


def _part(count: int, ranks: int) -> int:
    """What one of ``ranks`` sends of a buffer in a ring: (n - 1) / n of it."""
    return count * (ranks - 1) // ranks
