"""The documents of a corpus as text: the source code of Python's standard library, or the user's files."""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec.corpus_files import (
    EMBEDDED,
    FEW_REPLACED,
    FORMATS,
    MOST_REPLACED,
    PYTHON_STDLIB,
    find_files,
    kind_of,
    open_bytes,
    text_of_line,
    unreadable_among,
)

_LONGEST_TEXT_DOCUMENT = 1 << 20  # characters
# A long file of prose is split into documents of whole paragraphs of this length, about 4,000 tokens.
_TEXT_DOCUMENT = 1 << 14
_BLANK_LINE = re.compile(r"\n[ \t]*\n")
_BROKEN = re.compile("[\ud800-\udfff]")
_BLOCK_BYTES = 1 << 20
_COLUMNS_SHOWN = 20


@dataclass
class Tally:
    """Counters of the text read so far; ``replaced``: bytes that are not UTF-8, replaced by U+FFFD."""

    characters: int = 0
    replaced: int = 0


def source_files(source: str, kinds: Collection[str] = FORMATS) -> list[Path]:
    """Return the files of a corpus in a fixed order. Raises UsageError if there are none or one cannot be read."""
    files = find_files(source, kinds=kinds).files
    if source != PYTHON_STDLIB and (problem := unreadable_among(files)):
        raise UsageError(
            Reason("engine.data-source-unreadable", {"key": "data.source", "source": source, "problem": problem})
        )
    return list(files)


def corpus_identity(source: str, kinds: Collection[str] = FORMATS) -> list[str]:
    """Return what two equal corpora have in common: the hashes of their files, or the interpreter's version."""
    if source in EMBEDDED:
        return [source, sys.version]
    return [f"{kind_of(path)} {_content_hash(path)}" for path in source_files(source, kinds)]


def corpus_state(source: str, kinds: Collection[str] = FORMATS) -> str:
    """Return a hash of the metadata of a corpus's files, which changes with every write to them.

    It includes the inode change time, which programs cannot set, unlike the modification time.
    """
    digest = hashlib.sha256(source.encode("utf-8", "surrogateescape"))
    for path in source_files(source, kinds):
        found = path.stat()
        state = (str(path.absolute()), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        digest.update(repr(state).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def documents(source: str, tally: Tally | None = None) -> Iterator[str]:
    """Yield the text of every document; jsonl and parquet have one document per row, in the field ``text``.

    Text files are split into documents of whole lines; .txt and .md at blank lines. Raises UsageError for a file that
    cannot be read or is not UTF-8, apart from single bytes.
    """
    whole = Tally() if tally is None else tally
    for path in source_files(source):
        own = Tally()
        with readable(path):
            for text in _documents_of(path, own):
                own.characters += len(text)
                if own.replaced > max(FEW_REPLACED, MOST_REPLACED * max(own.characters, _TEXT_DOCUMENT)):
                    _reject_encoding(path, own)
                yield text
        if own.replaced > max(FEW_REPLACED, MOST_REPLACED * own.characters):
            _reject_encoding(path, own)
        whole.characters += own.characters
        whole.replaced += own.replaced


def _reject_encoding(path: Path, tally: Tally) -> None:
    counts = {"replaced": tally.replaced, "characters": tally.characters}
    raise UsageError(Reason("engine.file-not-utf-8", {"path": str(path), **counts}))


@contextmanager
def readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error) as error:
        raise UsageError(Reason("engine.file-not-gzip", {"path": str(path), "error": str(error)})) from error
    except OSError as error:
        params = {"path": str(path), "error": error.strerror or str(error)}
        raise UsageError(Reason("engine.file-unreadable", params)) from error


def _documents_of(path: Path, tally: Tally) -> Iterator[str]:
    return READERS.get(kind_of(path), _code)(path, tally)


def _jsonl(path: Path, tally: Tally) -> Iterator[str]:
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _text_field(path, number, clean(line, tally))


def _prose(path: Path, tally: Tally) -> Iterator[str]:
    with open_text(path) as file:
        yield from _paragraphs(_blocks(file, tally))


def _code(path: Path, tally: Tally) -> Iterator[str]:
    with open_text(path) as file:
        yield from (block for block in _blocks(file, tally) if block.strip())


@contextmanager
def open_text(path: Path) -> Iterator[io.TextIOWrapper]:
    """Open a file as text; bytes that are not UTF-8 become lone surrogates, which ``clean`` counts."""
    with open_bytes(path) as opened, io.TextIOWrapper(opened, encoding="utf-8-sig", errors="surrogateescape") as file:
        yield file


def _blocks(file: io.TextIOWrapper, tally: Tally) -> Iterator[str]:
    """Yield the text in blocks of whole lines, so that a large file is streamed."""
    while block := "".join(file.readlines(_LONGEST_TEXT_DOCUMENT)):
        yield clean(block, tally)


def _paragraphs(blocks: Iterator[str]) -> Iterator[str]:
    """Yield documents that end at the first blank line after a number of characters."""
    held = ""
    for block in blocks:
        held += block
        start = 0
        for match in _BLANK_LINE.finditer(held):
            if match.end() - start >= _TEXT_DOCUMENT:
                yield held[start : match.end()]
                start = match.end()
        held = held[start:]
        if len(held) >= _LONGEST_TEXT_DOCUMENT:
            yield held
            held = ""
    if held.strip():
        yield held


def clean(text: str, tally: Tally) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        text, replaced = _BROKEN.subn("\ufffd", text)
        tally.replaced += replaced
    return text


def _text_field(path: Path, number: int, line: str) -> str:
    text = text_of_line(line)
    if text is None:
        raise UsageError(Reason("engine.line-without-text", {"path": str(path), "line": number}))
    return text.encode("utf-8", "replace").decode()  # JSON can contain lone surrogates


def _parquet(path: Path, tally: Tally) -> Iterator[str]:
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UsageError(Reason("engine.pyarrow-missing", {"path": str(path)})) from error
    try:
        file = parquet.ParquetFile(path)
        schema = file.schema_arrow
        if "text" not in schema.names:
            raise UsageError(
                Reason("engine.parquet-without-text", {"path": str(path), "columns": schema.names[:_COLUMNS_SHOWN]})
            )
        kind = schema.field("text").type
        if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
            raise UsageError(Reason("engine.parquet-text-not-strings", {"path": str(path), "type": str(kind)}))
        row = 0
        for batch in file.iter_batches(columns=["text"]):
            values = batch.column(0).to_pylist()
            if None in values:
                params = {"path": str(path), "row": row + values.index(None)}
                raise UsageError(Reason("engine.parquet-text-null", params))
            yield from values
            row += len(values)
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        raise UsageError(Reason("engine.parquet-unreadable", {"path": str(path), "error": str(error)})) from error


def _content_hash(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=32)
    with readable(path), path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


# By file format: yields the documents of a file. ``spec.corpus_files.FORMATS`` names the formats for the run spec.
READERS: dict[str, Callable[[Path, Tally], Iterator[str]]] = {
    "txt": _prose,
    "md": _prose,
    "py": _code,
    "jsonl": _jsonl,
    "parquet": _parquet,
}
