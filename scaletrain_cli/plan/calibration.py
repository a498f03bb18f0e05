"""Correct planned step times by measurements of earlier runs on the same hardware.

A measurement has the step time of a run and what its plan was without any correction. Their ratio, the factor, is
applied to the plan of another run of the same GPU, model family, precision and framework: that of the same workload
and layout if it was measured, otherwise that of the nearest ones in model size, tokens per micro-batch and ranks. One
factor scales all causes, since the time of a step does not show them apart. Exposed communication stays as planned
where the measured run had another number of nodes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.plan.result import Calibration, Layout, ModelSize, StageTime, Time
from scaletrain_cli.spec import RunSpec

# Sum of the doublings, of parameters, tokens per micro-batch and ranks, beyond which a measurement says nothing.
_FURTHEST = 4.0
_OTHER_METHOD = 1.0  # distance of another recomputation, offloading or compilation, in doublings
_MOST_USED = 5


@dataclass(frozen=True)
class Measurement:
    """The measured step time of one run, with what decides whether it applies to another.

    ``machine``: the cluster's name in clusters.yaml, or the CPU's name for ranks on CPUs; empty: unknown. ``workload``:
    the dimensions of the model and the length of its samples, as one text. ``seconds``: the median of the measured
    steps; ``low`` and ``high``: their 10th and 90th percentile. ``planned_seconds``: without any calibration.
    ``measured``: Unix time of the last step. ``versions``: of scaletrain, torch and deepspeed.
    """

    gpu: str
    machine: str
    family: str
    precision: str
    framework: str
    workload: str
    parameters: int
    samples_length: int
    nodes: int
    layout: Layout
    seconds: float
    low: float
    high: float
    steps: int
    planned_seconds: float
    measured: float
    source: str
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def factor(self) -> float:
        """The measured time of a step as a multiple of the planned one."""
        return self.seconds / self.planned_seconds


def workload_text(spec: RunSpec) -> str:
    """Return the model section, with the length of the samples, as one text that is equal for equal work."""
    model: dict[str, Any] = spec.model.model_dump(mode="json", exclude={"weights", "text_weights", "vision_weights"})
    return ";".join(f"{key}={value}" for key, value in sorted(model.items()) if value is not None)


def samples_length(spec: RunSpec) -> int:
    """Return the tokens of a sample, or the pixels of an image."""
    if (length := getattr(spec.model, "seq_len", None)) is not None:
        return int(length)
    of = getattr(spec.model, "vision_config", spec.model)
    return int(getattr(of, "image_size", 1)) ** 2


def find_calibration(
    spec: RunSpec, model: ModelSize, layout: Layout, measured: Sequence[Measurement], machine: str = ""
) -> Calibration | None:
    """Return what measurements say about the step time of a planned layout; None if none of them applies.

    ``machine``: where the run will train, as in ``Measurement``; a measurement of another named machine does not apply.
    """
    kind = (find_accelerator(spec.cluster).name, spec.model.family, spec.training.precision, spec.planner.framework)
    applicable = [
        run
        for run in measured
        if (run.gpu, run.family, run.precision, run.framework) == kind
        and (not machine or not run.machine or run.machine == machine)
    ]
    apart = sorted(
        ((_distance(run, spec, model, layout), -run.measured, run) for run in applicable), key=lambda row: row[:2]
    )
    near = [(distance, run) for distance, _, run in apart if distance <= _FURTHEST]
    if not near:
        return None
    closest = near[0][0]
    used = [run for distance, run in near if distance == 0 or closest > 0][:_MOST_USED]
    return Calibration(
        factor=math.exp(median(math.log(run.factor) for run in used)),
        low=min(run.low / run.planned_seconds for run in used),
        high=max(run.high / run.planned_seconds for run in used),
        runs=len(used),
        newest=max(run.measured for run in used),
        same_workload=closest == 0,
        nodes=used[0].nodes,
        versions=dict(max(used, key=lambda run: run.measured).versions),
    )


def calibrated(time: Time, calibration: Calibration, *, nodes: int) -> Time:
    """Return the time of a plan, for ``nodes`` nodes, scaled by the factor of its calibration."""
    factor = calibration.factor
    network = 1.0 if calibration.nodes != nodes else factor
    step = factor * (time.step - time.exposed_communication) + network * time.exposed_communication
    scaled = ("compute", "bubble", "optimizer", "data_wait", "recompute", "reference")
    return time.of_step(
        step,
        **{name: factor * getattr(time, name) for name in scaled},
        exposed_communication=network * time.exposed_communication,
        to_train=step / time.step * (time.to_train - time.reference) + factor * time.reference,
        stall_seconds=network * time.stall_seconds,
        by_stage=tuple(StageTime(factor * stage.forward, factor * stage.backward) for stage in time.by_stage),
    )


def _distance(measurement: Measurement, spec: RunSpec, model: ModelSize, layout: Layout) -> float:
    """Return how many doublings apart the work of a rank is; 0 for the same workload in the same layout."""
    if measurement.workload == workload_text(spec) and measurement.layout == layout:
        return 0.0
    of, length = measurement.layout, samples_length(spec)
    pairs = (
        (measurement.parameters, model.parameters),
        (measurement.samples_length * of.micro_batch_size, length * layout.micro_batch_size),
        (of.world_size, layout.world_size),
    )
    methods = ("activation_checkpointing", "offload", "compile", "zero_stage", "pipeline_parallel", "tensor_parallel")
    other = sum(1.0 for name in methods if getattr(of, name) != getattr(layout, name))
    apart = sum(abs(math.log2(max(1, one) / max(1, two))) for one, two in pairs)
    return max(apart + _OTHER_METHOD * other, 1e-6)
