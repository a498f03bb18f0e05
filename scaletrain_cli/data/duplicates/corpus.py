"""The settings, the folder and the document numbers that all phases of deduplication share.

A document is known by its number: documents are counted through the signature files in the order of the tasks. Of
documents that are the same, the one with the lowest number is kept.

Its files have named sections of numbers, and are written aside and renamed: a file that is there is whole. The table of
sections stands at the end, so that a section of unknown length is written as it comes. Bytes depend on the content
alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from scaletrain_cli.data.drafts import draft_of
from scaletrain_cli.errors import MissingPackageError, UsageError
from scaletrain_cli.extras import install_command
from scaletrain_cli.safe_files import make_folder, open_new, open_to_read
from scaletrain_cli.spec.preparation import DuplicatesSpec

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
        self.begin(name, dtype, *rows.shape[1:])
        self.append(rows)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
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
        return int(self._sections[name]["rows"])

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Numbers:
        section = self._sections[name]
        stop = section["rows"] if stop is None else min(stop, section["rows"])
        dtype, shape = np.dtype(section["dtype"]), tuple(section["shape"])
        per_row = int(np.prod(shape, dtype=np.int64))
        count = max(0, stop - start)
        offset = section["offset"] + start * per_row * dtype.itemsize
        return np.fromfile(self.path, dtype, count * per_row, offset=offset).reshape(count, *shape)

    def chunks(self, name: str, rows: int) -> Iterator[Numbers]:
        for start in range(0, self.rows(name), rows):
            yield self.read(name, start, start + rows)

    def take(self, name: str, places: Numbers) -> Numbers:
        taken: Numbers = np.array(self.mapped(name)[places])
        return taken

    def mapped(self, name: str) -> Numbers:
        """Return a section, of which what is looked at is read."""
        section = self._sections[name]
        shape = (section["rows"], *section["shape"])
        if not section["rows"]:
            return np.empty(shape, section["dtype"])
        return np.memmap(self.path, section["dtype"], "r", section["offset"], shape)


Ids = npt.NDArray[np.int64]

VERSION = 1  # raised with every change of results
DEFAULT_MEMORY_BYTES = 1 << 30


def settings_key(settings: DuplicatesSpec) -> dict[str, Any]:
    """Return all that the results depend on beside the input, as JSON values.

    Raises MissingPackageError if rensa is needed and not installed.
    """
    key = settings.model_dump(exclude={"step", "only"}) | {"version": VERSION, "unicode": unicodedata.unidata_version}
    if not settings.near:
        return key
    try:
        return key | {"rensa": metadata.version("rensa")}
    except metadata.PackageNotFoundError as error:
        raise MissingPackageError(
            "data.prepare with step: duplicates and near: true needs rensa.", install_command("data")
        ) from error


# Yields the documents of a task, by number of the task: (index in the task, text), indices ascending. Each call yields
# the same documents. It is called in worker processes, so it can be pickled.
Texts = Callable[[int], Iterable[tuple[int, str]]]


@dataclass(frozen=True, order=True)
class Document:
    """A document by its task's number and its index in the task."""

    task: int
    index: int


@dataclass(frozen=True)
class Corpus:
    """The input and the folder of one deduplication. ``sources``: the source of each task, in order of preference."""

    folder: Path
    sources: tuple[str, ...]
    settings: DuplicatesSpec
    memory_bytes: int = DEFAULT_MEMORY_BYTES  # of one process, beside what is kept per document of a task

    @property
    def tasks(self) -> int:
        return len(self.sources)

    @cached_property
    def source_of_task(self) -> Ids:
        """The number of the source of each task, by the order in which the tasks name them."""
        names = list(dict.fromkeys(self.sources))
        return np.array([names.index(name) for name in self.sources], np.int64)

    def signatures(self, task: int) -> Path:
        return self.folder / "signatures" / f"{task:06d}"

    @property
    def identical(self) -> Path:
        return self.folder / "identical"

    def band(self, band: int) -> Path:
        return self.folder / "bands" / f"{band:04d}"

    @property
    def pairs(self) -> Path:
        return self.folder / "pairs"

    def shingles(self, task: int) -> Path:
        return self.folder / "shingles" / f"{task:06d}"

    def verified(self, part: int) -> Path:
        return self.folder / "verified" / f"{part:06d}"

    def removed(self, task: int) -> Path:
        return self.folder / "removed" / f"{task:06d}"

    @property
    def report(self) -> Path:
        return self.folder / "report.json"

    def read_report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self.report.read_text(encoding="utf-8"))
        return report


class Numbering:
    """The numbers of all documents. ``starts``: the number of the first document of each task, and the end."""

    def __init__(self, corpus: Corpus, starts: Ids | None = None) -> None:
        """Take ``starts`` from the file of identical documents unless it is given."""
        self._corpus = corpus
        self.starts: Ids = Sections(corpus.identical).read("starts") if starts is None else starts

    @property
    def documents(self) -> int:
        return int(self.starts[-1])

    def tasks_of(self, ids: Ids) -> Ids:
        tasks: Ids = np.searchsorted(self.starts, ids, "right").astype(np.int64) - 1
        return tasks

    def sources_of(self, ids: Ids) -> Ids:
        """Return the number of the source of each document, by the order in which the tasks name them."""
        sources: Ids = self._corpus.source_of_task[self.tasks_of(ids)]
        return sources

    def take(self, name: str, ids: Ids) -> npt.NDArray[Any]:
        """Return the rows of a section of the signature files for documents in any order."""
        order = np.argsort(ids, kind="stable")
        in_order = ids[order]
        bounds = np.searchsorted(in_order, self.starts)
        parts, filled = [], np.flatnonzero(np.diff(bounds))
        for task in filled.tolist() or [0]:
            local = in_order[bounds[task] : bounds[task + 1]] - self.starts[task]
            parts.append(Sections(self._corpus.signatures(task)).take(name, local))
        rows = np.concatenate(parts)
        result = np.empty_like(rows)
        result[order] = rows
        return result

    def places_of(self, ids: Ids) -> Ids:
        """Return the task and the index in it of each document, shape (documents, 2)."""
        return np.column_stack([self.tasks_of(ids), Sections(self._corpus.identical).take("index", ids)])

    def documents_at(self, ids: Ids) -> list[Document]:
        return [Document(task, index) for task, index in self.places_of(ids).tolist()]


def source_salts(corpus: Corpus) -> npt.NDArray[np.uint64]:
    """Return what is mixed into the keys of each task's documents: its source, unless duplicates go across sources."""
    if corpus.settings.across_sources:
        return np.zeros(corpus.tasks, np.uint64)
    salts: npt.NDArray[np.uint64] = (corpus.source_of_task + 1).astype(np.uint64) * np.uint64(0xD1342543DE82EF95)
    return salts
