"""The segments of a series file: rows of one tier, stored by column, compressed, with a CRC-32.

A segment is a header of 16 bytes (magic, version, tier, length and CRC of the body) and a body compressed by zlib. The
body is a JSON index and then, per block, little-endian columns: times (ms, int64), steps (int64), counts (int64), and
per column of values the mean (float32), and lowest and highest where they differ from it. Integers are stored as
differences to the row before, and all numbers byte by byte (all first bytes, then all second ones), which compresses
better. A block has the rows of all subjects with the same columns, one subject after another.

Rows of tier k stand for 10^k rows as they were added; ``first`` is the number of the first of these.
"""

from __future__ import annotations

import json
import math
import struct
import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import sub
from typing import NamedTuple

FACTOR = 10  # rows of a tier that make one row of the next tier
TIERS = 7  # of 1, 10, ... 10^6 rows
_MAGIC = b"STs\x01"  # with the version of the format
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


class Part(NamedTuple):
    """Consecutive rows of one subject in one segment; ``columns``: (mean, lowest, highest) by name."""

    tier: int
    first: int
    times: Sequence[float]
    steps: Sequence[int]
    counts: Sequence[int]
    columns: Mapping[str, tuple[Sequence[float], Sequence[float], Sequence[float]]]

    def firsts(self) -> range:
        """Return the number of the first added row of each row."""
        span = FACTOR**self.tier
        return range(self.first, self.first + span * len(self.times), span)


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
    index, columns = [], []
    for names, subjects in blocks.items():
        block = [row for subject in subjects for row in rows[subject]]
        columns += [
            _integers([round(row.time * _MS) for row in block]),
            _integers([row.step for row in block]),
            _integers([row.count for row in block]),
        ]
        ranged = []
        for name in names:
            cells = [row.cells.get(name, _ABSENT) for row in block]
            columns.append(_floats([cell.mean for cell in cells]))
            ranged.append(int(any(cell.lowest != cell.highest and cell.weight for cell in cells)))
            if ranged[-1]:
                columns += [_floats([cell.lowest for cell in cells]), _floats([cell.highest for cell in cells])]
        places = [[subject, rows[subject][0].first, len(rows[subject])] for subject in subjects]
        index.append([list(names), ranged, places])
    text = json.dumps(index, separators=(",", ":")).encode()
    body = zlib.compress(_INDEX_LENGTH.pack(len(text)) + text + b"".join(columns), 6)
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
            integers = []
            for _ in range(3):
                integers.append(_read_integers(body[at : at + 8 * rows], rows))
                at += 8 * rows
            times = [time / _MS for time in integers[0]]
            columns = {}
            for name, has_range in zip(names, ranged, strict=True):
                found = []
                for _ in range(3 if has_range else 1):
                    found.append(_read_floats(body[at : at + 4 * rows], rows))
                    at += 4 * rows
                columns[str(name)] = found if has_range else found * 3
            start = 0
            for subject, first, count in subjects:
                cut = slice(start, start + count)
                own = {name: (mean[cut], low[cut], high[cut]) for name, (mean, low, high) in columns.items()}
                parts[str(subject)] = Part(
                    segment.tier, int(first), times[cut], integers[1][cut], integers[2][cut], own
                )
                start += count
    except (zlib.error, struct.error, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"a segment with unknown content: {error}") from error
    return parts


_ABSENT = Cell(math.nan, math.nan, math.nan, 0)


def _crc(tier: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(_CHECKED.pack(tier, len(body))))


def _integers(values: Sequence[int]) -> bytes:
    return _split(array("q", [*values[:1], *map(sub, values[1:], values)]))


def _floats(values: Iterable[float]) -> bytes:
    # Beyond the largest float32 a value would become infinite, or raise an error, depending on the platform.
    return _split(array("f", [value if math.isinf(value) else _clamped(value) for value in values]))


def _clamped(value: float) -> float:
    if value > _LARGEST_FLOAT:
        return _LARGEST_FLOAT
    return -_LARGEST_FLOAT if value < -_LARGEST_FLOAT else value


def _split(values: array[float] | array[int]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    data = values.tobytes()
    return b"".join(data[byte :: values.itemsize] for byte in range(values.itemsize))


def _joined(data: bytes, rows: int, size: int) -> bytes:
    if len(data) != rows * size:
        raise ValueError("a segment that is shorter than its index says")
    joined = bytearray(len(data))
    for byte in range(size):
        joined[byte::size] = data[byte * rows : (byte + 1) * rows]
    return bytes(joined)


def _read_integers(data: bytes, rows: int) -> list[int]:
    values = array("q", _joined(data, rows, 8))
    if sys.byteorder == "big":
        values.byteswap()
    return list(accumulate(values))


def _read_floats(data: bytes, rows: int) -> array[float]:
    values = array("f", _joined(data, rows, 4))
    if sys.byteorder == "big":
        values.byteswap()
    return values
