"""Checkpoint size and interval, and the share of time that interruptions leave (goodput).

Goodput by the full formula of Daly (Future Generation Computer Systems 22, 2006, eq. 20), of which the one that Kokolis
et al. use (arXiv:2410.21680: 1 - (R + interval / 2) / M, over 1 + save / interval) is the first order.
"""

from __future__ import annotations

import math

from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.memory.states import checkpoint_bytes_per_parameter, weight_bytes
from scaletrain_cli.plan.result import Durability, Layout, Time
from scaletrain_cli.plan.workloads.registry import workload_of
from scaletrain_cli.spec import RunSpec

# Sustained writes of one node to shared storage: BLOOM's 2.3 TB in 40 s from 48 nodes (bigscience-workshop/bigscience,
# train/tr11-176B-ml/chronicles.md).
_STORAGE_BYTES_PER_SECOND_PER_NODE = 1.2e9
# Device to pageable host memory, one thread copying per GPU; stated, not measured. A slower link is the limit.
_COPY_BYTES_PER_SECOND_PER_GPU = 5e9
# From the interruption until ranks begin to load: requeue, start, process groups; stated, not measured.
_START_SECONDS = 180.0
_CPU_START_SECONDS = 15.0
# GPU hours between failures of a job. Llama 3 on H100 (arXiv:2407.21783, section 3.3.4): 419 unexpected interruptions
# in 54 days on 16,384 GPUs. A100 and older: OPT-175B's about two machines a day of 124 (facebookresearch/metaseq,
# projects/OPT/chronicles/final_update.md); Meta's RSC says 8,090 of jobs and 29,500 to 82,000 of nodes
# (arXiv:2410.21680).
_GPU_HOURS_BETWEEN_FAILURES = 54 * 24 * 16384 / 419
_GPU_HOURS_BETWEEN_FAILURES_BEFORE_HOPPER = 12 * 992
# Hours during which spot capacity stays, whole, once it is there: pooled over 21 traces of AWS V100 and K80 instances
# (skypilot-org/spot-traces, 2022 and 2023). Capacity goes by zone more than by node, so this is per job, of any size.
SPOT_HOURS_BETWEEN_PREEMPTIONS = 2.4
# Above this number of expected interruptions per interval no run finishes, and exp() would overflow.
_MOST_INTERRUPTIONS = 700.0


def checkpoint_bytes(spec: RunSpec, layout: Layout) -> int:
    """Return the bytes of the job's full state: fp32 weights and moments; state that ranks share is written once."""
    stage = framework_of(spec).checkpoint_zero_stage(layout)
    training = spec.training
    return workload_of(spec.model).parameter_count(spec.model) * checkpoint_bytes_per_parameter(
        training.precision, stage, training.optimizer.name
    )


def save_seconds(spec: RunSpec, layout: Layout) -> float:
    """Return the seconds until a checkpoint is committed: the bytes that rank 0 writes by itself, then those of all
    nodes.
    """
    size = checkpoint_bytes(spec, layout)
    weights = workload_of(spec.model).parameter_count(spec.model) * weight_bytes(spec.training.precision)
    alone = framework_of(spec).written_alone_bytes(layout, size, weights)
    return (alone + (size - alone) / spec.cluster.nodes) / _storage_rate(spec)


def gpu_hours_between_failures(device: Accelerator) -> tuple[float, str]:
    """Return the GPU hours between failures of this generation in a large job, and their source."""
    if device.compute_capability.startswith(("7.", "8.")):
        return _GPU_HOURS_BETWEEN_FAILURES_BEFORE_HOPPER, "OPT-175B's chronicle reports (facebookresearch/metaseq)"
    return _GPU_HOURS_BETWEEN_FAILURES, "Llama 3 reports (arXiv:2407.21783, section 3.3.4)"


def interruptions_per_second(spec: RunSpec, device: Accelerator) -> tuple[float, float]:
    """Return the interruptions per second of the whole job: preemptions (with notice) and failures (without).

    ``cluster.mean_time_between_interruptions`` is of the job: on spot between preemptions, to which failures add; on
    demand between interruptions of any cause.
    """
    cluster = spec.cluster
    stated = cluster.mean_time_between_interruptions
    if not cluster.spot and stated is not None:
        return 0.0, 1 / max(stated, 1e-3)
    between_preemptions = 3600 * SPOT_HOURS_BETWEEN_PREEMPTIONS if stated is None else max(stated, 1e-3)
    preemptions = 1 / between_preemptions if cluster.spot else 0.0
    if cluster.per_node_mtbf is not None:
        return preemptions, cluster.nodes / max(cluster.per_node_mtbf, 1e-3)
    hours, _ = gpu_hours_between_failures(device)
    return preemptions, spec.world_size / (3600 * hours)


