"""Measurements of ranks, GPUs, nodes and layers as JSON values: the latest figures, and curves of some of them."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from scaletrain_cli.diagnosis.hardware import STEP_PARTS, Hardware, Recent
from scaletrain_cli.markup import details, safe, table, value_text
from scaletrain_cli.report.chart import Chart, Span, draw
from scaletrain_cli.report.run_charts import line_of
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.telemetry.run import read_telemetry
from scaletrain_cli.telemetry.series import Series
from scaletrain_cli.text import counted

_RANK_COLUMNS = (
    "step_seconds",
    "own_seconds",
    "communication_seconds",
    "data_wait_seconds",
    "host_seconds",
    "allocation_retries",
)
_GPU_COLUMNS = ("utilization", "sm_clock_hertz", "temperature_celsius", "power_watts", "memory_used_bytes")
_GPU_HIGHEST = (
    "throttled_by_power",
    "throttled_by_heat",
    "throttled_by_hardware",
    "uncorrected_errors",
    "pcie_replays",
)
_NODE_COLUMNS = (
    *("cpu_utilization", "cpu_throttled", "memory_used_bytes", "memory_available_bytes", "disk_read_bytes_per_second"),
    *("disk_written_bytes_per_second", "network_received_bytes_per_second", "network_sent_bytes_per_second"),
    *("infiniband_received_bytes_per_second", "infiniband_sent_bytes_per_second", "infiniband_errors"),
)
_LAYER_COLUMNS = ("gradient_norm", "weight_norm", "update_ratio", "activation_rms", "dead_share")
_MOST_ROWS, _MOST_LINES, _MOST_POINTS = 64, 8, 300
_NODES_OF_CURVES = 2  # whose whole files are read, about 1 MB each
_MOST_ATTEMPTS = 4


def hardware_of_run(run: RunDir, hardware: Hardware | None) -> dict[str, Any] | None:
    """Return the latest figures of ``hardware`` and the curves of ranks, GPUs and layers; None without telemetry.

    ``ranks`` and ``gpus`` are at most 64: those with the most memory, and the hottest ones. Curves are of the first and
    the last node that was read, of the latest four attempts.
    """
    if hardware is None:
        return None
    ranks = [_latest(f"{number}", rank, _RANK_COLUMNS, ("memory_bytes",)) for number, rank in hardware.ranks.items()]
    gpus = [_latest(name, gpu, _GPU_COLUMNS, _GPU_HIGHEST) for name, gpu in hardware.gpus.items()]
    nodes = [_latest(name, node, _NODE_COLUMNS, ()) for name, node in hardware.nodes.items()]
    curves, layers = _curves(run)
    return {
        "is_whole": hardware.is_whole,
        "rank_count": len(ranks),
        "gpu_count": len(gpus),
        "ranks": _first(ranks, "memory_bytes"),
        "gpus": _first(gpus, "temperature_celsius"),
        "nodes": nodes[:_MOST_ROWS],
        "layers": layers,
        "curves": curves,
    }


def _latest(name: str, recent: Recent, means: Sequence[str], highest: Sequence[str]) -> dict[str, Any]:
    values = {column: recent.mean(column) for column in means} | {column: recent.highest(column) for column in highest}
    return {"name": name, **{column: value for column, value in values.items() if value is not None}}


def _first(rows: Sequence[dict[str, Any]], column: str) -> list[dict[str, Any]]:
    """Return the rows in their order; of more than 64, those with the greatest values."""
    if len(rows) <= _MOST_ROWS:
        return list(rows)
    return sorted(rows, key=lambda row: -row.get(column, -math.inf))[:_MOST_ROWS]


def _curves(run: RunDir) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the curves over the latest attempts, and the latest figures of each layer."""
    lines: dict[tuple[str, str], list[dict[str, Any]]] = {}
    layers: dict[str, dict[str, Any]] = {}
    for attempt in run.attempts()[-_MOST_ATTEMPTS:]:
        telemetry = read_telemetry(run, attempt=attempt, most_nodes=_NODES_OF_CURVES)
        for name, series in telemetry.layers.items():
            layers[name] = _latest(name, Recent(series), _LAYER_COLUMNS, ())
        subjects = {f"rank {rank}": series for rank, series in telemetry.ranks.items()}
        first = [telemetry.ranks[min(telemetry.ranks)]] if telemetry.ranks else []
        for key, name, series, column in (
            *(("memory", name, series, "memory_bytes") for name, series in _some(subjects)),
            *(("own", name, series, "own_seconds") for name, series in _some(subjects)),
            *(("causes", part.removesuffix("_seconds"), series, part) for part in STEP_PARTS for series in first),
            *(("noise", "noise scale", series, "noise_scale") for series in first),
            *(("use", name, series, "utilization") for name, series in _some(telemetry.gpus)),
            *(("clocks", name, series, "sm_clock_hertz") for name, series in _some(telemetry.gpus)),
            *(("heat", name, series, "temperature_celsius") for name, series in _some(telemetry.gpus)),
            *(("layers", name, series, "gradient_norm") for name, series in _some(telemetry.layers)),
        ):
            if points := _points(series, column, attempt):
                lines.setdefault((key, name), []).append(points)
    charts: dict[str, list[dict[str, Any]]] = {}
    for (key, name), parts in lines.items():
        joined = {field: [value for part in parts for value in part[field]] for field in parts[0]}
        charts.setdefault(key, []).append({"name": name, **joined})
    return [{"key": key, "lines": curves} for key, curves in charts.items()], list(layers.values())[:256]


