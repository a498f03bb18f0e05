"""The HTML page of a report, and its sections about several runs or a sweep: figures and curves side by side."""

import dataclasses
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from scaletrain_cli.errors import UsageError
from scaletrain_cli.markup import axis_place, document, plain_value, safe, table, tiles, time_text, value_text
from scaletrain_cli.reasons import Reason
from scaletrain_cli.report.chart import HEIGHT, WIDTH, Chart, Line, draw, span_of
from scaletrain_cli.report.curves import MOST_BINS
from scaletrain_cli.report.reading import SCHEMA, read_run_report, without_secrets
from scaletrain_cli.report.run_charts import line_of, since_start
from scaletrain_cli.report.run_sections import SWITCH, figure_of, finding_item, rate_of, run_sections, step_text
from scaletrain_cli.rundir.paths import RunDir, Sweep, read_sweep_place
from scaletrain_cli.text import counted, percent_text, whole_text

_COLORS = 8
_SHADES = 5  # of the colors q0 to q4, the best to the worst
_BEST = 10
_CHARTS = (
    ("loss", "Training loss", "", False),
    ("grad_norm", "Gradient norm", "", True),
    ("learning_rate", "Learning rate", "", False),
    ("step_seconds", "Step time", "seconds", False),
    ("tokens_per_second", "Tokens per second", "per_second", False),
    ("samples_per_second", "Samples per second", "per_second", False),
    ("mfu", "MFU", "share", False),
    ("memory_bytes", "Memory of rank 0", "bytes", False),
)


