"""The files that readers of all formats read, and the records that they yield: documents, also those that are bad."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from scaletrain_cli.spec.preparation import PreparationStep
    from scaletrain_cli.spec.sources import SourceSpec

# No document may be longer: a reader holds one in memory, and so does each step after it.
MAX_DOCUMENT_BYTES = 64 << 20


class Record(NamedTuple):
    """One document. ``place``: where it begins, in the unit of its format; ``columns``: the other columns asked for."""

    place: int
    text: str
    columns: Mapping[str, Any] = {}


class TokenRecord(NamedTuple):
    """Token ids of a tokenized file. ``ends_document``: the last one is the end of a document, whatever it is."""

    place: int
    tokens: npt.NDArray[np.integer[Any]]
    ends_document: bool


class BadRecord(NamedTuple):
    """A document, or the rest of a file, that cannot be read."""

    place: int
    reason: Reason


@dataclass(frozen=True)
class Columns:
    """``text``: the column with the document. ``others``: columns that later steps read."""

    text: str = "text"
    others: tuple[str, ...] = ()


def columns_of(section: SourceSpec, steps: Sequence[PreparationStep]) -> Columns:
    """Return the columns that are read from a source: that of the text, and those of its steps."""
    from scaletrain_cli.spec.preparation import ScoreSpec  # a worker process needs no pydantic

    chosen = [step for step in steps if step.only is None or section.name in step.only]
    others = {step.column for step in chosen if isinstance(step, ScoreSpec)} - {section.field}
    return Columns(section.field, tuple(sorted(others)))


@dataclass(frozen=True)
class SourceFile:
    """A file of a source. ``kind``: its format by name; ``compression``: gz, zst or empty; ``size`` in bytes.

    ``state``: changes with every write to a local file; empty if not known. ``etag``: that of a remote file.
    """

    path: str
    size: int
    kind: str
    compression: str = ""
    etag: str = ""
    state: str = ""


@dataclass(frozen=True)
class Part:
    """Documents of a file that begin from ``start`` to ``stop - 1``, in the unit of its format.

    Two parts of a file have no document in common, and its parts together have all of them.
    """

    file: SourceFile
    start: int
    stop: int
    columns: Columns = field(default_factory=Columns)


class Reader(Protocol):
    """Reads one format. Faults of the input are BadRecords, so that the caller decides whether to stop."""

    def parts(self, file: SourceFile, part_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of the parts of a file, each of about ``part_bytes`` bytes. Raises OSError."""
        ...

    def records(self, part: Part) -> Iterator[Record | TokenRecord | BadRecord]:
        """Yield the documents of a part in the order of the file. Raises OSError for faults of the storage."""
        ...

    def place_text(self, file: SourceFile, place: int) -> str:
        """Return a place for people, such as ``web.jsonl:17``. May read the file up to there. Raises OSError."""
        ...


def local_file(path: Path, kind: str, compression: str = "") -> SourceFile:
    """Return a file of this machine with its size and its state. Raises OSError."""
    stats = [part.stat() for part in parts_of(path, kind)]
    size = sum(status.st_size for status in stats)
    return SourceFile(os.path.abspath(path), size, kind, compression, state=_state(stats))


def parts_of(path: Path, kind: str) -> tuple[Path, ...]:
    """Return the files that one file of a source consists of: two for Megatron-LM."""
    return (path.with_suffix(".idx"), path.with_suffix(".bin")) if kind == "megatron" else (path,)


def paths_of(file: SourceFile) -> tuple[Path, ...]:
    """Return the paths of a local file: .idx and .bin of a Megatron-LM set, else one."""
    return parts_of(Path(file.path), file.kind)


def _state(stats: Iterable[os.stat_result]) -> str:
    """Return what changes with every write to the files.

    It includes the inode change time, which programs cannot set, unlike the modification time; not the device, which
    differs between machines that mount the same file system.
    """
    return " ".join(f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}-{status.st_ctime_ns}" for status in stats)


def require_unchanged(file: SourceFile) -> None:
    """Raise UsageError if a file is not the one that was listed. A file whose state is not known is not compared."""
    if not file.state:
        return
    try:
        same = _state(path.stat() for path in paths_of(file)) == file.state
    except OSError as error:
        params = {"path": file.path, "error": error.strerror or str(error)}
        raise UsageError(Reason("data.file-gone", params), file=file.path) from error
    if not same:
        raise UsageError(Reason("data.file-changed", {"path": file.path}), file=file.path)
