"""Files of named sections of numbers, written aside and renamed: a file that is there is whole.

The table of sections stands at the end, so that a section of unknown length is written as it comes. Bytes depend on
the content alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from scaletrain_cli.data.drafts import draft_of
from scaletrain_cli.errors import UsageError
from scaletrain_cli.safe_files import make_folder, open_new, open_to_read

Numbers = npt.NDArray[Any]

_MAGIC = b"STSECT1\n"
_TAIL = struct.Struct("<Q8s")  # length of the table, magic


class SectionWriter:
    """A file under way. It appears under its name when the ``with`` block ends without an error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._draft = draft_of(path)
        self._sections: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> SectionWriter:
        make_folder(self._path.parent)
        self._file: BinaryIO = open_new(self._draft)
        return self

    def begin(self, name: str, dtype: str, *row_shape: int) -> None:
        """Begin the next section: rows of numbers of ``dtype``, each row of shape ``row_shape``."""
        self._sections.append(
            {"name": name, "dtype": dtype, "shape": list(row_shape), "offset": self._file.tell(), "rows": 0}
        )

    def append(self, rows: Numbers) -> None:
        """Append rows to the section that was begun last."""
        section = self._sections[-1]
        data = np.ascontiguousarray(rows, dtype=section["dtype"])
        assert list(data.shape[1:]) == section["shape"]
        section["rows"] += len(data)
        self._file.write(data.data.cast("B") if data.size else b"")

    def add(self, name: str, dtype: str, rows: Numbers) -> None:
        """Write a whole section."""
        self.begin(name, dtype, *rows.shape[1:])
        self.append(rows)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                table = json.dumps({"sections": self._sections, "facts": self.facts}, sort_keys=True).encode()
                self._file.write(table + _TAIL.pack(len(table), _MAGIC))
                self._file.flush()
                os.fsync(self._file.fileno())
                os.replace(self._draft, self._path)
        finally:
            self._file.close()
            with contextlib.suppress(FileNotFoundError):
                self._draft.unlink()


class Sections:
    """A file of sections, to be read."""

    def __init__(self, path: Path) -> None:
        """Read the table of the file. Raises UsageError if it is no such file, and OSError."""
        self.path = path
        with open_to_read(path) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                file.seek(size - _TAIL.size)
                length, magic = _TAIL.unpack(file.read(_TAIL.size))
                file.seek(size - _TAIL.size - length)
                table = json.loads(file.read(length)) if magic == _MAGIC else {}
                self.facts: dict[str, Any] = table["facts"]
                self._sections = {section["name"]: section for section in table["sections"]}
            except (OSError, ValueError, KeyError, struct.error):
                raise UsageError(
                    f"{path}: not a file of prepared data, or a damaged one. Remove it and prepare the data again"
                ) from None

    def rows(self, name: str) -> int:
        """Return the number of rows of a section."""
        return int(self._sections[name]["rows"])

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Numbers:
        """Return rows ``start`` to ``stop`` of a section."""
        section = self._sections[name]
        stop = section["rows"] if stop is None else min(stop, section["rows"])
        dtype, shape = np.dtype(section["dtype"]), tuple(section["shape"])
        per_row = int(np.prod(shape, dtype=np.int64))
        count = max(0, stop - start)
        offset = section["offset"] + start * per_row * dtype.itemsize
        return np.fromfile(self.path, dtype, count * per_row, offset=offset).reshape(count, *shape)

    def chunks(self, name: str, rows: int) -> Iterator[Numbers]:
        """Yield a section in pieces of at most ``rows`` rows."""
        for start in range(0, self.rows(name), rows):
            yield self.read(name, start, start + rows)

    def take(self, name: str, places: Numbers) -> Numbers:
        """Return the rows at the given places."""
        taken: Numbers = np.array(self.mapped(name)[places])
        return taken

    def mapped(self, name: str) -> Numbers:
        """Return a section, of which what is looked at is read."""
        section = self._sections[name]
        shape = (section["rows"], *section["shape"])
        if not section["rows"]:
            return np.empty(shape, section["dtype"])
        return np.memmap(self.path, section["dtype"], "r", section["offset"], shape)