def plan_durability(spec: RunSpec, layout: Layout, time: Time, device: Accelerator) -> Durability:
    """Return checkpoint interval, goodput and lost work.

    An interruption costs the restart and the work since the last valid checkpoint. Where the notice is long enough for
    one step and a last checkpoint, a preemption costs that save instead, and M is that of failures alone.
    """
    size = checkpoint_bytes(spec, layout)
    save = save_seconds(spec, layout)
    blocked = save
    if spec.checkpoint.asynchronous:
        copy_rate = min(_COPY_BYTES_PER_SECOND_PER_GPU, device.host_bandwidth) * layout.world_size
        blocked = min(save, size / copy_rate)
    preemptions, failures = interruptions_per_second(spec, device)
    between = 1 / (preemptions + failures)
    grace_ok = save + time.step <= spec.cluster.grace_seconds
    noticed = preemptions if grace_ok else 0.0
    sudden = preemptions + failures - noticed
    if spec.checkpoint.every == "auto":
        interval_steps = min(spec.total_steps, best_interval_steps(time.step, save, blocked, sudden))
    else:
        interval_steps = spec.checkpoint.every
    interval = interval_steps * time.step
    started = _CPU_START_SECONDS if device.is_cpu else _START_SECONDS
    restart = started + size / (_storage_rate(spec) * spec.cluster.nodes)
    behind = save - blocked
    goodput = expected_goodput(interval, save, blocked, restart, sudden) / (1 + noticed * (restart + save))
    wall = time.to_train / goodput if goodput > 0 else None
    return Durability(
        checkpoint_bytes=size,
        save_seconds=save,
        interval_steps=interval_steps,
        interval_seconds=interval,
        expected_goodput=goodput,
        grace_ok=grace_ok,
        blocked_seconds=blocked,
        restart_seconds=restart,
        seconds_between_interruptions=between,
        seconds_between_losses=1 / sudden,
        interruptions_expected=None if wall is None else wall / between,
        lost_work_seconds=(_lost_seconds(interval + blocked, sudden) + behind) * sudden * between,
        wall_seconds=wall,
        copy_bytes_per_node=math.ceil(size / spec.cluster.nodes),
    )


def best_interval_steps(step: float, save: float, blocked: float, sudden: float) -> int:
    """Return the steps between checkpoints by Young (1974): sqrt(2 C M), where C is the time that one takes from
    training.

    Arguments: seconds of a step, seconds until a checkpoint is committed, seconds that it blocks training; ``sudden``:
    interruptions per second without a last save.
    """
    # At most one checkpoint per write, and at least one per expected interruption.
    wanted = min(max(math.sqrt(2 * blocked / sudden), save), max(1 / sudden, save))
    return max(1, round(wanted / step))


def expected_goodput(interval: float, save: float, blocked: float, restart: float, sudden: float) -> float:
    """Return the share of time that is progress, under interruptions without notice. Arguments are seconds and
    1/seconds.
    """
    # While a checkpoint is written in the background, a restart finds the one before.
    return _share_after_losses(interval, blocked, restart + save - blocked, sudden)


def _storage_rate(spec: RunSpec) -> float:
    given = spec.cluster.storage_bandwidth
    return _STORAGE_BYTES_PER_SECOND_PER_NODE if given == "auto" else max(given, 1.0)


def _share_after_losses(interval: float, blocked: float, restart: float, rate: float) -> float:
    """Return the share of time that is progress: tau / (M e^(R/M) (e^((tau + delta)/M) - 1)), Daly 2006, eq. 20."""
    expected = (interval + blocked) * rate
    if expected + restart * rate > _MOST_INTERRUPTIONS:
        return 0.0
    if expected < 1e-12:
        return interval / (interval + blocked)
    return interval * rate / (math.exp(restart * rate) * math.expm1(expected))


def _lost_seconds(segment: float, rate: float) -> float:
    """Return the mean seconds since the last checkpoint at an interruption within a segment; half of it if they are
    rare.

    M - L / (e^(L/M) - 1), the mean of an exponential law cut off at L.
    """
    expected = segment * rate
    if expected < 1e-6:
        return segment / 2
    return 1 / rate - (segment / math.expm1(expected) if expected < _MOST_INTERRUPTIONS else 0.0)
