"""Rows of a label and what it is about: the form of every plan and of every question."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.table import Table

LABEL_WIDTH = 11
Row = tuple[str, RenderableType]


def labelled(rows: Iterable[Row]) -> Table:
    """Labels in a column of their own; text folds within the other."""
    table = Table.grid(padding=(0, 0, 0, 0), expand=False)
    table.add_column(width=LABEL_WIDTH, style="bold")
    table.add_column(ratio=1, overflow="fold")
    for label, content in rows:
        table.add_row(label, content)
    return table
