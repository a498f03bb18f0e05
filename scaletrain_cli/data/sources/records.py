"""The records that readers of all formats yield: documents, and documents that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

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