def _some(subjects: Mapping[str, Series]) -> Iterable[tuple[str, Series]]:
    """Return at most eight subjects, evenly spaced."""
    every = list(subjects.items())
    count = min(_MOST_LINES, len(every))
    return [every[round(number * (len(every) - 1) / max(1, count - 1))] for number in range(count)]


def _points(series: Series, column: str, attempt: int) -> dict[str, list[Any]] | None:
    """Return at most 300 points of a column, each with the extremes of the rows that it stands for."""
    if column not in series.mean or all(value != value for value in series.mean[column]):
        return None
    size = max(1, math.ceil(len(series.times) / _MOST_POINTS))
    points: dict[str, list[Any]] = {"step": [], "time": [], "attempt": [], "mean": [], "low": [], "high": []}
    for start in range(0, len(series.times), size):
        group = range(start, min(start + size, len(series.times)))
        known = [at for at in group if math.isfinite(series.mean[column][at])]
        if not known:
            continue
        total = sum(series.counts[at] for at in known)
        mean = sum(series.mean[column][at] * series.counts[at] for at in known) / max(1, total)
        points["step"].append(series.steps[group[-1]])
        points["time"].append(series.times[group[-1]])
        points["attempt"].append(attempt)
        points["mean"].append(float(f"{mean:.6g}"))
        points["low"].append(float(f"{min(series.lowest[column][at] for at in known):.6g}"))
        points["high"].append(float(f"{max(series.highest[column][at] for at in known):.6g}"))
    return points


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
    hardware = run["hardware"]
    if hardware is None:
        return
    marks = [mark for mark in run["marks"] if mark["kind"] in ("attempt", "rollback")]
    if span is not None:
        figures = [_figure(curve, span, marks, run["planned"], tables) for curve in hardware["curves"]]
        yield f'<div class="charts">{"".join(figures)}</div>'
    for key, title, count in (
        ("ranks", "rank", "rank_count"),
        ("gpus", "GPU", "gpu_count"),
        ("nodes", "node", None),
        ("layers", "layer", None),
    ):
        rows = hardware[key]
        if rows:
            total = hardware[count] if count else len(rows)
            shown = f", {len(rows)} of {total:,} shown" if total > len(rows) else ""
            yield details(
                f"{counted(total, title)}: latest figures{shown}", _table(title, rows), is_open=len(rows) <= 16
            )
    if not hardware["is_whole"]:
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
    for number, series in enumerate(curve["lines"]):
        name, banded = series["name"].replace("_", " "), len(curve["lines"]) <= 2
        column = {key: series[key] for key in ("mean", "low", "high")} | {"name": name}
        tables.append({"step": series["step"], "time": series["time"], "columns": {"value": column}})
        line = line_of(tables[-1] | {"attempt": series["attempt"]}, "value", name, f"c{number % 8}", len(tables) - 1)
        lines.append(line if banded else dataclasses.replace(line, low=(), high=()))
    levels = {"planned peak": planned["memory_bytes"], "device": planned["memory_capacity_bytes"]}
    known = [(name, value) for name, value in levels.items() if value is not None and curve["key"] == "memory"]
    from_zero = unit in ("bytes", "seconds", "share")
    chart = Chart(f"hardware-{curve['key']}", title, unit, lines, logarithmic, known, marks, from_zero=from_zero)
    return draw(chart, span)


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    units = {column: _unit(column) for row in rows for column in row if column != "name"}
    cells = ([safe(row["name"]), *(safe(value_text(row.get(key), units[key])) for key in units)] for row in rows)
    names = (key if unit == "share" else key.removesuffix(f"_{unit}") for key, unit in units.items())
    return table([title, *(name.replace("_", " ") for name in names)], cells, "t" + "n" * len(units))


def _unit(column: str) -> str:
    if column.startswith("throttled_by_") or column.endswith(("utilization", "_throttled", "_share")):
        return "share"
    return next((unit for unit in _UNITS if column.endswith(f"_{unit}")), "")
