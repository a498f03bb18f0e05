"""Check the first rows of the data for fine-tuning: their columns and their messages."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec import DataSpec
from scaletrain_cli.spec.corpus_files import (
    kind_of,
    parquet_names,
    parquet_problem,
    sample_of,
    unreadable_among,
)
from scaletrain_cli.spec.data import FORMATS_WITH_IMAGES
from scaletrain_cli.spec.row_formats import (
    RowError,
    columns_of,
    format_of,
    images_of,
    parse_row,
    require_format_with_images,
)

_ROWS_PER_FILE = 8


def problem_of_rows(
    files: tuple[Path, ...], data: DataSpec, objective: str, folder: Path, *, images: bool = False
) -> Reason | None:
    """Return the first problem of the files, or of the first rows of a sample of them; None if there is none.

    ``images``: rows may have images, whose files must exist. ``folder``: the base of a relative data.images.folder.
    """
    if unreadable := unreadable_among(files):
        return Reason("checks.source-file", {"why": unreadable})
    for path in sample_of(files):
        try:
            if kind_of(path) == "parquet":
                if why := parquet_problem(path):
                    return Reason("checks.source-file", {"why": f"{path}: {why}"})
                found = _parquet_problem(path, data, objective, images=images)
            elif kind_of(path) != "arrow" or find_spec("pyarrow") is not None:
                beside = path.parent if data.images.folder is None else folder / expand_home(data.images.folder)
                found = _problem_of_first_rows(path, data, objective, beside if images else None)
            if found:
                return found
        except UsageError as error:
            return error.reason
        except OSError as error:
            return Reason("checks.source-file", {"why": f"{path}: cannot be read: {error.strerror or error}"})
    return None


def _problem_of_first_rows(path: Path, data: DataSpec, objective: str, images: Path | None) -> Reason | None:
    """``images``: the folder of the images of the rows; None: rows have none."""
    from scaletrain_cli.data.sources.rows import Tally, rows_in  # which imports numpy

    row_format: str = data.format
    for where, row, _ in islice(rows_in(path, Tally()), _ROWS_PER_FILE):
        try:
            if row_format == "auto":
                row_format = format_of(row, objective, data.fields)
            if images is None:
                parse_row(row, row_format, data.fields)
                continue
            require_format_with_images(row_format)
            parse_row(row, row_format, data.fields, images=True)
            for name, content in images_of(row, data.fields):
                if content is None and not (images / expand_home(name)).is_file():
                    place = str(images / expand_home(name))
                    return Reason("checks.row-without-image", {"where": where, "path": place})
        except RowError as error:
            if data.on_bad == "stop":
                return error.at(where)
    return None


def _parquet_problem(path: Path, data: DataSpec, objective: str, *, images: bool) -> Reason | None:
    """Return the problem of a parquet file by the names in its footer: reading it requires pyarrow."""
    formats = FORMATS_WITH_IMAGES if images and data.format == "auto" else (data.format,)
    needed = [columns for each in formats for columns in columns_of(each, objective, data.fields)]
    if any(parquet_names(path, columns) == columns for columns in needed):
        return None
    params = {"needed": [" and ".join(columns) for columns in needed]}
    return RowError("parquet-columns", **params).at(str(path))
