"""The measurements of a run as columns, read once from metrics.jsonl, with bounded memory and time.

A file of up to 2 MB is read whole. Of a larger one the beginning, the end, and blocks at equal distances between them
are read, and the lines of validations near the places that the steps of these blocks give. The cost is therefore the
same for ten thousand steps and for a million. What happened to a few steps between two blocks is not seen here; the
guard of the engine, which sees every step, records spikes and NaN as events.
"""

from __future__ import annotations

import contextlib
import math
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from scaletrain_cli.rundir.documents import parse_json, reporting_damage
from scaletrain_cli.safe_files import open_to_read

COLUMNS = (
    *("loss", "grad_norm", "learning_rate", "data_wait", "step_seconds", "memory_bytes", "loss_scale", "skipped"),
    *("attempt", "time"),
)
SOURCE_LOSS = "loss/"
VALIDATION_LOSS = "validation_loss"
_WHOLE_BYTES = 2_000_000
_END_BYTES = 400_000  # of the beginning, and of the end
_BLOCKS, _BLOCK_BYTES = 256, 4096
_MOST_VALIDATIONS = 48
_WINDOW_BYTES = 24_576  # read to find a validation; ten thousand times less than the distance of blocks may be
_BEGUN = ("started", "resumed", "rolled-back")


@dataclass(frozen=True)
class Validation:
    """The losses after ``step`` steps: of the whole validation data, and by source."""

    step: int
    loss: float
    sequences: float
    by_source: Mapping[str, float]