def comparison_sections(report: Mapping[str, Any], tables: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the HTML of the sections. ``tables``: the data of the page's script, to which those of runs are added."""
    runs: Sequence[Mapping[str, Any]] = report["runs"]
    sweep = report["sweep"]
    order = ranked(report)
    yield f"<header><h1>{safe(sweep['name'] if sweep else f'{len(runs)} runs')}</h1>"
    yield f'<p class="verdict"><span>{safe(_summary(report, order))}</span></p>{tiles(_tiles(report, order))}</header>'
    if sweep:
        yield from _parallel(report, order)
        yield from _best_points(report, order)
    # The CSS class of each run: by its rank in a sweep, else one each.
    colors = {run["run_id"]: f"c{number % _COLORS}" for number, run in enumerate(runs)}
    if sweep:
        places = {run_id: place * _SHADES // len(order) for place, run_id in enumerate(order)}
        colors = {run_id: f"q{places.get(run_id, _SHADES - 1)}" for run_id in colors}
    figures = _figures(runs, order, colors, tables)
    if figures:
        yield f'<section id="curves"><h2>Curves</h2>{SWITCH}<div class="charts">{"".join(figures)}</div></section>'
    yield f'<section id="runs"><h2>Runs</h2>{_table_of_runs(report, colors)}</section>'
    if report["differences"]:
        yield f'<section id="differences"><h2>Differences of the specs</h2>{_differences(report)}</section>'
    yield f'<section id="diagnosis"><h2>Diagnosis</h2>{"".join(_findings(runs))}</section>'
    missing = [f"{entry['run_id']}: {entry['text']}" for entry in report["damaged"]]
    missing += [f"{run['run_id']}: {entry['text']}" for run in runs for entry in run["missing"]]
    if missing:
        rows = "".join(f"<li>{safe(text)}</li>" for text in missing)
        yield f'<section id="missing"><h2>Not in this report</h2><ul class="missing">{rows}</ul></section>'


def _summary(report: Mapping[str, Any], order: Sequence[str]) -> str:
    states = [run["status"]["state"] for run in report["runs"]]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    gone = report["sweep"]["points"] - len(states) if report["sweep"] else 0
    missing = f", {gone} of {report['sweep']['points']} not readable or deleted" if gone > 0 else ""
    if not order:
        return f"{counts}{missing}. No run has a loss yet."
    best = report["final"][order[0]]
    return f"{counts}{missing}. The best {_measure(report)} is {best:.4g}, of {order[0]}."


def _measure(report: Mapping[str, Any]) -> str:
    return "validation loss" if report["measure"] == "validation_loss" else "training loss"


def _tiles(report: Mapping[str, Any], order: Sequence[str]) -> Iterator[tuple[str, str, str, str]]:
    runs, final = report["runs"], report["final"]
    if order:
        spread = f"worst {final[order[-1]]:.4g}" if len(order) > 1 else ""
        yield f"best {_measure(report)}", f"{final[order[0]]:.4g}", spread, ""
    findings = [finding["severity"] for run in runs for finding in run["diagnosis"]["findings"]]
    worse = "bad" if "error" in findings else "attention" if "warning" in findings else ""
    yield (
        "findings",
        whole_text(len(findings)),
        f"{findings.count('error')} errors, {findings.count('warning')} warnings",
        worse,
    )
    costs = [run["status"]["cost_so_far_usd"] for run in runs if run["status"]["cost_so_far_usd"] is not None]
    yield "cost of all runs", value_text(sum(costs), "usd") if costs else "–", counted(len(runs), "run"), ""
    restarts = sum(run["status"]["restarts"] for run in runs)
    yield "restarts", whole_text(restarts), f"{sum(run['status']['steps_lost_total'] for run in runs):,} steps lost", ""


def _figures(
    runs: Sequence[Mapping[str, Any]], order: Sequence[str], colors: Mapping[str, str], tables: list[dict[str, Any]]
) -> list[str]:
    """Return the charts with a line for each run, the best drawn last; time is counted from each run's start."""
    trained = sorted(
        (run for run in runs if run["curves"]["kept"]["step"]),
        key=lambda run: order.index(run["run_id"]) if run["run_id"] in order else len(order),
    )
    if not trained:
        return []
    names, first = short_names([run["run_id"] for run in trained]), len(tables)
    shifted = [{**run["curves"]["kept"], "time": since_start(run, run["curves"]["kept"]["time"])} for run in trained]
    for kept, name in zip(shifted, names, strict=True):
        columns = {key: {**column, "name": name} for key, column in kept["columns"].items()}
        tables.append({"step": kept["step"], "time": kept["time"], "columns": columns})
    span = span_of([(kept["step"], kept["time"]) for kept in shifted], origin=0.0)
    charts = []
    for column, title, unit, logarithmic in _CHARTS:
        lines = []
        for at, (run, kept, name) in enumerate(zip(trained, shifted, names, strict=True)):
            if column in kept["columns"]:
                line = line_of(kept, column, name, colors[run["run_id"]], first + at)
                lines.append(dataclasses.replace(line, low=(), high=()) if len(trained) > 3 else line)
        is_loss = column == "loss"
        legend, from_zero = is_loss or len(lines) <= _COLORS, not (is_loss or logarithmic)
        key = f"compared-{column}"
        charts.append(
            Chart(key, title, unit, lines[::-1], logarithmic, is_large=is_loss, from_zero=from_zero, legend=legend)
        )
        if is_loss:
            charts.append(_validation_chart(trained, names, colors))
    return [figure for chart in charts if (figure := draw(chart, span))]


def _validation_chart(runs: Sequence[Mapping[str, Any]], names: Sequence[str], colors: Mapping[str, str]) -> Chart:
    lines = []
    for run, name in zip(runs, names, strict=True):
        rows = run["curves"]["validations"]
        times = since_start(run, [row["time"] for row in rows])
        values = [row["loss"] for row in rows]
        lines.append(Line(name, colors[run["run_id"]], [row["step"] for row in rows], times, values, kind="dots"))
    return Chart("validation", "Validation loss", "", lines[::-1], legend=len(lines) <= _COLORS)


def short_names(names: Sequence[str]) -> list[str]:
    """Return the names without the words that all begin with."""
    if len(names) < 2:
        return list(names)
    shared = len(list(itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))))
    cut = max(max(names[0].rfind(mark, 0, shared) for mark in "-_.") + 1, 0)
    return [name[cut:] or name for name in names]


