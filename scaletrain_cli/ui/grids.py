"""Tables without lines that several screens use: with a row of titles, and of texts beside marks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from scaletrain_cli.ui.console import escaped_text


def titled_table(titles: Sequence[str], kinds: str, gap: int = 2) -> Table:
    """Return a table with its row of titles. ``kinds``, by column: l left, r right, w left and wrapped.

    ``gap``: blanks between columns.
    """
    table = Table.grid(padding=(0, gap, 0, 0))
    for _, kind in zip(titles, kinds, strict=True):
        table.add_column(justify="right" if kind == "r" else "left", no_wrap=kind != "w", overflow="fold")
    table.add_row(*(Text(title, "dim") for title in titles))
    return table


def marked(rows: Iterable[tuple[str | Text, Text]]) -> Table:
    """Return a row for each mark, such as a number, with its text wrapped beside it."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for mark, text in rows:
        table.add_row(mark, text)
    return table


def bullets(sentences: Iterable[tuple[str, str]]) -> Table:
    """Return a bullet for each (text, style)."""
    return marked((Text("•", style), escaped_text(text, style)) for text, style in sentences)
