"""Readers of parquet and Arrow files: one document per row. Places are numbers of rows, counted from 0."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from scaletrain_cli.data.sources.lines import record_of
from scaletrain_cli.data.sources.opening import stored
from scaletrain_cli.data.sources.records import BadRecord, Columns, Part, Record, SourceFile
from scaletrain_cli.data.sources.stores import is_remote
from scaletrain_cli.extras import require
from scaletrain_cli.reasons import Reason

_ARROW_MAGIC = b"ARROW1"
_ROWS_AT_ONCE = 1024


class _TableReader:
    def place_text(self, file: SourceFile, place: int) -> str:
        """Return ``path, row N``, counted from 1."""
        return f"{file.path}, row {place + 1}"


class Parquet(_TableReader):
    """Parquet files; a part is a range of rows that begins and ends with a row group."""

    def parts(self, file: SourceFile, part_bytes: int) -> Iterator[tuple[int, int]]:
        parquet = require("pyarrow.parquet", "parquet")
        start = stop = size = 0
        try:
            with _input(file) as content:
                metadata = parquet.read_metadata(content)
        except require("pyarrow", "parquet").ArrowException:
            yield 0, 0  # whose records name the fault
            return
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            stop += group.num_rows
            size += group.total_byte_size
            if size >= part_bytes:
                yield start, stop
                start, size = stop, 0
        if stop > start or not stop:
            yield start, stop

    def records(self, part: Part) -> Iterator[Record | BadRecord]:
        arrow, parquet = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
        with _faults(arrow) as fault, _input(part.file) as content, parquet.ParquetFile(content) as file:
            if (problem := _column_problem(arrow, file.schema_arrow, part.columns)) is not None:
                yield BadRecord(part.start, problem)
                return
            groups, first = [], 0
            for number in range(file.metadata.num_row_groups):
                if part.start <= first < part.stop:
                    groups.append(number)
                first += file.metadata.row_group(number).num_rows
            names = [part.columns.text, *part.columns.others]
            place = part.start
            for group in groups:  # one at a time, so that damage leaves the groups before it
                fault.place = place
                for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=[group], columns=names):
                    yield from _rows(batch, place, part.columns)
                    fault.place = place = place + batch.num_rows
        yield from fault.record()


class Arrow(_TableReader):
    """Arrow IPC files and streams (the ``datasets`` library writes streams); one part per file."""

    def parts(self, file: SourceFile, part_bytes: int) -> Iterator[tuple[int, int]]:
        yield 0, 1 << 62

    def records(self, part: Part) -> Iterator[Record | BadRecord]:
        arrow = require("pyarrow", "parquet")
        with _faults(arrow) as fault, arrow_batches(part.file) as (schema, batches):
            if (problem := _column_problem(arrow, schema, part.columns)) is not None:
                yield BadRecord(0, problem)
                return
            place = 0
            for batch in batches:
                for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                    yield from _rows(batch.slice(start, _ROWS_AT_ONCE), place + start, part.columns)
                fault.place = place = place + batch.num_rows
        yield from fault.record()


@contextmanager
def arrow_batches(file: SourceFile) -> Iterator[tuple[Any, Iterator[Any]]]:
    """Return schema and record batches of an IPC file or stream. Raises as stored() does, and ArrowException."""
    arrow = require("pyarrow", "parquet")
    with _input(file) as source:
        is_file = source.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC
        source.seek(0)
        reader = arrow.ipc.open_file(source) if is_file else arrow.ipc.open_stream(source)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
        yield reader.schema, batches


@contextmanager
def _input(file: SourceFile) -> Iterator[Any]:
    """Open a file for pyarrow. Raises as stored() does."""
    arrow = require("pyarrow", "parquet")
    if not is_remote(file.path):
        with arrow.OSFile(file.path) as local:
            yield local
        return
    with stored(file) as remote, arrow.PythonFile(remote, mode="r") as source:
        yield source


class _Fault:
    """The error that ended the reading of a file, and the row it was at."""

    def __init__(self) -> None:
        self.place = 0
        self.error: Exception | None = None

    def record(self) -> Iterator[BadRecord]:
        if self.error is not None:
            yield BadRecord(self.place, Reason("sources.table-damaged", {"error": " ".join(str(self.error).split())}))


@contextmanager
def _faults(arrow: Any) -> Iterator[_Fault]:
    """Keep an error of the library. Faults of the storage, which it raises as OSError with a number, go on."""
    fault = _Fault()
    try:
        yield fault
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        fault.error = error
    except OSError as error:
        if error.errno is not None:
            raise
        fault.error = error


def _column_problem(arrow: Any, schema: Any, columns: Columns) -> Reason | None:
    if columns.text not in schema.names:
        return Reason("sources.no-field", {"field": columns.text, "columns": schema.names[:20]})
    if missing := [name for name in columns.others if name not in schema.names]:
        return Reason("sources.no-column", {"column": missing[0], "columns": schema.names[:20]})
    kind = schema.field(columns.text).type
    if arrow.types.is_dictionary(kind):  # so pandas writes its categories
        kind = kind.value_type
    if any(check(kind) for check in (arrow.types.is_string, arrow.types.is_large_string, arrow.types.is_string_view)):
        return None
    return Reason("sources.not-text", {"field": columns.text, "type": str(kind)})


def _rows(batch: Any, place: int, columns: Columns) -> Iterator[Record | BadRecord]:
    for number, row in enumerate(batch.select([columns.text, *columns.others]).to_pylist()):
        if row[columns.text] is None:
            yield BadRecord(place + number, Reason("sources.not-text", {"field": columns.text, "type": "null"}))
        else:
            yield record_of(place + number, row, columns)
