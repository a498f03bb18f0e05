"""Step time of a data-parallel rank that trains a vision network: its kernels, its traffic, its optimizer.

Each operation takes as long as its arithmetic or its traffic, whichever is longer. Knows no memory and no search.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import inf

from scaletrain_cli.plan.framework_time import HABITS, Habits
from scaletrain_cli.plan.hardware import Accelerator
from scaletrain_cli.plan.kernels import Rates, flash_attention_seconds, matmul_seconds, memory_seconds, rates
from scaletrain_cli.plan.networks import cluster_link
from scaletrain_cli.plan.result import Layout, Network, PerStepBytes, StageTime, Time
from scaletrain_cli.plan.stages import zero_shards
from scaletrain_cli.plan.states import gradient_bytes, weight_bytes
from scaletrain_cli.plan.vision.network import network, planned_network, training_flops, vision_model
from scaletrain_cli.plan.vision.operations import Network as Whole
from scaletrain_cli.plan.vision.operations import Operation
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.vision import VisionSpec

# A batch of small products, one per head, runs at this share of the rate of large ones, as in plan/kernels.py; where
# rows are no multiple of 16 bytes, as with 197 tokens, loads are by single elements (NVIDIA, Matrix Multiplication
# Background User's Guide, figure 2; order of magnitude).
_BATCHED_SHARE = 0.6
_UNALIGNED_SHARE = 0.25
# Inner dimension at which filling the pipeline of an implicit GEMM costs as much as its products: one slice of it,
# since convolutions have many more tiles than the device runs at once, and the next one's loads overlap.
_CONVOLUTION_DEPTH = 32
# Share of the memory bandwidth's reach that turning images around keeps, because it reads or writes across the grain.
_TURNING_SHARE = 0.65
# Share of the fp32 units' peak that torch's depthwise kernels reach (aten/src/ATen/native/cuda/DepthwiseConv2d.cu);
# calibrated on the 26 ConvNeXt rows of timm's RTX 3090 results.
_DEPTHWISE_SHARE = 0.07
# What the host needs to issue one kernel of an eager network, autograd included: an order of magnitude.
_ISSUE_SECONDS = 6e-6


def plan_vision_time(spec: RunSpec, layout: Layout, device: Accelerator) -> tuple[Time, Network]:
    """Seconds per optimizer step by cause, and what follows; samples stand where a transformer has tokens."""
    model, training = vision_model(spec), spec.training
    habits = HABITS[spec.planner.framework]
    micro_batches, full = layout.gradient_accumulation_steps, layout.activation_checkpointing == "full"
    whole, rate = planned_network(spec, device), rates(device, training.precision)
    vector = device.flops["fp32"] * _DEPTHWISE_SHARE
    forward, backward, launched = pass_seconds(whole, layout.micro_batch_size, rate, vector)
    passes = (2 if full else 1) * forward + backward
    issued = 0.0 if device.is_cpu else launched * _ISSUE_SECONDS
    compute = micro_batches * (max(passes, issued) + _loss_seconds(model, layout, rate))
    sent, blocking, overlapping = _data_seconds(spec, layout, device, habits)
    hidden = min(overlapping, backward) * habits.reduce_overlap
    exposed = blocking + overlapping - hidden
    parameters = network(model).parameters
    updated = parameters if layout.zero_stage == 0 else -(-parameters // zero_shards(layout))
    optimizer = memory_seconds(updated * habits.optimizer, 1, rate)
    step = compute + exposed + optimizer
    samples = layout.global_batch_size
    flops, peak = training_flops(model), layout.world_size * device.peak_flops(training.precision)
    time = Time(
        step=step,
        compute=compute,
        exposed_communication=exposed,
        bubble=0.0,
        optimizer=optimizer,
        data_wait=0.0,
        tokens_per_second=samples / step,
        tokens_per_second_per_gpu=samples / step / layout.world_size,
        mfu=samples * flops / step / peak,
        hfu=samples * flops * (4 / 3 if full else 1) / step / peak,
        to_train=step * spec.total_steps,
        samples_per_second=samples / step,
        recompute=micro_batches * forward if full else 0.0,
        by_stage=(StageTime(forward=forward, backward=passes - forward),),
    )
    return time, Network(PerStepBytes(tensor=0, pipeline=0, data=sent, sequence=0, expert=0))


@lru_cache(maxsize=4096)
def pass_seconds(whole: Whole, samples: int, rate: Rates, vector_flops: float) -> tuple[float, float, int]:
    """Forward and backward of one micro-batch on the device, and the kernels that they launch."""
    forward = backward = 0.0
    launched = 0
    for block in whole.blocks:
        for operation in block.operations:
            ahead, back = _operation_seconds(operation, samples, rate, vector_flops)
            forward += block.count * ahead
            backward += block.count * back
            launched += block.count * operation.kernels
    return forward, backward, launched


def _operation_seconds(operation: Operation, samples: int, rate: Rates, vector_flops: float) -> tuple[float, float]:
    element = rate.element_bytes
    # Matrix units want channels last, depthwise kernels want them first.
    copied = operation.copied / _TURNING_SHARE if element == 2 or operation.depthwise else 0.0
    ahead = samples * (element * (operation.moved + copied) + operation.kept_bytes)
    back = samples * (element * (operation.moved_back + 2 * copied) + operation.kept_bytes)
    ahead_moved = memory_seconds(ahead, 1 if operation.moved else 0, rate)
    back_moved = memory_seconds(back, max(0, operation.kernels - 1) if operation.moved_back else 0, rate)
    flops = 2.0 * operation.macs * samples
    if not flops:
        return ahead_moved, back_moved
    if operation.depthwise:
        return max(ahead_moved, flops / vector_flops), max(back_moved, 2 * flops / vector_flops)
    if operation.fused_attention:
        # That function counts the causal half alone.
        heads, width = operation.batches, operation.depth // 2
        half = flash_attention_seconds(operation.rows * samples, operation.rows, heads, width, width, False, rate)
        return max(ahead_moved, 2 * half[0]), max(back_moved, 2 * half[1])
    if operation.batches > 1:
        aligned = operation.rows * element % 16 == 0
        seconds = flops / (rate.matmul * (_BATCHED_SHARE if aligned else _UNALIGNED_SHARE))
        return max(ahead_moved, seconds), max(back_moved, 2 * seconds)
    rows, depth, columns = operation.rows * samples, operation.depth, operation.columns
    unbound = replace(rate, memory=inf)  # an implicit GEMM reads its pixels once, not once per tap of its filter
    if operation.convolution:
        unbound = replace(unbound, depth=_CONVOLUTION_DEPTH)
    gradients = _weight_seconds(rows, depth, columns, unbound)
    if operation.has_input_gradient:
        gradients += matmul_seconds(rows, columns * operation.taps, depth // operation.taps, unbound)
    return max(ahead_moved, matmul_seconds(rows, depth, columns, unbound)), max(back_moved, gradients)


def _weight_seconds(rows: int, depth: int, columns: int, rate: Rates) -> float:
    """The gradient of the weights: small, over many rows, which are therefore cut into parts that fill the device."""
    tiles = -(-depth // rate.tile_rows) * -(-columns // rate.tile_columns)
    parts = max(1, min(rate.multiprocessors // tiles, rows // rate.depth))
    return matmul_seconds(depth * parts, -(-rows // parts), columns, rate)


def _loss_seconds(model: VisionSpec, layout: Layout, rate: Rates) -> float:
    """Of contrastive learning: two matrices of logits, forward and backward, and their entropies in fp32."""
    features = network(model).features
    if not features:
        return 0.0
    samples = layout.micro_batch_size
    everyone = samples * layout.data_parallel
    product = matmul_seconds(samples, features // 2, everyone, rate)
    return 6 * product + memory_seconds(2.0 * samples * everyone * 30, 20, rate)


def _data_seconds(spec: RunSpec, layout: Layout, device: Accelerator, habits: Habits) -> tuple[int, float, float]:
    """Bytes that a rank sends per step for gradients and weights; seconds that block, and that backward may hide."""
    ranks, micro_batches, training = zero_shards(layout), layout.gradient_accumulation_steps, spec.training
    model = vision_model(spec)
    whole, link = network(model), cluster_link(spec.cluster, device)
    weights = whole.parameters * weight_bytes(training.precision)
    gradients = whole.parameters * (habits.gradient_reduced or gradient_bytes(training.precision, training.grad_dtype))
    gathered = layout.micro_batch_size * layout.data_parallel * whole.features * weight_bytes(training.precision)
    blocking = 2 * micro_batches * link.gather(gathered, ranks)
    sent = 2 * micro_batches * _part(gathered, ranks)
    if layout.zero_stage == 3:
        times = 3 * micro_batches
        return sent + times * _part(weights, ranks), blocking, times * link.gather(weights, ranks)
    rounds = micro_batches if layout.zero_stage == 2 else 1
    sent += rounds * 2 * _part(gradients, ranks)
    reduced = rounds * link.reduce(gradients, ranks)
    if layout.zero_stage:
        sent += _part(weights, ranks)
        blocking += link.gather(weights, ranks)
    # DeepSpeed reduces below stage 2 after the last micro-batch (engine.py allreduce_gradients); DDP while it runs.
    if spec.planner.framework == "deepspeed" and layout.zero_stage < 2:
        return sent, blocking + reduced, 0.0
    return sent, blocking, reduced


def _part(size: int, ranks: int) -> int:
    """What one of ``ranks`` sends of a buffer in a ring."""
    return size * (ranks - 1) // ranks
