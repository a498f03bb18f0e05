"""The rows of a data source for fine-tuning: objects of jsonl, json and parquet files, or generated ones."""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from scaletrain_cli.data.content import embedded_content, known_content
from scaletrain_cli.data.sources.local_files import local_file
from scaletrain_cli.engine.data.docstrings import docstring_rows
from scaletrain_cli.errors import UsageError, sentence
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec import DataSpec
from scaletrain_cli.spec.corpus_files import (
    EMBEDDED,
    FEW_REPLACED,
    MOST_REPLACED,
    PYTHON_DOCSTRINGS,
    ROW_FORMATS,
    find_files,
    kind_of,
    open_bytes,
    unreadable_among,
)
from scaletrain_cli.spec.row_formats import (
    Example,
    RowError,
    format_of,
    images_of,
    parse_row,
    require_format_with_images,
)

_ROWS_WITH_IMAGES = 64
_BROKEN = re.compile("[\ud800-\udfff]")


@dataclass
class Tally:
    """Counters of the text read so far; ``replaced``: bytes that are not UTF-8, replaced by U+FFFD."""

    characters: int = 0
    replaced: int = 0


class RowImage(NamedTuple):
    """An image of a row. ``place``: for messages; ``path``: None if the row has the bytes of the file, ``content``."""

    place: str
    path: Path | None
    content: bytes | None = None


class Row(NamedTuple):
    """One row of the source. ``where``: its file and line; ``key``: its content as text, the same in every run."""

    where: str
    example: Example
    weight: float
    key: str
    images: tuple[RowImage, ...] = ()


class _RawRow(NamedTuple):
    where: str
    content: Any
    file: Path = Path()


def rows_of(
    data: DataSpec, objective: str, tally: Tally | None = None, *, images: bool = False
) -> tuple[str, Iterator[Row]]:
    """Return the format of the rows and the rows. ``images``: rows may have images.

    Raises UsageError, also while they are read.
    """
    raw = _raw_rows(data.only_source, objective, tally or Tally(), _ROWS_WITH_IMAGES if images else None)
    first = next(raw, None)
    if first is None:
        raise UsageError(Reason("data.no-rows", {"source": data.source}))
    row_format: str = data.format
    if row_format == "auto":
        try:
            row_format = format_of(first.content, objective, data.fields)
            if images:
                require_format_with_images(row_format)
        except RowError as error:
            raise row_error(first.where, error) from error
    if data.loss_on == "last_assistant" and row_format in ("prompt_completion", "text"):
        raise UsageError(Reason("data.no-last-turn", {"format": row_format}))
    return row_format, (_row(row, row_format, data, images=images) for row in chain([first], raw))


def rows_content(source: str, runs_root: Path) -> str:
    """Return a hash of what a source of rows contains, computed or remembered. Raises UsageError."""
    if source in EMBEDDED:
        return embedded_content(source)
    return known_content(source, [local_file(path, kind_of(path)) for path in _files(source)], runs_root)


def row_error(where: str, error: RowError) -> UsageError:
    """Return the error of a row with its place and what to do."""
    params = {"where": where, "problem": error.reason}
    remedies = " ".join(map(sentence, error.reason.remedies))
    return UsageError(
        Reason("data.row-and-remedy", params | {"remedy": remedies}) if remedies else Reason("data.row", params)
    )


def _row(raw: _RawRow, row_format: str, data: DataSpec, *, images: bool) -> Row:
    where, row, _ = raw
    key = json.dumps(row, sort_keys=True, default=_digest if images else str)
    try:
        parsed = parse_row(row, row_format, data.fields, images=images)
        return Row(where, *parsed, key, _images(raw, data) if images else ())
    except RowError as error:
        raise row_error(where, error) from error


def _images(raw: _RawRow, data: DataSpec) -> tuple[RowImage, ...]:
    folder = raw.file.parent if data.images.folder is None else expand_home(data.images.folder)
    found = []
    for number, (name, content) in enumerate(images_of(raw.content, data.fields), start=1):
        path = folder / expand_home(name) if content is None else None
        found.append(RowImage(str(path or f"{raw.where}, image {number}"), path, content))
    return tuple(found)


