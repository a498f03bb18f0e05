"""The screens of `scaletrain plan`, in order: the chosen cluster, the plan, sizes of a range, the spot trace, why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from scaletrain_cli.plan.reliability.node_sizes import NodeSize
from scaletrain_cli.text import bytes_text, count_text, dollars_text, percent_text, seconds_text, whole_text
from scaletrain_cli.ui.console import escaped_text, grid, plain, show, stdout_console, supports_unicode, titled_table
from scaletrain_cli.ui.plan import goodput_text, layout_text, show_plan

if TYPE_CHECKING:
    from scaletrain_cli.plan.advice.answer import Answer
    from scaletrain_cli.plan.advice.explanation import Question, Row
    from scaletrain_cli.plan.reliability.elastic import ElasticOutcome, PolicyOutcome
    from scaletrain_cli.plan.reliability.spot_trace import Spread, TraceOutcome
    from scaletrain_cli.plan.search.cluster_limits import Considered
    from scaletrain_cli.plan.search.sizing import Sizing


def show_trace(outcome: TraceOutcome, console: Console | None = None) -> None:
    """Print the median over all starting points, and the range from the 10th to the 90th percentile."""
    title = (
        f"On the spot trace {plain(outcome.name)} of {seconds_text(outcome.trace_days * 86400)}: "
        f"the run finishes from {outcome.finished} of {outcome.starts} starting points"
    )
    table = grid("lw", first_style="bold")
    for name, text in _rows(outcome):
        table.add_row(name, escaped_text(text))
    notes = [escaped_text(f"{note}.", "dim") for note in outcome.notes]
    show(console or stdout_console(), Group("", escaped_text(title, "bold"), table, *notes))


def _rows(outcome: TraceOutcome) -> Iterator[tuple[str, str]]:
    yield "Nodes", f"{whole_text(outcome.nodes_needed)} needed, {outcome.nodes_assumed}"
    days = _spread(outcome.days, lambda days: seconds_text(days * 86400))
    yield "Days", f"{days}; on demand {seconds_text(outcome.on_demand_days * 86400)}"
    yield "Goodput", _spread(outcome.goodput, percent_text)
    yield "Interruptions", _spread(outcome.interruptions, lambda n: count_text(round(n)))
    yield "Lost work", _spread(outcome.lost_hours, _hours)
    yield "Waiting", _spread(outcome.waiting_hours, _hours)
    if outcome.spot_usd is not None:
        text = _spread(outcome.spot_usd, dollars_text)
        if outcome.on_demand_usd is not None:
            text += f"; on demand {dollars_text(outcome.on_demand_usd)}"
        yield "Dollars", text


def _hours(hours: float) -> str:
    return seconds_text(hours * 3600) if hours else "none"


def _spread(spread: Spread, text: Callable[[float], str]) -> str:
    """Return ``12 d (10 d to 15 d)``."""
    low, middle, high = text(spread.p10), text(spread.median), text(spread.p90)
    return middle if low == middle == high else f"{middle} ({low} to {high})"


_OBJECTIVES = {"time": "the shortest time", "cost": "the lowest cost", "gpus": "the fewest GPUs"}
_TITLES = ("GPUs", "time", "expected cost", "goodput", "why not")


def show_sizing(sizing: Sizing, console: Console | None = None) -> None:
    """Print objective, limits and the table of clusters."""
    console = console or stdout_console()
    limits = [f"at most {whole_text(sizing.limits.max_gpus)} GPUs"]
    if sizing.limits.deadline_seconds is not None:
        limits.append(f"finished in {seconds_text(sizing.limits.deadline_seconds)}")
    if sizing.limits.budget_usd is not None:
        limits.append(f"at most {dollars_text(sizing.limits.budget_usd)}")
    asked = f"Cluster with {_OBJECTIVES[sizing.limits.objective]}: {', '.join(limits)}"
    notes = [escaped_text(str(note), "yellow") for note in sizing.notes]
    if sizing.probability is not None:
        chance = percent_text(min(sizing.probability, 0.99))  # errors as large as that were never measured
        notes.append(escaped_text(f"probability of meeting the limits, from the errors of plans: {chance}"))
    show(console, Group(escaped_text(asked, "bold"), *notes, "", _table(sizing.considered), ""))


def show_considered(considered: Sequence[Considered]) -> None:
    """Print only the table of clusters, for when none meets the limits."""
    if considered:
        show(stdout_console(), _table(considered))


def _table(considered: Sequence[Considered]) -> Table:
    several = len({row.gpu for row in considered}) > 1
    table = titled_table(("GPU", *_TITLES), "lrrrrw") if several else titled_table(_TITLES, "rrrrw")
    for row in considered:
        why = "" if row.why is None else str(row.why)
        if row.why is not None and row.why.code == "plan.cluster-does-not-fit":
            why = "does not fit"  # whose sentence is too long for a table
        cells = [
            whole_text(row.gpus),
            _cell(row.seconds, row.least_seconds, seconds_text),
            _cell(row.dollars, row.least_dollars, dollars_text),
            "-" if row.goodput is None else goodput_text(row.goodput),
            "chosen" if row.chosen else why,
        ]
        style = "bold green" if row.chosen else ""
        table.add_row(*(escaped_text(cell, style) for cell in ([row.gpu] if several else []) + cells))
    return table


def _cell(value: float | None, least: float | None, text: Callable[[float], str]) -> str:
    """Return a figure, or the lower bound on it, as text."""
    return text(value) if value is not None else "-" if least is None else f"≥ {text(least)}"


_ANSWER_STYLES = {True: "green", False: "red", None: "bold"}
_INDENT = 4
_NAME = 34


def show_explanation(questions: Sequence[Question], console: Console | None = None) -> None:
    """Print all questions, numbered."""
    console = console or stdout_console()
    arrow = "→" if supports_unicode(console) else "->"
    blocks: list[RenderableType] = ["", Text("Why this layout", "bold")]
    for number, question in enumerate(questions, 1):
        table = Table.grid(padding=0)
        table.add_column(width=_INDENT, style="dim")
        table.add_column(overflow="fold")
        table.add_row(f"{number:>2}.", escaped_text(f"{question.question}?", "bold"))
        blocks += ["", table]
        if question.rows:
            blocks.append(Padding(_arithmetic(question.rows), (0, 0, 0, _INDENT)))
        blocks.append(Padding(escaped_text(question.verdict_text, _ANSWER_STYLES[question.answer]), (0, 0, 0, _INDENT)))
        if question.follows:
            blocks.append(Padding(escaped_text(f"{arrow} {question.follows_text}"), (0, 0, 0, _INDENT)))
    show(console, Group(*blocks))


def _arithmetic(rows: Sequence[Row]) -> RenderableType:
    """Return the rows as a table without its empty columns; with column titles if the rows are layouts."""
    columns = {
        "memory": [bytes_text(row.bytes) if row.bytes is not None else "" for row in rows],
        "step": [seconds_text(row.seconds) if row.seconds is not None else "" for row in rows],
        "of device": ["" if row.share is None else _share(row.share) for row in rows],
        "": [_remark(row) for row in rows],
    }
    columns = {title: cells for title, cells in columns.items() if any(cells)}
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(max_width=_NAME, overflow="fold")
    for title in columns:
        table.add_column(justify="right" if title else "left", no_wrap=bool(title), overflow="fold")
    if any(row.fits is not None for row in rows):
        table.add_row("", *(Text(title, "dim") for title in columns))
    for index, row in enumerate(rows):
        style = "red" if row.fits is False else ""
        table.add_row(escaped_text(row.name), *(escaped_text(cells[index], style) for cells in columns.values()))
    return table


def _share(share: float) -> str:
    return percent_text(share) if share < 9.995 else f"{share:,.0f} x"


def _remark(row: Row) -> str:
    note = "" if row.note is None else str(row.note)
    if row.fits is not False:
        return note
    tells = row.note is None or row.note.code == "plan.needs-memory"
    return "does not fit" if tells else f"does not fit, {note}"


def show_answer(answer: Answer, *, everything: bool = False, console: Console | None = None) -> None:
    """Print every part of the answer on ``console``, by default stdout."""
    if answer.sizing is not None:
        show_sizing(answer.sizing, console)
    show_plan(answer.spec, answer.plan, everything=everything, console=console)
    if answer.sizes:
        show_sizes(answer.sizes, answer.elastic, console)
    if answer.outcome is not None:
        show_trace(answer.outcome, console)
    if answer.explanation is not None:
        show_explanation(answer.explanation, console)


_SIZE_TITLES = ("nodes", "step", "time", "expected cost", "layout, or why not used")


def _cells(size: NodeSize) -> tuple[str, ...]:
    plan = size.plan
    if size.why_not is not None or plan is None:
        return whole_text(size.nodes), "-", "-", "-", str(size.why_not)
    wall, usd = plan.durability.wall_seconds, plan.cost.expected_usd
    return (
        whole_text(size.nodes),
        seconds_text(plan.time.step),
        "-" if wall is None else seconds_text(wall),
        "-" if usd is None else dollars_text(usd),
        layout_text(plan.layout),
    )


def show_sizes(
    sizes: Sequence[NodeSize], outcome: ElasticOutcome | None = None, console: Console | None = None
) -> None:
    """Print the table, when the range pays, and the comparison on a spot trace, if there is one."""
    table = titled_table(_SIZE_TITLES, "rrrrw")
    for size in sizes:
        style = "" if size.why_not is None else "dim"
        table.add_row(*(escaped_text(cell, style) for cell in _cells(size)))
    parts: list[RenderableType] = ["", Text("Sizes of the range", "bold"), table]
    if (advice := NodeSize.range_advice(sizes)) is not None:
        parts.append(escaped_text(f"{advice}."))
    if outcome is not None:
        parts += ["", escaped_text(f"{outcome.advice}.", "bold"), _comparison(outcome)]
    show(console or stdout_console(), Group(*parts))


def _comparison(outcome: ElasticOutcome) -> RenderableType:
    titles = ("", "days", "samples per hour", "node hours", "waiting", "interruptions", "grown")
    table = titled_table(titles, "lrrrrrr")
    table.add_row(*map(escaped_text, ("the range", *_figures(outcome.elastic))))
    table.add_row(*map(escaped_text, (f"waiting for {whole_text(outcome.most)}", *_figures(outcome.waiting))))
    return table


def _figures(policy: PolicyOutcome) -> tuple[str, ...]:
    if policy.days is None:
        return ("never", *("-",) * 5)
    spreads = (policy.samples_per_hour, policy.node_hours, policy.waiting_hours, policy.interruptions, policy.growths)
    samples, nodes, waiting, interruptions, growths = (0.0 if one is None else one.median for one in spreads)
    figures = (whole_text(round(samples)), whole_text(round(nodes)), seconds_text(waiting * 3600))
    return (f"{policy.days.median:.3g}", *figures, f"{interruptions:.0f}", f"{growths:.0f}")
