"""A sweep for people: its points before they are submitted, with what all of them cost; and how its runs stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich.table import Table
from rich.text import Text

from scaletrain_cli.launch.backends.base import Start
from scaletrain_cli.launch.sweep import Point
from scaletrain_cli.launch.sweep_status import SweepStatus
from scaletrain_cli.text import dollars_text, seconds_text
from scaletrain_cli.ui.console import escaped_text, line, plain, show, stderr_console, stdout_console
from scaletrain_cli.ui.status import STYLES, measures_text
from scaletrain_cli.ui.submission import sweep_rows
from scaletrain_cli.ui.tables import labelled


def show_points(points: Sequence[Point], start: Start, at_once: int) -> None:
    """On stderr: it is about to be asked for. ``start`` is that of the first ones."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for title in ("point", "step", "to train", "cost"):
        table.add_column(justify="left" if title == "point" else "right", no_wrap=title != "point", overflow="fold")
    table.add_row(*(Text(title, "dim") for title in ("point", "step", "to train", "cost")))
    costs = [point.plan.cost.expected_usd for point in points]
    for point, cost in zip(points, costs, strict=True):
        time = point.plan.time
        price = dollars_text(cost) if cost is not None else ""
        table.add_row(
            escaped_text(", ".join(point.overrides)), seconds_text(time.step), seconds_text(time.to_train), price
        )
    show(stderr_console(), table)
    show(stderr_console(), labelled(sweep_rows([(point.spec, point.plan) for point in points], start, at_once)))


def show_sweep(status_of_all: SweepStatus) -> None:
    """How each of its runs stands, on stdout."""
    console, sweep, members = stdout_console(), status_of_all.sweep, status_of_all.members
    gone = sweep.points - len(members)
    missing = f"; {gone} of the {sweep.points} are not here any more" if gone > 0 else ""
    counted = f"  {len(members)} runs: {status_of_all.states_in_words}{missing}"
    line(console, Text.assemble((plain(sweep.name), "bold"), counted))
    table = Table.grid(padding=(0, 2, 0, 0))
    titles = ("  run", "state", "step", "job", "what it measured last, or why it stands so")
    for title in titles:
        justify: Literal["left", "right"] = "right" if title == "step" else "left"
        table.add_column(justify=justify, no_wrap=title != titles[-1], overflow="fold")
    table.add_row(*(Text(title, "dim") for title in titles))
    for member in members:
        status = member.status
        if status is None:
            table.add_row(
                escaped_text(f"  {member.run.run_id}"),
                Text("damaged", "red"),
                "",
                "",
                escaped_text(member.error, "dim"),
            )
            continue
        measured = status.state in ("running", "finished")
        table.add_row(
            escaped_text(f"  {status.run_id}"),
            Text(status.state, STYLES.get(status.state, "")),
            f"{status.step}/{status.total_steps}",
            escaped_text(status.job_id),
            escaped_text(measures_text(status)) if measured else escaped_text(status.why, "dim"),
        )
    show(console, table)
