"""Read the rows of files for fine-tuning as JSON values: jsonl, json, parquet and Arrow."""

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from scaletrain_cli.data.sources.opening import DamagedFileError, opened
from scaletrain_cli.data.sources.records import local_file
from scaletrain_cli.data.sources.tables import arrow_batches
from scaletrain_cli.errors import UsageError
from scaletrain_cli.extras import require
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec.corpus_files import COMPRESSIONS, FEW_REPLACED, LFS_POINTER, MOST_REPLACED, kind_of
from scaletrain_cli.spec.row_examples import RowError
from scaletrain_cli.spec.row_formats import from_json, parsed_json

_SURROGATES = re.compile("[\ud800-\udfff]")
_PROBLEMS_KEPT = 20


@dataclass
class Tally:
    """Counters of what was read. ``replaced``: bytes that are not UTF-8, replaced by U+FFFD.

    ``unusable``: rows that were left out, because data.on_bad is skip; ``problems``: what is wrong with the first ones.
    """

    characters: int = 0
    replaced: int = 0
    unusable: int = 0
    problems: list[str] = field(default_factory=list)

    def leave_out(self, problem: str) -> None:
        self.unusable += 1
        if len(self.problems) < _PROBLEMS_KEPT:
            self.problems.append(problem)


class RawRow(NamedTuple):
    """A row of a file. ``where``: its file and line; ``content``: its JSON value, or why it has none."""

    where: str
    content: Any
    file: Path = Path()


def rows_in(path: Path, tally: Tally, at_once: int | None = None) -> Iterator[RawRow]:
    """Yield the rows of a file. A line that is not JSON has a RowError as its content.

    ``at_once``: rows of a table that are in memory at a time; None: as many as pyarrow has. Raises UsageError
    for a file that cannot be read to its end, or is not text.
    """
    own = Tally()
    try:
        if (kind := kind_of(path)) in _TABLES:
            arrow = require("pyarrow", "parquet")
            number = 0
            try:
                for batch in _TABLES[kind](path, at_once):
                    types = {column.name: column.type for column in batch.schema}
                    for row in batch.to_pylist():
                        number += 1
                        content = {name: _as_json(value, types[name]) for name, value in row.items()}
                        yield RawRow(f"{path}, row {number}", content, path)
            except (arrow.ArrowException, UnicodeDecodeError) as error:
                reason = Reason("sources.table-damaged", {"error": " ".join(str(error).split())})
                raise UsageError(Reason("data.row", {"where": str(path), "problem": reason})) from error
        else:
            compression = path.suffix.lower().lstrip(".")
            stored = local_file(path, kind, compression if compression in COMPRESSIONS else "")
            with opened(stored) as file, io.TextIOWrapper(file, "utf-8-sig", "surrogateescape") as text:
                yield from _json_rows(path, text, own)
    except DamagedFileError as error:
        raise UsageError(Reason("data.row", {"where": str(path), "problem": error.reason})) from error
    except OSError as error:
        params = {"path": str(path), "error": error.strerror or str(error)}
        raise UsageError(Reason("engine.file-unreadable", params)) from error
    if own.replaced > max(FEW_REPLACED, MOST_REPLACED * own.characters):
        counts = {"replaced": own.replaced, "characters": own.characters}
        raise UsageError(Reason("engine.file-not-utf-8", {"path": str(path), **counts}))
    tally.characters += own.characters
    tally.replaced += own.replaced


def _json_rows(path: Path, text: io.TextIOWrapper, tally: Tally) -> Iterator[RawRow]:
    """Yield the rows of an array, or of lines; either may have either suffix."""
    number, line = 0, "\n"
    while line and not line.strip():
        number, line = number + 1, text.readline()
    if line.lstrip().startswith("["):
        whole = line + text.read()
        tally.characters += len(whole)
        rows = _parsed(_clean(whole, tally))
        if isinstance(rows, list):
            yield from (RawRow(f"{path}, row {place}", row, path) for place, row in enumerate(rows, start=1))
        else:
            yield RawRow(str(path), rows, path)
        return
    while line:
        if line.strip():
            tally.characters += len(line)
            row = _parsed(_clean(line, tally))
            yield RawRow(f"{path}:{number}", row, path)
        number, line = number + 1, text.readline()


def _clean(text: str, tally: Tally) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        text, replaced = _SURROGATES.subn("\ufffd", text)
        tally.replaced += replaced
    return text


def _parsed(text: str) -> Any:
    """Return the JSON value, or a RowError."""
    try:
        return parsed_json(text)
    except (ValueError, RecursionError) as error:
        return RowError(_json_problem(text.strip(" \t\r\n")), error=str(error))  # gzip begins with white space


def _json_problem(text: str) -> str:
    """Return the code of the reason why a line, or the whole of an array, is not JSON."""
    if text.startswith(LFS_POINTER):
        return "git-lfs-pointer"
    if text.startswith("\x1f"):
        return "json-is-gzip"
    if text.count("\0") > len(text) // 3 and "\0\0" not in text:  # every other byte
        return "json-is-utf-16"
    if "\0" in text:
        return "json-has-nul"
    if text in ("{", "["):
        return "json-over-lines"
    if re.match(r"[\[{]+\s*'", text):
        return "json-single-quotes"
    if re.search(r",\s*[\]}]+$", text) or text.endswith("},"):
        return "json-trailing-comma"
    return "json-invalid" if text.endswith(("}", "]")) else "json-cut"


def _parquet_batches(path: Path, at_once: int | None) -> Iterator[Any]:
    file = require("pyarrow.parquet", "parquet").ParquetFile(path)
    yield from file.iter_batches(**({} if at_once is None else {"batch_size": at_once}))


def _arrow_batches(path: Path, at_once: int | None) -> Iterator[Any]:
    with arrow_batches(local_file(path, "arrow")) as (_, batches):
        for batch in batches:
            size = at_once or max(1, batch.num_rows)
            yield from (batch.slice(start, size) for start in range(0, batch.num_rows, size))


_TABLES = {"parquet": _parquet_batches, "arrow": _arrow_batches}


def _as_json(value: Any, kind: Any) -> Any:
    """Return a value of an Arrow type as JSON has it, without the keys that parquet adds as null to objects in lists.

    The library datasets stores values of different forms in one column as JSON text (arrow.json); Spark writes maps.
    """
    if getattr(kind, "extension_name", "") == "arrow.json":
        return from_json(value)
    kind = getattr(kind, "storage_type", kind)
    if isinstance(value, dict):
        named = {key: _as_json(inner, kind.field(key).type) for key, inner in value.items()}
        return {key: inner for key, inner in named.items() if inner is not None or key == "content"}
    if not isinstance(value, list):
        return value
    if hasattr(kind, "item_type"):  # a map
        return {key: _as_json(inner, kind.item_type) for key, inner in value}
    return [_as_json(inner, kind.value_type) for inner in value]
