"""The choice of a cluster for people: every size that was considered, what it takes, and why it was not taken."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from scaletrain_cli.plan.search.cluster_choice import Considered
from scaletrain_cli.plan.search.sizing import Sizing
from scaletrain_cli.ui.console import answer, show, words
from scaletrain_cli.ui.plan_run_view import goodput_text
from scaletrain_cli.ui.units import dollars_text, seconds_text, whole_text

_OBJECTIVES = {"time": "the soonest end", "cost": "the lowest cost", "gpus": "the fewest GPUs"}
_TITLES = ("GPUs", "done in", "expected cost", "goodput", "why not")


def show_sizing(sizing: Sizing, console: Console | None = None) -> None:
    """What was asked, and the table of sizes."""
    console = console or answer()
    limits = [f"at most {whole_text(sizing.max_gpus)} GPUs"]
    if sizing.deadline_seconds is not None:
        limits.append(f"done in {seconds_text(sizing.deadline_seconds)}")
    if sizing.budget_usd is not None:
        limits.append(f"for {dollars_text(sizing.budget_usd)} at most")
    asked = f"Cluster for {_OBJECTIVES[sizing.objective]}: {', '.join(limits)}"
    notes = [words(note, "yellow") for note in sizing.notes]
    show(console, Group(words(asked, "bold"), *notes, "", _table(sizing.considered), ""))


def show_considered(considered: Sequence[Considered], console: Console | None = None) -> None:
    """The table alone, where no size will do."""
    if considered:
        show(console or answer(), _table(considered))


def _table(considered: Sequence[Considered]) -> Table:
    several = len({row.gpu for row in considered}) > 1
    table = Table.grid(padding=(0, 2, 0, 0))
    if several:
        table.add_column(no_wrap=True)
    for title in _TITLES:
        table.add_column(justify="left" if title == "why not" else "right", no_wrap=title != "why not", overflow="fold")
    table.add_row(*(Text(title, "dim") for title in (*(("GPU",) if several else ()), *_TITLES)))
    for row in considered:
        cells = [
            whole_text(row.gpus),
            "-" if row.seconds is None else seconds_text(row.seconds),
            "-" if row.dollars is None else dollars_text(row.dollars),
            "-" if row.goodput is None else goodput_text(row.goodput),
            "chosen" if row.chosen else _short(row.why),
        ]
        style = "bold green" if row.chosen else ""
        table.add_row(*(words(cell, style) for cell in ([row.gpu] if several else []) + cells))
    return table


def _short(why: str) -> str:
    """What does not fit, part by part, is a sentence too long for a table; JSON has it."""
    return "does not fit" if why.startswith("does not fit") else why
