"""The curves of one run as charts: the order, units, planned levels and marks."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scaletrain_cli.report.chart import Chart, Line, Span, draw, span_of

_SOURCES = 8
_SOURCE = "loss/"


def span_of_run(run: Mapping[str, Any]) -> Span | None:
    """Return the steps and the time of a run, from the start of its first attempt; None without measured steps."""
    kept, attempts = run["curves"]["kept"], run["attempts"]
    if not kept["step"]:
        return None
    parts = [(kept["step"], kept["time"]), *((part["step"], part["time"]) for part in run["curves"]["undone"])]
    return span_of(parts, attempts[0]["started"] if attempts else None)


def chart_figures(run: Mapping[str, Any], span: Span | None, tables: list[dict[str, Any]]) -> list[str]:
    """Return the figures of a run, the loss first; none without measured steps.

    ``tables``: the data of the page's script, to which those of the charts are added.
    """
    if span is None:
        return []
    number = len(tables)
    tables.append(_table(run["curves"]["kept"]))
    rows = run["curves"]["validations"]
    columns: dict[str, dict[str, Any]] = {"loss": {"name": "validation", "mean": [row["loss"] for row in rows]}}
    for source in sorted({name for row in rows for name in row["sources"]}):
        columns[source] = {"name": f"{source}, validation", "mean": [row["sources"].get(source) for row in rows]}
    tables.append(
        {
            "few": True,
            "step": [row["step"] for row in rows],
            "time": [row["time"] for row in rows],
            "columns": columns,
        }
    )
    return [figure for chart in _charts(run, number) if (figure := draw(chart, span))]


def _table(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a run for the script of the page, with the names that it shows."""
    columns = {
        name: {**column, "name": name.removeprefix(_SOURCE) if name.startswith(_SOURCE) else _NAMES.get(name, name)}
        for name, column in kept["columns"].items()
    }
    return {"step": kept["step"], "time": kept["time"], "columns": columns}


_NAMES = {
    "loss": "training",
    "grad_norm": "norm",
    "learning_rate": "learning rate",
    "step_seconds": "step",
    "data_wait": "waiting for data",
    "tokens_per_second": "tokens",
    "samples_per_second": "samples",
    "mfu": "MFU",
    "memory_bytes": "memory of rank 0",
    "loss_scale": "loss scale",
}


def line_of(table: Mapping[str, Any], column: str, name: str, color: str, number: int | None, **more: Any) -> Line:
    """Return the line of a column; without values if the run does not measure it."""
    curve = table["columns"].get(column, {"mean": [None] * len(table["step"])})
    return Line(
        name=name,
        color=color,
        steps=table["step"],
        times=table["time"],
        values=curve["mean"],
        low=curve.get("low", ()),
        high=curve.get("high", ()),
        parts=table["attempt"],
        data=None if number is None else (number, column),
        **more,
    )


def _charts(run: Mapping[str, Any], number: int) -> Iterator[Chart]:
    curves, planned, what = run["curves"], run["planned"], run["what"]
    kept, undone, marks = curves["kept"], curves["undone"], run["marks"]
    plain = [mark for mark in marks if mark["kind"] in ("attempt", "rollback")]

    def lines(column: str, name: str, color: str = "c0") -> list[Line]:
        faint = [
            line_of(part, column, "undone", "c5", None, kind="faint") for part in undone if column in part["columns"]
        ]
        return [line_of(kept, column, name, color, number), *faint]

    def level(name: str, text: str = "planned") -> list[tuple[str, float]]:
        return [(text, planned[name])] if planned[name] else []

    def chart(key: str, title: str, unit: str, drawn: Sequence[Line], **more: Any) -> Chart:
        return Chart(key, title, unit, drawn, marks=plain, **more)

    validated = curves["validations"]
    loss = lines("loss", "training")
    if validated:
        loss.append(_validation_line(validated, None, "validation", "c1", number + 1))
    yield Chart("loss", "Loss", "", loss, marks=marks, is_large=True)
    sources = [name for name in kept["columns"] if name.startswith(_SOURCE)][:_SOURCES]
    if sources:
        by_source = [
            line_of(kept, name, name.removeprefix(_SOURCE), f"c{at}", number) for at, name in enumerate(sources)
        ]
        names = [name.removeprefix(_SOURCE) for name in sources]
        by_source += [
            _validation_line(validated, name, f"{name}, validation", f"c{at}", number + 1)
            for at, name in enumerate(names)
            if any(name in row["sources"] for row in validated)
        ]
        yield chart("sources", "Loss by source", "", by_source)
    clip = [("clipped at", what["clipping"])] if what["clipping"] else []
    norm = lines("grad_norm", "before clipping", "c3")
    yield chart("gradients", "Gradient norm", "", norm, logarithmic=True, levels=clip)
    rate = lines("learning_rate", "learning rate", "c2")
    yield chart("rate", "Learning rate", "", rate, from_zero=True, legend=False)
    seconds = lines("step_seconds", "step")
    columns = [kept["columns"].get(name) or {"mean": []} for name in ("data_wait", "step_seconds")]
    waited, whole = (sum(value or 0.0 for value in column["mean"]) for column in columns)
    if waited > 0.02 * whole > 0:
        seconds.append(line_of(kept, "data_wait", "waiting for data", "c1", number))
    yield chart("step-time", "Step time", "seconds", seconds, levels=level("step_seconds"), from_zero=True)
    samples = str(run["status"]["unit"]).capitalize()
    for column, title, unit, color in (
        ("tokens_per_second", "Tokens per second", "per_second", "c2"),
        ("samples_per_second", f"{samples} per second", "per_second", "c2"),
        ("mfu", "MFU", "share", "c3"),
    ):
        yield chart(column, title, unit, lines(column, "measured", color), levels=level(column), from_zero=True)
    yield chart("loss-scale", "Loss scale", "", lines("loss_scale", "loss scale", "c4"), logarithmic=True, legend=False)
    if run["hardware"] is not None and any(curve["key"] == "memory" for curve in run["hardware"]["curves"]):
        return  # that of all ranks is among those of the hardware
    memory = [*level("memory_bytes"), *level("memory_capacity_bytes", "device")]
    yield chart("memory", "Memory", "bytes", lines("memory_bytes", "rank 0", "c6"), levels=memory, from_zero=True)


def _validation_line(rows: Sequence[Mapping[str, Any]], source: str | None, name: str, color: str, number: int) -> Line:
    values = [row["loss"] if source is None else row["sources"].get(source) for row in rows]
    steps, times = [row["step"] for row in rows], [row["time"] for row in rows]
    return Line(name, color, steps, times, values, kind="dots", data=(number, "loss" if source is None else source))


def since_start(run: Mapping[str, Any], times: Sequence[float | None]) -> list[float | None]:
    """Return times in seconds since the first attempt of a run."""
    attempts = run["attempts"]
    start = attempts[0]["started"] if attempts else next((at for at in times if at is not None), 0.0)
    return [None if at is None else round(at - start, 3) for at in times]
