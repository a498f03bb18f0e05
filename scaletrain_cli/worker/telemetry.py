"""Measurements of a rank, sent to the node agent through the pipe of its heartbeat.

A line of JSON, which agents and programs that do not know it pass over:
``{"telemetry": 1, "step": 12, "time": 1.7e9, "count": 4, "mean": {...}, "lowest": {...}, "highest": {...}}``. The
agent writes it to the file of the node. Nothing here may fail or delay training.
"""

import contextlib
import fcntl
import json
import math
import os
import select
import stat
import sys
import termios
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from scaletrain_cli.worker.heartbeat import HEARTBEAT_VARIABLE, private_descriptor

_FORMAT = 1
_MOST_COLUMNS = 64
_LONGEST_NAME = 64
# With more unread bytes the agent is not reading; the rest of the pipe is left to heartbeats.
_MOST_UNREAD_BYTES = 1 << 14


@dataclass(frozen=True)
class RankRow:
    """Values of a rank: of each column the mean, lowest and highest of ``count`` steps, the last of them ``step``.

    ``time``: Unix seconds.
    """

    step: int
    time: float
    count: int
    mean: Mapping[str, float]
    lowest: Mapping[str, float]
    highest: Mapping[str, float]


def telemetry_line(row: RankRow) -> bytes:
    """Return the row as a line of JSON. Columns that do not vary have no lowest and highest value."""
    varying = [name for name, mean in row.mean.items() if not row.lowest[name] == mean == row.highest[name]]
    fields = {
        "telemetry": _FORMAT,
        "step": row.step,
        "time": round(row.time, 3),
        "count": row.count,
        "mean": {name: _short(value) for name, value in row.mean.items()},
        "lowest": {name: _short(row.lowest[name]) for name in varying},
        "highest": {name: _short(row.highest[name]) for name in varying},
    }
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def read_telemetry_line(line: bytes) -> RankRow | None:
    """Return the row in a line; None for any other text."""
    try:
        fields = json.loads(line)
        if fields["telemetry"] != _FORMAT:
            return None
        mean, lowest, highest = (_numbers(fields[key]) for key in ("mean", "lowest", "highest"))
        row = RankRow(
            int(fields["step"]), float(fields["time"]), int(fields["count"]), mean, mean | lowest, mean | highest
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    return row if math.isfinite(row.time) and row.step >= 0 and row.count > 0 else None


def _numbers(values: Mapping[str, float]) -> dict[str, float]:
    numbers = {name: float(value) for name, value in values.items() if len(name) <= _LONGEST_NAME}
    if len(numbers) > _MOST_COLUMNS:
        raise ValueError(f"more than {_MOST_COLUMNS} columns")
    return numbers


def _short(value: float) -> float:
    return float(f"{value:.7g}")  # of float32


class RankTelemetry:
    """Sends what a rank measures to its agent: one line per ``interval_seconds`` with mean, lowest and highest.

    Without an agent (``descriptor`` is None) every call does nothing.
    """

    def __init__(
        self,
        descriptor: int | None = None,
        *,
        interval_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._descriptor = descriptor
        self._interval_seconds = interval_seconds
        self._clock, self._wall_clock = clock, wall_clock
        self._sent = -math.inf
        self._step = self._steps = 0
        self._sums: dict[str, list[float]] = {}  # sum, number, lowest, highest

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], *, interval_seconds: float = 1.0) -> "RankTelemetry":
        """Return the telemetry for the pipe of the heartbeat."""
        descriptor = private_descriptor(environment, HEARTBEAT_VARIABLE, stat.S_ISFIFO)
        return cls(descriptor, interval_seconds=interval_seconds)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of a step; call it once a step. A value that was not measured is absent or NaN.

        Never blocks and never raises an error for a pipe that is full or closed: then the values are lost.
        """
        if self._descriptor is None:
            return
        for name, value in values.items():
            if math.isnan(value):
                continue
            sums = self._sums.get(name)
            if sums is None:
                if len(self._sums) < _MOST_COLUMNS and len(name) <= _LONGEST_NAME:
                    self._sums[name] = [value, 1, value, value]
            else:
                sums[0] += value
                sums[1] += 1
                sums[2] = min(sums[2], value)
                sums[3] = max(sums[3], value)
        self._step, self._steps = step, self._steps + 1
        if self._clock() - self._sent >= self._interval_seconds:
            self.send()

    def send(self) -> None:
        """Send what has been added since the last line, as at the end of training."""
        if self._descriptor is None or not self._steps:
            return
        row = RankRow(
            self._step,
            self._wall_clock(),
            self._steps,
            {name: total / number for name, (total, number, _, _) in self._sums.items()},
            {name: sums[2] for name, sums in self._sums.items()},
            {name: sums[3] for name, sums in self._sums.items()},
        )
        self._sums, self._steps, self._sent = {}, 0, self._clock()
        line = telemetry_line(row)
        # Atomic up to PIPE_BUF: heartbeats are written to the same pipe.
        if len(line) <= select.PIPE_BUF and self._unread_bytes() <= _MOST_UNREAD_BYTES:
            with contextlib.suppress(OSError):
                os.write(self._descriptor, line)

    def _unread_bytes(self) -> int:
        assert self._descriptor is not None
        try:
            answer = fcntl.ioctl(self._descriptor, termios.FIONREAD, bytes(4))
        except OSError:
            return 0
        return int.from_bytes(answer, "little")


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory now."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory_columns() -> dict[str, float]:
    """Return the bytes of a program's rank: on its GPU, once it uses one through torch, else those that are resident.

    ``memory_bytes`` of a GPU is the most that was allocated since the start, or since the program has reset the peak
    statistics of torch; this does not reset them. Raises OSError, and RuntimeError of an allocator without statistics.
    """
    torch: Any = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not getattr(cuda, "is_initialized", bool)():
        return {"memory_bytes": float(resident_bytes())}
    statistics = cuda.memory_stats()
    names = {
        "memory_bytes": "allocated_bytes.all.peak",
        "memory_reserved_bytes": "reserved_bytes.all.current",
        "allocation_retries": "num_alloc_retries",
    }
    return {column: float(statistics[name]) for column, name in names.items() if name in statistics}


class StepTimes:
    """Times the steps of a loop that is not the engine's by its heartbeats, and sends them with the rank's memory.

    A step takes from its beat ``step`` to that of the next step. Not measured is a step with another phase in between,
    such as a save. ``sender`` is None with ``telemetry.enabled: false``; then steps are only timed. Never raises.
    """

    def __init__(
        self,
        sender: RankTelemetry | None,
        *,
        interval_seconds: float = 1.0,
        memory: Callable[[], Mapping[str, float]] = memory_columns,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._sender, self._memory, self._clock = sender, memory, clock
        self._memory_seconds, self._memory_read = interval_seconds / 2, -math.inf  # a value for each row that is sent
        self._step, self._began = 0, math.nan  # NaN: the present step is not measured
        self._values: dict[str, float] = {}
        self._logged: dict[str, list[float]] = {"step_seconds": [], "data_wait": []}

    def beat(self, step: int, phase: str) -> None:
        """Take note of a heartbeat: ``step`` (from 1) begins if ``phase`` is ``step``."""
        if phase != "step":
            self._began = math.nan
            return
        now = self._clock()
        if step == self._step and self._began == self._began:
            return  # another micro-batch
        if step == self._step + 1 and self._began == self._began:
            self._took(now - self._began)
        self._step, self._began, self._values = step, now, {}

    def add(self, values: Mapping[str, float]) -> None:
        """Add values of the present step; of the same name their sum, as of several micro-batches."""
        for name, value in values.items():
            self._values[name] = self._values.get(name, 0.0) + value

    def means(self) -> dict[str, float]:
        """Return the mean ``step_seconds`` and ``data_wait`` since the last call, for a line of metrics.jsonl."""
        means = {name: sum(values) / len(values) for name, values in self._logged.items() if values}
        self._logged = {name: [] for name in self._logged}
        return means

    def close(self) -> None:
        """Send what is left."""
        if self._sender is not None:
            self._sender.send()

    def _took(self, seconds: float) -> None:
        self._logged["step_seconds"].append(seconds)
        if "data_wait_seconds" in self._values:
            self._logged["data_wait"].append(self._values["data_wait_seconds"])
        if self._sender is not None:
            self._sender.add(self._step, {"step_seconds": seconds, **self._values, **self._memory_if_due()})

    def _memory_if_due(self) -> Mapping[str, float]:
        now = self._clock()
        if now - self._memory_read < self._memory_seconds:
            return {}
        self._memory_read = now
        try:
            return self._memory()
        except (OSError, RuntimeError):
            self._memory_seconds = math.inf
            return {}
