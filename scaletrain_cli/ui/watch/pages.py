"""The pages of `watch`: the overview, curves, and tables of ranks and nodes; and the output without a terminal."""

import bisect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.text import Text

from scaletrain_cli.diagnosis.hardware import Recent
from scaletrain_cli.launch.view import RunView, Shown
from scaletrain_cli.text import bytes_text, counted, listed, percent_text, seconds_text
from scaletrain_cli.ui import status as texts
from scaletrain_cli.ui.console import escaped_text, event_line, line, plain, show, stdout_console, supports_unicode
from scaletrain_cli.ui.diagnosis import finding_headline
from scaletrain_cli.ui.tables import STYLES
from scaletrain_cli.ui.watch.layout import Choices, Content, cut, elsewhere_text, joined, rows_of, wrapped
from scaletrain_cli.ui.watch.plot import Line, Mark, ceiling, plot

_LEAST_CHART_ROWS = 6
_TALL = 30


def overview(view: RunView, choices: Choices, width: int, height: int, *, more: str = "page 6") -> Content:
    """Return the state, the loss, and a line for each figure; the chart takes the lines that are left.

    ``more``: where to see the findings that are not shown.
    """
    share = min(1.0, view.status.step / view.status.total_steps) if view.status.total_steps else 0.0
    words = f" {view.status.step:,} of {view.status.total_steps:,} steps  {100 * share:.1f} %"
    cells = max(4, width - len(words))
    full = int(cells * share)
    filled, empty = ("━", "─") if choices.unicode else ("#", "-")
    bar = Text.assemble((filled * full, "bold green"), (empty * (cells - full), "dim"), words)
    if not view.status.step_seen:
        bar = Text(texts.progress_text(view.status))
    lines = 2 if height >= _TALL else 1
    figures = [line for label, text in _figures(view, height) if text for line in rows_of(label, text, width, lines)]
    findings = [cut(finding_headline(finding), width) for finding in view.diagnosis.findings]
    head = [bar, *_why(view, width)]
    left = height - len(head) - len(figures)
    shown_findings = findings[: 5 if height >= _TALL else 2]
    if len(findings) > len(shown_findings):
        rest = f"and {counted(len(findings) - len(shown_findings), 'more finding')}: {more}"
        shown_findings = [*shown_findings, cut(Text(plain(rest), "dim"), width)]
    left -= len(shown_findings)
    has_curve = len(view.case.history) > 1
    wanted = max(1, left // 4) if has_curve else left
    major = [event for event in view.events if event.get("event") not in _MINOR_EVENTS]
    newest = major[-max(1, wanted) :] if left > 0 or not has_curve else []
    shown_events = [cut(event_line(event), width) for event in newest]
    rows = left - len(shown_events)
    chart: list[Text] = []
    if has_curve and rows >= _LEAST_CHART_ROWS:
        chart = loss_curve(view, choices, width, rows)
    return Content([*head, *chart, *figures, *shown_findings, *shown_events])


_MINOR_EVENTS = ("measured", "first-loss", "mixture", "finding", "finding-cleared")


def _why(view: RunView, width: int) -> list[Text]:
    """Return why the run is in its state, where that needs a reason, in at most three lines."""
    status, lines = view.status, []
    if status.why and status.state not in ("finished", "running"):
        lines = wrapped(escaped_text(status.why), width)[:3]
    if view.is_elsewhere and status.state != "queued":
        lines += wrapped(escaped_text(elsewhere_text(view), "dim"), width)
    return lines


def _figures(view: RunView, height: int) -> list[tuple[str, str]]:
    """Return label and text of each line of figures; an empty text where nothing is known."""
    status, figures, plan, hardware = view.status, view.figures, view.record.plan, view.hardware
    left = [texts.left_text(figures), texts.cost_text(figures)]
    if figures.eta_seconds:
        end = time.localtime(view.now + figures.eta_seconds)
        is_today = end[:3] == time.localtime(view.now)[:3]
        left[0] += time.strftime(", until %H:%M" if is_today else ", until %b %d %H:%M", end)
    rate = [f"learning rate {status.learning_rate:.3g}"] if status.learning_rate is not None else []
    rate += [f"gradient norm {status.grad_norm:.3g}"] if status.grad_norm is not None else []
    mfu = "" if status.mfu is None else f"MFU {percent_text(status.mfu)}, planned {percent_text(plan.time.mfu)}"
    parts = "" if hardware is None else texts.step_parts_text(hardware)
    is_beside = bool(parts) and height >= _TALL
    memory = ""
    if hardware is not None and hardware.memory is not None:
        memory = texts.rank_memory_text(hardware.memory, plan)
    elif status.measured is not None:
        memory = texts.memory_text(status.measured)
    return [
        ("left" if figures.eta_seconds else "cost", joined(left)),
        ("last", texts.measures_text(status)),
        ("", ", ".join(rate)),
        ("sources", texts.sources_text(status)),
        ("step", joined([texts.step_text(figures), mfu])),
        ("measured", parts),
        ("planned", texts.planned_parts_text(plan) if is_beside else ""),
        ("slow", str(status.straggler or "")),
        ("start", str(status.starting or "")),
        ("idle", str(status.idle or "")),
        ("memory", memory),
        ("GPU", texts.gpu_text(hardware) if hardware is not None else ""),
        ("goodput", texts.goodput_text(status.goodput) if status.goodput is not None else ""),
        ("saved", _saved(view)),
        ("job", _job_text(view)),
    ]


def _saved(view: RunView) -> str:
    if not view.status.files_seen:
        return texts.NOT_SEEN
    step, seconds = view.status.last_checkpoint_step, view.figures.measured_step_seconds
    parts, took = [], ""
    if step is not None:
        commits = [event for event in view.events if event.get("event") == "checkpoint" and event.get("step") == step]
        saved: Mapping[str, Any] = commits[-1] if commits else {}
        at = saved.get("time")
        age = f", {seconds_text(max(0, round(view.now - at)))} ago" if isinstance(at, int | float) else ""
        parts.append(f"step {step:,}{age}")
        if isinstance(saved.get("bytes"), int) and isinstance(saved.get("seconds"), int | float):
            took = f"{bytes_text(saved['bytes'])} in {seconds_text(saved['seconds'])}"
    following = view.next_checkpoint_step
    if following is not None:
        wait = following - view.status.step
        when = f" in {seconds_text(wait * seconds)}" if seconds is not None and wait > 0 else ""
        parts.append(f"next at step {following:,}{when}")
    if view.status.steps_lost_total:
        parts.append(texts.lost_text(view.status))
    return joined([*parts, took])


def _job_text(view: RunView) -> str:
    status = view.status
    where = f"{status.scheduler} job {status.job_id}" if status.job_id else status.scheduler
    nodes = f" on {listed(status.nodes)}" if status.nodes else ""
    attempt = f"attempt {status.attempt}, " if status.attempt > 1 else ""
    detail = f": {status.job.detail}" if status.state == "running" and status.job.detail else ""
    return attempt + where + nodes + detail


_ROWS = 34


def show_overview(view: RunView) -> None:
    """Print the first page of `watch` to stdout."""
    console = stdout_console()
    line(console, headline(view))
    choices = Choices(unicode=supports_unicode(console))
    for text in overview(view, choices, console.width, _ROWS, more=f"scaletrain diagnose {view.run.run_id}").body:
        show(console, text)


def show_change(view: RunView, before: RunView | None) -> None:
    """Print new events and findings, and then the state with the figures of the last step, each on a line."""
    console = stdout_console()
    for event in view.events[len(before.events) if before is not None else max(0, len(view.events) - 3) :]:
        line(console, event_line(event))
    known = {finding.code for finding in before.diagnosis.findings} if before is not None else set()
    for finding in view.diagnosis.findings:
        if finding.code not in known:
            line(console, finding_headline(finding))
    status, figures = view.status, view.figures
    why = status.why if status.state not in ("running", "finished") else ""
    words = [
        texts.progress_text(status),
        texts.measures_text(status),
        texts.left_text(figures),
        texts.cost_text(figures),
        why,
    ]
    when = time.strftime("%H:%M:%S", time.localtime(view.now))
    line(console, f"{when}  {status.state}  {'; '.join(word for word in words if word)}")


def headline(view: RunView) -> Text:
    """Return run id, state and attempt."""
    status = view.status
    text = Text.assemble((plain(status.run_id), "bold"), "  ", (status.state, STYLES.get(status.state, "")))
    if status.attempt > 1:
        text.append(f"  attempt {status.attempt}")
    return text


MOST_HALVINGS = 10
_TRAINING, _VALIDATION, _ATTEMPT, _ROLLBACK = "cyan", "bold yellow", "blue", "bold red"
_GAP = 2


def loss_curve(view: RunView, choices: Choices, width: int, rows: int) -> list[Text]:
    """Return the training and validation loss in ``rows`` lines, the first of which is the title."""
    validations = view.case.history.validations
    lines = [_line(view, choices, "loss", _TRAINING)]
    title = Text.assemble(("loss", f"bold {_TRAINING}"))
    if validations:
        places = _places(view, choices, [validation.step for validation in validations])
        lines.append(_latest(Line(places, [point.loss for point in validations], _VALIDATION, "o"), lines[0], choices))
        title.append("  o validation", _VALIDATION)
    return _chart(view, choices, title, lines, width, rows, lambda value: f"{value:.4g}")


def curves(view: RunView, choices: Choices, width: int, height: int) -> list[Text]:
    """Return the four charts in two rows of two."""
    if len(view.case.history) < 2:
        why = elsewhere_text(view) if view.is_elsewhere else "no steps yet"
        return wrapped(escaped_text(why, "dim"), width)
    half, rows = (width - _GAP) // 2, height // 2
    planned = view.figures.planned_step_seconds
    seconds = Text(f"step time, planned {seconds_text(planned)}" if planned > 0 else "step time")
    step_line = _line(view, choices, "step_seconds", _TRAINING)
    rate, norm = (_line(view, choices, *column) for column in (("learning_rate", "green"), ("grad_norm", "magenta")))
    charts = [
        loss_curve(view, choices, half, rows),
        _chart(view, choices, Text("learning rate"), [rate], half, rows, _short),
        _chart(view, choices, Text("gradient norm"), [norm], half, rows, _short),
        _chart(view, choices, seconds, [step_line], half, rows, seconds_text, {"plan": planned} if planned > 0 else {}),
    ]
    lines = []
    for left, right in (charts[:2], charts[2:]):
        for one, other in zip(left, right, strict=True):
            first = cut(one, half)
            first.pad_right(half + _GAP - first.cell_len)
            lines.append(first.append_text(cut(other, half)))
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
    first = max(0, len(history) - max(8, len(history) >> choices.halvings)) if choices.halvings else 0
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
    marks = []
    start = began(view) if choices.by_time else 0.0
    for event in view.events:
        name, at = event.get("event"), event.get("time")
        step = event.get("to_step" if name == "rolled-back" else "step")
        place = at - start if choices.by_time and isinstance(at, int | float) else step
        if not isinstance(place, int | float):
            continue
        if name == "rolled-back":
            marks.append(Mark(place, "R", _ROLLBACK))
        elif name in ("started", "resumed") and isinstance(event.get("attempt"), int) and event["attempt"] > 1:
            marks.append(Mark(place, str(event["attempt"]), _ATTEMPT))
    return marks


def _short(value: float) -> str:
    return f"{value:.2g}" if value else "0"


_Value = Callable[[Recent], float | None]
ORDERS: tuple[tuple[str, _Value | None], ...] = (
    ("rank", None),
    ("own time", lambda one: one.mean("own_seconds")),
    ("memory", lambda one: one.highest("memory_bytes")),
)
_RANK_COLUMNS: tuple[tuple[str, _Value, Callable[[float], str]], ...] = (
    ("step", lambda one: one.mean("step_seconds"), seconds_text),
    ("own", lambda one: one.mean("own_seconds"), seconds_text),
    ("data wait", lambda one: one.mean("data_wait_seconds"), seconds_text),
    ("communication", lambda one: one.mean("communication_seconds"), seconds_text),
    ("memory", lambda one: one.highest("memory_bytes"), bytes_text),
    ("reserved", lambda one: one.highest("memory_reserved_bytes"), bytes_text),
    ("retries", lambda one: one.highest("allocation_retries"), lambda value: f"{value:,.0f}"),
)


def _throttled_share(one: Recent) -> float | None:
    columns = ("throttled_by_power", "throttled_by_heat", "throttled_by_hardware")
    return max((value for column in columns if (value := one.mean(column)) is not None), default=None)


_GPU_COLUMNS: tuple[tuple[str, _Value, Callable[[float], str]], ...] = (
    ("used", lambda one: one.mean("utilization"), percent_text),
    ("clock", lambda one: one.mean("sm_clock_hertz"), lambda value: f"{value / 1e9:.2f} GHz"),
    ("heat", lambda one: one.highest("temperature_celsius"), lambda value: f"{value:.0f} °C"),
    ("power", lambda one: one.mean("power_watts"), lambda value: f"{value:,.0f} W"),
    ("memory", lambda one: one.latest("memory_used_bytes"), bytes_text),
    ("throttled", _throttled_share, percent_text),
    ("ECC", lambda one: one.highest("uncorrected_errors"), lambda value: f"{value:,.0f}"),
)
_NODE_COLUMNS: tuple[tuple[str, _Value, Callable[[float], str]], ...] = (
    ("CPU", lambda one: one.mean("cpu_utilization"), percent_text),
    ("free memory", lambda one: one.latest("memory_available_bytes"), bytes_text),
    ("disk write", lambda one: one.mean("disk_written_bytes_per_second"), lambda v: f"{bytes_text(v)}/s"),
    ("net in", lambda one: one.mean("network_received_bytes_per_second"), lambda v: f"{bytes_text(v)}/s"),
    ("net out", lambda one: one.mean("network_sent_bytes_per_second"), lambda v: f"{bytes_text(v)}/s"),
    ("IB in", lambda one: one.mean("infiniband_received_bytes_per_second"), lambda v: f"{bytes_text(v)}/s"),
)


def ranks_page(shown: Shown, choices: Choices, width: int, height: int) -> Content:
    """Return a line for each rank; columns that no rank has are left out."""
    hardware = shown.view.hardware
    if hardware is None or not hardware.ranks:
        return Content(_nothing(shown, width))
    ranks = hardware.ranks
    title, value = ORDERS[choices.order % len(ORDERS)]
    order = sorted(ranks)
    if value is not None:
        order.sort(key=lambda rank: -(value(ranks[rank]) or 0.0))
    on_nodes = [(rank, node.name) for node in shown.nodes for rank in node.ranks]
    places = {rank.rank + offset: name for rank, name in on_nodes for offset in range(rank.ranks)}
    names = [(str(rank), places.get(rank, "")) for rank in order]
    rows = _table(("rank", "node"), names, [ranks[rank] for rank in order], _RANK_COLUMNS, width)
    return Content(rows[1:], [Text(f"order: {title} (o changes it){_part(shown)}", "dim"), rows[0]])


def nodes_page(shown: Shown, choices: Choices, width: int, height: int) -> Content:
    """Return the state of each node of the attempt, and what its GPUs and the node itself measure."""
    hardware = shown.view.hardware
    lines: list[Text] = []
    for node in shown.nodes:
        alive = sum(rank.ended is None for rank in node.ranks)
        ended = [f"rank {rank.rank} {rank.signal or f'exit {rank.exit_code}'}" for rank in node.ranks if rank.exit_code]
        state = "running" if node.ended is None else f"ended with exit code {node.exit_code}"
        text = Text.assemble((plain(node.name), "bold"), f"  {state}", style="red" if ended else "")
        words = f"  {counted(len(node.ranks), 'rank')}" + (f", {alive} alive" if node.ended is None else "")
        lines += wrapped(text.append(words + (f"; {', '.join(ended[:4])}" if ended else "")), width, indent=2)
    if not shown.nodes:
        lines.append(Text("no node has begun in the run directory", "dim"))
    if hardware is None:
        return Content([*lines, Text(""), *_nothing(shown, width)])
    for series, columns, title in ((hardware.gpus, _GPU_COLUMNS, "GPU"), (hardware.nodes, _NODE_COLUMNS, "node")):
        if series:
            names = sorted(series)
            rows = _table((title,), [(name,) for name in names], [series[name] for name in names], columns, width)
            lines += [Text(""), *rows]
    return Content(lines, [Text(_part(shown).lstrip("; "), "dim")] if _part(shown) else [])


def _nothing(shown: Shown, width: int) -> list[Text]:
    """Return why there are no measurements of ranks and nodes."""
    if shown.view.is_elsewhere:
        why = elsewhere_text(shown.view)
    elif not shown.view.record.spec.telemetry.enabled:
        why = "telemetry.enabled is false in the spec: nothing is measured on the nodes."
    else:
        why = "No measurements of ranks and nodes yet."
    return wrapped(escaped_text(why, "dim"), width)


def _part(shown: Shown) -> str:
    hardware = shown.view.hardware
    if hardware is None or hardware.is_whole:
        return ""
    return f"; some of the {shown.view.record.spec.cluster.nodes} nodes are read, not all"


def _table(
    titles: Sequence[str],
    names: Sequence[Sequence[str]],
    series: Sequence[Recent],
    columns: Sequence[tuple[str, _Value, Callable[[float], str]]],
    width: int,
) -> list[Text]:
    """Return the line of titles and a line for each series, without columns that are empty everywhere."""
    cells = [list(map(plain, (title, *(name[place] for name in names)))) for place, title in enumerate(titles)]
    for title, value, text in columns:
        values = [value(recent) for recent in series]
        if any(one is not None for one in values):
            cells.append([title, *("-" if one is None else text(one) for one in values)])
    widths = [max(map(len, column)) for column in cells]
    lines = []
    for number in range(len(series) + 1):
        parts = [
            column[number].ljust(widths[place]) if place < len(titles) else column[number].rjust(widths[place])
            for place, column in enumerate(cells)
        ]
        lines.append(cut(Text("  ".join(parts), "dim" if number == 0 else ""), width))
    return lines
