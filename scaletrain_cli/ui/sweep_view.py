"""The points of a sweep before they are submitted: what differs, how long each takes, and what all of them cost."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from scaletrain_cli.launch.sweep import Point
from scaletrain_cli.ui.console import line, show, talk, words
from scaletrain_cli.ui.units import dollars_text, seconds_text


def show_points(points: Sequence[Point]) -> None:
    """On stderr: it is about to be asked for."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for title in ("point", "step", "to train", "cost"):
        table.add_column(justify="left" if title == "point" else "right", no_wrap=title != "point", overflow="fold")
    table.add_row(*(Text(title, "dim") for title in ("point", "step", "to train", "cost")))
    costs = [point.plan.cost.expected_usd for point in points]
    for point, cost in zip(points, costs, strict=True):
        time = point.plan.time
        price = dollars_text(cost) if cost is not None else ""
        table.add_row(words(", ".join(point.overrides)), seconds_text(time.step), seconds_text(time.to_train), price)
    show(talk(), table)
    known = [cost for cost in costs if cost is not None]
    if known and len(known) == len(costs):
        line(talk(), f"{len(points)} runs, {dollars_text(sum(known))} together", "dim")
