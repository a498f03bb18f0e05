"""The plan of a run beside its measurements: memory by part, the time of a step by cause, cost, checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from scaletrain_cli.diagnosis.case import Case
from scaletrain_cli.diagnosis.curves import median
from scaletrain_cli.diagnosis.timing import RunFigures, recent_steps
from scaletrain_cli.launch.status import RunStatus
from scaletrain_cli.launch.view import RunView
from scaletrain_cli.rundir.measured import MODEL_STATES

Unit = Literal["bytes", "seconds", "usd", "share", "steps", "per_second"]
Topic = Literal["memory", "step time", "throughput", "cost", "checkpoints", "goodput"]
_MEASURED_MEMORY = (*MODEL_STATES, "activations", "host", "allocated", "reserved")
# The parts of the planned time of a step, with the columns of the telemetry of ranks that measure them.
_CAUSES = {
    "compute": ("forward_seconds", "backward_seconds"),
    "exposed_communication": ("communication_seconds",),
    "bubble": (),
    "optimizer": ("optimizer_seconds",),
    "data_wait": ("data_wait_seconds",),
}


@dataclass(frozen=True)
class Compared:
    """One figure; None where it was not planned or not measured."""

    topic: Topic
    name: str
    unit: Unit
    planned: float | None
    measured: float | None


def compared_figures(view: RunView) -> list[Compared]:
    """Return all figures that have a plan or a measurement, in the order of their topics."""
    case, figures, hardware = view.case, view.figures, view.hardware
    by_rank = {} if hardware is None else dict(hardware.step_parts)
    fullest = None if hardware is None or hardware.memory is None else hardware.memory.highest
    found = [*_memory(case, fullest), *_step(case, figures, by_rank), *_throughput(case, view.status)]
    found += [*_cost(case, figures), *_checkpoints(case), *_goodput(case)]
    return [each for each in found if each.planned is not None or each.measured is not None]


def _memory(case: Case, fullest: float | None) -> Iterator[Compared]:
    """Yield the parts of the fullest pipeline stage, and the peak.

    On a CPU only those that were measured: the memory of a process has its libraries, too.
    """
    planned: dict[str, int] = asdict(case.plan.memory)
    stage = None if case.measured is None else case.measured.stages[case.measured.worst].figures
    for name in _MEASURED_MEMORY:
        figure = None if stage is None else stage.get(name)
        if figure is not None:
            yield Compared("memory", name, "bytes", figure.planned, figure.measured)
        elif planned.get(name) and not case.on_cpu:
            yield Compared("memory", name, "bytes", planned[name], None)
    for name in (
        () if case.on_cpu else ("step_temporaries", "logits", "communication_buffers", "framework", "fragmentation")
    ):
        if planned[name]:
            yield Compared("memory", name, "bytes", planned[name], None)
    _, peaks = case.history.known("memory_bytes")
    known = [value for value in (fullest, max(peaks, default=None)) if value is not None]
    yield Compared("memory", "peak", "bytes", None if case.on_cpu else case.plan.memory.peak, max(known, default=None))


def _step(case: Case, figures: RunFigures, by_rank: Mapping[str, float]) -> Iterator[Compared]:
    yield Compared("step time", "step", "seconds", figures.planned_step_seconds, figures.measured_step_seconds)
    waits = [step.data_wait for step in recent_steps(case) if step.data_wait == step.data_wait]
    for name, columns in _CAUSES.items():
        known = [by_rank[column] for column in columns if column in by_rank]
        measured = sum(known) if known else median(waits) if name == "data_wait" and waits else None
        planned: float = getattr(case.plan.time, name)
        if planned or measured is not None:
            yield Compared("step time", name, "seconds", planned, measured)


def _throughput(case: Case, status: RunStatus) -> Iterator[Compared]:
    time = case.plan.time
    for name, planned in (
        ("tokens_per_second", time.tokens_per_second),
        ("samples_per_second", time.samples_per_second),
    ):
        if (measured := getattr(status, name)) is not None:
            yield Compared("throughput", name, "per_second", planned or None, measured)
    if status.mfu is not None:
        yield Compared("throughput", "mfu", "share", time.mfu, status.mfu)


def _cost(case: Case, figures: RunFigures) -> Iterator[Compared]:
    so_far, to_come = figures.cost_so_far_usd, figures.cost_to_come_usd
    whole = None if so_far is None or to_come is None else so_far + to_come
    yield Compared("cost", "whole_run", "usd", case.plan.cost.expected_usd, whole)
    if so_far is not None:
        yield Compared("cost", "so_far", "usd", None, so_far)


def _checkpoints(case: Case) -> Iterator[Compared]:
    planned, saves = case.plan.durability, list(case.events_named("checkpoint"))
    for name, key, unit in _SAVES:
        yield Compared("checkpoints", name, unit, getattr(planned, key), _median_of(saves, name))
    steps = sorted({save["step"] for save in saves if isinstance(save.get("step"), int)})
    apart = [float(after - before) for before, after in itertools.pairwise(steps)]
    yield Compared("checkpoints", "interval", "steps", planned.interval_steps, median(apart) if apart else None)
    times = [save["time"] for save in saves if isinstance(save.get("time"), int | float)]
    between = [after - before for before, after in itertools.pairwise(times) if after > before]
    yield Compared(
        "checkpoints", "interval_time", "seconds", planned.interval_seconds, median(between) if between else None
    )


_SAVES: tuple[tuple[str, str, Unit], ...] = (
    ("bytes", "checkpoint_bytes", "bytes"),
    ("seconds", "save_seconds", "seconds"),
    ("blocked_seconds", "blocked_seconds", "seconds"),
)


def _median_of(saves: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [float(value) for save in saves if isinstance(value := save.get(name), int | float)]
    return median(values) if values else None


def _goodput(case: Case) -> Iterator[Compared]:
    measured = None if case.goodput is None else case.goodput.share
    yield Compared("goodput", "goodput", "share", case.plan.durability.expected_goodput, measured)
