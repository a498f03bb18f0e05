"""One series file: values of many subjects over time, the older the coarser, in at most a fixed number of bytes.

One process writes a file; any number of others may read it meanwhile. Added rows are appended, and summed into rows of
10, 100, ... 10^6 with mean, lowest and highest. Once the file reaches its largest size it is replaced by one without
the oldest rows that coarser rows stand for as well. A torn or damaged segment loses its own rows only, or the detail
of them.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import itertools
import math
import os
import threading
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from scaletrain_cli.safe_files import closing_descriptor, make_folder, open_to_append, open_to_read, replace_file
from scaletrain_cli.telemetry.segments import (
    FACTOR,
    TIERS,
    Cell,
    Part,
    Row,
    find_segments,
    read_segment,
    write_segment,
)

LARGEST_FILE = 1 << 20  # bytes
MOST_SUBJECTS = 1024
MOST_COLUMNS = 64  # of a subject
_KEPT_SHARE = 0.75  # of the largest size, when the oldest rows are removed
# Shares of the tiers in the file: the first three eighths are rows as they were added.
_WEIGHTS = (6.0, 4.0, 2.5, 1.5, 1.0, 0.5, 0.5)
_CELLS_PER_SEGMENT = 1 << 14
_MOST_PENDING = 20_000  # rows that are not written yet, where the file system does not respond
_COARSE_ROWS_PER_SEGMENT = 8
_LONGEST_NAME = 200
_NUMBERS = FACTOR ** (TIERS - 1)
_LATEST, _LAST_STEP = 1e11, 1 << 62
# With ``newest``: bytes read at first, and at most.
_FIRST_BYTES, _MOST_BYTES = 1 << 13, 1 << 17


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


@dataclass
class _Stored:
    """A segment of the file. ``ends``: for each subject the number after its last added row."""

    start: int
    end: int
    tier: int
    ends: Mapping[str, int]


class SeriesWriter:
    """Writer of one file, which only this process writes. A method never raises OSError: then values are lost.

    ``add`` does not touch the file; ``flush`` does, and may be called in another thread. An existing file is continued.
    """

    def __init__(self, path: Path, *, largest_bytes: int = LARGEST_FILE) -> None:
        self._path, self._largest = path, largest_bytes
        self._lock, self._file_lock = threading.Lock(), threading.Lock()
        self._next: dict[str, int] = {}
        self._sums: dict[str, list[_Sum | None]] = {}
        self._pending: list[dict[str, list[Row]]] = [{} for _ in range(TIERS)]
        self._rows_pending = 0
        self._stored: list[_Stored] = []
        self._covered: list[dict[str, int]] = [{} for _ in range(TIERS)]
        self._size = 0  # of the file
        with contextlib.suppress(OSError):
            self._find_end()
        # Numbers begin at the next row of the coarsest tier, as the sums of rows that a file has already are not known.
        last = max((end for stored in self._stored for end in stored.ends.values()), default=0)
        self._begun = -(-last // _NUMBERS) * _NUMBERS

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
        with self._lock:
            taken = []
            for tier, rows in enumerate(self._pending):
                if rows and (tier == 0 or max(map(len, rows.values())) >= least_rows):
                    taken.append((tier, rows))
                    self._pending[tier] = {}
                    self._rows_pending -= sum(map(len, rows.values()))
        if not taken:
            return
        if self._size == 0:
            make_folder(self._path.parent, parents=False)  # not where the run was removed
        self._find_end()
        for tier, rows in taken:
            for piece in _pieces(tier, rows):
                self._append(tier, piece)

    def _append(self, tier: int, rows: Mapping[str, Sequence[Row]]) -> None:
        """Append a segment. It is lost where there is no room for it. Raises OSError."""
        data = write_segment(tier, rows)
        if self._size + len(data) > self._largest:
            self._make_room(len(data))
        if self._size + len(data) > self._largest:
            return
        # Opened for each segment: on NFS other hosts see what was written once the file is closed.
        with closing_descriptor(open_to_append(self._path)) as file:
            try:
                if os.write(file, data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            except OSError:
                os.ftruncate(file, self._size)
                raise
        self._note(tier, len(data), _ends(tier, rows))

    def _note(self, tier: int, length: int, ends: Mapping[str, int]) -> None:
        self._stored.append(_Stored(self._size, self._size + length, tier, ends))
        self._covered[tier].update(ends)
        self._size += length

    def _make_room(self, needed: int) -> None:
        """Replace the file by one without the rows that are oldest in their tier. Raises OSError."""
        with self._lock:  # before rows are removed, those that stand for them are written
            waiting = self._pending[1:]
            self._pending[1:] = [{} for _ in waiting]
            self._rows_pending -= sum(len(own) for rows in waiting for own in rows.values())
        new = [
            (_ends(tier, piece), tier, write_segment(tier, piece))
            for tier, rows in enumerate(waiting, start=1)
            for piece in _pieces(tier, rows)
        ]
        for ends, tier, _ in new:
            self._covered[tier].update(ends)
        kept: list[deque[_Stored]] = [deque() for _ in range(TIERS)]
        for stored in self._stored:
            kept[stored.tier].append(stored)
        sizes = [sum(stored.end - stored.start for stored in tier) for tier in kept]
        room = _KEPT_SHARE * self._largest - needed - sum(len(data) for _, _, data in new)
        while sum(sizes) > max(room, 0):
            # Of the rows that coarser ones stand for, those of the tier that exceeds its share of the file most.
            oldest = [tier for tier in range(TIERS) if kept[tier]]
            covered = [tier for tier in oldest if self._is_covered(kept[tier][0])]
            tier = max(covered or oldest, key=lambda tier: sizes[tier] / _WEIGHTS[tier])
            removed = kept[tier].popleft()
            sizes[tier] -= removed.end - removed.start
        with open_to_read(self._path) as file:
            data = file.read()
        rest = sorted((stored for tier in kept for stored in tier), key=lambda stored: stored.start)
        pieces = [(stored.ends, stored.tier, data[stored.start : stored.end]) for stored in rest] + new
        replace_file(self._path, b"".join(piece for _, _, piece in pieces))
        self._stored, self._size = [], 0
        for stands_for, tier, piece in pieces:
            self._note(tier, len(piece), stands_for)

    def _is_covered(self, stored: _Stored) -> bool:
        """Return whether rows of the next tier stand for all rows of the segment."""
        if stored.tier == TIERS - 1:
            return True
        covered = self._covered[stored.tier + 1]
        return all(end <= covered.get(subject, 0) for subject, end in stored.ends.items())

    def _find_end(self) -> None:
        """Find the segments of the file unless they are known, as for a file that this object wrote. Raises OSError."""
        size = os.stat(self._path).st_size if self._path.exists() else 0
        if size == self._size:
            return
        self._stored, self._covered, self._size = [], [{} for _ in range(TIERS)], 0
        with open_to_read(self._path) as file:
            data = file.read()
        for segment in find_segments(data):
            with contextlib.suppress(ValueError):
                parts = read_segment(data, segment)
                self._size = segment.start
                ends = {subject: part.firsts()[-1] + FACTOR**segment.tier for subject, part in parts.items()}
                self._note(segment.tier, segment.end - segment.start, ends)
        self._size = len(data)


def _ends(tier: int, rows: Mapping[str, Sequence[Row]]) -> dict[str, int]:
    """Return for each subject the number after the last added row that its rows stand for."""
    return {subject: own[-1].first + FACTOR**tier for subject, own in rows.items()}


def _pieces(tier: int, rows: Mapping[str, Sequence[Row]]) -> Iterator[dict[str, Sequence[Row]]]:
    """Yield the rows in pieces for one segment each: at most so many values, and consecutive rows of each subject."""
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

    ``newest``: at most so many rows of each subject, read from the end of the file. At most 128 KiB are read for it,
    so that a subject with few rows may have fewer, or be absent.
    """
    if newest is not None and newest < 1:
        raise ValueError(f"newest must be at least 1, not {newest}")
    with open_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        window = size if newest is None else min(size, _FIRST_BYTES)
        while True:
            file.seek(size - window)
            parts = _parts(file.read(window), newest)
            fewest = min((sum(len(part.times) for part in own if not part.tier) for own in parts.values()), default=0)
            if newest is None or fewest >= newest or window >= min(size, _MOST_BYTES):
                break
            window = min(size, _MOST_BYTES, 4 * window)
    return {subject: _series(subject, own, newest) for subject, own in parts.items()}


