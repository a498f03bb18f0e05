"""A list of checks, one line each, with what to do under those that are not well."""

from __future__ import annotations

from collections.abc import Iterable

from rich.padding import Padding
from rich.text import Text

from scaletrain_cli.ui.console import answer, line, plain, show

_MARKS = {"ok": ("ok  ", "green"), "warn": ("WARN", "bold yellow"), "none": ("-   ", "dim")}


def show_checks(rows: Iterable[tuple[str, str, str, str]]) -> None:
    """Rows of (name, state, found, advice), each printed as soon as it is known."""
    console = answer()
    for name, state, found, advice in rows:
        line(console, Text.assemble(_MARKS[state], f"  {plain(name):<11}  ", plain(found)))
        if advice:
            show(console, Padding(Text(plain(advice), "yellow" if state == "warn" else "dim"), (0, 0, 0, 19)))
