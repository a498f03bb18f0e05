"""Seconds of one micro-batch on each pipeline stage: kernels, host, offloading, and communication between blocks."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from scaletrain_cli.plan.architecture import Architecture
from scaletrain_cli.plan.block_graph import backward_products
from scaletrain_cli.plan.catalogue.hardware import HOPPER, Accelerator, near_ranks
from scaletrain_cli.plan.catalogue.networks import Link, cluster_link
from scaletrain_cli.plan.frameworks.profile import FrameworkProfile, compiled_profile
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.memory.activations import attends_by_document, fuses_attention, has_documents, loss_chunks
from scaletrain_cli.plan.memory.parameter_groups import stage_tensors
from scaletrain_cli.plan.memory.states import expert_tensor_parallel
from scaletrain_cli.plan.result import Layout, StageTime
from scaletrain_cli.plan.speed.block_time import PartTime, RankWork, block_time, embedding_time, head_time
from scaletrain_cli.plan.speed.communication import (
    BlockTraffic,
    block_traffic,
    boundary_gather_seconds,
    boundary_seconds,
    data_traffic,
    exposed,
)
from scaletrain_cli.plan.speed.kernels import Rates, memory_seconds, rates
from scaletrain_cli.plan.speed.offload import activation_offload_seconds
from scaletrain_cli.plan.speed.recompute import computes_logits_again, recompute_seconds, recomputed_forwards
from scaletrain_cli.plan.stages import Stage, first_alike, local_tokens, rank_architecture, stage_shard, stages_with
from scaletrain_cli.plan.trained_stages import TrainedStage, trains_before_head
from scaletrain_cli.spec import RunSpec

# Rate of the memory-efficient kernel, which takes a mask, relative to FlashAttention-2, which takes none (torch,
# aten/src/ATen/native/transformers/cuda/sdp_utils.cpp ``check_for_attn_mask``). It is CUTLASS's implementation of the
# first FlashAttention, than which the second one is about twice as fast: 25 to 40 % and 50 to 73 % of the A100's peak
# (arXiv:2307.08691, abstract).
_MASKED_SHARE = 0.5
# GPUs per CPU socket, in a server with two sockets and eight GPUs.
_SOCKET = 4
# Kernel launches that the adapter of one layer adds, as a share of the block's: about 4 of 40 forward (two products,
# scaling, sum) and 8 of 80 backward. An estimate.
_ADAPTER_HOST = 0.1
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
    blocking: bool = False  # the host waits for each kernel, so nothing overlaps

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
        waiting = max(0.0, self.seconds - self.communication - (self.forward + self.backward + self.recompute))
        return self.forward + waiting / 3, self.backward + self.recompute + 2 * waiting / 3

    def _with(self, host: float) -> float:
        """Return the seconds of both passes if the host takes ``host`` seconds to launch the kernels."""
        device = self.forward + self.backward + self.recompute + self.communication
        if self.blocking:
            return device + host
        longer, p = max(device, host), _HOST_DEVICE_NORM
        return float(longer * (1 + (min(device, host) / longer) ** p) ** (1 / p)) if longer else 0.0


class StepSetting(NamedTuple):
    """The inputs of the times of all pipeline stages of a layout.

    ``per_rank``: see ``rank_architecture``; ``stages``: all pipeline stages; ``trained``: the parameters that train.
    """

    spec: RunSpec
    layout: Layout
    device: Accelerator
    rate: Rates
    link: Link
    profile: FrameworkProfile
    per_rank: Architecture
    stages: tuple[Stage, ...]
    trained: TrainedStage


def step_setting(spec: RunSpec, layout: Layout, device: Accelerator, trained: TrainedStage) -> StepSetting:
    """Return the inputs of the stage times of a layout, with the rates of the device and the framework's profile."""
    framework, model = framework_of(spec), spec.transformer
    profile = framework.profile_on(device)
    return StepSetting(
        spec,
        layout,
        device,
        rates(device, spec.training.precision),
        cluster_link(spec.cluster, device),
        compiled_profile(profile) if layout.compile else profile,
        rank_architecture(spec, layout),
        stages_with(model, layout.pipeline_split or framework.blocks_by_stage(model, layout.pipeline_parallel)),
        trained,
    )


