"""Many plans compared, one line each: for a sweep over a setting, which is too wide to stand side by side."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from scaletrain_cli.plan.advice.comparison import Compared
from scaletrain_cli.ui.console import words
from scaletrain_cli.ui.plan_layout_view import differing
from scaletrain_cli.ui.units import bytes_text, dollars_text, percent_text, ratio_text, seconds_text

_GAP = 2
_WIDEST_NAME, _NARROWEST_NAME = 30, 12
# What goes first where the width does not suffice.
_LEAST_WANTED = (
    "of device",
    "MFU",
    "whole run",
    "cost",
    "virtual",
    "context",
    "expert",
    "seq",
    "pipe",
    "tensor",
    "data",
)


def comparison_list(compared: Sequence[Compared], width: int) -> Table:
    """Layout, memory, step and its ratio to the first that fits; the rest as far as ``width`` allows."""
    layouts = [column.plan.layout for column in compared if column.plan is not None]
    fields = differing(layouts)
    titles = [*fields, "memory", "of device", "step", "", "MFU", "whole run", "cost"]
    first = next((column.plan.time.step for column in compared if column.plan and column.feasible), None)
    rows = [_cells(column, fields, first) for column in compared]
    name = min(_WIDEST_NAME, max(len(column.name) for column in compared))
    widths = {title: max(len(title), *(len(row.get(title, "")) for row in rows)) for title in titles}
    kept = [title for title in titles if any(row.get(title) for row in rows)]
    for title in _LEAST_WANTED:
        if name + _taken(kept, widths) > width and title in kept:
            kept.remove(title)
    name = min(name, max(_NARROWEST_NAME, width - _taken(kept, widths)))
    table = Table.grid(padding=(0, _GAP, 0, 0))
    table.add_column(width=name, overflow="fold")
    for title in kept:
        table.add_column(justify="left" if title in fields else "right", no_wrap=True)
    table.add_row("", *(Text(title, "dim") for title in kept))
    for column, row in zip(compared, rows, strict=True):
        style = "" if column.feasible else "red"
        table.add_row(words(column.name), *(words(row.get(title, ""), style) for title in kept))
    return table


def _taken(titles: Sequence[str], widths: dict[str, int]) -> int:
    return sum(_GAP + widths[title] for title in titles)


def _cells(column: Compared, fields: dict[str, str], first: float | None) -> dict[str, str]:
    plan = column.plan
    if plan is None:
        return {"memory": "does not divide"}
    cells = {title: str(getattr(plan.layout, field)) for title, field in fields.items()}
    cells |= {
        "memory": bytes_text(plan.memory.peak),
        "of device": percent_text(plan.memory.peak / plan.memory.capacity),
    }
    if not column.feasible:
        return cells | {"step": "does not fit"}
    cost = plan.cost.expected_usd
    return cells | {
        "step": seconds_text(plan.time.step),
        "": ratio_text(plan.time.step / first) if first else "",
        "MFU": percent_text(plan.time.mfu),
        "whole run": seconds_text(plan.time.to_train),
        "cost": "" if cost is None else dollars_text(cost),
    }
