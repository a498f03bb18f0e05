"""External sort: rows of unsigned 64-bit numbers in lexicographic order, within a limit of memory.

Rows beyond the limit go to sorted runs in one temporary file, which has no name, so a killed process leaves nothing.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

# Arrays of the size of a chunk that exist at once: the rows, as they came and joined, their order, and the sorted copy.
_COPIES = 4
_MOST_ROWS = 1 << 17  # of a block that is yielded
_LEAST_BLOCK = 1024  # rows of one run in memory while runs are merged


class _Run(NamedTuple):
    offset: int  # in rows of the temporary file
    rows: int


class Sorter:
    """Takes rows of ``columns`` numbers and returns them sorted; uses about ``memory_bytes``."""

    def __init__(self, folder: Path, columns: int, memory_bytes: int) -> None:
        self._folder, self._columns = folder, columns
        self._chunk_rows = max(4 * _LEAST_BLOCK, memory_bytes // (columns * 8 * _COPIES))
        self._parts: list[U64] = []
        self._held = 0
        self._runs: list[_Run] = []
        self._written = 0
        self._file: BinaryIO | None = None
        self._open = contextlib.ExitStack()

    def add(self, rows: U64) -> None:
        """Take rows, an array of shape (n, columns)."""
        for start in range(0, len(rows), self._chunk_rows):
            part = rows[start : start + self._chunk_rows]
            if self._held + len(part) > self._chunk_rows:
                self._runs.append(self._write_run([self._sorted_parts()]))
            self._parts.append(part)
            self._held += len(part)

    def blocks(self) -> Iterator[U64]:
        """Yield all rows in order, in blocks of limited length. To be called once."""
        for block in self._long_blocks():
            for start in range(0, len(block), _MOST_ROWS):
                yield block[start : start + _MOST_ROWS]

    def _long_blocks(self) -> Iterator[U64]:
        try:
            if not self._runs:
                if self._held:
                    yield self._sorted_parts()
                return
            if self._held:
                self._runs.append(self._write_run([self._sorted_parts()]))
            most = max(2, self._chunk_rows // _LEAST_BLOCK)
            while len(self._runs) > most:
                merged, self._runs = self._runs[:most], self._runs[most:]
                self._runs.append(self._write_run(self._merge(merged)))
            yield from self._merge(self._runs)
        finally:
            self._open.close()

    def _sorted_parts(self) -> U64:
        rows = np.concatenate(self._parts)
        self._parts, self._held = [], 0
        return _sorted(rows)

    def _write_run(self, blocks: Iterator[U64] | list[U64]) -> _Run:
        if self._file is None:
            self._file = self._open.enter_context(tempfile.TemporaryFile(dir=self._folder))  # noqa: SIM115
        start = self._written
        for block in blocks:
            self._file.seek(self._written * self._columns * 8)
            self._file.write(np.ascontiguousarray(block).data.cast("B"))
            self._written += len(block)
        return _Run(start, self._written - start)

    def _merge(self, runs: list[_Run]) -> Iterator[U64]:
        block_rows = max(_LEAST_BLOCK, self._chunk_rows // len(runs))
        unread = list(runs)
        heads: list[U64] = [np.empty((0, self._columns), np.uint64)] * len(runs)
        while True:
            for number, (offset, rows) in enumerate(unread):
                if rows and not len(heads[number]):
                    count = min(rows, block_rows)
                    assert self._file is not None
                    self._file.seek(offset * self._columns * 8)
                    data = self._file.read(count * self._columns * 8)
                    heads[number] = np.frombuffer(data, np.uint64).reshape(-1, self._columns)
                    unread[number] = _Run(offset + count, rows - count)
            # Rows up to the lowest end of a block whose run goes on come before all that is unread.
            ends = [tuple(heads[number][-1].tolist()) for number, run in enumerate(unread) if run.rows]
            if not ends:
                rest = [head for head in heads if len(head)]
                if rest:
                    yield _sorted(np.concatenate(rest))
                return
            bound = min(ends)
            taken = []
            for number, head in enumerate(heads):
                count = _rows_up_to(head, bound)
                taken.append(head[:count])
                heads[number] = head[count:]
            yield _sorted(np.concatenate(taken))


def _sorted(rows: U64) -> U64:
    in_order: U64 = rows[np.lexsort(rows.T[::-1])]
    return in_order


def _rows_up_to(rows: U64, bound: tuple[int, ...]) -> int:
    """Return how many of the sorted rows are not above ``bound``."""
    start, stop = 0, len(rows)
    for column, value in enumerate(bound):
        part = np.ascontiguousarray(rows[start:stop, column])
        lower, upper = np.searchsorted(part, np.uint64(value), "left"), np.searchsorted(part, np.uint64(value), "right")
        start, stop = start + int(lower), start + int(upper)
    return stop