def stage_times(setting: StepSetting) -> list[MicroBatchTime]:
    """Return the time of one micro-batch on each pipeline stage; equal ones have the same object."""
    spec, layout, model, trained = setting.spec, setting.layout, setting.spec.transformer, setting.trained
    work = _rank_work(spec, layout, setting.device)
    traffic = block_traffic(spec, layout, setting.link, setting.profile)
    ends = embedding_time(model, work, setting.rate, trained.embedding), _head_time(setting, work)
    known: dict[object, MicroBatchTime] = {}
    times = []
    places_differ = bool(trained.runs) or model.has_pattern
    for stage, first in zip(setting.stages, first_alike(setting.stages), strict=True):
        key: object = first
        if places_differ:
            runs = trained.blocks_of(model, stage)
            key = (tuple((run.blocks, run.experts, run.training) for run in runs), stage.first, stage.last)
        if key not in known:
            known[key] = _stage(setting, work, traffic, ends, stage)
        times.append(known[key])
    return times


def stage_sizes(setting: StepSetting, stage: Stage) -> tuple[int, int]:
    """Return the parameters on one rank of a pipeline stage: all, and those that train."""
    if not setting.trained.runs:
        parameters = stage_shard(setting.per_rank, stage).parameters
        return parameters, parameters
    tensors = stage_tensors(setting.spec, setting.layout, stage, setting.trained)
    learned = sum(group.elements for group, *_ in tensors.trained)
    return learned + sum(group.elements for group, *_ in tensors.frozen), learned


