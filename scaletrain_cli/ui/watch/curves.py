"""Charts of a run: its loss with validations, learning rate, gradient norm and seconds per step."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence

from rich.text import Text

from scaletrain_cli.launch.view import RunView
from scaletrain_cli.text import seconds_text
from scaletrain_cli.ui.console import escaped_text
from scaletrain_cli.ui.watch.layout import Choices, cut, elsewhere_text, wrapped
from scaletrain_cli.ui.watch.plot import Line, Mark, ceiling, plot

MOST_HALVINGS = 10
_TRAINING, _VALIDATION, _ATTEMPT, _ROLLBACK = "cyan", "bold yellow", "blue", "bold red"
_GAP = 2


def loss_curve(view: RunView, choices: Choices, width: int, rows: int) -> list[Text]:
    """Return the training and validation loss in ``rows`` lines, the first of which is the title."""
    validations = view.case.history.validations
    lines = [_line(view, choices, "loss", _TRAINING)]
    title = Text.assemble(("loss", f"bold {_TRAINING}"))
    if validations:
        steps = [validation.step for validation in validations]
        places = _places(view, choices, steps)
        lines.append(_latest(Line(places, [each.loss for each in validations], _VALIDATION, "o"), lines[0], choices))
        title.append("  o validation", _VALIDATION)
    return _chart(view, choices, title, lines, width, rows, lambda value: f"{value:.4g}")


def curves(view: RunView, choices: Choices, width: int, height: int) -> list[Text]:
    """Return the four charts in two rows of two."""
    if len(view.case.history) < 2:
        why = elsewhere_text(view) if view.is_elsewhere else "no steps yet"
        return wrapped(escaped_text(why, "dim"), width)
    each, rows = (width - _GAP) // 2, height // 2
    planned = view.figures.planned_step_seconds
    seconds = Text(f"step time, planned {seconds_text(planned)}" if planned > 0 else "step time")
    step_line = _line(view, choices, "step_seconds", _TRAINING)
    rate, norm = (_line(view, choices, *column) for column in (("learning_rate", "green"), ("grad_norm", "magenta")))
    charts = [
        loss_curve(view, choices, each, rows),
        _chart(view, choices, Text("learning rate"), [rate], each, rows, _short),
        _chart(view, choices, Text("gradient norm"), [norm], each, rows, _short),
        _chart(view, choices, seconds, [step_line], each, rows, seconds_text, {"plan": planned} if planned > 0 else {}),
    ]
    lines = []
    for left, right in (charts[:2], charts[2:]):
        for one, other in zip(left, right, strict=True):
            first = cut(one, each)
            first.pad_right(each + _GAP - first.cell_len)
            lines.append(first.append_text(cut(other, each)))
    return lines


def _chart(
    view: RunView,
    choices: Choices,
    title: Text,
    lines: Sequence[Line],
    width: int,
    rows: int,
    y_text: Callable[[float], str],
    levels: Mapping[str, float] | None = None,
) -> list[Text]:
    part = f"  last {len(lines[0].x):,}" if choices.halvings else ""
    values = [value for value in lines[0].y if math.isfinite(value)]
    highest = max(values, default=0.0)
    above = f"  {'▲' if choices.unicode else '^'} up to {y_text(highest)}" if highest > ceiling(values) else ""
    x_text: Callable[[float], str] = seconds_text if choices.by_time else lambda value: f"{value:,.0f}"
    drawn = plot(
        lines,
        width,
        rows - 1,
        x_text=x_text,
        y_text=y_text,
        marks=_marks(view, choices),
        levels=levels,
        unicode=choices.unicode,
    )
    return [cut(title.copy().append(above, "red").append(part, "dim"), width), *drawn]


def _line(view: RunView, choices: Choices, column: str, style: str) -> Line:
    """Return a column of the history, the part of it that is chosen."""
    history = view.case.history
    first = len(history) - max(8, len(history) >> choices.halvings) if choices.halvings else 0
    first = max(0, first)
    steps = history.steps[first:]
    return Line(
        _places(view, choices, steps), history.column(column)[first:], f"bold {style}", band_style=f"dim {style}"
    )


def _latest(line: Line, other: Line, choices: Choices) -> Line:
    """Return the points of a line that are not left of another line."""
    if not choices.halvings or not other.x:
        return line
    kept = [(x, y) for x, y in zip(line.x, line.y, strict=True) if x >= other.x[0]]
    return Line([x for x, _ in kept], [y for _, y in kept], line.style, line.mark)


def _places(view: RunView, choices: Choices, steps: Sequence[int]) -> Sequence[float]:
    """Return where steps stand on the x axis: their numbers, or seconds since the first attempt began."""
    if not choices.by_time:
        return steps
    known, times = view.case.history.known("time")
    if not known:
        return steps
    start = began(view)
    places = (min(bisect.bisect_left(known, step), len(known) - 1) for step in steps)
    return [times[place] - start for place in places]


def began(view: RunView) -> float:
    """Return when the first attempt began, in Unix seconds."""
    first = view.attempts[0].started if view.attempts else math.inf
    return min([first, *(time for time in view.case.history.column("time")[:1] if math.isfinite(time))])


def _marks(view: RunView, choices: Choices) -> list[Mark]:
    """Return the starts of all attempts after the first, and the rollbacks."""
    found = []
    start = began(view) if choices.by_time else 0.0
    for event in view.events:
        name, at = event.get("event"), event.get("time")
        step = event.get("to_step" if name == "rolled-back" else "step")
        place = at - start if choices.by_time and isinstance(at, int | float) else step
        if not isinstance(place, int | float):
            continue
        if name == "rolled-back":
            found.append(Mark(place, "R", _ROLLBACK))
        elif name in ("started", "resumed") and isinstance(event.get("attempt"), int) and event["attempt"] > 1:
            found.append(Mark(place, str(event["attempt"]), _ATTEMPT))
    return found


def _short(value: float) -> str:
    return f"{value:.2g}" if value else "0"
