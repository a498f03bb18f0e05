"""Images in parquet files: a column of bytes, or of {bytes, path} as the datasets library writes it, and others."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from scaletrain_cli.data.images.samples import MOST_IMAGE_BYTES, Bad, Found, ImageSettings, TargetError, json_value
from scaletrain_cli.data.sources.opening import stored
from scaletrain_cli.data.sources.records import SourceFile, require_unchanged
from scaletrain_cli.data.sources.stores import is_remote
from scaletrain_cli.errors import UsageError
from scaletrain_cli.extras import require
from scaletrain_cli.reasons import Reason

IMAGE, LABEL, CAPTION = ("image", "img", "jpg", "png", "webp"), ("label", "labels", "cls"), ("caption", "text", "txt")
UNIT_BYTES = 256 << 20
_ROWS_AT_ONCE = 64
_MOST_SHOWN = 20
_IN_JSON = "json:"


@dataclass(frozen=True)
class TableUnit:
    """Groups of rows of one parquet file, the one with ``number`` among those of the source.

    ``first_row``: the number of the first row of ``first_group``. ``split``: that its name says, or empty.
    """

    number: int
    file: SourceFile
    split: str
    first_group: int
    last_group: int
    first_row: int

    def samples(self, settings: ImageSettings) -> Iterator[Found | Bad]:
        """Yield the rows; those of a group that cannot be read are bad samples."""
        arrow = require("pyarrow", "parquet")
        require_unchanged(self.file)
        with opened_table(self.file) as table:
            columns = table_columns(table.schema_arrow, settings, self.file.path)
            names = list(dict.fromkeys(column for column in columns.values() if column is not None))
            row = self.first_row
            for group in range(self.first_group, self.last_group):
                start = row
                try:
                    for batch in table.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=names):
                        for values in batch.to_pylist():
                            yield self._sample(values, columns, group, row, row - start, settings)
                            row += 1
                except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
                    if isinstance(error, OSError) and error.errno is not None:  # of the storage, not of the data
                        raise
                    require_unchanged(self.file)
                    for lost in range(row, start + table.metadata.row_group(group).num_rows):
                        yield Bad(_place(self.file, lost), Reason("images.table-damaged", {"error": _line(error)}))
                row = start + table.metadata.row_group(group).num_rows
        require_unchanged(self.file)

    def _sample(
        self,
        values: Mapping[str, Any],
        columns: Mapping[str, str | None],
        group: int,
        row: int,
        row_of_group: int,
        settings: ImageSettings,
    ) -> Found | Bad:
        place = _place(self.file, row)
        image: Any = values[str(columns["image"])]
        if isinstance(image, dict):
            if image.get("bytes") is None and image.get("path"):
                return Bad(place, Reason("images.path-without-bytes", {"path": str(image["path"])}))
            image = image.get("bytes")
        if image is None:
            return Bad(place, Reason("images.no-bytes", {"column": columns["image"]}))
        if len(image) > MOST_IMAGE_BYTES:
            return Bad(place, Reason("images.file-too-large", {"most": MOST_IMAGE_BYTES}))
        label, caption = (values[name] if (name := columns[part]) else None for part in ("label", "caption"))
        if settings.caption.startswith(_IN_JSON) and settings.captions:
            try:
                caption = json_value(str(caption).encode(), settings.caption.removeprefix(_IN_JSON))
            except TargetError as error:
                return Bad(place, error.reason)
        key = f"{PurePosixPath(self.file.path).stem}:{row}"
        at = group << 32 | row_of_group
        return Found(self.split, self.number, at, key, "", bytes(image), label, caption, place)


def table_units(number: int, file: SourceFile, split: str) -> Iterator[TableUnit]:
    """Yield the units of a parquet file, each of about UNIT_BYTES. Raises UsageError for one that cannot be read."""
    with opened_table(file) as table:
        sizes = [table.metadata.row_group(group) for group in range(table.metadata.num_row_groups)]
        first = row = held = rows = 0
        for group, about in enumerate(sizes):
            held += about.total_byte_size
            rows += about.num_rows
            if held >= UNIT_BYTES or group == len(sizes) - 1:
                yield TableUnit(number, file, split, first, group + 1, row)
                first, row, held = group + 1, rows, 0


@contextmanager
def opened_table(file: SourceFile) -> Iterator[Any]:
    """Open a parquet file, here or remote. Raises UsageError for one that is none, and OSError."""
    arrow, parquet = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
    with stored(file) as source:
        try:
            table = parquet.ParquetFile(arrow.PythonFile(source, mode="r") if is_remote(file.path) else source)
        except (arrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            where = {"where": file.path, "problem": Reason("images.table-damaged", {"error": _line(error)})}
            raise UsageError(Reason("images.source-unusable", where), file=file.path) from error
        with table:
            yield table


def table_columns(schema: Any, settings: ImageSettings, path: str) -> dict[str, str | None]:
    """Return the columns of the image, the label and the caption; None for one that is not read.

    Raises UsageError if one is missing, or is not what it must be.
    """
    caption = "json" if settings.caption.startswith(_IN_JSON) else settings.caption
    columns = {
        "image": _column(schema, settings.image, IMAGE, "image", path),
        "label": _column(schema, settings.label, LABEL, "label", path) if settings.targets != "none" else None,
        "caption": _column(schema, caption, CAPTION, "caption", path) if settings.captions else None,
    }
    kind = schema.field(columns["image"]).type
    if not _holds_bytes(kind):
        params = {"column": columns["image"], "type": " ".join(str(kind).split())}
        raise _unusable(path, Reason("images.column-without-bytes", params))
    return columns


def image_leaf(schema: Any, settings: ImageSettings, path: str) -> tuple[str, bool]:
    """Return the column with the bytes of the images as pyarrow names it, and True if it is within a struct."""
    name = _column(schema, settings.image, IMAGE, "image", path)
    in_struct = require("pyarrow", "parquet").types.is_struct(schema.field(name).type)
    return (f"{name}.bytes" if in_struct else name), in_struct


def _column(schema: Any, named: str, usual: Sequence[str], part: str, path: str) -> str:
    names = usual if named == "auto" else (named,)
    if (column := next((name for name in names if name in schema.names), None)) is None:
        params = {"columns": list(names), "found": schema.names[:_MOST_SHOWN], "key": f"data.images.fields.{part}"}
        raise _unusable(path, Reason("images.no-column", params))
    return column


def _holds_bytes(kind: Any) -> bool:
    types = require("pyarrow", "parquet").types
    if types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and _holds_bytes(kind.field("bytes").type)
    return any(check(kind) for check in (types.is_binary, types.is_large_binary, types.is_binary_view))


def names_of_classes(file: SourceFile, settings: ImageSettings) -> tuple[str, ...]:
    """Return the names of the classes that the datasets library has written to a parquet file; empty if there are none.

    Raises UsageError for a file that cannot be read, or that lacks a column.
    """
    with opened_table(file) as table:
        schema = table.schema_arrow
        column = table_columns(schema, settings, file.path)["label"]
        try:
            feature = json.loads(schema.metadata[b"huggingface"])["info"]["features"][column]
            names = feature.get("feature", feature)["names"]
        except (KeyError, TypeError, ValueError, AttributeError):
            return ()
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _unusable(path: str, reason: Reason) -> UsageError:
    return UsageError(Reason("images.source-unusable", {"where": path, "problem": reason}), file=path)


def _place(file: SourceFile, row: int) -> str:
    return f"{file.path}, row {row + 1}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
