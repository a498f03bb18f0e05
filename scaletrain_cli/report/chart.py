"""Charts of a report: curves as SVG that stretches to its place, with axes and marks in HTML of a fixed size.

A line is at most 600 points in whole units of a grid of 2400 x 800, about 7 bytes a point. Each chart is drawn twice,
over steps and over time; a style sheet shows one of them.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from scaletrain_cli.markup import axis_place, details, safe, table, value_text
from scaletrain_cli.text import seconds_text, whole_text

WIDTH, HEIGHT = 2400, 800
Kind = Literal["line", "faint", "dots"]
Axis = Literal["step", "time"]
_TABLE_ROWS = 12
_TICKS = 5
_NEAR = 0.02  # of the width: flags that are nearer than this are drawn beside each other
_SECONDS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200)
_DAYS = (1, 2, 5, 10, 20, 50, 100, 200, 500)


@dataclass(frozen=True)
class Line:
    """Values over steps and over times (Unix seconds). ``color``: its CSS class; ``data``: its table and column.

    ``low`` and ``high``: the band of each point, or empty. ``parts``: a line is broken where these change.
    """

    name: str
    color: str
    steps: Sequence[int]
    times: Sequence[float | None]
    values: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    parts: Sequence[int | None] = ()
    kind: Kind = "line"
    data: tuple[int, str] | None = None


@dataclass(frozen=True)
class Span:
    """The ranges of the axes that all charts of a page share. ``origin``: Unix seconds that time is counted from."""

    first_step: int
    last_step: int
    origin: float
    seconds: float

    def place(self, axis: Axis, step: int, time: float | None) -> float | None:
        """Return a place on the axis, 0 to 1 within the span; None without a time."""
        if axis == "step":
            return (step - self.first_step) / max(1, self.last_step - self.first_step)
        return None if time is None or self.seconds <= 0 else (time - self.origin) / self.seconds


@dataclass(frozen=True)
class Chart:
    """A chart to draw. ``levels``: (text, value) of horizontal lines; ``marks``: as in the report of a run."""

    key: str
    title: str
    unit: str
    lines: Sequence[Line]
    logarithmic: bool = False
    levels: Sequence[tuple[str, float]] = ()
    marks: Sequence[Mapping[str, Any]] = ()
    is_large: bool = False
    from_zero: bool = False
    note: str = ""
    legend: bool = field(default=True)


def draw(chart: Chart, span: Span) -> str:
    """Return the figure; empty if no line has a value."""
    if (scale := _scale(chart)) is None:
        return ""
    steps = _plot(chart, scale, span, "step")
    times = _plot(chart, scale, span, "time") if span.seconds > 0 else ""
    ticks = "".join(
        f'<span style="bottom:{100 * scale.share(value):.2f}%">{safe(_tick_text(value, chart.unit, scale))}</span>'
        for value in scale.ticks
    )
    series = ";".join(f"{line.data[0]}:{line.color}:{line.data[1]}" for line in chart.lines if line.data is not None)
    name = f"{chart.title}, {'logarithmic, ' if chart.logarithmic else ''}over steps or time"
    ends = {"s0": span.first_step, "s1": span.last_step, "t0": span.origin, "t1": span.origin + span.seconds}
    edges = " ".join(f'data-{name}="{value:.3f}"' for name, value in ends.items())
    legend = _legend(chart) if chart.legend else ""
    size = " large" if chart.is_large else ""
    return (
        f'<figure class="chart{size}" id="{safe(chart.key)}"><figcaption><b>{safe(chart.title)}</b>{legend}'
        f"{f'<small>{safe(chart.note)}</small>' if chart.note else ''}</figcaption>{_flags(chart, span)}"
        f'<div class="plot"><div class="y" aria-hidden="true">{ticks}</div>'
        f'<div class="area" tabindex="0" role="group" aria-label="{safe(name)}" data-unit="{safe(chart.unit)}" '
        f'data-series="{safe(series)}" {edges}>{steps}{times}<i class="cursor"></i></div>'
        f"{_x_axis(span, 'step')}{_x_axis(span, 'time') if times else ''}</div>"
        f"{details('Values', _values_table(chart))}</figure>"
    )


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    logarithmic: bool
    ticks: Sequence[float]
    cut: bool  # values above ``high`` are drawn at the upper edge

    def share(self, value: float) -> float:
        """Return the height of a value, 0 to 1 within the scale."""
        return axis_place(value, self.low, self.high, logarithmic=self.logarithmic)


def _scale(chart: Chart) -> _Scale | None:
    """Return the scale for the values that are kept; what is far above all others leaves it at the top."""
    values = [
        value
        for line in chart.lines
        if line.kind != "faint"
        for values in (line.values, line.low, line.high)
        for value in values
        if value is not None and math.isfinite(value) and (value > 0 or not chart.logarithmic)
    ]
    if not values:
        return None
    values.sort()
    low, high = values[0], values[-1]
    usual = values[min(len(values) - 1, int(0.985 * len(values)))]
    cut = False
    if not chart.logarithmic and high > usual + 3 * (usual - low) and usual > low:
        high, cut = usual + 0.6 * (usual - low), True
    near = [value for _, value in chart.levels if low / 4 <= value <= 2.5 * max(high, 1e-300) and value > 0]
    low, high = min([low, *near]), max([high, *near])
    if chart.from_zero and low > 0 and not chart.logarithmic:
        low = 0.0
    if chart.logarithmic:
        low, high = (low / 1.1, high * 1.1) if high > low else (low / 2, high * 2)
        return _Scale(low, high, True, _log_ticks(low, high), cut)
    margin = 0.04 * (high - low) or 0.5 * abs(high) or 1.0
    low, high = (low if chart.from_zero and low == 0 else low - margin), high + margin
    return _Scale(low, high, False, _ticks(low, high), cut)


def _ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / _TICKS
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= rough)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    stride = max(1, len(decades) // _TICKS)
    factors = (1.0, 2.0, 5.0) if len(decades) <= 3 else (1.0,)
    values = [factor * 10.0**decade for decade in decades[::stride] for factor in factors]
    ticks = [value for value in values if low <= value <= high]
    return ticks if len(ticks) >= 2 else _ticks(low, high)


def _tick_text(value: float, unit: str, scale: _Scale) -> str:
    if unit in ("bytes", "seconds", "per_second", "share", "hertz", "celsius") and value != 0:
        return value_text(value, unit).removesuffix("/s").strip()
    return "0" if abs(value) < 1e-12 * max(abs(scale.low), abs(scale.high)) else f"{value:.4g}"


def _x_positions(line: Line, span: Span, axis: Axis) -> list[float | None]:
    return [span.place(axis, step, time) for step, time in zip(line.steps, line.times, strict=True)]


def _plot(chart: Chart, scale: _Scale, span: Span, axis: Axis) -> str:
    grid = "".join(f"M0 {_y(scale, value)}H{WIDTH}" for value in scale.ticks)
    parts = [f'<path class="grid" d="{grid}"/>', *_mark_lines(chart.marks, span, axis)]
    for text, value in chart.levels:
        if 0 <= scale.share(value) <= 1:
            title = f"{text}: {value_text(value, chart.unit)}"
            parts.append(f'<path class="level" d="M0 {_y(scale, value)}H{WIDTH}"><title>{safe(title)}</title></path>')
    for line in chart.lines:
        parts += _line_paths(line, _x_positions(line, span, axis), scale, breaks=axis == "time")
    name = f"{chart.title} over {'steps' if axis == 'step' else 'time'}"
    cut = _cut_marks(chart, scale, span, axis)
    return (
        f'<svg class="by-{axis}" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{safe(name)}"><title>{safe(name)}</title>{"".join(parts)}</svg>{cut}'
    )


def _y(scale: _Scale, value: float) -> int:
    return round(HEIGHT * (1 - min(1.02, max(-0.02, scale.share(value)))))


def _line_paths(line: Line, places: Sequence[float | None], scale: _Scale, *, breaks: bool) -> Iterator[str]:
    """Yield the band and the line of a curve; a value that is not known is a gap."""
    runs = list(_runs(line, places, breaks=breaks))
    if line.kind == "dots":
        points = [(x, y) for run in runs for x, y, _, _ in run]
        dots = "".join(f"M{round(WIDTH * x)} {_y(scale, y)}h0" for x, y in points)
        yield f'<path class="dots {line.color}" d="{dots}"/>'
        if len(points) > 1:
            yield f'<path class="thin {line.color}" d="{_path([(x, y) for x, y in points], scale)}"/>'
        return
    if line.low and line.high:
        bands = "".join(_band(run, scale) for run in runs if len(run) > 1)
        yield f'<path class="band {line.color}" d="{bands}"/>'
    drawn = "".join(_path([(x, y) for x, y, _, _ in run], scale) for run in runs)
    yield f'<path class="{line.kind} {line.color}" d="{drawn}"/>'


_Point = tuple[float, float, float, float]


def _runs(line: Line, places: Sequence[float | None], *, breaks: bool) -> Iterator[list[_Point]]:
    """Yield the points (x, value, low, high) between gaps; a line that went back on the axis begins again."""
    run: list[_Point] = []
    part: int | None = None
    lows, highs = line.low or line.values, line.high or line.values
    parts = line.parts or [None] * len(line.values)
    for x, value, low, high, of in zip(places, line.values, lows, highs, parts, strict=True):
        gap = value is None or x is None or not math.isfinite(value)
        if run and (gap or (breaks and of != part) or (x is not None and x < run[-1][0])):
            yield run
            run = []
        if not gap:
            run.append((x, value, value if low is None else low, value if high is None else high))  # type: ignore[arg-type]
        part = of
    if run:
        yield run


def _path(points: Sequence[tuple[float, float]], scale: _Scale) -> str:
    """Return the path through points, relative to each other: the shortest form."""
    grid = [(round(WIDTH * x), _y(scale, value)) for x, value in points]
    if not grid:
        return ""
    if len(grid) == 1:
        return f"M{grid[0][0]} {grid[0][1]}h0"
    moves = [f"{x - x0} {y - y0}" for (x0, y0), (x, y) in itertools.pairwise(grid)]
    return f"M{grid[0][0]} {grid[0][1]}l{' '.join(moves)}".replace(" -", "-")


def _band(run: Sequence[_Point], scale: _Scale) -> str:
    upper = [(x, high) for x, _, _, high in run]
    lower = [(x, low) for x, _, low, _ in reversed(run)]
    return f"{_path([*upper, *lower], scale)}z"


def _mark_lines(marks: Sequence[Mapping[str, Any]], span: Span, axis: Axis) -> Iterator[str]:
    saves = []
    for mark in marks:
        if (x := mark_place(mark, span, axis)) is None:
            continue
        at = round(WIDTH * x)
        if mark["kind"] == "checkpoint":
            saves.append(f"M{at} {HEIGHT}v-22")
            continue
        if mark["kind"] == "rollback" and axis == "step":
            from_x = mark_place({**mark, "step": mark["to_step"]}, span, axis) or 0.0
            left = round(WIDTH * from_x)
            yield f'<rect class="undone" x="{left}" y="0" width="{max(1, at - left)}" height="{HEIGHT}"/>'
        yield f'<path class="mark {safe(mark["kind"])}" d="M{at} 0V{HEIGHT}"><title>{safe(mark["text"])}</title></path>'
    if saves:
        yield f'<path class="saves" d="{"".join(saves)}"><title>checkpoints</title></path>'


def mark_place(mark: Mapping[str, Any], span: Span, axis: Axis) -> float | None:
    """Return the place of a mark on the axis, 0 to 1; None if it is not on it."""
    place = span.place(axis, mark["step"], mark["time"])
    if place is None or axis == "step":
        return None if place is None else min(1.0, max(0.0, place))
    return place if -0.01 <= place <= 1.01 else None


def _flags(chart: Chart, span: Span) -> str:
    """Return the row of flags above a large chart: attempts, rollbacks, findings."""
    if not chart.is_large:
        return ""
    symbols = {"attempt": "", "rollback": "↩", "spike": "▲", "finding": "!"}
    rows = []
    for axis in ("step", "time"):
        flags: list[str] = []
        before, beside = -1.0, 0
        for mark in sorted(chart.marks, key=lambda flag: mark_place(flag, span, axis) or 0.0):
            place = mark_place(mark, span, axis) if mark["kind"] in symbols else None
            if place is None:
                continue
            text = f"{mark.get('attempt') or ''}" if mark["kind"] == "attempt" else symbols[mark["kind"]]
            if mark["kind"] == "finding":
                text = f"{mark['number']}"
            kind = f"{mark['kind']} {mark.get('severity', '')}".strip()
            beside = beside + 1 if place - before < _NEAR else 0
            before = place
            style = f"left:{100 * place:.2f}%" + (f";margin-left:{1.2 * beside:.1f}rem" if beside else "")
            flags.append(f'<i class="{safe(kind)}" style="{style}" title="{safe(mark["text"])}">{safe(text)}</i>')
        rows.append(f'<div class="flags by-{axis}" aria-hidden="true">{"".join(flags)}</div>')
    return "".join(rows)


def _cut_marks(chart: Chart, scale: _Scale, span: Span, axis: Axis) -> str:
    """Return triangles with the values that are above the scale: the greatest of each line."""
    peaks: list[tuple[float, float, str]] = []
    for line in chart.lines:
        places = _x_positions(line, span, axis)
        beyond = [
            (top, x)
            for top, x in zip(line.high or line.values, places, strict=True)
            if top is not None and x is not None and top > scale.high
        ]
        if beyond:
            peaks.append((*max(beyond), line.name))
    shown: list[float] = []
    marks = []
    for top, x, name in sorted(peaks, reverse=True):
        if all(abs(x - other) > 0.12 for other in shown):
            shown.append(x)
            text, side = value_text(top, chart.unit), " left" if x > 0.9 else ""
            title = safe(f"{name}: up to {text}")
            marks.append(
                f'<i class="cut by-{axis}{side}" style="left:{100 * x:.2f}%" title="{title}">▲ {safe(text)}</i>'
            )
    return "".join(marks)


def _x_axis(span: Span, axis: Axis) -> str:
    if axis == "step":
        width = max(1, span.last_step - span.first_step)
        ticks = [(value, whole_text(round(value))) for value in _ticks(span.first_step, span.first_step + width)]
        ticks = [(value, text) for value, text in ticks if value == round(value)]
        places = [((value - span.first_step) / width, text) for value, text in ticks]
        title = "step"
    else:
        size = next(
            (one for one in (*_SECONDS, *(86400 * day for day in _DAYS)) if span.seconds / one <= 6), 86400 * 1000
        )
        places = [
            (number * size / span.seconds, seconds_text(number * size))
            for number in range(int(span.seconds / size) + 1)
        ]
        title = "time since the start"
    spans = "".join(f'<span style="left:{100 * place:.2f}%">{safe(text)}</span>' for place, text in places)
    return f'<div class="x by-{axis}" aria-hidden="true" data-title="{title}">{spans}</div>'


def _legend(chart: Chart) -> str:
    entries = [
        f'<span class="key {line.kind} {line.color}">{safe(line.name)}</span>'
        for line in {line.name: line for line in chart.lines}.values()
    ]
    entries += [
        f'<span class="key level">{safe(f"{text} {value_text(value, chart.unit)}")}</span>'
        for text, value in chart.levels
    ]
    return f'<span class="legend">{"".join(entries)}</span>'


def _values_table(chart: Chart) -> str:
    """Return values of the lines at steps of equal distance, as text for readers without the picture."""
    drawn = [line for line in chart.lines if line.kind != "faint" and line.steps]
    if not drawn:
        return ""
    longest = max(drawn, key=lambda line: len(line.steps))
    count = min(_TABLE_ROWS, len(longest.steps))
    chosen = sorted({round(number * (len(longest.steps) - 1) / max(1, count - 1)) for number in range(count)})
    shown = [line for line in drawn if len(line.steps) == len(longest.steps)][:8]
    rows = (
        [whole_text(longest.steps[at]), *(safe(value_text(line.values[at], chart.unit)) for line in shown)]
        for at in chosen
    )
    return table(["step", *(line.name for line in shown)], rows, "n" * (1 + len(shown)))


def span_of(tables: Iterable[tuple[Sequence[int], Sequence[float | None]]], origin: float | None = None) -> Span:
    """Return the span of several tables of steps and times."""
    known = list(tables)
    ends = [step for steps, _ in known if steps for step in (steps[0], steps[-1])]
    times = [at for _, moments in known for at in moments if at is not None]
    start = min([*times, *([] if origin is None else [origin])], default=0.0)
    return Span(min([0, *ends]), max(ends, default=1), start, max(times, default=start) - start)
