"""Nodes that runs keep away from in a table, one line each."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from scaletrain_cli.rundir.bad_nodes import BadNode
from scaletrain_cli.ui.console import answer, show, words
from scaletrain_cli.ui.units import seconds_text

_TITLES = ("node", "why", "since", "expires in", "run", "evidence")


def show_nodes(nodes: Sequence[BadNode], now: float) -> None:
    """Newest evidence first, as given."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for title in _TITLES:
        table.add_column(no_wrap=title != "evidence", overflow="fold")
    table.add_row(*(Text(title, "dim") for title in _TITLES))
    for node in nodes:
        table.add_row(
            words(node.node, "bold"),
            words(node.reason),
            f"{seconds_text(max(0.0, _whole_minutes(now - node.time)))} ago",
            seconds_text(_whole_minutes(node.expires - now)),
            words(f"{node.run_id} attempt {node.attempt}"),
            words(node.message),
        )
    show(answer(), table)


def _whole_minutes(seconds: float) -> float:
    return round(seconds / 60) * 60.0 if seconds >= 60 else round(seconds)
