"""The rows of a data source for fine-tuning: of its files, or generated ones.

Generated are questions and answers about Python's standard library, from its docstrings, for tests and recipes.
"""

import ast
import hashlib
import inspect
import json
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from scaletrain_cli.data.content import combined_content, embedded_content, known_hashes, read_hashes
from scaletrain_cli.data.sources.records import local_file
from scaletrain_cli.data.sources.rows import RawRow, Tally, rows_in
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec import DataSpec
from scaletrain_cli.spec.corpus_files import (
    EMBEDDED,
    PYTHON_DOCSTRINGS,
    PYTHON_STDLIB,
    ROW_FORMATS,
    find_files,
    kind_of,
    unreadable_among,
)
from scaletrain_cli.spec.row_examples import Example, RowError, images_of, require_format_with_images
from scaletrain_cli.spec.row_formats import format_of, parse_row

_FEWEST_CHARACTERS = 20
_MOST_CHARACTERS = 600
_NAMES_PER_PAIR = 5


class _Documented(NamedTuple):
    name: str
    kind: str
    signature: str
    summary: str


def docstring_rows(*, pairs: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) for each documented function, method and class, in a fixed order.

    A row is a conversation: what something does and, for functions, how it is called. With ``pairs`` it has a
    ``chosen`` answer, and as the ``rejected`` one the answer about something else; pairs are made of fewer names,
    because a reference model reads all of them before training.
    """
    before: _Documented | None = None
    for where, symbol in _documented()[:: _NAMES_PER_PAIR if pairs else 1]:
        asked = {"role": "user", "content": f"What does the {symbol.kind} `{symbol.name}` do?"}
        answer = {"role": "assistant", "content": symbol.summary}
        if not pairs:
            messages = [asked, answer]
            if symbol.signature:
                messages.append({"role": "user", "content": "How is it called?"})
                messages.append({"role": "assistant", "content": f"`{symbol.signature}`"})
            yield where, {"messages": messages}
        elif before is not None and before.summary != symbol.summary:
            rejected = {"role": "assistant", "content": before.summary}
            yield where, {"prompt": [asked], "chosen": [answer], "rejected": [rejected]}
        before = symbol


@lru_cache(maxsize=1)  # a tokenizer is trained on the rows before they are encoded
def _documented() -> tuple[tuple[str, _Documented], ...]:
    return tuple(_read_library())


def _read_library() -> Iterator[tuple[str, _Documented]]:
    files = find_files(PYTHON_STDLIB)
    root = Path(ast.__file__).parent
    for path in files.files:
        relative = path.relative_to(root) if path.is_relative_to(root) else Path(path.name)
        parts = [part for part in relative.with_suffix("").parts if part != "__init__"]
        if any(part.startswith("_") for part in parts) or not parts:
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):  # a file of the library that this interpreter does not run
            continue
        for node, name in _definitions(tree, ".".join(parts)):
            if (text := _first_paragraph(ast.get_docstring(node))) is None:
                continue
            is_class = isinstance(node, ast.ClassDef)
            signature = "" if isinstance(node, ast.ClassDef) else f"{name}({ast.unparse(node.args)})"
            yield f"{path}:{node.lineno}", _Documented(name, "class" if is_class else "function", signature, text)


_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _definitions(tree: ast.Module | ast.ClassDef, before: str) -> Iterator[tuple[_Definition, str]]:
    for node in tree.body:
        if isinstance(node, _Definition) and not node.name.startswith("_"):
            name = f"{before}.{node.name}"
            yield node, name
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node, name)


def _first_paragraph(docstring: str | None) -> str | None:
    """Return the first paragraph on one line; None if it is very short or very long."""
    if docstring is None:
        return None
    text = " ".join(inspect.cleandoc(docstring).partition("\n\n")[0].split())
    return text if _FEWEST_CHARACTERS <= len(text) <= _MOST_CHARACTERS else None


_ROWS_WITH_IMAGES = 64


class RowImage(NamedTuple):
    """An image of a row. ``place``: for messages; ``path``: None if the row has the bytes of the file, ``content``."""

    place: str
    path: Path | None
    content: bytes | None = None


class Row(NamedTuple):
    """One row of the source. ``where``: its file and line; ``key``: its content as text, the same in every run.

    ``not_read``: its columns with content that its format does not use.
    """

    where: str
    example: Example
    weight: float
    key: str
    images: tuple[RowImage, ...] = ()
    not_read: tuple[str, ...] = ()


def rows_of(
    data: DataSpec, objective: str, tally: Tally | None = None, *, images: bool = False, validation: bool = False
) -> tuple[str, Iterator[Row]]:
    """Return the format of the rows and the rows. ``images``: rows may have images.

    ``validation``: the rows of data.validation_source, which must be set, in place of those of data.source.

    Raises UsageError, also while they are read; with data.on_bad: skip not for a row that cannot be used, which
    ``tally`` counts.
    """
    tally = tally or Tally()
    source = data.validation_source if validation else data.only_source
    assert source is not None
    raw = _raw_rows(source, objective, tally, _ROWS_WITH_IMAGES if images else None, validation=validation)
    row_format: str = data.format
    first: list[RawRow] = []
    while row_format == "auto" or not first:
        if (row := next(raw, None)) is None:
            raise UsageError(Reason("data.no-rows", {"source": source}))
        try:
            if row_format == "auto":
                row_format = format_of(row.content, objective, data.fields)
                if images:
                    require_format_with_images(row_format)
            first.append(row)
        except RowError as error:
            row_format = "auto"
            refuse_or_leave_out(row.where, error, data, tally)
    if data.loss_on == "last_assistant" and row_format in ("prompt_completion", "text"):
        raise UsageError(Reason("data.no-last-turn", {"format": row_format}))
    return row_format, _usable_rows(chain(first, raw), row_format, data, tally, images=images)


def _usable_rows(
    rows: Iterator[RawRow], row_format: str, data: DataSpec, tally: Tally, *, images: bool
) -> Iterator[Row]:
    for row in rows:
        try:
            example, weight, not_read = parse_row(row.content, row_format, data.fields, images=images)
            of_row = _images(row, data) if images else ()
        except RowError as error:
            refuse_or_leave_out(row.where, error, data, tally)
            continue
        key = json.dumps(row.content, sort_keys=True, default=_digest if images else str)
        yield Row(row.where, example, weight, key, of_row, not_read)


def refuse_or_leave_out(where: str, error: RowError, data: DataSpec, tally: Tally) -> None:
    """Raise UsageError for a row that cannot be used, or count it if such rows are left out."""
    refused = UsageError(error.at(where))
    if data.on_bad == "stop":
        raise refused
    tally.leave_out(str(refused))


def rows_content(source: str, runs_root: Path, *, validation: bool = False) -> str:
    """Return a hash of what a source of rows contains, computed or remembered. Raises UsageError.

    ``validation``: of a folder with splits, what is read for validation.
    """
    if source in EMBEDDED:
        return embedded_content(source)
    files = [local_file(path, kind_of(path)) for path in _files(source, validation=validation)]
    name = f"{source} for validation" if validation else source
    return combined_content(files, known_hashes(name, files, runs_root, read_hashes) or {})


def _images(raw: RawRow, data: DataSpec) -> tuple[RowImage, ...]:
    folder = raw.file.parent if data.images.folder is None else expand_home(data.images.folder)
    images = []
    for number, (name, content) in enumerate(images_of(raw.content, data.fields), start=1):
        path = folder / expand_home(name) if content is None else None
        images.append(RowImage(str(path or f"{raw.where}, image {number}"), path, content))
    return tuple(images)


def _digest(value: object) -> str:
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else str(value)


def _raw_rows(source: str, objective: str, tally: Tally, at_once: int | None, *, validation: bool) -> Iterator[RawRow]:
    if source == PYTHON_DOCSTRINGS:
        yield from (RawRow(*row) for row in docstring_rows(pairs=objective == "dpo"))
        return
    for path in _files(source, validation=validation):
        yield from rows_in(path, tally, at_once)


def _files(source: str, *, validation: bool) -> tuple[Path, ...]:
    """Return the files of a source in a fixed order. Raises UsageError if there are none or one cannot be read."""
    files = find_files(source, kinds=ROW_FORMATS, evaluation=validation).files
    if problem := unreadable_among(files):
        key = "data.validation_source" if validation else "data.source"
        raise UsageError(Reason("engine.data-source-unreadable", {"key": key, "source": source, "problem": problem}))
    return files
