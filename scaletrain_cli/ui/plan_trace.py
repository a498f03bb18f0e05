"""A run replayed on a recorded spot market, for people: days, goodput, interruptions and dollars."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import Console, Group
from rich.table import Table

from scaletrain_cli.plan.survival.spot_trace import Spread, TraceOutcome
from scaletrain_cli.ui.console import answer, plain, show, words
from scaletrain_cli.ui.units import count_text, dollars_text, percent_text, seconds_text, whole_text


def show_trace(outcome: TraceOutcome, console: Console | None = None) -> None:
    """The median of all starts, and the range that four of five fall into."""
    title = (
        f"On the spot market of {plain(outcome.name)}: {outcome.finished} of {outcome.starts} starts finish, "
        f"{seconds_text(outcome.trace_days * 86400)} recorded"
    )
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=13, style="bold")
    table.add_column(overflow="fold")
    for name, text in _rows(outcome):
        table.add_row(name, words(text))
    notes = [words(note, "dim") for note in outcome.notes]
    show(console or answer(), Group("", words(title, "bold"), table, *notes))


def _rows(outcome: TraceOutcome) -> Iterator[tuple[str, str]]:
    nodes = f"{whole_text(outcome.nodes_needed)} needed, {outcome.nodes_assumed}"
    yield "Nodes", nodes
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
    """``12 d (10 d to 15 d)``."""
    low, middle, high = text(spread.p10), text(spread.median), text(spread.p90)
    return middle if low == middle == high else f"{middle} ({low} to {high})"
