"""The explanation of a plan for people: questions in order, the arithmetic under each, the answer, what follows."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from scaletrain_cli.plan.advice.explanation import Question, Row
from scaletrain_cli.ui.console import answer, show, speaks_unicode, words
from scaletrain_cli.ui.units import bytes_text, percent_text, seconds_text

_ANSWER_STYLES = {True: "green", False: "red", None: "bold"}
_INDENT = 4
_NAME = 34


def show_explanation(questions: Sequence[Question], console: Console | None = None) -> None:
    """All questions, numbered."""
    console = console or answer()
    arrow = "→" if speaks_unicode(console) else "->"
    blocks: list[RenderableType] = ["", Text("Why this layout", "bold")]
    for number, question in enumerate(questions, 1):
        blocks += ["", _numbered(number, question.question)]
        if question.rows:
            blocks.append(Padding(_arithmetic(question.rows), (0, 0, 0, _INDENT)))
        blocks.append(Padding(words(question.verdict, _ANSWER_STYLES[question.answer]), (0, 0, 0, _INDENT)))
        if question.follows:
            blocks.append(Padding(words(f"{arrow} {question.follows}"), (0, 0, 0, _INDENT)))
    show(console, Group(*blocks))


def _numbered(number: int, question: str) -> RenderableType:
    table = Table.grid(padding=0)
    table.add_column(width=_INDENT, style="dim")
    table.add_column(overflow="fold")
    table.add_row(f"{number:>2}.", words(question, "bold"))
    return table


def _arithmetic(rows: Sequence[Row]) -> RenderableType:
    """Name, size, time, share and remark, in the columns that any row fills; titled where the rows are layouts."""
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
        table.add_row(words(row.name), *(words(cells[index], style) for cells in columns.values()))
    return table


def _share(share: float) -> str:
    return percent_text(share) if share < 9.995 else f"{share:,.0f} x"


def _remark(row: Row) -> str:
    if row.fits is False and not row.note.startswith("does not fit"):
        return f"does not fit{f', {row.note}' if row.note else ''}"
    return "does not fit" if row.fits is False else row.note