def _table_of_runs(report: Mapping[str, Any], colors: Mapping[str, str]) -> str:
    rows = []
    names = short_names([run["run_id"] for run in report["runs"]]) if report["sweep"] else []
    for run, short in itertools.zip_longest(report["runs"], names):
        name, color = safe(short or run["run_id"]), colors[run["run_id"]]
        status, final = run["status"], report["final"][run["run_id"]]
        goodput = status["goodput"]
        severities = [finding["severity"] for finding in run["diagnosis"]["findings"]]
        rows.append(
            [
                f'<span class="swatch {color}"></span>{name}',
                safe(status["state"]),
                step_text(status),
                safe(value_text(status["loss"], "")),
                value_text(final, ""),
                safe(value_text(status["step_seconds"]["measured"], "seconds")),
                safe(value_text(status["step_seconds"]["planned"], "seconds")),
                safe(value_text(rate_of(status), "per_second")),
                safe(value_text(figure_of(run, "mfu")["measured"], "share")),
                "–" if goodput is None else percent_text(goodput["goodput"]),
                safe(value_text(status["cost_so_far_usd"], "usd")),
                whole_text(status["restarts"]),
                safe(", ".join(f"{severities.count(name)} {name}" for name in dict.fromkeys(severities))),
            ]
        )
    units = {run["status"]["unit"] for run in report["runs"]}
    titles = [
        "run",
        "state",
        "step",
        "last loss",
        f"final {_measure(report)}",
        "step time",
        "planned",
        f"{units.pop() if len(units) == 1 else 'samples'}/s",
    ]
    titles += ["MFU", "goodput", "cost", "restarts", "findings"]
    return table(titles, rows, "ltnnnnnnnnnnl")


def _differences(report: Mapping[str, Any]) -> str:
    names = short_names([run["run_id"] for run in report["runs"]])
    if len(names) <= 6:
        rows = (
            [
                f"<code>{safe(row['key'])}</code>",
                *(f"<code>{safe(plain_value(value))}</code>" for value in row["values"]),
            ]
            for row in report["differences"]
        )
        return table(["key", *names], rows, "t" + "l" * len(names))
    rows = (
        [f"<code>{safe(row['key'])}</code>", safe(", ".join(dict.fromkeys(map(plain_value, row["values"]))))]
        for row in report["differences"]
    )
    return table(["key", "values"], rows, "tl")


