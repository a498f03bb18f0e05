"""Tables: runs, excluded nodes, checks, and rows with labels."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.status import RunStatus
from scaletrain_cli.rundir.bad_nodes import BadNode
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.text import seconds_text
from scaletrain_cli.ui.console import escaped_text, line, plain, show, stdout_console, titled_table
from scaletrain_cli.ui.status import STYLES, steps_text

LABEL_WIDTH = 11
Row = tuple[str, RenderableType]


def labelled(rows: Iterable[Row]) -> Table:
    """Return a table with a column of labels and a column of wrapped text."""
    table = Table.grid(padding=(0, 0, 0, 0), expand=False)
    table.add_column(width=LABEL_WIDTH, style="bold")
    table.add_column(ratio=1, overflow="fold")
    for label, content in rows:
        table.add_row(label, content)
    return table


_MARKS = {"ok": ("ok  ", "green"), "warn": ("WARN", "bold yellow"), "none": ("-   ", "dim")}


def show_checks(rows: Iterable[tuple[str, str, str, str]]) -> None:
    """Print rows of (name, state, found, advice) to stdout as they arrive."""
    console = stdout_console()
    for name, state, found, advice in rows:
        line(console, Text.assemble(_MARKS[state], f"  {plain(name):<13}  ", plain(found)))
        if advice:
            show(console, Padding(Text(plain(advice), "yellow" if state == "warn" else "dim"), (0, 0, 0, 21)))


_NODE_TITLES = ("node", "why", "since", "expires in", "run", "evidence")


def show_nodes(nodes: Sequence[BadNode], now: float) -> None:
    """Print a table of excluded nodes in the given order to stdout."""
    table = titled_table(_NODE_TITLES, "lllllw")
    for node in nodes:
        table.add_row(
            escaped_text(node.node, "bold"),
            escaped_text(node.reason),
            f"{seconds_text(max(0.0, _whole_minutes(now - node.time)))} ago",
            seconds_text(_whole_minutes(node.expires - now)),
            escaped_text(f"{node.run_id} attempt {node.attempt}"),
            escaped_text(node.message),
        )
    show(stdout_console(), table)


def _whole_minutes(seconds: float) -> float:
    return round(seconds / 60) * 60.0 if seconds >= 60 else round(seconds)


_RUN_TITLES = ("run", "state", "step", "loss", "attempts")


def show_runs(rows: Sequence[tuple[RunDir, float, RunStatus | UsageError, float | None]]) -> None:
    """Print a table of runs in the given order, each with its time of submission (Unix seconds) and the seconds left.

    With a column for the time that is left if a run trains, and one for the point if a run is part of a sweep.
    """
    of_sweeps = any(not isinstance(status, UsageError) and status.sweep is not None for _, _, status, _ in rows)
    trains = any(seconds for *_, seconds in rows)
    titles = (*_RUN_TITLES, *(["left"] if trains else []), "submitted", *(["of sweep"] if of_sweeps else []))
    kinds = {"run": "w"} | dict.fromkeys(("step", "loss", "attempts", "left"), "r")
    table = titled_table(titles, "".join(kinds.get(title, "l") for title in titles))
    for run, submitted, status, seconds in rows:
        created = time.strftime("%Y-%m-%d %H:%M", time.localtime(submitted))
        if isinstance(status, UsageError):
            empty = ("",) * (4 if trains else 3)
            table.add_row(escaped_text(run.run_id), Text("damaged", "red"), *empty, created)
            continue
        table.add_row(
            escaped_text(status.run_id),
            Text(plain(status.state), STYLES.get(status.state, "")),
            steps_text(status),
            "" if status.loss is None else f"{status.loss:.4f}",
            str(status.attempt),
            *([seconds_text(seconds) if seconds else ""] if trains else []),
            created,
            *([] if status.sweep is None else [f"{status.sweep.number} of {status.sweep.points}"]),
        )
    show(stdout_console(), table)
