"""The screen of `status --cluster`: GPUs, nodes, quota and queue, in the same columns for every scheduler."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from scaletrain_cli.launch.backends.cluster_view import ClusterView, QuotaRow
from scaletrain_cli.text import seconds_text
from scaletrain_cli.ui.console import escaped_text, line, plain, show, stdout_console, titled_table

_STATES = {"running": "bold cyan", "queued": "cyan"}


def show_cluster(view: ClusterView, now: float | None = None) -> None:
    """Print the cluster to stdout."""
    console, now = stdout_console(), now or time.time()
    nodes = ", ".join(f"{row.count} {plain(row.state)}" for row in view.nodes)
    rest = f"  {view.scheduler}" + (f"  nodes: {nodes}" if nodes else "")
    line(console, Text.assemble((plain(view.cluster or view.scheduler), "bold"), rest))
    parts: list[RenderableType] = ["", _gpus(view)] if view.gpus else []
    if view.quotas:
        parts += ["", _quotas(view.quotas)]
    parts += ["", _queue(view, now)] if view.queue else []
    show(console, Group(*parts))
    others = f"{view.others_running} running and {view.others_queued} queued jobs of other users"
    reported = view.nodes or view.gpus or view.has_other_users  # otherwise the back end does not report it
    mine = "" if view.queue or not reported else "no jobs of yours; "
    for note in (
        f"{mine}{others}" if view.has_other_users else mine.removesuffix("; "),
        *view.notes,
    ):
        if note:
            line(console, note, "dim")


def _gpus(view: ClusterView) -> Table:
    titles = ("GPUs", "free", "used", "unavailable", "total", "nodes", "idle nodes")
    table = titled_table(titles, "lrrrrrr")
    for row in view.gpus:
        figures = (row.used, row.out_of_order, row.total, row.nodes, row.free_nodes)
        free = Text(str(row.free), "bold green" if row.free else "yellow")
        table.add_row(escaped_text(row.type, "bold"), free, *map(str, figures))
    return table


def _quotas(quotas: tuple[QuotaRow, ...]) -> Table:
    table = titled_table(("quota", "free", "used", "allowed", "of"), "lrrrw")
    for row in quotas:
        free = None if row.used is None else max(0.0, row.allowed - row.used)
        style = "" if free is None else ("bold green" if free else "yellow")
        table.add_row(
            escaped_text(row.owner, "bold"),
            Text("" if free is None else f"{free:g}", style),
            "" if row.used is None else f"{row.used:g}",
            seconds_text(row.allowed) if row.resource.startswith("time") else f"{row.allowed:g}",
            escaped_text(f"{_resource(row)} ({row.limit})"),
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


def _resource(row: QuotaRow) -> str:
    return (
        "time per job"
        if row.resource.startswith("time")
        else f"{row.resource}{'' if row.used is not None else ' per job'}"
    )
