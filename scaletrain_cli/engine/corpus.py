"""Documents to train on, as text: the Python standard library's own source, or the user's files. Knows no tokens."""

from __future__ import annotations

import glob
import importlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from scaletrain_cli.errors import UsageError
from scaletrain_cli.extras import install_command

PYTHON_STDLIB = "python-stdlib"
# Not the library itself: installed packages, and tests, whose generated tables are not prose or code worth learning.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_FORMATS = ("txt", "md", "py", "jsonl", "parquet")
_LONGEST_TEXT_DOCUMENT = 1 << 20  # characters


def source_files(source: str) -> list[Path]:
    """The files of a corpus in a fixed order. Raises UsageError when there are none, or of a kind we cannot read."""
    if source == PYTHON_STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        found = [p for p in root.rglob("*.py") if not _SKIPPED_FOLDERS & set(p.relative_to(root).parts)]
        return sorted(found)
    path = Path(source).expanduser()
    if path.is_dir():
        found = [entry for entry in path.rglob("*") if entry.is_file()]
    else:  # a name may hold what a glob would interpret
        found = [path] if path.exists() else [Path(name) for name in glob.glob(str(path), recursive=True)]
    files = sorted(entry for entry in found if entry.suffix.lstrip(".") in _FORMATS)
    if not files:
        raise UsageError(
            f"data.source = {source}: no {', '.join(_FORMATS)} file there. "
            f"Give {PYTHON_STDLIB}, a prepared dataset, or a path or glob of text files."
        )
    return files


def corpus_identity(source: str) -> list[str]:
    """What makes two corpora the same without reading them: names, sizes and times, or the interpreter's version."""
    if source == PYTHON_STDLIB:
        return [PYTHON_STDLIB, sys.version]
    return [f"{path.absolute()} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in source_files(source)]


def documents(source: str) -> Iterator[str]:
    """Every document's text. jsonl and parquet hold one document per row, in the field ``text``."""
    for path in source_files(source):
        if path.suffix == ".jsonl":
            with path.open(encoding="utf-8", errors="replace") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield _text_field(path, number, line)
        elif path.suffix == ".parquet":
            yield from _parquet(path)
        else:
            yield from _pieces(path)


def _pieces(path: Path) -> Iterator[str]:
    """A text file as documents of whole lines, bounded so that a large file is streamed and can be split."""
    with path.open(encoding="utf-8", errors="replace") as file:
        while piece := "".join(file.readlines(_LONGEST_TEXT_DOCUMENT)):
            if piece.strip():
                yield piece


def _text_field(path: Path, number: int, line: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise UsageError(f'{path}:{number}: each line must be a JSON object with a string in "text"')
    return text.encode("utf-8", "replace").decode()  # JSON may hold lone surrogates


def _parquet(path: Path) -> Iterator[str]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UsageError(f"{path}: reading parquet needs pyarrow. Run {install_command('parquet')}.") from error
    for batch in parquet.ParquetFile(path).iter_batches(columns=["text"]):
        yield from (str(value) for value in batch.column(0).to_pylist())
