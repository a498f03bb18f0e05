"""The screen of `preflight`: a row per rank, then the anomalies."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from scaletrain_cli.launch.preflight import Preflight
from scaletrain_cli.text import bytes_text, counted, seconds_text
from scaletrain_cli.ui.console import escaped_text, line, show, stdout_console
from scaletrain_cli.ui.grids import titled_table

_MOST_ROWS = 64


def show_preflight(found: Preflight) -> None:
    """Print the result to stdout."""
    console = stdout_console()
    if found.ranks:
        show(console, _ranks(found.ranks[:_MOST_ROWS]))
        if len(found.ranks) > _MOST_ROWS:
            line(console, f"{counted(len(found.ranks) - _MOST_ROWS, 'more rank')}; --json lists all", "dim")
    if found.all_reduce_seconds is not None:
        planned = found.all_reduce_planned_seconds
        beside = f", planned {seconds_text(planned)}" if planned else ""
        line(console, f"all-reduce over all ranks: {seconds_text(found.all_reduce_seconds)}{beside}")
    for node in found.nodes:
        for problem in node["problems"]:
            line(console, Text.assemble(("bad   ", "bold red"), escaped_text(f"{node['node']}: {problem}")))
        for note in node["notes"]:
            line(console, Text.assemble(("note  ", "yellow"), escaped_text(f"{node['node']}: {note}")))
    for finding in found.findings:
        mark = ("bad   ", "bold red") if finding["keeps_off"] else ("note  ", "yellow")
        who = f"rank {finding['rank']} on {finding['node']}: " if finding["rank"] >= 0 else ""
        line(console, Text.assemble(mark, escaped_text(f"{who}{finding['message']}")))
    if found.exit_code == 0 and not found.ranks:
        line(
            console,
            "the nodes match the plan; the measurements are on the pods' volume, which is not visible here",
            "green",
        )
    elif found.exit_code == 0:
        line(
            console,
            f"{counted(len(found.nodes), 'node')}, {counted(len(found.ranks), 'rank')}: the nodes match the plan",
            "green",
        )
    else:
        line(console, found.why, "bold red")
        line(console, f"the run directory is kept in {found.folder}", "dim")


def _ranks(ranks: tuple[dict[str, Any], ...]) -> Table:
    table = titled_table(("rank", "node", "device", "free", "TFLOP/s", "links"), "rwwrrw")
    for rank in ranks:
        links = ", ".join(f"{bytes_text(link)}/s" for link in rank["links"])
        free = bytes_text(rank["free_bytes"]) if rank["total_bytes"] else "-"
        row = (str(rank["rank"]), rank["node"], rank["device"], free, f"{rank['flops'] / 1e12:.3g}", links or "-")
        table.add_row(*(escaped_text(cell) for cell in row))
    return table
