"""The section of ranks, GPUs, nodes and layers: curves of some of them, and tables of their latest figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scaletrain_cli.markup import details, safe, table, value_text
from scaletrain_cli.report.chart import Chart, Span, draw
from scaletrain_cli.report.run_charts import line_of
from scaletrain_cli.text import counted

_CHARTS = {
    "memory": ("Memory of ranks", "bytes", False),
    "own": ("Work of ranks before they wait for others", "seconds", False),
    "causes": ("Step of rank 0 by cause", "seconds", False),
    "use": ("Use of GPUs", "share", False),
    "clocks": ("Clocks of GPUs", "hertz", False),
    "heat": ("Temperature of GPUs", "celsius", False),
    "layers": ("Gradient norm by layer", "", True),
    "noise": ("Gradient noise scale in sequences", "", True),
}
_UNITS = ("bytes_per_second", "bytes", "seconds", "hertz", "celsius", "watts")  # the ends of names of columns


def hardware_section(run: Mapping[str, Any], span: Span | None, tables: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the charts and tables. ``span``: of the other charts; ``tables``: the data of the page's script."""
    found = run["hardware"]
    if found is None:
        return
    marks = [mark for mark in run["marks"] if mark["kind"] in ("attempt", "rollback")]
    if span is not None:
        figures = [_figure(each, span, marks, run["planned"], tables) for each in found["curves"]]
        yield f'<div class="charts">{"".join(figures)}</div>'
    for key, title, count in (
        ("ranks", "rank", "rank_count"),
        ("gpus", "GPU", "gpu_count"),
        ("nodes", "node", None),
        ("layers", "layer", None),
    ):
        rows = found[key]
        if rows:
            total = found[count] if count else len(rows)
            shown = f", {len(rows)} of {total:,} shown" if total > len(rows) else ""
            yield details(
                f"{counted(total, title)}: latest figures{shown}", _table(title, rows), is_open=len(rows) <= 16
            )
    if not found["is_whole"]:
        yield "<p class='soft'>Of very many nodes, 64 at equal distances were read.</p>"


def _figure(
    curve: Mapping[str, Any],
    span: Span,
    marks: Sequence[Mapping[str, Any]],
    planned: Mapping[str, float | None],
    tables: list[dict[str, Any]],
) -> str:
    title, unit, logarithmic = _CHARTS[curve["key"]]
    lines = []
    for number, each in enumerate(curve["lines"]):
        name, banded = each["name"].replace("_", " "), len(curve["lines"]) <= 2
        column = {key: each[key] for key in ("mean", "low", "high")} | {"name": name}
        tables.append({"step": each["step"], "time": each["time"], "columns": {"value": column}})
        line = line_of(tables[-1] | {"attempt": each["attempt"]}, "value", name, f"c{number % 8}", len(tables) - 1)
        lines.append(line if banded else dataclasses.replace(line, low=(), high=()))
    levels = {"planned peak": planned["memory_bytes"], "device": planned["memory_capacity_bytes"]}
    known = [(name, value) for name, value in levels.items() if value is not None and curve["key"] == "memory"]
    from_zero = unit in ("bytes", "seconds", "share")
    chart = Chart(f"hardware-{curve['key']}", title, unit, lines, logarithmic, known, marks, from_zero=from_zero)
    return draw(chart, span)


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row if column != "name"))
    cells = (
        [safe(row["name"]), *(safe(value_text(row.get(column), _unit(column))) for column in columns)] for row in rows
    )
    return table([title, *(_title(column) for column in columns)], cells, "t" + "n" * len(columns))


def _unit(column: str) -> str:
    if column.startswith("throttled_by_") or column.endswith(("utilization", "_throttled", "_share")):
        return "share"
    return next((unit for unit in _UNITS if column.endswith(f"_{unit}")), "")


def _title(column: str) -> str:
    unit = _unit(column)
    return (column if unit == "share" else column.removesuffix(f"_{unit}")).replace("_", " ")
