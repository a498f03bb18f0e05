"""Step time of a data-parallel rank that trains a vision network: its kernels, its traffic, its optimizer.

Knows no memory and no search.
"""

from __future__ import annotations

from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.catalogue.networks import cluster_link
from scaletrain_cli.plan.memory.states import gradient_bytes, weight_bytes
from scaletrain_cli.plan.result import Layout, Network, PerStepBytes, StageTime, Time
from scaletrain_cli.plan.speed.framework_time import HABITS, FrameworkProfile
from scaletrain_cli.plan.speed.kernels import Rates, matmul_seconds, memory_seconds
from scaletrain_cli.plan.stages import zero_shards
from scaletrain_cli.plan.vision.kernel_time import machine, pass_seconds
from scaletrain_cli.plan.vision.network import network, planned_network, training_flops, vision_model
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.vision import VisionSpec

# What the host needs to issue one kernel of an eager network, autograd included: an order of magnitude.
_ISSUE_SECONDS = 6e-6


def plan_vision_time(spec: RunSpec, layout: Layout, device: Accelerator) -> tuple[Time, Network]:
    """Seconds per optimizer step by cause, and what follows; samples stand where a transformer has tokens."""
    model, training = vision_model(spec), spec.training
    habits = HABITS[spec.planner.framework]
    micro_batches, full = layout.gradient_accumulation_steps, layout.activation_checkpointing == "full"
    on = machine(device, training.precision, layout.compile)
    forward, backward, launched = pass_seconds(planned_network(spec, device), layout.micro_batch_size, on)
    passes = (2 if full else 1) * forward + backward
    issued = 0.0 if device.is_cpu else launched * _ISSUE_SECONDS
    compute = micro_batches * (max(passes, issued) + _loss_seconds(model, layout, on.rate))
    sent, blocking, overlapping = _data_seconds(spec, layout, device, habits)
    hidden = min(overlapping, backward) * habits.reduce_overlap
    exposed = blocking + overlapping - hidden
    parameters = network(model).parameters
    updated = parameters if layout.zero_stage == 0 else -(-parameters // zero_shards(layout))
    optimizer = memory_seconds(updated * habits.optimizer, 1, on.rate)
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


def _loss_seconds(model: VisionSpec, layout: Layout, rate: Rates) -> float:
    """Of contrastive learning: two matrices of logits, forward and backward, and their entropies in fp32."""
    features = network(model).features
    if not features:
        return 0.0
    samples = layout.micro_batch_size
    everyone = samples * layout.data_parallel
    product = matmul_seconds(samples, features // 2, everyone, rate)
    return 6 * product + memory_seconds(2.0 * samples * everyone * 30, 20, rate)


def _data_seconds(
    spec: RunSpec, layout: Layout, device: Accelerator, habits: FrameworkProfile
) -> tuple[int, float, float]:
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
