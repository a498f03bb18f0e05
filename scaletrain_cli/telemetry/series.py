"""One series file: values of many subjects over time, the older the coarser, in at most a fixed number of bytes.

One process writes a file; any number of others may read it meanwhile. A file has JSON lines, and each line is a gzip
member of its own, so that ``zcat`` prints the file and the CRC-32 of a member tells whether its line is whole. A torn
or damaged line loses its own rows only. A line has the rows of some seconds::

    {"level": 0, "columns": ["a", ...], "subjects": {"rank 0": [times, steps, counts, values of a, ...], ...}}

Values of a column are the means, followed by the lowest and the highest ones where they differ. NaN and Infinity are
written as Python's json does; a column that a subject does not have is null.
Rows of level k stand for about 10^k rows as they were added. Once the file reaches its largest size, the oldest lines
of a level become one line of the next level, with one row for ten.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import itertools
import json
import math
import os
import threading
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.safe_files import closing_descriptor, make_folder, open_to_append, open_to_read, replace_file

LARGEST_FILE = 1 << 20  # bytes
MOST_SUBJECTS = 1024
MOST_COLUMNS = 64  # of a subject
_FACTOR = 10  # lines and rows of a level that become one of the next level
_COARSEST = 6  # level
_KEPT_SHARE = 0.75  # of the largest size, when the oldest rows become coarser
_MOST_PENDING = 20_000  # rows that are not written yet, where the file system does not respond
_LONGEST_NAME = 200
_LATEST = 1e11  # Unix seconds
_LARGEST_LINE = 1 << 26  # bytes; far above what the writer makes
# With ``newest``: bytes read at first, and at most.
_FIRST_BYTES, _MOST_BYTES = 1 << 15, 1 << 18
_MEMBER = b"\x1f\x8b\x08\0\0\0\0\0"  # begins each gzip member, as none has a time
_GZIP = 31  # bits of the window, with the header of gzip


@dataclass(frozen=True)
class Series:
    """The values of one subject over time, oldest row first; rows may stand for one value or for many.

    ``times``: Unix seconds of the last value in the row (resolution 1 ms); ``steps``: its step; ``counts``: the values
    that the row stands for; ``mean``, ``lowest`` and ``highest``: by column, to seven digits in files. NaN: not
    measured.
    """

    subject: str
    times: Sequence[float]
    steps: Sequence[int]
    counts: Sequence[int]
    mean: Mapping[str, Sequence[float]]
    lowest: Mapping[str, Sequence[float]]
    highest: Mapping[str, Sequence[float]]


class SeriesWriter:
    """Writer of one file, which only this process writes. A method never raises OSError: then values are lost.

    ``add`` does not touch the file; ``flush`` does, and may be called in another thread. An existing file is continued.
    """

    def __init__(self, path: Path, *, largest_bytes: int = LARGEST_FILE) -> None:
        self._path, self._largest = path, largest_bytes
        self._lock, self._file_lock = threading.Lock(), threading.Lock()
        self._subjects: set[str] = set()
        self._pending: list[Series] = []  # of one row each

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
        if not (abs(time) < _LATEST and 0 <= step < math.inf and 0 < count < math.inf):
            return
        names = [name for name, value in values.items() if not math.isnan(value) and len(name) <= _LONGEST_NAME]
        mean = low = high = {name: [values[name]] for name in names[:MOST_COLUMNS]}
        if lowest is not None:
            low = {name: [min(value, lowest.get(name, value))] for name, (value,) in mean.items()}
        if highest is not None:
            high = {name: [max(value, highest.get(name, value))] for name, (value,) in mean.items()}
        row = Series(subject, [round(time, 3)], [int(step)], [count], mean, low, high)
        with self._lock:
            if subject not in self._subjects:
                if len(self._subjects) >= MOST_SUBJECTS or len(subject) > _LONGEST_NAME:
                    return
                self._subjects.add(subject)
            if len(self._pending) < _MOST_PENDING:
                self._pending.append(row)

    def flush(self) -> None:
        """Write the added rows to the file."""
        with self._file_lock, contextlib.suppress(OSError):
            with self._lock:
                rows, self._pending = self._pending, []
            if rows:
                self._append(_encode(0, _by_subject(rows)))

    def close(self) -> None:
        """Write all that is not written yet."""
        self.flush()

    def _append(self, line: bytes) -> None:
        """Append a line, and make the oldest ones coarser where there is no room for it. Raises OSError."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if size + len(line) > self._largest:
            with open_to_read(self._path) as file:
                lines = [*_lines(file.read()), line] if size else [line]
            replace_file(self._path, b"".join(_shortened(lines, int(_KEPT_SHARE * self._largest))))
            return
        if size == 0:
            make_folder(self._path.parent, parents=False)  # not where the run was removed
        # Opened for each line: on NFS other hosts see what was written once the file is closed.
        with closing_descriptor(open_to_append(self._path)) as descriptor:
            try:
                if os.write(descriptor, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            except OSError:
                os.ftruncate(descriptor, size)
                raise


def read_series(path: Path, *, newest: int | None = None) -> dict[str, Series]:
    """Return the series in a file by subject; what is damaged is left out. Raises OSError.

    ``newest``: maximum number of rows of each subject, read from the end of the file. At most 256 KiB are read for it,
    so that a subject with few rows may have fewer, or be absent.
    """
    if newest is not None and newest < 1:
        raise ValueError(f"newest must be at least 1, not {newest}")
    with open_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        window = size if newest is None else min(size, _FIRST_BYTES)
        while True:
            file.seek(size - window)
            parts, is_enough = _last_parts(file.read(window), newest)
            if is_enough or window >= min(size, _MOST_BYTES):
                return _by_subject(reversed(parts), newest)
            window = min(size, _MOST_BYTES, 4 * window)


def _last_parts(data: bytes, newest: int | None) -> tuple[list[Series], bool]:
    """Return the series of the last lines, newest first, and whether each subject has ``newest`` rows in them."""
    parts: list[Series] = []
    rows: Counter[str] = Counter()
    for line in reversed(_lines(data)):
        line_parts = _decode(line)
        parts += reversed(line_parts)
        rows.update({part.subject: len(part.times) for part in line_parts})
        if newest is not None and rows and min(rows.values()) >= newest:
            return parts, True
    return parts, False


def _by_subject(parts: Iterable[Series], newest: int | None = None) -> dict[str, Series]:
    """Return the rows of each subject, at most the ``newest``, from parts in order of time."""
    subjects: dict[str, list[Series]] = {}
    for part in parts:
        subjects.setdefault(part.subject, []).append(part)
    return {subject: _joined(subject, own, newest) for subject, own in subjects.items()}


def _joined(subject: str, parts: Sequence[Series], newest: int | None) -> Series:
    """Return the rows of all parts, in their order. Columns without a range have one array for all three values."""
    if len(parts) == 1 and newest is None:
        return parts[0]
    cut = slice(None if newest is None else -newest, None)
    absent = [array("d", [math.nan]) * len(part.times) for part in parts]
    means = [part.mean for part in parts]
    lows, highs = [part.lowest for part in parts], [part.highest for part in parts]

    def column(tables: Sequence[Mapping[str, Sequence[float]]], name: str) -> array[float]:
        joined = array("d")
        for table, nans in zip(tables, absent, strict=True):
            joined.extend(table.get(name, nans))
        return joined[cut]

    mean = {name: column(means, name) for name in sorted({name for table in means for name in table})}
    ranged = {name for low, high in zip(lows, highs, strict=True) for name in low if low[name] is not high[name]}
    return Series(
        subject,
        [time for part in parts for time in part.times][cut],
        [step for part in parts for step in part.steps][cut],
        [count for part in parts for count in part.counts][cut],
        mean,
        {name: column(lows, name) if name in ranged else mean[name] for name in mean},
        {name: column(highs, name) if name in ranged else mean[name] for name in mean},
    )


def _encode(level: int, subjects: Mapping[str, Series]) -> bytes:
    columns = sorted({name for series in subjects.values() for name in series.mean})
    rows = {
        subject: [list(series.times), list(series.steps), list(series.counts), *(_cells(series, c) for c in columns)]
        for subject, series in subjects.items()
    }
    line = json.dumps({"level": level, "columns": columns, "subjects": rows}, separators=(",", ":"))
    return gzip.compress(line.encode() + b"\n", 6, mtime=0)


def _cells(series: Series, name: str) -> list[float] | None:
    if name not in series.mean:
        return None
    mean, lowest, highest = series.mean[name], series.lowest[name], series.highest[name]
    ranged = any(low < high for low, high in zip(lowest, highest, strict=True))
    values = itertools.chain(mean, lowest, highest) if ranged else mean
    return [float(f"{value:.7g}") for value in values]


def _lines(data: bytes) -> list[bytes]:
    """Return the gzip members in ``data``, each with what follows it before the next one."""
    return [_MEMBER + part for part in data.split(_MEMBER)[1:]]


def _decode(line: bytes) -> list[Series]:
    """Return the series of a line; none of a line that is torn or damaged."""
    unpacker = zlib.decompressobj(_GZIP)
    parts = []
    try:
        text = unpacker.decompress(line, _LARGEST_LINE)
        if not unpacker.eof:
            return []
        content = json.loads(text)
        for subject, (times, steps, counts, *values) in content["subjects"].items():
            rows = len(times)
            columns: list[dict[str, array[float]]] = [{}, {}, {}]
            for name, cells in zip(content["columns"], values, strict=True):
                if cells is not None:
                    numbers = array("d", cells)
                    is_ranged = len(numbers) > rows
                    for place, column in enumerate(columns):
                        column[name] = numbers[place * rows : (place + 1) * rows] if is_ranged else numbers
            parts.append(Series(subject, times, steps, counts, *columns))
    except (zlib.error, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        return []  # not written by SeriesWriter
    return parts


def _shortened(lines: Sequence[bytes], largest: int) -> list[bytes]:
    """Return the lines in at most ``largest`` bytes: the older the coarser, and the coarsest ones only if they fit."""
    kept = [(_level(line), line) for line in lines]
    while sum(len(line) for _, line in kept) > largest:
        levels = [level for level, _ in kept]
        sizes: Counter[int] = Counter()
        for level, line in kept:
            sizes[level] += len(line) * (level + 1)  # the finer a level, the larger its share of the file
        level = max(sizes, key=sizes.__getitem__)
        first = levels.index(level)
        last = first + min(levels.count(level), _FACTOR)
        if level >= _COARSEST:
            del kept[first]
            continue
        by_subject = _by_subject(part for _, line in kept[first:last] for part in _decode(line))
        coarse = {subject: _coarser(series) for subject, series in by_subject.items()}
        kept[first:last] = [(level + 1, _encode(level + 1, coarse))]
    return [line for _, line in kept]


def _level(line: bytes) -> int:
    """Return the level of a line, by its beginning; that of the lines to remove first where it has none."""
    with contextlib.suppress(zlib.error, ValueError, IndexError):
        return int(zlib.decompressobj(_GZIP).decompress(line, len('{"level":0'))[-1:])
    return _COARSEST


def _coarser(series: Series) -> Series:
    """Return one row for ten, with mean, lowest and highest of the values that were measured."""
    starts = range(0, len(series.times), _FACTOR)
    ends = [min(start + _FACTOR, len(series.times)) for start in starts]
    columns: list[dict[str, array[float]]] = [{}, {}, {}]
    for name, means in series.mean.items():
        mean, lowest, highest = (column.setdefault(name, array("d", [math.nan]) * len(ends)) for column in columns)
        for place, (start, end) in enumerate(zip(starts, ends, strict=True)):
            known = [row for row in range(start, end) if means[row] == means[row]]
            if known:
                weight = sum(series.counts[row] for row in known)
                mean[place] = sum(means[row] * (series.counts[row] / weight) for row in known)
                lowest[place] = min(series.lowest[name][row] for row in known)
                highest[place] = max(series.highest[name][row] for row in known)
    return Series(
        series.subject,
        [series.times[end - 1] for end in ends],
        [series.steps[end - 1] for end in ends],
        [sum(series.counts[start:end]) for start, end in zip(starts, ends, strict=True)],
        *columns,
    )