def _head_time(setting: StepSetting, work: RankWork) -> PartTime:
    """Return the seconds of head and loss, with the sums of a chunked loss and what it computes again."""
    spec, layout, device, trained = setting.spec, setting.layout, setting.device, setting.trained
    rate, model = setting.rate, spec.transformer
    # The chunked loss computes the gradient of the hidden states whether or not anything before them trains.
    arriving = layout.cross_entropy == "chunked" or trains_before_head(model, trained)
    # Beside fp8 and fp4 the head multiplies in 16 bits (Megatron-LM, gpt_model.py: output_layer is a
    # ColumnParallelLinear, not Transformer Engine's; torchtitan's recipes for float8: filter_fqns = ["output"]).
    narrow = spec.training.precision in ("fp8", "fp4") and spec.training.precision in device.flops
    head_rate = rates(device, "bf16") if narrow else rate
    head = head_time(model, work, setting.profile, head_rate, trained.head, arriving)
    # Each chunk of the loss adds to the head's fp32 gradient: it reads two tensors of its size and writes one, 12
    # bytes per parameter. The log-probabilities of ``dpo`` are computed again, because their gradients follow from the
    # loss of the pair (engine/model/loss.py ``_ChunkedTokens``).
    chunks, backward = loss_chunks(model, work.tokens, layout.cross_entropy), head.backward
    if trained.head:
        entries = 1.0 * -(-model.vocab_size // work.tensor) * model.hidden_size
        backward += memory_seconds(chunks * entries * 12, 2 * chunks, rate)
    return PartTime(head.forward, backward + (head.forward if computes_logits_again(spec, layout) else 0.0))


def _stage(
    setting: StepSetting, work: RankWork, traffic: BlockTraffic, ends: tuple[PartTime, PartTime], stage: Stage
) -> MicroBatchTime:
    """Return the time of one micro-batch on one stage; ``ends``: the times of the embedding and of the head."""
    spec, layout, rate, link, profile = setting.spec, setting.layout, setting.rate, setting.link, setting.profile
    parameters, learned = stage_sizes(setting, stage)
    count, first, last = stage.blocks, stage.first, stage.last
    model, forwards, blocking = spec.transformer, recomputed_forwards(spec, layout), launches_block(spec)
    forward = backward = recompute = communication = host = 0.0
    modules = model.sublayers_per_block / 2  # of a whole block, for which traffic and host work are
    for run in setting.trained.blocks_of(model, stage):
        part = block_time(model, work, profile, rate, run.experts, run.training)
        reached = backward_products(model, run.training, run.experts).reached
        again = forwards if reached else 0.0
        forward += run.blocks * part.forward
        backward += run.blocks * part.backward
        recompute += run.blocks * recompute_seconds(spec, layout, part) if reached else 0.0
        passes = traffic.forward * (1 + again) + (traffic.backward if reached else 0.0)
        communication += run.blocks * modules * passes
        communication += run.blocks * traffic.experts * ((2 if reached else 1) + again) if run.experts else 0.0
        adapters = 1 + _ADAPTER_HOST * len(run.training.adapters)
        host += run.blocks * modules * adapters * profile.forward_host * (1 + again)
        host += run.blocks * (modules * adapters * profile.backward_host if reached else 0.0)
        host += run.blocks * profile.experts_host if run.experts else 0.0
    for end in (end for end, is_here in zip(ends, (first, last), strict=True) if is_here):
        forward, backward = forward + end.forward, backward + end.backward
    backward += learned * profile.accumulate / rate.memory
    copied = count * activation_offload_seconds(spec, layout, setting.device)
    forward, backward = forward + copied, backward + copied
    # A stage receives and sends in the forward and in the backward pass; first and last stage do half of it.
    boundary = boundary_seconds(spec, layout, link) * layout.virtual_pipeline * (1 - profile.pipeline_overlap)
    communication += boundary * (0 if first and last else 2 if first or last else 4)
    communication += boundary_gather_seconds(spec, layout, link, stage)
    if layout.zero_stage >= 2:
        data = data_traffic(spec, layout, link, profile, parameters, count, learned)
        overlap = 0.0 if blocking else framework_of(spec).reduce_overlap(layout, profile)
        communication += exposed(data.forward, forward, overlap)
        communication += exposed(data.backward, backward + recompute, overlap)
    if rate.is_cpu:
        return MicroBatchTime(forward, backward, recompute, communication, 0.0, 0.0)
    host += profile.micro_batch_host + profile.end_host * (first + last)
    if layout.pipeline_parallel > 1:
        host += profile.pipeline_host
    if layout.zero_stage == 3:
        host += count * profile.gather_host * (2 + forwards)
    stall = 0.0
    if layout.tensor_parallel > 1:
        host += count * profile.tensor_host
        if layout.tensor_parallel > _SOCKET:
            host += count * profile.socket_host
        if layout.pipeline_parallel > 1 and layout.world_size > near_ranks(spec.cluster):
            stall = count * layout.tensor_parallel * profile.stage_stall
    return MicroBatchTime(forward, backward, recompute, communication, host, stall, blocking)


def launches_block(spec: RunSpec) -> bool:
    """Return whether ``env`` sets CUDA_LAUNCH_BLOCKING: the host waits for each kernel before it launches the next."""
    return spec.env.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")


def _rank_work(spec: RunSpec, layout: Layout, device: Accelerator) -> RankWork:
    framework = framework_of(spec)
    model = spec.transformer
    capped = framework.is_engine and model.attn_logit_softcapping is not None
    by_document = framework.is_engine and attends_by_document(spec, device)
    masks_documents = framework.is_engine and has_documents(spec) and not by_document
    is_hopper = HOPPER <= device.cuda_capability < HOPPER + 1
    head = max(model.qk_head_dim, model.value_head_dim)
    flash_without_mask = device.fuses_attention(spec.training.precision, head, True)  # which has grouped queries
    return RankWork(
        tokens=local_tokens(spec, layout),
        keys=model.seq_len,
        tensor=layout.tensor_parallel,
        sequence=layout.sequence_parallel,
        expert=layout.expert_parallel,
        expert_tensor=expert_tensor_parallel(spec, layout),
        sharded_norms=framework.shards_norms(spec, layout),
        flash=fuses_attention(spec, device) and not framework.drops_scores(spec) and not capped,
        compiled=layout.compile,
        by_document=by_document,
        takes_mask=spec.planner.attention == "masked" or masks_documents,
        flash_3=spec.planner.attention == "flash3" and is_hopper and not masks_documents,
        masked_share=_MASKED_SHARE if flash_without_mask and not device.is_cpu else 1.0,
    )
