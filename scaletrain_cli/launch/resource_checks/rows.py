"""Check the first rows of the data for fine-tuning: their columns and their messages."""

from __future__ import annotations

import zlib
from pathlib import Path

from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import DataSpec
from scaletrain_cli.spec.corpus_files import (
    first_rows,
    kind_of,
    parquet_names,
    row_file_problem,
    sample_of,
    unreadable_among,
)
from scaletrain_cli.spec.row_formats import RowError, columns_of, format_of, parse_row

_ROWS_PER_FILE = 8


def problem_of_rows(files: tuple[Path, ...], data: DataSpec, objective: str) -> Reason | None:
    """Return the first problem of the files, or of the first rows of a sample of them; None if there is none."""
    if unreadable := unreadable_among(files):
        return Reason("checks.source-file", {"why": unreadable})
    for path in sample_of(files):
        try:
            if why := row_file_problem(path):
                return Reason("checks.source-file", {"why": f"{path}: {why}"})
            look = _parquet_problem if kind_of(path) == "parquet" else _problem_of_first_rows
            if found := look(path, data, objective):
                return found
        except (EOFError, zlib.error) as error:
            return Reason("checks.source-file", {"why": f"{path}: is not a complete gzip file: {error}"})
        except OSError as error:
            return Reason("checks.source-file", {"why": f"{path}: cannot be read: {error.strerror or error}"})
    return None


def _problem_of_first_rows(path: Path, data: DataSpec, objective: str) -> Reason | None:
    row_format: str = data.format
    for where, row in first_rows(path, _ROWS_PER_FILE):
        try:
            if row_format == "auto":
                row_format = format_of(row, objective, data.fields)
            parse_row(row, row_format, data.fields)
        except RowError as error:
            return Reason("checks.source-row", {"where": where, "problem": error.reason})
    return None


def _parquet_problem(path: Path, data: DataSpec, objective: str) -> Reason | None:
    """Return the problem of a parquet file by the names in its footer: reading it requires pyarrow."""
    needed = columns_of(data.format, objective, data.fields)
    if any(parquet_names(path, columns) == columns for columns in needed):
        return None
    params = {"needed": [" and ".join(columns) for columns in needed]}
    return Reason("checks.source-row", {"where": str(path), "problem": Reason("data.parquet-columns", params)})