@dataclass(frozen=True)
class History:
    """Measured steps in order; each column has a value for each of ``steps``, NaN where it was not measured.

    ``columns``: those of COLUMNS, and the losses of sources under ``loss/NAME``. ``validations`` are in order, too.
    ``is_whole``: every line of the file was read. ``size_bytes``: of the file. ``not_finite``: steps whose loss is
    null, as NaN and infinity are recorded; they are not among ``steps``.
    """

    steps: Sequence[int]
    columns: Mapping[str, array[float]]
    validations: Sequence[Validation]
    is_whole: bool
    size_bytes: int
    not_finite: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.steps)

    def column(self, name: str) -> array[float]:
        """Return a column; all NaN if the run does not measure it."""
        values = self.columns.get(name)
        return array("d", [math.nan] * len(self.steps)) if values is None else values

    def known(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps at which a column has a value, and the values."""
        pairs = [(step, value) for step, value in zip(self.steps, self.column(name), strict=True) if value == value]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def of_last_attempt(self, *columns: str) -> list[tuple[Any, ...]]:
        """Return the step and these columns of the measured steps of the newest attempt that have the first column."""
        attempts = self.column("attempt")
        rows = zip(zip(self.steps, *map(self.column, columns), strict=True), attempts, strict=True)
        return [row for row, attempt in rows if attempt == attempts[-1] and row[1] == row[1]]

    @property
    def last_step(self) -> int:
        """The last measured step; 0 before the first."""
        return self.steps[-1] if self.steps else 0

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources with a training loss of their own."""
        return tuple(sorted(name.removeprefix(SOURCE_LOSS) for name in self.columns if name.startswith(SOURCE_LOSS)))


def read_history(path: Path, events: Sequence[Mapping[str, Any]], evaluate_every: int = 0) -> History:
    """Return the history in a metrics.jsonl; empty if there is no file. Raises DamagedError if it cannot be read.

    ``events``: of the same run. Steps that were rolled back, or repeated by a later attempt, are left out.
    ``evaluate_every``: steps between validations, 0 if there are none.
    """
    rows: list[tuple[int, dict[str, Any]]] = []
    size = 0
    with reporting_damage(path), contextlib.suppress(FileNotFoundError), open_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _WHOLE_BYTES:
            rows = list(_rows(file, 0, size, size))
        else:
            rows = _sampled(file, size)
            rows += _validations_between(file, size, rows, evaluate_every)
            rows.sort(key=lambda row: row[0])
    return _history(_valid(rows, events), size <= _WHOLE_BYTES, size)


def _rows(file: BinaryIO, start: int, end: int, size: int, only: bytes = b"") -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of complete lines within ``start`` and ``end``, each with the offset of its first byte.

    ``only``: text that a line must contain.
    """
    file.seek(start)
    data = file.read(end - start)
    place = start
    lines = data.split(b"\n")
    for number, line in enumerate(lines):
        cut = (number == 0 and start > 0) or (number == len(lines) - 1 and end < size)
        if line and not cut and only in line:
            try:
                row = parse_json(line)
            except ValueError:
                row = None
            if isinstance(row, dict) and type(row.get("step")) is int:
                yield place, row
        place += len(line) + 1


def _sampled(file: BinaryIO, size: int) -> list[tuple[int, dict[str, Any]]]:
    """Return rows of the beginning, of blocks at equal distances, and of the end."""
    rows = list(_rows(file, 0, _END_BYTES, size))
    between = size - 2 * _END_BYTES
    for number in range(_BLOCKS):
        start = _END_BYTES + between * number // _BLOCKS
        rows += _rows(file, start, start + _BLOCK_BYTES, size)
    rows += _rows(file, size - _END_BYTES, size, size)
    return list({place: (place, row) for place, row in rows}.values())


def _validations_between(
    file: BinaryIO, size: int, rows: Sequence[tuple[int, dict[str, Any]]], every: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield rows of validations at up to 48 steps, each looked for where neighboring rows place its step."""
    places, steps = [place for place, _ in rows], [row["step"] for _, row in rows]
    last = steps[-1] if rows else 0
    count = last // every if every else 0
    seen = {row["step"] for _, row in rows if VALIDATION_LOSS in row}
    wanted = sorted({every * (1 + (count - 1) * number // _MOST_VALIDATIONS) for number in range(_MOST_VALIDATIONS)})
    for step in wanted if count else ():
        place = None if step in seen else _place_of(step, places, steps)
        if place is not None:
            start = max(0, place - _WINDOW_BYTES // 2)
            yield from _rows(file, start, min(size, start + _WINDOW_BYTES), size, VALIDATION_LOSS.encode())


def _place_of(step: int, places: Sequence[int], steps: Sequence[int]) -> int | None:
    """Return about where the file has a step: by the last pair of neighboring rows around it."""
    for at in range(len(steps) - 2, -1, -1):
        if steps[at] <= step <= steps[at + 1]:
            share = (step + 0.5 - steps[at]) / max(1, steps[at + 1] - steps[at])
            return places[at] + int((places[at + 1] - places[at]) * share)
    return None


def _valid(
    rows: Sequence[tuple[int, dict[str, Any]]], events: Sequence[Mapping[str, Any]]
) -> dict[int, dict[str, Any]]:
    """Return the rows by step, without those that an event has made void; later ones override earlier ones."""
    scratch = max((metrics_place(event) for event in events if event.get("event") == "from-scratch"), default=0)
    begun = [(metrics_place(event), kept_step(event)) for event in events if event.get("event") in _BEGUN]
    by_step: dict[int, dict[str, Any]] = {}
    for place, row in rows:
        step = row["step"]
        if place < scratch or any(place < at and step > kept for at, kept in begun):
            continue
        by_step[step] = {**by_step.get(step, {}), **row}
    return by_step


def metrics_place(event: Mapping[str, Any]) -> int:
    """Return the length of metrics.jsonl in bytes that an event records; 0 if it records none."""
    length = event.get("metrics_bytes")
    return length if isinstance(length, int) else 0


def kept_step(event: Mapping[str, Any]) -> int:
    """Return the last step before an event that stays valid after it."""
    if event.get("event") == "from-scratch":
        return 0
    step: object = event.get("to_step" if event.get("event") == "rolled-back" else "step")
    return step if isinstance(step, int) else 0


def _history(by_step: Mapping[int, dict[str, Any]], is_whole: bool, size: int) -> History:
    trained = [step for step in sorted(by_step) if number_in(by_step[step].get("loss")) is not None]
    names = {name for step in trained for name in by_step[step] if name in COLUMNS or name.startswith(SOURCE_LOSS)}
    known = {name: [number_in(by_step[step].get(name)) for step in trained] for name in names}
    columns = {name: array("d", [math.nan if one is None else one for one in known[name]]) for name in names}
    validations = [_validation(step, by_step[step]) for step in sorted(by_step)]
    lost = [step for step in sorted(by_step) if by_step[step].get("loss", 0.0) is None]
    return History(trained, columns, [point for point in validations if point is not None], is_whole, size, lost)


def _validation(step: int, row: Mapping[str, Any]) -> Validation | None:
    if (loss := number_in(row.get(VALIDATION_LOSS))) is None:
        return None
    prefix = f"{VALIDATION_LOSS}/"
    sources = {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}
    known = {name: number for name, value in sources.items() if (number := number_in(value)) is not None}
    samples = (number_in(row.get(f"validation_{name}")) for name in ("sequences", "images", "pairs"))
    return Validation(step, loss, next((count for count in samples if count is not None), 0.0), known)


def number_in(value: Any) -> float | None:
    """Return a value of a JSON document as a number; None if it is none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