def _findings(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    found = False
    for run in runs:
        findings = run["diagnosis"]["findings"]
        if findings:
            found = True
            yield f"<h3>{safe(run['run_id'])}</h3><ul class='list'>{''.join(map(finding_item, findings))}</ul>"
    if not found:
        yield "<p>No findings.</p>"


def _best_points(report: Mapping[str, Any], order: Sequence[str]) -> Iterator[str]:
    parameters = report["sweep"]["parameters"]
    by_id = {run["run_id"]: run for run in report["runs"]}
    rows = [
        [
            str(place),
            *(safe("–" if (n := varied["values"].get(run_id)) is None else plain_value(n)) for varied in parameters),
            value_text(report["final"][run_id], ""),
            safe(by_id[run_id]["status"]["state"]),
            safe(value_text(by_id[run_id]["status"]["cost_so_far_usd"], "usd")),
            safe(run_id),
        ]
        for place, run_id in enumerate(order[:_BEST], 1)
    ]
    if rows:
        titles = ["", *(parameter["key"] for parameter in parameters), _measure(report), "state", "cost", "run"]
        listing = table(titles, rows, "n" * (2 + len(parameters)) + "tnl")
        yield f"<section id='best'><h2>Best points</h2>{listing}</section>"


def _parallel(report: Mapping[str, Any], order: Sequence[str]) -> Iterator[str]:
    """Yield parallel coordinates: an axis for each parameter, the last one for the final loss, a line for each run."""
    parameters, final = report["sweep"]["parameters"], report["final"]
    if not order or not parameters:
        return
    axes = [(parameter["key"], parameter["values"]) for parameter in parameters]
    axes.append((_measure(report), {run_id: final[run_id] for run_id in order}))
    scales = [_axis([values[run_id] for run_id in order if run_id in values]) for _, values in axes]
    labels, drawn = [], []
    for number, ((key, _), (_, ticks)) in enumerate(zip(axes, scales, strict=True)):
        left = 100 * number / (len(axes) - 1)
        side = ' class="first"' if number == 0 else ' class="last"' if number == len(axes) - 1 else ""
        drawn.append(f'<path class="axis" d="M{round(WIDTH * left / 100)} 0V{HEIGHT}"/>')
        labels.append(f'<b{side} style="left:{left:.2f}%">{safe(key.rpartition(".")[2])}</b>')
        labels += [
            f'<span{side} style="left:{left:.2f}%;bottom:{100 * at:.1f}%">{safe(text)}</span>' for at, text in ticks
        ]
    for place, run_id in reversed(list(enumerate(order))):
        points = [
            (round(WIDTH * number / (len(axes) - 1)), round(HEIGHT * (1 - scale(values[run_id]))))
            for number, ((_, values), (scale, _)) in enumerate(zip(axes, scales, strict=True))
            if run_id in values
        ]
        path = "L".join(f"{x} {y}" for x, y in points)
        best = " best" if place == 0 else ""
        shade = place * _SHADES // len(order)
        title = safe(f"{run_id}: {final[run_id]:.4g}")
        drawn.append(f'<path class="point q{shade}{best}" d="M{path}"><title>{title}</title></path>')
    name = f"parameters of {len(order)} runs, to the {_measure(report)}"
    yield (
        f'<section id="parameters"><h2>Parameters</h2><p class="soft"><small>A line is a run: blue the best fifth, '
        f'orange the worst, the thickest the best one. The table has the values.</small></p><div class="parallel">'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{safe(name)}">'
        f"<title>{safe(name)}</title>{''.join(drawn)}</svg>{''.join(labels)}</div></section>"
    )


_Scale = Callable[[Any], float]
_MOST_TICKS = 8


def _axis(values: Sequence[Any]) -> tuple[_Scale, list[tuple[float, str]]]:
    """Return the scale of an axis, 0 to 1, and its ticks: by value for numbers, in order of appearance for words."""
    numbers = [value for value in values if isinstance(value, float) and math.isfinite(value)]
    if len(numbers) < len(values) or not numbers:
        names = list(dict.fromkeys(map(str, values)))
        places = {name: (number + 0.5) / len(names) for number, name in enumerate(names)}
        return lambda value: places[str(value)], [(place, name) for name, place in places.items()]
    low, high = min(numbers), max(numbers)
    logarithmic = low > 0 and high / low >= 10

    def scale(value: Any) -> float:
        return 0.5 if high == low else axis_place(value, low, high, logarithmic=logarithmic)

    distinct = sorted(set(numbers))
    if len(distinct) > _MOST_TICKS:
        middle = math.sqrt(low * high) if logarithmic else (low + high) / 2
        distinct = [low, middle, high]
    return scale, [(scale(value), f"{value:.4g}") for value in distinct]


def page(report: Mapping[str, Any]) -> str:
    """Return the HTML document of a report (schema ``scaletrain.report/v1``)."""
    runs: Sequence[Mapping[str, Any]] = report["runs"]
    is_one = len(runs) == 1 and report["sweep"] is None and not report["damaged"]
    tables: list[dict[str, Any]] = []
    body: Iterable[str] = run_sections(runs[0], tables) if is_one else comparison_sections(report, tables)
    title = runs[0]["run_id"] if is_one else report["sweep"]["name"] if report["sweep"] else f"{len(runs)} runs"
    sections = list(body)  # which fills the tables
    data = json.dumps(tables, allow_nan=False, separators=(",", ":"))
    # ends no script element and begins no comment
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    parts = [
        *sections,
        f'<p class="soft">Made {time_text(report["made"])} UTC by <code>scaletrain report</code>.</p>',
        '<div id="tip" role="status"></div>',
        f'<script type="application/json" id="data">{data}</script>',
    ]
    return document(f"{title}: report", parts, files(__package__).joinpath("page.js").read_text(encoding="utf-8"))


MOST_RUNS = 256
_POINTS = 12_000  # of all curves of one kind in a page
_FEWEST_BINS = 60
_LAST_VALUES = 20


def read_report(runs: Sequence[RunDir], sweep: Sweep | None = None) -> dict[str, Any]:
    """Return the report (docs/json.md). Of several runs, those that cannot be read are in ``damaged``.

    Raises UsageError if none can be read.
    """
    if len(runs) > MOST_RUNS:
        raise UsageError(Reason("report.many-runs", {"runs": len(runs), "most": MOST_RUNS}))
    bins = MOST_BINS if len(runs) == 1 else max(_FEWEST_BINS, min(MOST_BINS // 2, _POINTS // len(runs)))
    reports: list[dict[str, Any]] = []
    damaged: list[dict[str, str]] = []
    for run in runs:
        try:
            reports.append(read_run_report(run, most_bins=bins))
        except UsageError as error:
            if sweep is None and run == runs[-1] and not reports:
                raise
            damaged.append({"run_id": run.run_id, "text": error.message})
    trained = [run for run in reports if run["curves"]["kept"]["step"]]
    validated = all(run["status"]["validation_loss"] is not None for run in trained)
    measure = "validation_loss" if reports and validated else "loss"
    specs = [{row["key"]: row["value"] for row in run["spec"]["keys"]} for run in reports]
    keys = dict.fromkeys(key for spec in specs for key in spec if key != "name")
    rows = [{"key": key, "values": [spec.get(key) for spec in specs]} for key in keys]
    return {
        "schema": SCHEMA,
        "made": time.time(),
        "runs": reports,
        "damaged": damaged,
        # keys whose values differ, None where a spec lacks the key
        "differences": [row for row in rows if any(value != row["values"][0] for value in row["values"])],
        "measure": measure,
        "final": {run["run_id"]: _final(run, measure) for run in reports},
        "sweep": None if sweep is None else _sweep(sweep, runs),
    }


def ranked(report: Mapping[str, Any]) -> list[str]:
    """Return the ids of the runs with a final loss, the best first."""
    known = {run_id: value for run_id, value in report["final"].items() if value is not None}
    return sorted(known, key=lambda run_id: known[run_id])


def _final(run: Mapping[str, Any], measure: str) -> float | None:
    """Return the last validation loss, or the median of the last 20 points of the training loss."""
    if measure == "validation_loss":
        loss = run["status"]["validation_loss"]
        return loss if isinstance(loss, float) else None
    means = [value for value in run["curves"]["kept"]["columns"].get("loss", {"mean": []})["mean"] if value is not None]
    return statistics.median(means[-_LAST_VALUES:]) if means else None


def _sweep(sweep: Sweep, runs: Sequence[RunDir]) -> dict[str, Any]:
    """Return the name and size of a sweep, and its parameters with their values by run."""
    given: dict[str, dict[str, Any]] = {}
    for run in runs:
        place = read_sweep_place(run)
        for override in () if place is None else place.overrides:
            key, _, value = without_secrets(override).partition("=")
            given.setdefault(key.strip(), {})[run.run_id] = _parsed(value)
    return {
        "name": sweep.name,
        "points": sweep.points,
        "parameters": [{"key": key, "values": by} for key, by in given.items()],
    }


def _parsed(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
