"""The texts of evaluation files, for the step ``contamination``; with the standard library alone.

A line of a ``.txt`` file is an item, and so is each of the given fields of a row of a ``.jsonl`` file.
"""

import glob
import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason


def evaluation_items(patterns: Iterable[str], fields: Iterable[str]) -> Iterator[str]:
    """Yield the texts of all files that the paths and globs name.

    Raises UsageError with file and line if there is no file, or if one cannot be read or has none of the fields.
    """
    paths: list[Path] = []
    for pattern in patterns:
        matches = sorted(Path(path) for path in glob.glob(pattern, recursive=True) if Path(path).is_file())
        if not matches:
            raise UsageError(Reason("document_steps.files-missing", {"pattern": pattern}), file=pattern)
        paths += matches
    yield from _items(list(dict.fromkeys(paths)), tuple(fields))


def _items(files: Iterable[Path], fields: tuple[str, ...]) -> Iterator[str]:
    """Yield the texts of evaluation files: each line of a text file, each of the fields of a row."""
    for file in files:
        kind = file.with_suffix("").suffix if file.suffix == ".gz" else file.suffix
        if kind not in (".txt", ".jsonl"):
            raise UsageError(Reason("document_steps.file-format", {"file": str(file)}), file=str(file))
        for number, line in enumerate(_lines(file), start=1):
            if kind == ".txt":
                yield line
            elif line.strip():
                yield from _texts(line, file, number, fields)


def _lines(file: Path) -> Iterator[str]:
    try:
        with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
            yield from lines
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UsageError(
            Reason("document_steps.file-unreadable", {"file": str(file), "error": str(error)}), file=str(file)
        ) from error


def _texts(line: str, file: Path, number: int, fields: tuple[str, ...]) -> Iterator[str]:
    place: dict[str, Any] = {"file": str(file), "line": number}
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise UsageError(Reason("document_steps.item-not-object", place), file=str(file))
    if not any(field in row for field in fields):
        params = place | {"fields": list(fields), "columns": sorted(row)}
        raise UsageError(Reason("document_steps.item-without-fields", params), file=str(file))
    for field in fields:
        value = row.get(field)
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                yield text
            elif text is not None:
                raise UsageError(Reason("document_steps.item-not-text", place | {"field": field}), file=str(file))