def _digest(value: object) -> str:
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else str(value)


def _raw_rows(source: str, objective: str, tally: Tally, at_once: int | None) -> Iterator[_RawRow]:
    """``at_once``: rows of a parquet file that are in memory at a time; None: as many as pyarrow has."""
    if source == PYTHON_DOCSTRINGS:
        yield from (_RawRow(*each) for each in docstring_rows(pairs=objective == "dpo"))
        return
    for path in _files(source):
        own = Tally()
        with _readable(path):
            rows = _parquet(path, at_once) if kind_of(path) == "parquet" else _READERS[kind_of(path)](path, own)
            yield from (_RawRow(where, row, path) for where, row in rows)
        if own.replaced > max(FEW_REPLACED, MOST_REPLACED * own.characters):
            counts = {"replaced": own.replaced, "characters": own.characters}
            raise UsageError(Reason("engine.file-not-utf-8", {"path": str(path), **counts}))
        tally.characters += own.characters
        tally.replaced += own.replaced


def _files(source: str) -> tuple[Path, ...]:
    """Return the files of a source in a fixed order. Raises UsageError if there are none or one cannot be read."""
    files = find_files(source, kinds=ROW_FORMATS).files
    if problem := unreadable_among(files):
        raise UsageError(
            Reason("engine.data-source-unreadable", {"key": "data.source", "source": source, "problem": problem})
        )
    return files


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error) as error:
        raise UsageError(Reason("engine.file-not-gzip", {"path": str(path), "error": str(error)})) from error
    except OSError as error:
        params = {"path": str(path), "error": error.strerror or str(error)}
        raise UsageError(Reason("engine.file-unreadable", params)) from error


@contextmanager
def _open_text(path: Path) -> Iterator[io.TextIOWrapper]:
    """Open a file as text; bytes that are not UTF-8 become lone surrogates, which ``clean`` counts."""
    with open_bytes(path) as opened, io.TextIOWrapper(opened, encoding="utf-8-sig", errors="surrogateescape") as file:
        yield file


def _clean(text: str, tally: Tally) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        text, replaced = _BROKEN.subn("\ufffd", text)
        tally.replaced += replaced
    return text


def _jsonl(path: Path, tally: Tally) -> Iterator[tuple[str, Any]]:
    with _open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                tally.characters += len(line)
                yield f"{path}:{number}", _parsed(_clean(line, tally))


def _json(path: Path, tally: Tally) -> Iterator[tuple[str, Any]]:
    with _open_text(path) as file:
        text = file.read()
    tally.characters += len(text)
    found = _parsed(_clean(text, tally))
    if not isinstance(found, list):
        raise row_error(str(path), RowError("not-an-array"))
    yield from ((f"{path}, row {number}", row) for number, row in enumerate(found, start=1))


def _parsed(text: str) -> Any:
    """Return the JSON value, None for other text; lone surrogates, which JSON can contain, become question marks."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if "\\u" in text:
        plain = json.dumps(found, ensure_ascii=False)
        if (valid := plain.encode("utf-8", "replace").decode()) != plain:
            return json.loads(valid)
    return found


def _parquet(path: Path, at_once: int | None) -> Iterator[tuple[str, Any]]:
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UsageError(Reason("engine.pyarrow-missing", {"path": str(path)})) from error
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(**({} if at_once is None else {"batch_size": at_once})):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", {name: _without_nulls(value) for name, value in row.items()}
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        raise UsageError(Reason("engine.parquet-unreadable", {"path": str(path), "error": str(error)})) from error


def _without_nulls(value: Any) -> Any:
    """Return a nested value without the keys that parquet adds as null to the objects of a list that lack them."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None or key == "content"}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


_READERS = {"jsonl": _jsonl, "json": _json}