def _parts(data: bytes, newest: int | None) -> dict[str, list[Part]]:
    """Return the parts of each subject in ``data``, newest first; with ``newest`` no more segments than needed."""
    found: dict[str, list[Part]] = {}
    rows: dict[str, int] = {}
    for segment in reversed(list(find_segments(data))):
        try:
            parts = read_segment(data, segment)
        except ValueError:
            continue
        for subject, part in parts.items():
            found.setdefault(subject, []).append(part)
            rows[subject] = rows.get(subject, 0) + (0 if part.tier else len(part.times))
        if newest is not None and min(rows.values()) >= newest:
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
    times: list[float] = []
    steps: list[int] = []
    counts: list[int] = []
    names = sorted({name for part in {id(row.part): row.part for row in rows}.values() for name in part.columns})
    columns: dict[str, tuple[array[float], array[float], array[float]]] = {
        name: (array("f"), array("f"), array("f")) for name in names
    }
    for part, places in itertools.groupby(rows, key=attrgetter("part")):
        indices = [place.row for place in places]
        cut = slice(indices[0], indices[-1] + 1)  # consecutive, as rows of a part are in order
        times += part.times[cut]
        steps += part.steps[cut]
        counts += part.counts[cut]
        for name, targets in columns.items():
            found = part.columns.get(name)
            for number, target in enumerate(targets):
                target.extend(found[number][cut] if found else itertools.repeat(math.nan, len(indices)))
    mean, lowest, highest = ({name: targets[number] for name, targets in columns.items()} for number in range(3))
    return Series(subject, times, steps, counts, mean, lowest, highest)
