"""Seconds of one micro-batch on each pipeline stage: kernels, host, offloading, and communication between blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from scaletrain_cli.plan.architecture import Architecture
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.catalogue.networks import Link
from scaletrain_cli.plan.frameworks.profile import FrameworkProfile
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.memory.activations import fuses_attention, loss_chunks
from scaletrain_cli.plan.memory.engine_memory import kept_activation_bytes
from scaletrain_cli.plan.memory.states import (
    expert_tensor_parallel,
    gradient_bytes,
    optimizer_state_bytes_per_parameter,
    weight_bytes,
)
from scaletrain_cli.plan.result import Layout, StageTime
from scaletrain_cli.plan.speed.block_time import PartTime, RankWork, block_time, embedding_time, head_time
from scaletrain_cli.plan.speed.communication import (
    BlockTraffic,
    block_traffic,
    boundary_seconds,
    data_traffic,
    exposed,
)
from scaletrain_cli.plan.speed.kernels import Rates, memory_seconds
from scaletrain_cli.plan.speed.recompute import recompute_seconds, recomputed_forwards
from scaletrain_cli.plan.stages import local_tokens
from scaletrain_cli.spec import RunSpec

# Share of the host link's bandwidth that copies from pinned memory reach (PCIe 4.0 x16: 25 of 31.5 GB/s).
_LINK_SHARE = 0.8
# DeepSpeed's CPU Adam reads and writes 28 bytes per parameter. One socket moves about 150 GB/s, which 4 ranks share.
_UPDATE_BYTES = 28
_HOST_MEMORY_BANDWIDTH = 37e9
# Bytes/s of a data-center NVMe drive on PCIe 4.0 x4, which reads 6 to 7 GB/s and writes about 4 (data sheets); all
# ranks of a node share it.
_NVME_BANDWIDTH = 5e9


def activation_offload_seconds(spec: RunSpec, layout: Layout, device: Accelerator) -> float:
    """Return the seconds to copy the activations of an average block and one micro-batch between device and host.

    The forward pass copies each saved tensor to the host, and the backward pass copies it back. Both copies are on the
    stream that computes (``torch.autograd.graph.save_on_cpu``), so neither overlaps compute. 0 without offload.
    """
    if not spec.layout.activation_offload or device.is_cpu:
        return 0.0
    kept = kept_activation_bytes(spec, replace(layout, pipeline_parallel=1), device, 0)
    return kept / spec.transformer.num_hidden_layers / (device.host_bandwidth * _LINK_SHARE)


def offload_seconds(spec: RunSpec, layout: Layout, device: Accelerator, updated: int) -> float:
    """Return the seconds per step of an offloaded optimizer that updates ``updated`` parameters.

    It copies gradients to the host, updates on the CPU and copies weights back. Offloaded weights are fetched once for
    each forward and each backward pass (ZeRO-Infinity, arXiv:2104.07857); half of that is assumed to overlap compute.
    With NVMe all of this passes through the node's drives too.
    """
    link = device.host_bandwidth * _LINK_SHARE
    training = spec.training
    weights = updated * weight_bytes(training.precision)
    gradients = updated * gradient_bytes(training.precision, training.grad_dtype)
    seconds = (weights + gradients) / link + updated * _UPDATE_BYTES / _HOST_MEMORY_BANDWIDTH
    fetched = 2 * layout.gradient_accumulation_steps * weights if layout.offload == "optimizer+params" else 0
    seconds += 0.5 * fetched / link
    if spec.layout.offload_device == "nvme":
        given = spec.cluster.nvme_bandwidth
        drive = (_NVME_BANDWIDTH if given == "auto" else max(given, 1.0)) / spec.cluster.gpus_per_node
        states = updated * optimizer_state_bytes_per_parameter(training.precision, layout.zero_stage)
        seconds += (2 * states + fetched) / drive  # states are read and written; no overlap with the drives
    return seconds


# GPUs per CPU socket, in a server with two sockets and eight GPUs.
_SOCKET = 4
# Host and device work concurrently, so the longer time decides. But kernels differ in length, so each sometimes waits
# for the other: their times combine as a p-norm, (host^p + device^p)^(1/p), with this p, calibrated on vTrain's runs.
_HOST_DEVICE_NORM = 9.0


@dataclass(frozen=True)
class MicroBatchTime:
    """Seconds of one micro-batch on one pipeline stage."""

    forward: float  # GPU, without communication
    backward: float
    recompute: float
    communication: float  # exposed
    host: float  # to launch all kernels
    stall: float  # that sends and receives add to ``host`` in the steady state of the pipeline

    @cached_property
    def seconds(self) -> float:
        """Seconds of forward and backward pass: of the device or of the host, whichever is slower."""
        return self._with(self.host + self.stall)

    @cached_property
    def filling(self) -> float:
        """Seconds of forward and backward pass while the pipeline fills and drains, without ``stall``."""
        return self._with(self.host) if self.stall else self.seconds

    @cached_property
    def passes(self) -> StageTime:
        """Seconds of each pass, with communication and host waits in proportion to compute."""
        compute = self.forward + self.backward + self.recompute
        forward = self.forward / compute if compute else 0.5
        return StageTime(self.seconds * forward, self.seconds * (1 - forward))

    @cached_property
    def overlappable(self) -> tuple[float, float]:
        """(Forward, backward) seconds that communication may overlap: kernels, and waiting for the host.

        The host launches about twice as many kernels backward as forward, so backward has two thirds of the waiting.
        """
        compute = self.forward + self.backward + self.recompute
        waiting = max(0.0, self.seconds - self.communication - compute)
        return self.forward + waiting / 3, self.backward + self.recompute + 2 * waiting / 3

    def _with(self, host: float) -> float:
        """Return the seconds of both passes if the host takes ``host`` seconds to launch the kernels."""
        device = self.forward + self.backward + self.recompute + self.communication
        longer, p = max(device, host), _HOST_DEVICE_NORM
        return float(longer * (1 + (min(device, host) / longer) ** p) ** (1 / p)) if longer else 0.0


@dataclass(frozen=True)
class _Parts:
    """Seconds of the parts of which stages consist; pairs are (dense block, MoE block)."""

    blocks: tuple[PartTime, PartTime]
    recompute: tuple[float, float]
    forwards: float  # recomputed forward passes per block
    embedding: PartTime
    head: PartTime
    traffic: BlockTraffic
    boundary: float  # one send to the next stage
    offload_copy: float  # one copy of a block's activations between device and host


def stage_times(
    spec: RunSpec,
    layout: Layout,
    device: Accelerator,
    rate: Rates,
    link: Link,
    profile: FrameworkProfile,
    per_rank: Architecture,
    blocks: tuple[int, ...],
) -> list[MicroBatchTime]:
    """Return the time of one micro-batch on each stage.

    ``per_rank``: the parameters that one rank holds under tensor and expert parallelism, of all stages; ``blocks``: the
    number of blocks on each stage.
    """
    last, parts = len(blocks) - 1, _parts(spec, layout, device, rate, link, profile)
    known: dict[tuple[int, int, bool, bool], MicroBatchTime] = {}
    found, first = [], 0
    for index, count in enumerate(blocks):
        dense = max(0, min(first + count, per_rank.dense_layers) - first)
        key = (count, dense, index == 0, index == last)
        if key not in known:
            parameters = stage_parameters(per_rank, blocks, index, first)
            known[key] = _stage(spec, layout, rate, link, profile, parts, key, parameters)
        found.append(known[key])
        first += count
    return found


def stage_parameters(per_rank: Architecture, blocks: tuple[int, ...], index: int, first: int | None = None) -> int:
    """Return the parameters on one rank of stage ``index``; ``first``: its first block, computed if None."""
    found = per_rank.blocks_parameters(sum(blocks[:index]) if first is None else first, blocks[index])
    if index == 0:
        found += per_rank.embedding
    if index == len(blocks) - 1:
        tied_copy = per_rank.embedding if not per_rank.head and len(blocks) > 1 else 0
        found += per_rank.final_norm + per_rank.head + tied_copy
    return found


def _parts(
    spec: RunSpec, layout: Layout, device: Accelerator, rate: Rates, link: Link, profile: FrameworkProfile
) -> _Parts:
    model, work = spec.transformer, _rank_work(spec, layout, device)
    dense = moe = block_time(model, work, profile, rate, experts=bool(model.num_experts))
    if model.num_experts and model.first_k_dense_replace:
        dense = block_time(model, work, profile, rate, experts=False)
    return _Parts(
        blocks=(dense, moe),
        recompute=(recompute_seconds(spec, layout, dense), recompute_seconds(spec, layout, moe)),
        forwards=recomputed_forwards(spec, layout),
        embedding=embedding_time(model, work, rate),
        head=_chunked(head_time(model, work, profile, rate), spec, layout, rate, work),
        traffic=block_traffic(spec, layout, link, profile),
        boundary=boundary_seconds(spec, layout, link) * layout.virtual_pipeline * (1 - profile.pipeline_overlap),
        offload_copy=activation_offload_seconds(spec, layout, device),
    )


def _chunked(head: PartTime, spec: RunSpec, layout: Layout, rate: Rates, work: RankWork) -> PartTime:
    """Return the time of head and loss, with the accumulation of the head's fp32 gradient after each chunk of the loss.

    That reads two tensors of the head's size and writes one, 12 bytes per parameter.
    """
    chunks = loss_chunks(spec.transformer, work.tokens, layout.cross_entropy)
    entries = 1.0 * -(-spec.transformer.vocab_size // work.tensor) * spec.transformer.hidden_size
    return PartTime(head.forward, head.backward + memory_seconds(chunks * entries * 12, 2 * chunks, rate))


def _stage(
    spec: RunSpec,
    layout: Layout,
    rate: Rates,
    link: Link,
    profile: FrameworkProfile,
    parts: _Parts,
    held: tuple[int, int, bool, bool],
    parameters: int,
) -> MicroBatchTime:
    """Return the time of one micro-batch on one stage.

    ``held``: (blocks, dense blocks among them, is first stage, is last stage); ``parameters``: on one rank.
    """
    count, dense, first, last = held
    moe, forwards, traffic = count - dense, parts.forwards, parts.traffic
    forward = dense * parts.blocks[0].forward + moe * parts.blocks[1].forward
    backward = dense * parts.blocks[0].backward + moe * parts.blocks[1].backward
    recompute = dense * parts.recompute[0] + moe * parts.recompute[1]
    if first:
        forward, backward = forward + parts.embedding.forward, backward + parts.embedding.backward
    if last:
        forward, backward = forward + parts.head.forward, backward + parts.head.backward
    backward += parameters * profile.accumulate / rate.memory
    if parts.offload_copy:
        forward, backward = forward + count * parts.offload_copy, backward + count * parts.offload_copy
    communication = count * (traffic.forward * (1 + forwards) + traffic.backward)
    communication += moe * traffic.experts * (2 + forwards)
    # A stage receives and sends in the forward and in the backward pass; first and last stage do half of it.
    communication += parts.boundary * (0 if first and last else 2 if first or last else 4)
    if layout.zero_stage >= 2:
        data = data_traffic(spec, layout, link, profile, parameters, count)
        communication += exposed(data.forward, forward, profile.reduce_overlap)
        communication += exposed(data.backward, backward + recompute, profile.reduce_overlap)
    if rate.is_cpu:
        return MicroBatchTime(forward, backward, recompute, communication, 0.0, 0.0)
    host = count * (profile.forward_host * (1 + forwards) + profile.backward_host) + profile.micro_batch_host
    host += profile.end_host * (first + last) + profile.experts_host * moe
    stall = 0.0
    if layout.tensor_parallel > 1:
        host += count * profile.tensor_host
        if layout.tensor_parallel > _SOCKET:
            host += count * profile.socket_host
        if layout.pipeline_parallel > 1 and layout.world_size > spec.cluster.gpus_per_node:
            stall = count * layout.tensor_parallel * profile.stage_stall
    return MicroBatchTime(forward, backward, recompute, communication, host, stall)


def _rank_work(spec: RunSpec, layout: Layout, device: Accelerator) -> RankWork:
    framework = framework_of(spec)
    return RankWork(
        tokens=local_tokens(spec, layout),
        keys=spec.transformer.seq_len,
        tensor=layout.tensor_parallel,
        sequence=layout.sequence_parallel,
        expert=layout.expert_parallel,
        expert_tensor=expert_tensor_parallel(spec, layout),
        sharded_norms=framework.shards_norms(spec, layout),
        flash=fuses_attention(spec, device) and not framework.drops_scores(spec),
        compiled=layout.compile,
    )
