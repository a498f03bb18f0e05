"""The segments of a series file: rows of one tier, stored by column, compressed, with a CRC-32.

A segment is a header of 16 bytes (magic, version, tier, length and CRC of the body) and a body compressed by zlib. The
body is a JSON index and then, per block, two arrays by column: int64 with times (ms), steps and counts, as differences
to the row before, and float32 with the mean of each column, and its lowest and highest value where they differ from it.
Arrays are little-endian and stored byte by byte (all first bytes, then all second ones), which compresses better. A
block has the rows of all subjects with the same columns, one subject after another.

Rows of tier k stand for 10^k rows as they were added; ``first`` is the number of the first of these.
"""

from __future__ import annotations

import json
import math
import struct
import sys
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import sub
from typing import Any, Literal, NamedTuple

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
