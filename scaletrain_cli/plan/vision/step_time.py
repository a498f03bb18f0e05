"""Seconds of one optimizer step of a data-parallel rank that trains a vision network; ``vision_stage_time`` is the
entry.

An operation takes the longer of its arithmetic and its memory traffic, plus copies that change the memory format.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import NamedTuple

from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.catalogue.networks import cluster_link
from scaletrain_cli.plan.frameworks.profile import FrameworkProfile
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.memory.states import gradient_bytes, weight_bytes
from scaletrain_cli.plan.result import Layout, Network, PerStepBytes, StageTime, Time
from scaletrain_cli.plan.speed.communication import ring_share
from scaletrain_cli.plan.speed.kernels import Rates, flash_attention_seconds, matmul_seconds, memory_seconds, rates
from scaletrain_cli.plan.speed.step_time import with_rates
from scaletrain_cli.plan.stages import zero_shards
from scaletrain_cli.plan.trained_parameters import Stage, count_trained
from scaletrain_cli.plan.vision.image_feed import image_feed
from scaletrain_cli.plan.vision.losses import caches_gradients, feature_width, loss_seconds, views
from scaletrain_cli.plan.vision.networks import planned_network, vision_model
from scaletrain_cli.plan.vision.operations import Operation, VisionNetwork
from scaletrain_cli.plan.vision.parameters import parameter_counts, vision_buffers
from scaletrain_cli.plan.vision.states import trained_network
from scaletrain_cli.spec import ModelSpec, ResNetSpec, RunSpec
from scaletrain_cli.spec.loader_processes import decodes_images

# Share of the rate of large products that batched per-head products reach, as in speed/kernels.py; and the share if
# rows are not a multiple of 16 bytes, as with 197 tokens, so that elements are loaded one by one (NVIDIA, Matrix
# Multiplication Background User's Guide, figure 2; order of magnitude).
_BATCHED_SHARE = 0.6
_UNALIGNED_SHARE = 0.25
# Inner dimension whose time equals that of filling the pipeline of an implicit GEMM's tile: only one slice, because
# convolutions have many more tiles than run at once, and the loads of the next tile overlap.
_CONVOLUTION_DEPTH = 32
# Share of the fp32 peak that torch's depthwise kernels reach (aten/src/ATen/native/cuda/DepthwiseConv2d.cu), calibrated
# on timm's ConvNeXts on RTX 3090.
_DEPTHWISE_SHARE = 0.09
# Channels are padded to a multiple of 8 for tensor cores, such as the 3 channels of images (NVIDIA, Convolutional
# Layers User's Guide). The weight gradient divides its rows into multiples of 64.
_CHANNELS = 8
_PART = 64
# Share of the fp32 peak that fp32 matrix products reach: cuBLAS usually has 14.5 of the V100's 15.7 TFLOP/s.
_VECTOR_SHARE = 0.9
# Speed-up by Winograd's algorithm of a 3 x 3 convolution of stride 1 without tensor cores: 2.25 times fewer products
# (arXiv:1509.09308, F(2 x 2, 3 x 3)), minus the cost of its transformations.
_WINOGRAD = 2.0


@dataclass(frozen=True)
class Machine:
    """A device at one precision; ``fuses``: torch.compile fuses element-wise operations into one kernel."""

    rate: Rates
    depthwise_flops: float
    matrix_units: bool
    fuses: bool


def machine(device: Accelerator, precision: str, fuses: bool) -> Machine:
    """Return the rates of the device for the kernels of vision networks."""
    rate, vector = rates(device, precision), device.flops["fp32"]
    if device.is_cpu:
        return Machine(rate, rate.matmul, False, fuses)
    matrix_units = precision != "fp32"
    if not matrix_units:
        rate = replace(rate, matmul=vector * _VECTOR_SHARE)
    return Machine(rate, vector * _DEPTHWISE_SHARE, matrix_units, fuses)


@lru_cache(maxsize=4096)
def pass_seconds(network: VisionNetwork, samples: int, on: Machine) -> tuple[float, float, int]:
    """Return (forward seconds, backward seconds, number of kernel launches) of one micro-batch."""
    forward = backward = 0.0
    launched = 0
    for block in network.blocks:
        before = None
        for operation in block.operations:
            fused = on.fuses and operation.pointwise and before is not None and not before.macs
            ahead, back = _seconds(operation, samples, on, fused, weights=block.training == "trained")
            forward += block.count * ahead
            backward += 0.0 if block.training == "frozen" else block.count * back
            launched += 0 if fused else block.count * (1 if block.training == "frozen" else operation.kernels)
            before = operation
    return forward, backward, launched


def _seconds(operation: Operation, samples: int, on: Machine, fused: bool, weights: bool) -> tuple[float, float]:
    """Return the (forward, backward) seconds of one operation; ``fused``: it runs in the kernel of the one before.

    ``weights``: its weights train, so that their gradient is computed, too.
    """
    rate, element = on.rate, on.rate.element_bytes
    # The intermediate values of a fused operation stay in registers: they are neither written nor read.
    spared = 2 * operation.outputs if fused else 0
    ahead = samples * (element * max(0, operation.moved - spared) + operation.kept_bytes)
    back = samples * (element * max(0, operation.moved_back - spared) + operation.kept_bytes)
    ahead_moved = memory_seconds(ahead, 1 if operation.moved and not fused else 0, rate)
    back_moved = memory_seconds(back, operation.kernels - 1 if operation.moved_back and not fused else 0, rate)
    if not operation.macs:
        return ahead_moved, back_moved
    forward, backward = _product_seconds(operation, samples, on, weights)
    turned = 0.0
    if operation.depthwise or on.matrix_units:  # conversion between channels-first and channels-last
        turned = memory_seconds(samples * element * operation.copied, 0, rate)
    return max(ahead_moved, forward) + turned, max(back_moved, backward) + 2 * turned


def _product_seconds(operation: Operation, samples: int, on: Machine, weights: bool) -> tuple[float, float]:
    """Return the seconds of arithmetic alone: (forward, gradients of input and, with ``weights``, of weights)."""
    rate, flops = on.rate, 2.0 * operation.macs * samples
    rows, depth, columns = operation.rows * samples, operation.depth, operation.columns
    if operation.depthwise:
        return flops / on.depthwise_flops, (2 if weights else 1) * flops / on.depthwise_flops
    if operation.fused_attention:
        width = depth // 2
        causal = flash_attention_seconds(rows, operation.rows, operation.batches, width, width, False, rate)
        return 2 * causal[0], 2 * causal[1]  # the causal kernel computes only half of the scores
    if operation.batches > 1:
        aligned = operation.rows * rate.element_bytes % 16 == 0
        seconds = flops / (rate.matmul * (_BATCHED_SHARE if aligned else _UNALIGNED_SHARE))
        return seconds, 2 * seconds
    if on.matrix_units:
        depth = _whole(depth // operation.taps, _CHANNELS) * operation.taps
    unbound = replace(rate, memory=inf)  # an implicit GEMM reads each pixel once, not once per filter element
    if operation.convolution:
        unbound = replace(unbound, depth=_CONVOLUTION_DEPTH)
    forward = matmul_seconds(rows, depth, columns, unbound)
    backward = 0.0
    if weights:  # whose many rows are divided to fill all multiprocessors
        tiles = -(-depth // unbound.tile_rows) * -(-columns // unbound.tile_columns)
        parts = max(1, min(unbound.multiprocessors // tiles, rows // unbound.depth))
        backward = matmul_seconds(depth * parts, _whole(-(-rows // parts), _PART), columns, unbound)
    if operation.has_input_gradient:
        backward += matmul_seconds(rows, columns * operation.taps, depth // operation.taps, unbound)
    same_size = operation.inputs * operation.taps == operation.rows * depth
    if operation.taps == 9 and same_size and not on.matrix_units and not rate.is_cpu:
        return forward / _WINOGRAD, backward / _WINOGRAD
    return forward, backward


def _whole(count: int, multiple: int) -> int:
    """Return ``count`` rounded up to a multiple of ``multiple``."""
    return -(-count // multiple) * multiple


_FP64_BYTES = 8
# Host seconds to launch one kernel of an eager network, including autograd (order of magnitude).
_ISSUE_SECONDS = 6e-6


def vision_stage_time(
    spec: RunSpec, layout: Layout, device: Accelerator, stage: Stage | None, *, least: bool = False
) -> tuple[Time, Network]:
    """Return the seconds per optimizer step by cause with derived figures, which count samples instead of tokens.

    ``stage``: what the run trains (None: everything). ``least``: without what depends on the global batch, for lower
    bounds: contrastive losses, a second forward pass, and waiting for data.
    """
    whole = trained_network(planned_network(spec, device), vision_model(spec), stage)
    seen = network_seconds(spec, layout, device, whole, count_trained(spec, stage), least=least)
    seen = seen._replace(exposed=seen.exposed + synchronization_seconds(spec, layout, device, stage))
    time = time_of_samples(spec, layout, device, seen, views(spec) * whole.training_flops, least=least)
    return time, Network(PerStepBytes(tensor=0, pipeline=0, data=seen.sent, sequence=0, expert=0))


class NetworkSeconds(NamedTuple):
    """Seconds per step of a network by cause; ``recompute``: of ``compute``, those of repeated forward passes.

    ``sent``: bytes of a rank; ``repeated_flops``: of a sample, for recomputation.
    """

    compute: float
    exposed: float
    optimizer: float
    recompute: float
    by_stage: tuple[StageTime, ...]
    sent: int
    repeated_flops: float


def network_seconds(
    spec: RunSpec, layout: Layout, device: Accelerator, whole: VisionNetwork, trained: int, *, least: bool
) -> NetworkSeconds:
    """Return the time of a network, or of one that is a part of the model; ``trained``: its parameters that train."""
    on, profile = machine(device, spec.training.precision, layout.compile), framework_of(spec).profile
    images, micro_batches = views(spec), layout.gradient_accumulation_steps
    forward, backward, launched = pass_seconds(whole, images * layout.micro_batch_size, on)
    # Blocks of which nothing trains and through which no gradient passes are not recomputed.
    full = layout.activation_checkpointing == "full" and any(block.training != "frozen" for block in whole.blocks[:-1])
    cached = caches_gradients(spec, layout) and not least
    passes = (2 if full else 1) * forward + backward
    issued = 0.0 if device.is_cpu else launched * _ISSUE_SECONDS
    loss = 0.0 if least else loss_seconds(spec, whole, layout, on.rate)
    sent, blocking, overlapping = _data_seconds(spec, layout, device, profile, whole, trained, least)
    updated = trained if layout.zero_stage == 0 else -(-trained // zero_shards(layout))
    return NetworkSeconds(
        compute=micro_batches * (max(passes, issued) + (forward if cached else 0.0)) + loss,
        exposed=blocking + overlapping - min(overlapping, backward) * profile.reduce_overlap,
        optimizer=memory_seconds(updated * profile.optimizer, 1, on.rate) if trained else 0.0,
        recompute=micro_batches * forward * (full + cached),
        by_stage=(StageTime(forward=forward, backward=passes - forward),),
        sent=sent,
        repeated_flops=images * 2 * whole.macs * (full + cached),
    )


def time_of_samples(
    spec: RunSpec, layout: Layout, device: Accelerator, seconds: NetworkSeconds, flops: float, *, least: bool
) -> Time:
    """Return the time of a data-parallel step whose samples take the place of tokens; it may wait for images.

    ``flops``: of a sample; ``least``: without waiting.
    """
    busy = seconds.compute + seconds.exposed + seconds.optimizer
    # workers read ahead while the step runs
    waited = image_feed(spec, layout, busy).wait if decodes_images(spec) and not least else 0.0
    time = Time(busy + waited, seconds.compute, seconds.exposed, 0.0, seconds.optimizer, waited)
    time, samples = replace(time, recompute=seconds.recompute, by_stage=seconds.by_stage), layout.global_batch_size
    executed = samples * (flops + seconds.repeated_flops)
    return with_rates(time, spec, layout, device, samples, samples * flops, executed)


def synchronizes_batch_norm(spec: RunSpec, layout: Layout) -> bool:
    """Return whether BatchNorm has the statistics of all data-parallel ranks (``training.sync_batch_norm``)."""
    if not isinstance(spec.model, ResNetSpec) or not vision_buffers(spec.model) or layout.data_parallel == 1:
        return False
    return spec.training.synchronizes_batch_norm(layout.micro_batch_size, layout.data_parallel)


def synchronization_seconds(spec: RunSpec, layout: Layout, device: Accelerator, stage: Stage | None) -> float:
    """Return the seconds per step of the collectives of BatchNorm, which nothing overlaps: sums of each layer.

    A layer of which neither weight nor bias trains in the stage normalizes by its running statistics, without sums.
    """
    if not framework_of(spec).is_engine or not synchronizes_batch_norm(spec, layout):
        return 0.0
    link = cluster_link(spec.cluster, device)
    buffers, mean = vision_buffers(vision_model(spec)), ".running_mean"
    norms = {buffer.name.removesuffix(mean): buffer.numel for buffer in buffers if buffer.name.endswith(mean)}
    trained = None if stage is None else {name.rpartition(".")[0] for name in stage.since}
    widths = [width for norm, width in norms.items() if trained is None or norm in trained]
    # forward: sums with the number of values, then squares; backward: two sums
    sizes = [_FP64_BYTES * values for width in widths for values in (width + 1, width, 2 * width)]
    return layout.gradient_accumulation_steps * sum(link.reduce(size, layout.data_parallel) for size in sizes)


def _data_seconds(
    spec: RunSpec,
    layout: Layout,
    device: Accelerator,
    profile: FrameworkProfile,
    whole: VisionNetwork,
    trained: int,
    least: bool,
) -> tuple[int, float, float]:
    """Return (bytes that a rank sends per step, seconds of exposed communication, seconds that may overlap).

    ``trained``: number of parameters with gradients.
    """
    ranks, micro_batches, training = zero_shards(layout), layout.gradient_accumulation_steps, spec.training
    link, element = cluster_link(spec.cluster, device), weight_bytes(training.precision)
    assert not isinstance(spec.model, ModelSpec)
    weights = parameter_counts(spec.model)[0] * element
    gradients = trained * (profile.gradient_reduced or gradient_bytes(training.precision, training.grad_dtype))
    # A contrastive loss gathers two feature vectors of each sample.
    features = 0 if least else 2 * feature_width(spec, whole)
    gathered = layout.micro_batch_size * layout.data_parallel * features * element
    blocking = 2 * micro_batches * link.gather(gathered, ranks)
    sent = 2 * micro_batches * ring_share(gathered, ranks)
    if layout.zero_stage == 3:
        times = (4 if caches_gradients(spec, layout) and not least else 3) * micro_batches
        return sent + times * ring_share(weights, ranks), blocking, times * link.gather(weights, ranks)
    rounds = micro_batches if layout.zero_stage == 2 else 1
    sent += rounds * 2 * ring_share(gradients, ranks)
    reduced = rounds * link.reduce(gradients, ranks)
    if layout.zero_stage:
        updated = trained * element
        sent += ring_share(updated, ranks)
        blocking += link.gather(updated, ranks)
    # Below stage 2 DeepSpeed reduces after the last backward pass (engine.py allreduce_gradients), DDP during it.
    if framework_of(spec).reduces_after_backward and layout.zero_stage < 2:
        return sent, blocking + reduced, 0.0
    return sent, blocking, reduced
