"""The partition of a source into tasks, which depends on its files alone, never on the number of workers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scaletrain_cli.data.sources.formats import TOKEN_FORMATS, reader_of
from scaletrain_cli.data.sources.records import (
    BadRecord,
    Columns,
    Part,
    Record,
    SourceFile,
    TokenRecord,
    require_unchanged,
)
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason

# A worker tokenizes this in about ten seconds, and loses no more than that when it is killed.
TASK_BYTES = 32 << 20
# A small source has smaller tasks, so that many workers share it evenly.
_LEAST_TASK_BYTES = 2 << 20
_TASKS_OF_A_SMALL_SOURCE = 256


@dataclass(frozen=True)
class Source:
    """One source of the spec, with its files in a fixed order. ``content``: a hash of what they contain."""

    name: str
    files: tuple[SourceFile, ...]
    content: str
    columns: Columns = field(default_factory=Columns)

    @property
    def is_tokenized(self) -> bool:
        """True if the files hold tokens. Raises UsageError if others hold text."""
        tokenized = [file for file in self.files if file.kind in TOKEN_FORMATS]
        if tokenized and len(tokenized) < len(self.files):
            text = next(file for file in self.files if file.kind not in TOKEN_FORMATS)
            params = {"source": self.name, "tokens": tokenized[0].path, "text": text.path}
            raise UsageError(Reason("data.tokens-beside-text", params))
        return bool(tokenized)


@dataclass(frozen=True)
class Task:
    """Consecutive parts of a source that one worker reads. ``number``: counted from 0 within the source."""

    source: str
    number: int
    parts: tuple[Part, ...]

    def records(self) -> Iterator[tuple[Part, Record | TokenRecord | BadRecord]]:
        """Yield the documents in order, each with the part that it is in.

        Raises UsageError for a file that changes meanwhile, and OSError.
        """
        for part in self.parts:
            require_unchanged(part.file)
            for record in reader_of(part.file).records(part):
                if isinstance(record, BadRecord):
                    require_unchanged(part.file)
                yield part, record
            require_unchanged(part.file)


def tasks_of(source: Source, task_bytes: int = TASK_BYTES) -> tuple[Task, ...]:
    """Return the tasks of a source. Small files share a task, large ones are cut. Raises OSError.

    ``task_bytes``: of the tasks of a large source.
    """
    total = sum(file.size for file in source.files)
    task_bytes = min(task_bytes, max(_LEAST_TASK_BYTES, total // _TASKS_OF_A_SMALL_SOURCE))
    tasks: list[Task] = []
    held: list[Part] = []
    size = 0
    for file in source.files:
        ranges = list(reader_of(file).parts(file, task_bytes))
        for start, stop in ranges:
            held.append(Part(file, start, stop, source.columns))
            size += file.size // len(ranges)
            if size >= task_bytes:
                tasks.append(Task(source.name, len(tasks), tuple(held)))
                held, size = [], 0
    if held:
        tasks.append(Task(source.name, len(tasks), tuple(held)))
    return tuple(tasks)


class Place(NamedTuple):
    """The place of a document: a part of a task, and the position ``at`` in it, in the unit of the file's format."""

    task: Task
    part: Part
    at: int

    def to_document(self) -> dict[str, int]:
        """Return the place without the path of the file, as other files may have the same content."""
        return {"part": next(n for n, part in enumerate(self.task.parts) if part is self.part), "at": self.at}


def place_text(part: Part, place: int) -> str:
    """Return a place for people: ``web.jsonl:17``. May read the file up to there. Raises OSError."""
    return reader_of(part.file).place_text(part.file, place)


def documents(files: Sequence[SourceFile]) -> Iterator[str]:
    """Yield the text of every document of some files. Raises UsageError for one that cannot be read, and OSError."""
    for task in tasks_of(Source("", tuple(files), "")):
        for part, record in task.records():
            if isinstance(record, BadRecord):
                where = place_text(part, record.place)
                raise UsageError(Reason("data.bad-document", {"where": where, "problem": record.reason}))
            if isinstance(record, Record):
                yield record.text
