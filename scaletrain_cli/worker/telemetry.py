"""What a rank measures of itself, sent to the node agent through the pipe of its heartbeat.

A line of JSON, which agents and programs that do not know it pass over:
``{"telemetry": 1, "step": 12, "time": 1.7e9, "count": 4, "mean": {...}, "lowest": {...}, "highest": {...}}``. The
agent writes it to the file of the node. Nothing here may fail or delay training.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import select
import stat
import termios
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from scaletrain_cli.worker.heartbeat import HEARTBEAT_VARIABLE, private_descriptor

_FORMAT = 1
_MOST_COLUMNS = 64
_LONGEST_NAME = 64
# With so many unread bytes the agent does not listen; the rest of the pipe is left to heartbeats.
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
    def from_environment(cls, environment: Mapping[str, str], *, interval_seconds: float = 1.0) -> RankTelemetry:
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
            found = self._sums.get(name)
            if found is None:
                if len(self._sums) < _MOST_COLUMNS and len(name) <= _LONGEST_NAME:
                    self._sums[name] = [value, 1, value, value]
            else:
                found[0] += value
                found[1] += 1
                found[2] = min(found[2], value)
                found[3] = max(found[3], value)
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
            {name: found[2] for name, found in self._sums.items()},
            {name: found[3] for name, found in self._sums.items()},
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
