"""The explanation of a plan for people: questions in order, the arithmetic under each, the answer, what follows."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from scaletrain_cli.plan.explanation import Question, Row
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
        blocks += ["", Text.assemble((f"{number:>2}. ", "dim"), (words(question.question, "bold")))]
        if question.rows:
            blocks.append(Padding(_arithmetic(question.rows), (0, 0, 0, _INDENT)))
        blocks.append(Padding(words(question.verdict, _ANSWER_STYLES[question.answer]), (0, 0, 0, _INDENT)))
        if question.follows:
            blocks.append(Padding(words(f"{arrow} {question.follows}"), (0, 0, 0, _INDENT)))
    show(console, Group(*blocks))


def _arithmetic(rows: Sequence[Row]) -> RenderableType:
    """Name, size, share, time and remark, in the columns that any row fills."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(max_width=_NAME, overflow="fold")
    cells = [
        [bytes_text(row.bytes) if row.bytes is not None else "" for row in rows],
        [seconds_text(row.seconds) if row.seconds is not None else "" for row in rows],
        [percent_text(row.share) if row.share is not None else "" for row in rows],
        [_remark(row) for row in rows],
    ]
    filled = [column for column in cells if any(column)]
    for column in filled:
        table.add_column(
            justify="left" if column is cells[-1] else "right", no_wrap=column is not cells[-1], overflow="fold"
        )
    for index, row in enumerate(rows):
        style = "red" if row.fits is False else ""
        table.add_row(words(row.name), *(words(column[index], style) for column in filled))
    return table


def _remark(row: Row) -> str:
    if row.fits is False and not row.note.startswith("does not fit"):
        return f"does not fit{f', {row.note}' if row.note else ''}"
    return "does not fit" if row.fits is False else row.note
