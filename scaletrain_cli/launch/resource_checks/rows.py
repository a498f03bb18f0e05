"""Check the first rows of a sample of files, as the built-in engine would read them."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec import DataSpec
from scaletrain_cli.spec.corpus_files import kind_of, parquet_names, parquet_problem, sample_of, unreadable_among
from scaletrain_cli.spec.data import FORMATS_OF, FORMATS_WITH_IMAGES
from scaletrain_cli.spec.row_examples import RowError
from scaletrain_cli.spec.row_formats import columns_of, format_of, parse_row
from scaletrain_cli.spec.row_images import images_of, require_format_with_images

if TYPE_CHECKING:
    from scaletrain_cli.data.tokenizers.chat_templates import TemplateFiles

_ROWS_PER_FILE = 8


def problem_of_rows(
    files: tuple[Path, ...],
    data: DataSpec,
    objective: str,
    folder: Path,
    templates: TemplateFiles | None = None,
    *,
    images: bool = False,
) -> Reason | None:
    """Return the first problem of the files, or of the first rows of a sample of them; None if there is none.

    ``images``: rows may have images, whose files must exist. ``folder``: the base of a relative data.images.folder.
    ``templates``: one must be there for rows with messages; None if that is not known.
    """
    if unreadable := unreadable_among(files):
        return Reason("checks.source-file", {"why": unreadable})
    for path in sample_of(files):
        try:
            if kind_of(path) == "parquet":
                if why := parquet_problem(path):
                    return Reason("checks.source-file", {"why": f"{path}: {why}"})
                found = _parquet_problem(path, data, objective, templates, images=images)
            elif kind_of(path) != "arrow" or find_spec("pyarrow") is not None:
                beside = path.parent if data.images.folder is None else folder / expand_home(data.images.folder)
                found = _problem_of_first_rows(path, data, objective, templates, beside if images else None)
            if found:
                return found
        except UsageError as error:
            return error.reason
        except OSError as error:
            return Reason("checks.source-file", {"why": f"{path}: cannot be read: {error.strerror or error}"})
    return None


def _problem_of_first_rows(
    path: Path, data: DataSpec, objective: str, templates: TemplateFiles | None, images: Path | None
) -> Reason | None:
    """``images``: the folder of the images of the rows; None: rows have none."""
    from scaletrain_cli.data.sources.rows import Tally, rows_in  # which imports numpy

    row_format: str = data.format
    for where, row, _ in islice(rows_in(path, Tally()), _ROWS_PER_FILE):
        try:
            if row_format == "auto":
                row_format = format_of(row, objective, data.fields)
            if images is not None:
                require_format_with_images(row_format)
            example = parse_row(row, row_format, data.fields, images=images is not None).example
        except RowError as error:
            if data.on_bad == "stop":
                return error.at(where)
            continue
        try:
            if templates is not None:  # else each row would be a bad one
                templates.require_template(example, data.tokenizer.path or "bpe")
        except RowError as error:
            return error.at(where)
        if images is None:
            continue
        for name, content in images_of(row, data.fields):
            if content is None and not (images / expand_home(name)).is_file():
                return Reason("checks.row-without-image", {"where": where, "path": str(images / expand_home(name))})
    return None


def _parquet_problem(
    path: Path, data: DataSpec, objective: str, templates: TemplateFiles | None, *, images: bool
) -> Reason | None:
    """Return the problem of a parquet file by the names in its footer: reading it requires pyarrow."""
    of_objective = FORMATS_WITH_IMAGES if images else FORMATS_OF[objective]
    needed = []
    for row_format in of_objective if data.format == "auto" else (data.format,):
        (columns,) = columns_of(row_format, objective, data.fields)
        needed.append(" and ".join(columns))
        if parquet_names(path, columns) != columns:
            continue
        if row_format in ("messages", "sharegpt", "alpaca") and templates is not None:
            try:
                templates.template_for(None, data.tokenizer.path or "bpe")
            except RowError as error:
                return error.at(str(path))
        return None
    return RowError("parquet-columns", needed=needed).at(str(path))
