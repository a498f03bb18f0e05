"""Tables: runs, excluded nodes, checks, the cluster, and rows with labels."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from scaletrain_cli.errors import UsageError
from scaletrain_cli.text import seconds_text
from scaletrain_cli.ui.console import escaped_text, line, plain, show, stdout_console, titled_table

if TYPE_CHECKING:
    from scaletrain_cli.launch.backends.cluster_view import ClusterView, QuotaRow
    from scaletrain_cli.launch.run_status import RunStatus
    from scaletrain_cli.rundir.bad_nodes import BadNode
    from scaletrain_cli.rundir.paths import RunDir

STYLES = {
    "finished": "bold green",
    "running": "bold cyan",
    "queued": "cyan",
    "suspended": "yellow",
    "ending": "cyan",
    "preempted": "yellow",
    "failed": "bold red",
    "cancelled": "yellow",
    "ended-idle": "yellow",
    "unknown": "yellow",
}

LABEL_WIDTH = 11
Row = tuple[str, RenderableType]


def steps_text(status: RunStatus) -> str:
    """Return ``1234/2000`` for a table, or ``?/2000``."""
    return f"{status.step if status.step_seen else '?'}/{status.total_steps}"


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
    """Print rows of (name, state, finding, advice) to stdout as they arrive."""
    console = stdout_console()
    for name, state, finding, advice in rows:
        line(console, Text.assemble(_MARKS[state], f"  {plain(name):<13}  ", plain(finding)))
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


_STATES = {"running": "bold cyan", "queued": "cyan"}


def show_cluster(view: ClusterView, now: float | None = None) -> None:
    """Print the cluster to stdout."""
    console, now = stdout_console(), now or time.time()
    nodes = ", ".join(f"{row.count} {plain(row.state)}" for row in view.nodes)
    rest = f"  {view.scheduler}" + (f"  nodes: {nodes}" if nodes else "")
    line(console, Text.assemble((plain(view.cluster or view.scheduler), "bold"), rest))
    parts: list[RenderableType] = []
    if view.gpus:
        table = titled_table(("GPUs", "free", "used", "unavailable", "total", "nodes", "idle nodes"), "lrrrrrr")
        for row in view.gpus:
            figures = (row.used, row.out_of_order, row.total, row.nodes, row.free_nodes)
            free = Text(str(row.free), "bold green" if row.free else "yellow")
            table.add_row(escaped_text(row.type, "bold"), free, *map(str, figures))
        parts += ["", table]
    if view.quotas:
        parts += ["", _quotas(view.quotas)]
    parts += ["", _queue(view, now)] if view.queue else []
    show(console, Group(*parts))
    others = f"{view.others_running} running and {view.others_queued} queued jobs of other users"
    reported = view.nodes or view.gpus or view.has_other_users  # otherwise the back end does not report it
    mine = "" if view.queue or not reported else "no jobs of yours; "
    for note in (f"{mine}{others}" if view.has_other_users else mine.removesuffix("; "), *view.notes):
        if note:
            line(console, note, "dim")


def _quotas(quotas: tuple[QuotaRow, ...]) -> Table:
    table = titled_table(("quota", "free", "used", "allowed", "of"), "lrrrw")
    for row in quotas:
        free = None if row.used is None else max(0.0, row.allowed - row.used)
        style = "" if free is None else ("bold green" if free else "yellow")
        per_job, is_time = "" if row.used is not None else " per job", row.resource.startswith("time")
        resource = "time per job" if is_time else f"{row.resource}{per_job}"
        table.add_row(
            escaped_text(row.owner, "bold"),
            Text("" if free is None else f"{free:g}", style),
            "" if row.used is None else f"{row.used:g}",
            seconds_text(row.allowed) if is_time else f"{row.allowed:g}",
            escaped_text(f"{resource} ({row.limit})"),
        )
    return table


def _queue(view: ClusterView, now: float) -> Table:
    table = titled_table(("job", "state", "queue", "nodes", "GPUs", "ahead", "start", "run"), "lllrrrrw")
    for row in view.queue:
        table.add_row(
            escaped_text(row.job_id, "bold"),
            Text(row.state, _STATES.get(row.state, "")),
            escaped_text(row.queue),
            str(row.nodes),
            "" if row.gpus is None else str(row.gpus),
            "" if row.ahead is None else str(row.ahead),
            _start(row.start, now),
            Text.assemble(plain(row.name), (f"\n{plain(row.reason)}" if row.reason else "", "dim")),
        )
    return table


def _start(start: float | None, now: float) -> str:
    if start is None:
        return ""
    span = seconds_text(round(abs(start - now) / 60) * 60.0 or 60.0)
    return f"in {span}" if start > now else f"{span} ago"
