"""The latest telemetry: memory of every rank, parts of a step, use, clocks and temperature of the GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from scaletrain_cli.diagnosis.curves import median
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.telemetry.run import Telemetry, read_telemetry
from scaletrain_cli.telemetry.series import Series

_NEWEST_ROWS = 20  # per subject: about the last minute
STEP_PARTS = (
    "forward_seconds",
    "backward_seconds",
    "optimizer_seconds",
    "communication_seconds",
    "data_wait_seconds",
)
_GPU_COLUMNS = ("utilization", "sm_clock_hertz", "temperature_celsius", "power_watts")
_THROTTLES = ("throttled_by_power", "throttled_by_heat", "throttled_by_hardware")


class Recent:
    """The latest rows of one rank, GPU or node. Each method returns None for a column that was not measured."""

    def __init__(self, series: Series) -> None:
        self._series = series

    def mean(self, column: str) -> float | None:
        """Return the mean, in which each row counts as often as the values that it stands for."""
        means, counts = self._series.mean.get(column, ()), self._series.counts
        pairs = [(value, count) for value, count in zip(means, counts, strict=False) if math.isfinite(value)]
        total = sum(count for _, count in pairs)
        return math.fsum(value * count for value, count in pairs) / total if total else None

    def highest(self, column: str) -> float | None:
        """Return the highest value."""
        return max(filter(math.isfinite, self._series.highest.get(column, ())), default=None)

    def latest(self, column: str) -> float | None:
        """Return the last value."""
        return next(filter(math.isfinite, reversed(self._series.mean.get(column, ()))), None)


@dataclass(frozen=True)
class Spread:
    """A measure over subjects: the lowest and highest value, each with the subject that has it, and the median."""

    count: int
    lowest: float
    lowest_name: str
    median: float
    highest: float
    highest_name: str

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        return dict(vars(self))


@dataclass(frozen=True)
class Hardware:
    """The telemetry of the newest attempt that has any. ``is_whole``: all nodes were read.

    ``memory``: bytes by rank, the most of the rows read. ``step_parts``: seconds, the median over ranks of their mean;
    ``step_seconds``: of the whole steps, the same ones.
    ``gpu_spreads``: by column. ``throttled``: share of time by cause, of the GPU with the most.
    """

    ranks: Mapping[int, Recent]
    gpus: Mapping[str, Recent]
    nodes: Mapping[str, Recent]
    is_whole: bool
    memory: Spread | None
    step_parts: Mapping[str, float]
    step_seconds: float | None
    gpu_spreads: Mapping[str, Spread]
    throttled: Mapping[str, Spread]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of `status`; null for what was not measured."""
        return {
            "is_whole": self.is_whole,
            "memory_bytes": None if self.memory is None else self.memory.to_json(),
            "step_parts": dict(self.step_parts),
            "step_seconds": self.step_seconds,
            "gpus": {name: spread.to_json() for name, spread in self.gpu_spreads.items()},
            "throttled": {name: spread.to_json() for name, spread in self.throttled.items()},
        }


def read_hardware(run: RunDir) -> Hardware | None:
    """Return what was measured last; None if the run has no telemetry. Bounded cost, whatever its size."""
    telemetry = read_telemetry(run, newest=_NEWEST_ROWS)
    if not (telemetry.ranks or telemetry.gpus or telemetry.nodes):
        return None
    return hardware_of(telemetry)


def hardware_of(telemetry: Telemetry) -> Hardware:
    """Return the figures of a telemetry that was read."""
    ranks = {number: Recent(series) for number, series in telemetry.ranks.items()}
    gpus = {name: Recent(series) for name, series in telemetry.gpus.items()}
    nodes = {name: Recent(series) for name, series in telemetry.nodes.items()}
    parts = {}
    for column in ("step_seconds", *STEP_PARTS):
        means = [value for each in ranks.values() if (value := each.mean(column)) is not None]
        if means:
            parts[column] = median(means)
    step_seconds = parts.pop("step_seconds", None)
    memory = _spread((f"rank {number}", each.highest("memory_bytes")) for number, each in ranks.items())
    found = {c: _spread((name, each.mean(c)) for name, each in gpus.items()) for c in (*_GPU_COLUMNS, *_THROTTLES)}
    known = {column: spread for column, spread in found.items() if spread is not None}
    spreads = {column: known[column] for column in _GPU_COLUMNS if column in known}
    throttled = {column: known[column] for column in _THROTTLES if column in known}
    return Hardware(ranks, gpus, nodes, telemetry.is_whole, memory, parts, step_seconds, spreads, throttled)


def _spread(values: Iterable[tuple[str, float | None]]) -> Spread | None:
    known = sorted((value, name) for name, value in values if value is not None)
    if not known:
        return None
    (lowest, lowest_name), (highest, highest_name) = known[0], known[-1]
    return Spread(len(known), lowest, lowest_name, median([value for value, _ in known]), highest, highest_name)
