"""One series file: values of many subjects over time, the older the coarser, in at most a fixed number of bytes.

One process writes a file; any number of others may read it meanwhile. Added rows are appended, and summed into rows of
10, 100, ... 10^6 with mean, lowest and highest. Once the file reaches its largest size it is replaced by one without
the oldest rows that coarser rows stand for as well. A torn or damaged segment loses its own rows only, or the detail
of them.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import os
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO, NamedTuple

from scaletrain_cli.safe_files import open_to_read
from scaletrain_cli.telemetry.segments import (
    FACTOR,
    TIERS,
    BoundedFile,
    Cell,
    Part,
    Row,
    Segment,
    find_segments,
    read_segment,
)

LARGEST_FILE = 1 << 20  # bytes
MOST_SUBJECTS = 1024
MOST_COLUMNS = 64  # of a subject
_CELLS_PER_SEGMENT = 1 << 14
_MOST_PENDING = 20_000  # rows that are not written yet, where the file system does not respond
_COARSE_ROWS_PER_SEGMENT = 8
_LONGEST_NAME = 200
_NUMBERS = FACTOR ** (TIERS - 1)
_LATEST, _LAST_STEP = 1e11, 1 << 62
# With ``newest``: bytes read at first, and at most.
_FIRST_BYTES, _MOST_BYTES = 1 << 14, 1 << 17


@dataclass(frozen=True)
class Series:
    """The values of one subject over time, oldest row first; rows may stand for one value or for many.

    ``times``: Unix seconds of the last value in the row (resolution 1 ms); ``steps``: its step; ``counts``: the values
    that the row stands for; ``mean``, ``lowest`` and ``highest``: float32, by column. NaN: not measured.
    """

    subject: str
    times: Sequence[float]
    steps: Sequence[int]
    counts: Sequence[int]
    mean: Mapping[str, Sequence[float]]
    lowest: Mapping[str, Sequence[float]]
    highest: Mapping[str, Sequence[float]]


@dataclass
class _Sum:
    """The row of a tier that is being summed."""

    first: int
    rows: int = 0
    count: int = 0
    cells: dict[str, Cell] = field(default_factory=dict)

    def add(self, row: Row) -> Row | None:
        """Add a row of the tier below. Return the finished row, if this was its last."""
        self.rows += 1
        self.count += row.count
        for name, cell in row.cells.items():
            old = self.cells.get(name)
            self.cells[name] = cell if old is None else _merged(old, cell)
        if self.rows < FACTOR:
            return None
        return Row(self.first, row.time, row.step, self.count, self.cells)


def _merged(one: Cell, other: Cell) -> Cell:
    weight = one.weight + other.weight
    mean = one.mean + (other.mean - one.mean) * (other.weight / weight)
    if not math.isfinite(mean):  # one of them is infinite
        mean = one.mean + other.mean
    return Cell(mean, min(one.lowest, other.lowest), max(one.highest, other.highest), weight)


class SeriesWriter:
    """Writer of one file, which only this process writes. A method never raises OSError: then values are lost.

    ``add`` does not touch the file; ``flush`` does, and may be called in another thread. An existing file is continued.
    """

    def __init__(self, path: Path, *, largest_bytes: int = LARGEST_FILE) -> None:
        self._file = BoundedFile(path, largest_bytes)
        self._lock, self._file_lock = threading.Lock(), threading.Lock()
        self._next: dict[str, int] = {}
        self._sums: dict[str, list[_Sum | None]] = {}
        self._pending: list[dict[str, list[Row]]] = [{} for _ in range(TIERS)]
        self._rows_pending = 0
        # Numbers begin at the next row of the coarsest tier, as the sums of rows that a file has already are not known.
        self._begun = -(-self._file.last // _NUMBERS) * _NUMBERS

    def add(
        self,
        subject: str,
        time: float,
        step: int,
        values: Mapping[str, float],
        *,
        count: int = 1,
        lowest: Mapping[str, float] | None = None,
        highest: Mapping[str, float] | None = None,
    ) -> None:
        """Add a row. A column that is absent, or NaN, was not measured.

        ``count``: how many values each of ``values`` is the mean of, with ``lowest`` and ``highest`` among them. A row
        is ignored if its time is not finite, or beyond MOST_SUBJECTS; so are columns beyond MOST_COLUMNS.
        """
        if not (abs(time) < _LATEST and 0 <= step < _LAST_STEP and 0 < count < _LAST_STEP // _NUMBERS):
            return
        cells: dict[str, Cell] = {}
        for name, value in values.items():
            if math.isnan(value) or len(cells) == MOST_COLUMNS or len(name) > _LONGEST_NAME:
                continue
            low = value if lowest is None else lowest.get(name, value)
            high = value if highest is None else highest.get(name, value)
            cells[name] = Cell(float(value), min(low, value), max(high, value), count)
        with self._lock:
            if subject not in self._next:
                if len(self._next) >= MOST_SUBJECTS or len(subject) > _LONGEST_NAME:
                    return
                self._next[subject] = self._begun
                self._sums[subject] = [None] * TIERS
            row: Row | None = Row(self._next[subject], time, int(step), count, cells)
            self._next[subject] += 1
            sums = self._sums[subject]
            for tier in range(TIERS):
                assert row is not None
                if self._rows_pending < _MOST_PENDING:
                    self._pending[tier].setdefault(subject, []).append(row)
                    self._rows_pending += 1
                if tier + 1 == TIERS:
                    return
                summed = sums[tier + 1] or _Sum(row.first)
                row = summed.add(row)
                sums[tier + 1] = summed if row is None else None
                if row is None:
                    return

    def flush(self) -> None:
        """Write the added rows to the file."""
        with self._file_lock, contextlib.suppress(OSError):
            self._write(_COARSE_ROWS_PER_SEGMENT)

    def close(self) -> None:
        """Write all that is not written yet."""
        with self._file_lock, contextlib.suppress(OSError):
            self._write(1)

    def _write(self, least_rows: int) -> None:
        """Write the rows as they were added, and rows of coarser tiers where a subject has ``least_rows``.

        Until then a segment would not be worth its index, and the file still has their finer rows.
        """
        for tier, piece in self._take(0, least_rows):
            self._file.append(tier, piece, lambda: self._take(1, 1))

    def _take(self, first: int, least_rows: int) -> list[tuple[int, dict[str, Sequence[Row]]]]:
        """Return the pending rows of tiers from ``first`` on, in pieces for one segment each, and forget them.

        The coarsest are first: the rows that they stand for may be removed to make room for the others.
        """
        taken = []
        with self._lock:
            for tier in reversed(range(first, TIERS)):
                rows = self._pending[tier]
                if rows and (tier == 0 or max(map(len, rows.values())) >= least_rows):
                    taken.append((tier, rows))
                    self._pending[tier] = {}
                    self._rows_pending -= sum(map(len, rows.values()))
        return [(tier, piece) for tier, rows in taken for piece in _pieces(tier, rows)]


def _pieces(tier: int, rows: Mapping[str, Sequence[Row]]) -> Iterator[dict[str, Sequence[Row]]]:
    """Yield the rows in pieces for one segment each: _CELLS_PER_SEGMENT values at most, consecutive rows only."""
    values = sum(len(row.cells) + 3 for own in rows.values() for row in own)
    number = -(-values // _CELLS_PER_SEGMENT)
    for index in range(number):
        cut = {name: own[len(own) * index // number : len(own) * (index + 1) // number] for name, own in rows.items()}
        runs = {name: list(_runs(own, FACTOR**tier)) for name, own in cut.items() if own}
        for layer in range(max(map(len, runs.values()), default=0)):
            yield {name: own[layer] for name, own in runs.items() if layer < len(own)}


def _runs(rows: Sequence[Row], span: int) -> Iterator[Sequence[Row]]:
    """Yield the rows in runs of consecutive numbers: where too many were pending, some are missing."""
    start = 0
    for index in range(1, len(rows) + 1):
        if index == len(rows) or rows[index].first - rows[index - 1].first != span:
            yield rows[start:index]
            start = index


def read_series(path: Path, *, newest: int | None = None) -> dict[str, Series]:
    """Return the series in a file by subject; what is damaged is left out. Raises OSError.

    ``newest``: maximum number of rows of each subject, read from the end of the file. At most 128 KiB are read for it,
    so that a subject with few rows may have fewer, or be absent.
    """
    if newest is not None and newest < 1:
        raise ValueError(f"newest must be at least 1, not {newest}")
    with open_to_read(path) as file:
        if newest is None:
            data = file.read()
            parts = _parts(data, list(find_segments(data)))
        else:
            parts = _newest_parts(file, newest)
    return {subject: _series(subject, own, newest) for subject, own in parts.items()}


def _newest_parts(file: BinaryIO, newest: int) -> dict[str, list[Part]]:
    """Return the parts at the end of the file: fine rows, and coarser ones too if the fine ones are too few."""
    size = os.fstat(file.fileno()).st_size
    window, found = min(size, _FIRST_BYTES), {}
    while True:
        file.seek(size - window)
        data = file.read(window)
        segments = list(find_segments(data))
        found = _parts(data, [segment for segment in segments if segment.tier == 0], newest)
        if found and all(sum(part.rows for part in parts) >= newest for parts in found.values()):
            return found
        if window >= min(size, _MOST_BYTES):
            return _parts(data, segments)
        window = min(size, _MOST_BYTES, 4 * window)


def _parts(data: bytes, segments: Sequence[Segment], newest: int | None = None) -> dict[str, list[Part]]:
    """Return the parts of each subject; with ``newest`` of no more of the last segments than are needed."""
    found: dict[str, list[Part]] = {}
    rows: dict[str, int] = {}
    for segment in reversed(segments):
        try:
            parts = read_segment(data, segment)
        except ValueError:
            continue
        for subject, part in parts.items():
            found.setdefault(subject, []).append(part)
            rows[subject] = rows.get(subject, 0) + part.rows
        if newest is not None and min(rows.values(), default=0) >= newest:
            break
    return found


def _series(subject: str, parts: Sequence[Part], newest: int | None) -> Series:
    """Return the rows of the parts in order: each added row once, in the finest row that is left of it."""
    rows = [
        _Place(first, 1, part, index) for part in parts if not part.tier for index, first in enumerate(part.firsts())
    ]
    rows.sort(key=_first)
    if newest is None or len(rows) < newest:
        for tier in range(1, TIERS):
            span = FACTOR**tier
            coarse = (
                _Place(first, span, part, index)
                for part in parts
                if part.tier == tier
                for index, first in enumerate(part.firsts())
            )
            rows = _with_coarse(rows, sorted(coarse, key=_first))
    return _joined(subject, rows if newest is None else rows[-newest:])


class _Place(NamedTuple):
    """A row of a part, which stands for ``span`` added rows from number ``first`` on."""

    first: int
    span: int
    part: Part
    row: int


_first = attrgetter("first")


def _with_coarse(rows: Sequence[_Place], coarse: Sequence[_Place]) -> list[_Place]:
    """Return ``rows`` with the coarse ones for whose added rows they do not stand completely, in order."""
    merged: list[_Place] = []
    at = 0
    for place in coarse:
        low = bisect.bisect_left(rows, place.first, at, key=_first)
        high = bisect.bisect_left(rows, place.first + place.span, low, key=_first)
        merged += rows[at:low]
        is_complete = sum(row.span for row in rows[low:high]) == place.span
        merged += rows[low:high] if is_complete else [place]
        at = high
    return [*merged, *rows[at:]]


def _joined(subject: str, rows: Sequence[_Place]) -> Series:
    # Consecutive, as rows of a part are in order.
    cuts = [(part, places[0].row, places[-1].row + 1) for part, places in _by_part(rows)]
    return _cut_out(subject, *cuts[0]) if len(cuts) == 1 else _put_together(subject, cuts)


def _cut_out(subject: str, part: Part, low: int, high: int) -> Series:
    """Return rows of one part. Columns without a range have one array for mean, lowest and highest."""
    block, start, stop = part.block, part.start + low, part.start + high
    columns: list[dict[str, array[float]]] = [{}, {}, {}]
    for name, places in block.columns.items():
        mean = block.values[places[0] + start : places[0] + stop]
        ranged = places[0] != places[1]
        columns[0][name] = mean
        columns[1][name] = block.values[places[1] + start : places[1] + stop] if ranged else mean
        columns[2][name] = block.values[places[2] + start : places[2] + stop] if ranged else mean
    return Series(subject, block.times[start:stop], block.steps[start:stop], block.counts[start:stop], *columns)


def _put_together(subject: str, cuts: Sequence[tuple[Part, int, int]]) -> Series:
    times: list[float] = []
    steps: list[int] = []
    counts: list[int] = []
    names = sorted({name for part, _, _ in cuts for name in part.block.columns})
    columns: dict[str, tuple[array[float], ...]] = {name: (array("f"), array("f"), array("f")) for name in names}
    for part, low, high in cuts:
        block, start, stop = part.block, part.start + low, part.start + high
        times += block.times[start:stop]
        steps += block.steps[start:stop]
        counts += block.counts[start:stop]
        for name, targets in columns.items():
            places = block.columns.get(name)
            for number, target in enumerate(targets):
                if places is None:
                    target.extend(itertools.repeat(math.nan, high - low))
                else:
                    target += block.values[places[number] + start : places[number] + stop]
    mean, lowest, highest = ({name: targets[number] for name, targets in columns.items()} for number in range(3))
    return Series(subject, times, steps, counts, mean, lowest, highest)


def _by_part(rows: Sequence[_Place]) -> Iterator[tuple[Part, list[_Place]]]:
    for _, group in itertools.groupby(rows, key=lambda place: id(place.part)):
        places = list(group)
        yield places[0].part, places
