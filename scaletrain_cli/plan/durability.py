"""How large a checkpoint is, how often to take one, and what interruptions leave of the time. Knows no prices."""

from __future__ import annotations

import math

from scaletrain_cli.plan.architecture import parameter_count
from scaletrain_cli.plan.hardware import Accelerator
from scaletrain_cli.plan.result import Durability, Layout, Time
from scaletrain_cli.plan.states import checkpoint_bytes_per_parameter, weight_bytes
from scaletrain_cli.spec import RunSpec

# Sustained writes of one node to shared storage, hash and fsync included; stated, not measured.
_WRITE_BYTES_PER_SECOND_PER_NODE = 1e9
# Device to pageable host memory; stated, not measured.
_COPY_BYTES_PER_SECOND_PER_GPU = 5e9
# From the interruption to the next step: requeue, start, load. A CPU run of a laptop starts faster.
_RESTART_SECONDS = 180.0
_CPU_RESTART_SECONDS = 15.0
# Llama 3 (arXiv:2407.21783, section 3.3.4): 419 unexpected interruptions in 54 days on 16,384 GPUs.
_MTBF_PER_GPU_SECONDS = 54 * 86400 * 16384 / 419


def checkpoint_bytes(spec: RunSpec, layout: Layout) -> int:
    """Full state of the job; what ranks hold alike is written once."""
    return parameter_count(spec.transformer) * checkpoint_bytes_per_parameter(
        spec.training.precision, layout.zero_stage
    )


def save_seconds(spec: RunSpec, layout: Layout) -> float:
    """Until a checkpoint is committed: what data-parallel rank 0 writes alone, then what all nodes write together.

    Alone: everything without ZeRO, the weights under stages 1 and 2, nothing under stage 3.
    """
    size = checkpoint_bytes(spec, layout)
    weights = parameter_count(spec.transformer) * weight_bytes(spec.training.precision)
    alone = {0: size, 3: 0}.get(layout.zero_stage, weights)
    alone //= layout.tensor_parallel * layout.pipeline_parallel
    return (alone + (size - alone) / spec.cluster.nodes) / _WRITE_BYTES_PER_SECOND_PER_NODE


def mean_time_between_interruptions(spec: RunSpec) -> float:
    """Seconds, of the whole job: as the spec states it, or from the failure rate of data-centre GPUs."""
    stated = spec.cluster.mean_time_between_interruptions
    return max(stated, 1e-3) if stated is not None else _MTBF_PER_GPU_SECONDS / spec.world_size


def plan_durability(spec: RunSpec, layout: Layout, time: Time, device: Accelerator) -> Durability:
    """Cadence by Young (1974): sqrt(2 C M), where C is the time that one checkpoint takes from training.

    Goodput follows Daly (2006) to first order: each interval loses C, each interruption half an interval and the
    restart; where the grace period is long enough for a last checkpoint, an interruption loses no step.
    """
    size = checkpoint_bytes(spec, layout)
    save = save_seconds(spec, layout)
    taken = save
    if spec.checkpoint.asynchronous:
        taken = min(save, size / (_COPY_BYTES_PER_SECOND_PER_GPU * layout.world_size))
    between = mean_time_between_interruptions(spec)
    if spec.checkpoint.every == "auto":
        # Not more often than one write takes, not less often than interruptions come.
        wanted = min(max(math.sqrt(2 * taken * between), save), max(between, save))
        interval_steps = max(1, min(spec.total_steps, round(wanted / time.step)))
    else:
        interval_steps = spec.checkpoint.every
    interval = interval_steps * time.step
    grace_ok = save + time.step <= spec.cluster.grace_seconds
    restart = _CPU_RESTART_SECONDS if device.is_cpu else _RESTART_SECONDS
    lost = restart + (save if spec.cluster.spot and grace_ok else interval / 2)
    goodput = max(0.0, 1 - lost / between) / (1 + taken / interval)
    return Durability(
        checkpoint_bytes=size,
        save_seconds=save,
        interval_steps=interval_steps,
        interval_seconds=interval,
        expected_goodput=goodput,
        grace_ok=grace_ok,
    )
