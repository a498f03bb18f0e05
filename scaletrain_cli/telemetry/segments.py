"""The segments of a series file: rows of one tier, stored by column, compressed, with a CRC-32.

A segment is a header of 16 bytes (magic, version, tier, length and CRC of the body) and a body compressed by zlib. The
body is a JSON index and then, per block, two arrays by column: int64 with times (ms), steps and counts, as differences
to the row before, and float32 with the mean of each column, and its lowest and highest value where they differ from it.
Arrays are little-endian and stored byte by byte (all first bytes, then all second ones), which compresses better. A
block has the rows of all subjects with the same columns, one subject after another.

Rows of tier k stand for 10^k rows as they were added; ``first`` is the number of the first of these.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import struct
import sys
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import sub
from pathlib import Path
from typing import Any, Literal, NamedTuple

from scaletrain_cli.safe_files import closing_descriptor, make_folder, open_to_append, open_to_read, replace_file

FACTOR = 10  # rows of a tier that make one row of the next tier
TIERS = 7  # of 1, 10, ... 10^6 rows
_MAGIC = b"STs\x02"  # with the version of the format
_HEADER = struct.Struct("<4sB3xII")  # magic, tier, length of the body, CRC-32 of the rest
_CHECKED = struct.Struct("<BI")
_INDEX_LENGTH = struct.Struct("<I")
_LARGEST_BODY = 1 << 26  # uncompressed; far above what the writer makes
_LARGEST_FLOAT = 3.4028234663852886e38
_MS = 1000.0


class Cell(NamedTuple):
    """The values of one column in a row: ``weight`` of them, with mean, lowest and highest."""

    mean: float
    lowest: float
    highest: float
    weight: int


@dataclass(frozen=True, slots=True)
class Row:
    """A row of one subject. ``first``: number of its first added row; time (Unix seconds) and step of its last."""

    first: int
    time: float
    step: int
    count: int
    cells: Mapping[str, Cell]


class Block(NamedTuple):
    """Rows of all subjects with the same columns. ``columns``: places of mean, lowest and highest in ``values``."""

    times: Sequence[float]
    steps: Sequence[int]
    counts: Sequence[int]
    values: array[float]
    columns: Mapping[str, tuple[int, int, int]]


class Part(NamedTuple):
    """Consecutive rows of one subject in one segment: ``rows`` rows of a block from row ``start`` on."""

    tier: int
    first: int
    block: Block
    start: int
    rows: int

    def firsts(self) -> range:
        """Return the number of the first added row of each row."""
        span = FACTOR**self.tier
        return range(self.first, self.first + span * self.rows, span)


class Segment(NamedTuple):
    """The place of a whole segment in the bytes that were searched."""

    start: int
    end: int
    tier: int


def write_segment(tier: int, rows: Mapping[str, Sequence[Row]]) -> bytes:
    """Return the segment of ``rows``: of each subject at least one, consecutive in number."""
    blocks: dict[tuple[str, ...], list[str]] = {}
    for subject, own in rows.items():
        names = tuple(sorted({name for row in own for name in row.cells}))
        blocks.setdefault(names, []).append(subject)
    index, numbers = [], []
    for names, subjects in blocks.items():
        block = [row for subject in subjects for row in rows[subject]]
        columns = [[round(row.time * _MS) for row in block], [row.step for row in block], [row.count for row in block]]
        integers = array("q")
        for column in columns:
            integers.extend([*column[:1], *map(sub, column[1:], column)])
        values, ranged = array("f"), []
        for name in names:
            cells = [row.cells.get(name, _ABSENT) for row in block]
            ranged.append(int(any(cell.lowest != cell.highest and cell.weight for cell in cells)))
            for number in range(3 if ranged[-1] else 1):
                values.extend(map(_in_float32, (cell[number] for cell in cells)))
        numbers += [_split(integers), _split(values)]
        index.append([names, ranged, [[subject, rows[subject][0].first, len(rows[subject])] for subject in subjects]])
    text = json.dumps(index, separators=(",", ":")).encode()
    body = zlib.compress(_INDEX_LENGTH.pack(len(text)) + text + b"".join(numbers), 6)
    return _HEADER.pack(_MAGIC, tier, len(body), _crc(tier, body)) + body


def find_segments(data: bytes) -> Iterator[Segment]:
    """Yield the whole segments in ``data``, in order. Damaged ones, and text between them, are passed over."""
    at = data.find(_MAGIC)
    while 0 <= at <= len(data) - _HEADER.size:
        _, tier, length, crc = _HEADER.unpack_from(data, at)
        body = at + _HEADER.size
        is_whole = tier < TIERS and body + length <= len(data) and _crc(tier, data[body : body + length]) == crc
        if is_whole:
            yield Segment(at, body + length, tier)
        at = data.find(_MAGIC, body + length if is_whole else at + 1)


def read_segment(data: bytes, segment: Segment) -> dict[str, Part]:
    """Return the rows of a segment found by find_segments(), by subject. Raises ValueError for an unknown content."""
    unpacker = zlib.decompressobj()
    try:
        body = unpacker.decompress(data[segment.start + _HEADER.size : segment.end], _LARGEST_BODY)
        (length,) = _INDEX_LENGTH.unpack_from(body)
        at = _INDEX_LENGTH.size + length
        parts: dict[str, Part] = {}
        for names, ranged, subjects in json.loads(body[_INDEX_LENGTH.size : at]):
            rows = sum(count for _, _, count in subjects)
            integers = _joined("q", body, at, 3 * rows)
            at += 24 * rows
            columns, place = {}, 0
            for name, has_range in zip(names, ranged, strict=True):
                columns[str(name)] = (place, place + rows, place + 2 * rows) if has_range else (place,) * 3
                place += (3 if has_range else 1) * rows
            values = _joined("f", body, at, place)
            at += 4 * place
            times, steps, counts = (accumulate(integers[rows * column : rows * (column + 1)]) for column in range(3))
            block = Block([time / _MS for time in times], list(steps), list(counts), values, columns)
            start = 0
            for subject, first, count in subjects:
                parts[str(subject)] = Part(segment.tier, int(first), block, start, count)
                start += count
    except (zlib.error, struct.error, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"a segment with unknown content: {error}") from error
    return parts


_ABSENT = Cell(math.nan, math.nan, math.nan, 0)


def _crc(tier: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(_CHECKED.pack(tier, len(body))))


def _in_float32(value: float) -> float:
    # Beyond the largest float32 a value would become infinite, or raise an error, depending on the platform.
    if value > _LARGEST_FLOAT:
        return _LARGEST_FLOAT if value < math.inf else value
    if value < -_LARGEST_FLOAT:
        return -_LARGEST_FLOAT if value > -math.inf else value
    return value


def _split(values: array[float] | array[int]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    data = values.tobytes()
    return b"".join(data[byte :: values.itemsize] for byte in range(values.itemsize))


def _joined(kind: Literal["f", "q"], body: bytes, at: int, number: int) -> array[Any]:
    """Return ``number`` values of the array that begins at ``at``. Raises ValueError where the body is too short."""
    values = array(kind)
    size = values.itemsize
    if number < 0 or at + number * size > len(body):
        raise ValueError("a segment that is shorter than its index says")
    joined = bytearray(number * size)
    for byte in range(size):
        joined[byte::size] = body[at + byte * number : at + (byte + 1) * number]
    values.frombytes(joined)
    if sys.byteorder == "big":
        values.byteswap()
    return values


# A file of segments that never exceeds its largest size: the oldest rows that coarser rows stand for are removed.


Rows = Mapping[str, Sequence[Row]]  # of one tier, by subject
_KEPT_SHARE = 0.75  # of the largest size, when the oldest rows are removed
# Shares of the tiers in the file: the first three eighths are rows as they were added.
_WEIGHTS = (6.0, 4.0, 2.5, 1.5, 1.0, 0.5, 0.5)


@dataclass(frozen=True)
class _Stored:
    """A segment of the file. ``ends``: for each subject the number after its last added row."""

    start: int
    end: int
    tier: int
    ends: Mapping[str, int]


class BoundedFile:
    """A file of at most ``largest`` bytes, which only this process writes. An existing file is continued."""

    def __init__(self, path: Path, largest: int) -> None:
        self._path, self._largest = path, largest
        self._stored: list[_Stored] = []
        self._covered: list[dict[str, int]] = [{} for _ in range(TIERS)]  # for which rows a tier has rows
        self._size = 0
        with contextlib.suppress(OSError):
            self._find_end()

    @property
    def last(self) -> int:
        """Return the number after the last added row of any subject; 0 for an empty file."""
        return max((end for stored in self._stored for end in stored.ends.values()), default=0)

    def append(self, tier: int, rows: Rows, waiting: Callable[[], Sequence[tuple[int, Rows]]]) -> None:
        """Append a segment, or lose it where there is no room for it. Raises OSError.

        ``waiting`` is called before rows are removed: it returns the rows of coarser tiers that are not written yet.
        """
        self._find_end()
        data = write_segment(tier, rows)
        if self._size + len(data) > self._largest:
            self._make_room(len(data), waiting())
        if self._size + len(data) > self._largest:
            return
        if self._size == 0:
            make_folder(self._path.parent, parents=False)  # not where the run was removed
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

    def _make_room(self, needed: int, waiting: Sequence[tuple[int, Rows]]) -> None:
        """Replace the file by one without the rows that are oldest in their tier. Raises OSError."""
        new = [(_ends(tier, rows), tier, write_segment(tier, rows)) for tier, rows in waiting]
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


def _ends(tier: int, rows: Rows) -> dict[str, int]:
    """Return for each subject the number after the last added row that its rows stand for."""
    return {subject: own[-1].first + FACTOR**tier for subject, own in rows.items()}
