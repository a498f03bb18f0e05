"""What ranks and GPUs measured last: memory of every rank, parts of a step, use, clocks and heat of the GPUs."""

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
    """Of the newest attempt that measured anything. ``is_whole`` is False if only some of very many nodes were read.

    ``memory``: bytes by rank, the most of the rows read. ``step_parts``: seconds, the median over ranks of their mean.
    ``gpus``: by column of the telemetry. ``throttled``: share of time by cause, of the GPU with the most.
    """

    telemetry: Telemetry
    memory: Spread | None
    step_parts: Mapping[str, float]
    gpus: Mapping[str, Spread]
    throttled: Mapping[str, Spread]

    @property
    def is_whole(self) -> bool:
        return self.telemetry.is_whole

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of `status`; null for what was not measured."""
        return {
            "is_whole": self.is_whole,
            "memory_bytes": None if self.memory is None else self.memory.to_json(),
            "step_parts": dict(self.step_parts),
            "gpus": {name: spread.to_json() for name, spread in self.gpus.items()},
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
    ranks = {f"rank {number}": series for number, series in telemetry.ranks.items()}
    parts = {}
    for name in STEP_PARTS:
        means = [value for series in ranks.values() if (value := mean_of(series, name)) is not None]
        if means:
            parts[name] = median(means)
    memory = _spread((name, highest_of(series, "memory_bytes")) for name, series in ranks.items())
    gpus = {
        column: found
        for column in _GPU_COLUMNS
        if (found := _spread((name, mean_of(series, column)) for name, series in telemetry.gpus.items())) is not None
    }
    throttled = {
        column: found
        for column in _THROTTLES
        if (found := _spread((name, mean_of(series, column)) for name, series in telemetry.gpus.items())) is not None
    }
    return Hardware(telemetry, memory, parts, gpus, throttled)


def mean_of(series: Series, column: str) -> float | None:
    """Return the mean of a column over its rows, each with the number of values that it stands for."""
    values = series.mean.get(column)
    if values is None:
        return None
    pairs = [(value, count) for value, count in zip(values, series.counts, strict=True) if math.isfinite(value)]
    total = sum(count for _, count in pairs)
    return math.fsum(value * count for value, count in pairs) / total if total else None


def highest_of(series: Series, column: str) -> float | None:
    """Return the highest value of a column."""
    return max((value for value in series.highest.get(column, ()) if math.isfinite(value)), default=None)


def latest_of(series: Series, column: str) -> float | None:
    """Return the last value of a column that was measured."""
    return next((value for value in reversed(series.mean.get(column, ())) if math.isfinite(value)), None)


def _spread(values: Iterable[tuple[str, float | None]]) -> Spread | None:
    known = sorted((value, name) for name, value in values if value is not None)
    if not known:
        return None
    (lowest, lowest_name), (highest, highest_name) = known[0], known[-1]
    return Spread(len(known), lowest, lowest_name, median([value for value, _ in known]), highest, highest_name)
