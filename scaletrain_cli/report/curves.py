"""The curves of a run for a page: metrics.jsonl reduced to at most 600 bins of steps, each with mean, least and most.

A spike of one step stays, because each bin keeps its extremes. A file of more than 16 MB is read in 1,024 pieces; of
each piece, lines at equal distances are decoded, and the lines that hold its least and greatest loss, gradient norm and
step time. The cost is therefore about 3 microseconds a line.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from scaletrain_cli.diagnosis.history import kept_step, metrics_place, number_in
from scaletrain_cli.rundir.documents import parse_json
from scaletrain_cli.rundir.evaluations import measures_in
from scaletrain_cli.safe_files import open_to_read

MOST_BINS = 600
COLUMNS = (
    *("loss", "grad_norm", "learning_rate", "step_seconds", "data_wait", "tokens_per_second", "samples_per_second"),
    *("mfu", "memory_bytes", "loss_scale"),
)
_SOURCE_LOSS = "loss/"
_VALIDATION_LOSS = "validation_loss"
_WHOLE_BYTES = 16_000_000
_PIECES, _ROWS_OF_PIECE = 1024, 48
_MOST_VALIDATIONS = 2000
_MOST_UNDONE = 120  # bins of steps that were undone, for each time
_EXTREMES = tuple(
    re.compile(rb'"%s":(-?[\d.]+(?:[eE][-+]?\d+)?)' % name) for name in (b"loss", b"grad_norm", b"step_seconds")
)
_VALIDATED = b'"validation_'
_BEGUN = ("from-scratch", "started", "resumed", "rolled-back")


@dataclass(frozen=True)
class _Row:
    """A line of metrics.jsonl; ``chosen`` for its extreme value, so that it must not count in a mean."""

    step: int
    values: Mapping[str, Any]
    chosen: bool = False


@dataclass(frozen=True)
class Curves:
    """JSON values. ``kept``: the steps of the run; ``undone``: those after which it went back, in the order of events.

    A table has ``step``, ``time`` (Unix seconds), ``attempt``, and ``columns`` by name, each with ``mean`` and, where
    bins have several steps, ``low`` and ``high``; None: not measured. ``validations``: a row for each, with its losses.
    """

    kept: dict[str, Any]
    undone: list[dict[str, Any]]
    validations: list[dict[str, Any]]
    rows_read: int
    every_row_read: bool


def read_curves(path: Path, events: Sequence[Mapping[str, Any]], *, most_bins: int = MOST_BINS) -> Curves:
    """Return the curves in a metrics.jsonl, empty without the file. ``events``: of the same run. Raises OSError."""
    kept: list[_Row] = []
    undone: list[list[_Row]] = []
    validations: dict[int, dict[str, Any]] = {}
    read, is_whole = 0, True
    try:
        with open_to_read(path) as file:
            size = os.fstat(file.fileno()).st_size
            is_whole = size <= _WHOLE_BYTES
            for limit, rows in _parts(file, size, events):
                gone: list[_Row] = []
                for row in rows:
                    read += 1
                    is_kept = row.step <= limit
                    if _VALIDATION_LOSS in row.values:
                        if is_kept:
                            validations[row.step] = _validation(row)
                    elif "loss" in row.values:
                        (kept if is_kept else gone).append(row)
                if gone:
                    undone.append(gone)
    except FileNotFoundError:
        pass
    kept.sort(key=lambda row: row.step)
    few = kept[:: max(1, len(kept) // 2000)]
    sources = sorted({key for row in few for key in row.values if key.startswith(_SOURCE_LOSS)})
    names = [name for name in (*COLUMNS, *sources) if any(number_in(row.values.get(name)) is not None for row in few)]
    ordered = [validations[step] for step in sorted(validations)]
    return Curves(
        kept=_table(_latest(kept), names, most_bins),
        undone=[_table(sorted(rows, key=lambda row: row.step), names, _MOST_UNDONE) for rows in undone],
        validations=ordered[:: max(1, math.ceil(len(ordered) / most_bins))],
        rows_read=read,
        every_row_read=is_whole,
    )


def _parts(file: BinaryIO, size: int, events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, Iterator[_Row]]]:
    """Yield the rows between two events, each time with the last step that the later events leave valid."""
    places = sorted((metrics_place(event), kept_step(event)) for event in events if event.get("event") in _BEGUN)
    ends = sorted({min(place, size) for place, _ in places if place > 0} | {size})
    start = 0
    for end in ends:
        limit = min((step for place, step in places if place >= end and place > start), default=math.inf)
        if end > start:
            yield limit, _rows(file, start, end, size)
        start = end


def _rows(file: BinaryIO, start: int, end: int, size: int) -> Iterator[_Row]:
    """Yield rows of the lines between two offsets in the file, in its order."""
    if size <= _WHOLE_BYTES:
        file.seek(start)
        yield from _decoded(file.read(end - start).split(b"\n"), set())
        return
    pieces = max(1, round(_PIECES * (end - start) / size))
    rest, file_place = b"", start
    for number in range(1, pieces + 1):
        until = start + (end - start) * number // pieces
        file.seek(file_place)
        data = rest + file.read(until - file_place)
        file_place = until
        whole, line_end, rest = data.rpartition(b"\n") if number < pieces else (data, b"", b"")
        if number < pieces and not line_end:
            whole, rest = b"", data
        lines = whole.split(b"\n")
        stride = max(1, len(lines) // _ROWS_OF_PIECE)
        extremes = set[bytes]()  # lines with the least and the greatest loss, gradient norm and step time
        for pattern in _EXTREMES if stride > 1 else ():
            matches = sorted(pattern.finditer(whole), key=lambda match: float(match[1]))
            for match in {*matches[:1], *matches[-1:]}:
                extremes.add(whole[whole.rfind(b"\n", 0, match.start()) + 1 :].partition(b"\n")[0])
        regular = lines[::stride]
        validated = _with(whole, _VALIDATED) if stride > 1 else []
        yield from _decoded([*regular, *(line for line in extremes if line not in regular), *validated], extremes)


def _with(data: bytes, text: bytes) -> list[bytes]:
    """Return the lines that contain a text."""
    lines: list[bytes] = []
    at = data.find(text)
    while at >= 0 and len(lines) < _MOST_VALIDATIONS:
        end = data.find(b"\n", at)
        end = len(data) if end < 0 else end
        lines.append(data[data.rfind(b"\n", 0, at) + 1 : end])
        at = data.find(text, end)
    return lines


def _decoded(lines: Sequence[bytes], extremes: set[bytes]) -> Iterator[_Row]:
    for line in lines:
        try:
            row = parse_json(line) if line else None
        except ValueError:
            continue
        if isinstance(row, dict) and type(row.get("step")) is int:
            yield _Row(row["step"], row, line in extremes)


def _validation(row: _Row) -> dict[str, Any]:
    prefix = f"{_VALIDATION_LOSS}/"
    return {
        "step": row.step,
        "time": number_in(row.values.get("time")),
        "loss": number_in(row.values.get(_VALIDATION_LOSS)),
        "sources": {
            key.removeprefix(prefix): number_in(value) for key, value in row.values.items() if key.startswith(prefix)
        },
        "measures": {key: number_in(value) for key, value in measures_in(row.values).items()},
    }


def _latest(rows: Sequence[_Row]) -> list[_Row]:
    """Return sorted rows without earlier ones of the same step, which a later attempt has trained again."""
    latest: list[_Row] = []
    for row in rows:
        if latest and latest[-1].step == row.step:
            latest[-1] = row
        else:
            latest.append(row)
    return latest


def _table(rows: Sequence[_Row], names: Sequence[str], most_bins: int) -> dict[str, Any]:
    """Return the rows as columns of at most ``most_bins`` bins of equal numbers of steps."""
    bins = _bins(rows, most_bins)
    columns: dict[str, dict[str, list[float | None]]] = {}
    for name in names:
        means: list[float | None] = []
        lows: list[float | None] = []
        highs: list[float | None] = []
        for group in bins:
            values = [(value, row.chosen) for row in group if (value := number_in(row.values.get(name))) is not None]
            usual = [value for value, chosen in values if not chosen] or [value for value, _ in values]
            means.append(_short(math.fsum(usual) / len(usual)) if usual else None)
            lows.append(_short(min(value for value, _ in values)) if values else None)
            highs.append(_short(max(value for value, _ in values)) if values else None)
        columns[name] = {"mean": means} | ({} if lows == highs else {"low": lows, "high": highs})
    middle = [group[len(group) // 2] for group in bins]
    return {
        "step": [group[-1].step for group in bins],
        "time": [number_in(row.values.get("time")) for row in middle],
        "attempt": [row.values.get("attempt") if type(row.values.get("attempt")) is int else None for row in middle],
        "columns": columns,
    }


def _bins(rows: Sequence[_Row], most: int) -> list[list[_Row]]:
    if len(rows) <= most:
        return [[row] for row in rows]
    first, last = rows[0].step, rows[-1].step
    bins: list[list[_Row]] = [[] for _ in range(most)]
    for row in rows:
        bins[(row.step - first) * most // (last - first + 1)].append(row)
    return [group for group in bins if group]


def _short(value: float) -> float:
    """Return a value with six significant digits."""
    return float(f"{value:.6g}")
