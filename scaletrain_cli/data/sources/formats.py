"""The readers of source files, by format, and the first documents of a file, for checks before a run and estimates.

A new format is an entry here, its reader, and its suffix in the spec.
"""

import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from scaletrain_cli.data.sources.lines import Code, JsonLines, Prose, TextReader
from scaletrain_cli.data.sources.opening import DamagedFileError, opened
from scaletrain_cli.data.sources.records import BadRecord, Columns, Part, Reader, Record, SourceFile, TokenRecord
from scaletrain_cli.data.sources.tables import Arrow, Parquet
from scaletrain_cli.extras import require
from scaletrain_cli.reasons import Reason

_TEXT: dict[str, Reader] = {
    "txt": Prose(),
    "md": Prose(),
    "code": Code(),
    "jsonl": JsonLines(),
    "parquet": Parquet(),
    "arrow": Arrow(),
}
# Formats whose files hold tokens, not text.
TOKEN_FORMATS = ("megatron", "npy", "raw_uint16", "raw_uint32")


def reader_of(file: SourceFile) -> Reader:
    if file.kind not in TOKEN_FORMATS:
        return _TEXT[file.kind]
    # It loads numpy, which takes as long as the rest of a command on text.
    from scaletrain_cli.data.sources.token_formats import Megatron, TokenArray

    return (
        Megatron() if file.kind == "megatron" else TokenArray(None if file.kind == "npy" else file.kind[len("raw_") :])
    )


FIRST_BYTES = 1 << 18  # of a file, as stored
FILES_READ = 8  # of each format of a source
_MOST_INFLATED_BYTES = 16 << 20
_MOST_ROWS, _MOST_ROW_BYTES = 512, 1 << 22  # of a table, or of documents of tokens
_END = 1 << 62


@dataclass(frozen=True)
class Beginning:
    """``documents``: the first ones; ``bad``: those among them that cannot be read.

    ``share``: about how much of the stored file they are, above 0 to 1; 0 if that is not known.
    """

    documents: tuple[Record | TokenRecord, ...]
    bad: tuple[BadRecord, ...]
    share: float


def read_beginning(file: SourceFile, columns: Columns, first_bytes: int = FIRST_BYTES) -> Beginning:
    """Return the first documents of a file. Reads at most ``first_bytes`` of a file of text. Raises OSError.

    A text file that is no longer is read whole, so that damage at its end shows, too. Tables and files of tokens are
    read by their readers up to a few rows. Raises UsageError if a library is missing.
    """
    reader, whole = reader_of(file), Part(file, 0, _END, columns)
    if not isinstance(reader, TextReader):
        return _beginning(_few(reader.records(whole)), 0.0)
    if file.size <= first_bytes:
        return _beginning(reader.records(whole), 1.0)
    with opened(replace(file, compression="")) as stored:
        content = stored.read(first_bytes)
    used = len(content)
    if file.compression:
        try:
            content, used = _inflated(content, file.compression)
        except DamagedFileError as error:
            return Beginning((), (BadRecord(0, error.reason),), 0.0)
    end = content.rfind(b"\n") + 1
    if not end and file.kind == "jsonl" and content.lstrip()[:1] in (b"", b"{"):
        return Beginning((), (), 0.0)  # a line that is longer than what was read
    kept = content[: end or len(content)]
    share = used / file.size * len(kept) / max(1, len(content))
    return _beginning(reader.records_in(io.BytesIO(kept), whole), share)


class Fault(NamedTuple):
    """A bad document: its place and the reason. ``of_all``: no document of the beginning of its file can be read."""

    place: str
    reason: Reason
    of_all: bool


def first_fault(
    files: Sequence[SourceFile],
    columns: Columns,
    *,
    skips_bad: bool,
    most_files: int = FILES_READ,
    problem_of: Callable[[Record], Reason | None] = lambda record: None,
) -> Fault | None:
    """Return the first bad document among the beginnings of some files; None without one.

    ``skips_bad``: only if no document of them can be used. ``problem_of``: what the steps of the source cannot use in a
    document. Raises as ``read_beginning``.
    """
    usable, fault = False, None
    for file in sample_of(files, most_files):
        beginning = read_beginning(file, columns)
        bad, usable_here = list(beginning.bad), False
        for record in beginning.documents:
            problem = problem_of(record) if isinstance(record, Record) else None
            usable_here = usable_here or problem is None
            if problem is not None and fault is None:
                bad.append(BadRecord(record.place, problem))
        if bad and fault is None:
            first = min(bad, key=lambda record: record.place)
            fault = Fault(reader_of(file).place_text(file, first.place), first.reason, not usable_here)
        usable = usable or usable_here
    return None if skips_bad and usable else fault


def sample_of(files: Sequence[SourceFile], most: int) -> list[SourceFile]:
    """Return at most ``most`` files of each format, spread over all of them."""
    by_format: dict[tuple[str, str], list[SourceFile]] = {}
    for file in files:
        by_format.setdefault((file.kind, file.compression), []).append(file)
    return [file for group in by_format.values() for file in group[:: -(-len(group) // most)]]


def _few(records: Iterable[Record | TokenRecord | BadRecord]) -> Iterator[Record | TokenRecord | BadRecord]:
    """Yield the first records of a table or a file of tokens."""
    size = 0
    for record in islice(records, _MOST_ROWS):
        yield record
        size += record.tokens.nbytes if isinstance(record, TokenRecord) else len(getattr(record, "text", ""))
        if size >= _MOST_ROW_BYTES:
            return


def _beginning(records: Iterable[Record | TokenRecord | BadRecord], share: float) -> Beginning:
    read = list(records)
    documents = tuple(record for record in read if not isinstance(record, BadRecord))
    return Beginning(documents, tuple(record for record in read if isinstance(record, BadRecord)), share)


def _inflated(stored: bytes, compression: str) -> tuple[bytes, int]:
    """Return the decompressed first bytes of a file, and how many stored bytes hold them. Raises DamagedFileError."""
    if compression == "gz":
        return _gunzipped(stored)
    zstandard = require("zstandard", "data")
    content, rest = b"", stored
    try:
        while rest and len(content) < _MOST_INFLATED_BYTES:
            frame = zstandard.ZstdDecompressor().decompressobj()
            content += frame.decompress(rest)
            rest = frame.unused_data
    except zstandard.ZstdError as error:
        raise DamagedFileError("zstd", str(error)) from error
    return content, len(stored) - len(rest)


def _gunzipped(stored: bytes) -> tuple[bytes, int]:
    content, rest = b"", stored
    try:
        while rest and len(content) < _MOST_INFLATED_BYTES:
            member = zlib.decompressobj(wbits=31)
            content += member.decompress(rest, _MOST_INFLATED_BYTES - len(content))
            rest = member.unused_data if member.eof else member.unconsumed_tail
            if not member.eof:
                break
    except zlib.error as error:
        raise DamagedFileError("gzip", str(error)) from error
    return content, len(stored) - len(rest)
