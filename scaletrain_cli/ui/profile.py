"""The screen of `profile`: the time of a step by cause beside the plan, the top kernels and operators, and memory."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.profiles import CAUSES
from scaletrain_cli.text import bytes_text, listed, percent_text, seconds_text
from scaletrain_cli.ui.console import escaped_text, line, plain, show, stdout_console
from scaletrain_cli.ui.plan_breakdown import TIME_PARTS

_NAMES = TIME_PARTS | {"copies": "copies of memory", "between_steps": "between steps", "host": "host", "idle": "idle"}
_SHOWN = 8
_WIDEST = 60


def show_profile(run: RunDir, summary: Mapping[str, Any]) -> None:
    """Print a profile to stdout."""
    console = stdout_console()
    first, ranks = int(summary["first_step"]), summary["ranks"]
    steps = f"steps {first:,} to {first + summary['steps'] - 1:,}" if summary["steps"] > 1 else f"step {first:,}"
    head = f"  {steps} of attempt {summary['attempt']}, {'ranks' if len(ranks) > 1 else 'rank'} {listed(ranks)}"
    line(console, Text.assemble((plain(run.run_id), "bold"), head))
    if summary["state"] != "recorded" or summary["ranks_missing"]:
        missing = f", without ranks {listed(summary['ranks_missing'])}" if summary["ranks_missing"] else ""
        line(console, f"{summary['state']}{missing}")
    if summary["measured"]:
        show(console, Group("", _causes(summary)))
    for figures in summary["by_rank"]:
        parts = list(_rank(figures))
        if len(ranks) > 1 and len(parts) > 0:
            parts.insert(0, Text(f"rank {figures['rank']}", "bold"))
        show(console, Group("", *parts))
    line(console, "")
    line(console, f"traces for https://ui.perfetto.dev: {summary['folder']}", "dim")


def _causes(summary: Mapping[str, Any]) -> RenderableType:
    planned, measured = summary["planned"], summary["measured"]
    several = len(summary["by_rank"]) > 1
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("seconds per step")
    for name in ("plan", "measured", *(("least", "most") if several else ()), "share"):
        table.add_column(name, justify="right")
    whole = measured["step"]["median"]
    for name in ("step", *CAUSES):
        seconds = measured[name]
        if not seconds["highest"] and not planned.get(name):
            continue
        spread = (_seconds(seconds["lowest"]), _seconds(seconds["highest"])) if several else ()
        share = "" if name == "step" else percent_text(seconds["median"] / whole)
        row = (_seconds(planned.get(name)), _seconds(seconds["median"]), *spread, share)
        table.add_row(_NAMES.get(name, "step"), *row, style="bold" if name == "step" else "")
    return table


def _seconds(value: float | None) -> str:
    return "" if value is None else seconds_text(value) if value else "0 s"


def _rank(figures: Mapping[str, Any]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if figures.get("error"):
        parts.append(escaped_text(f"not profiled: {figures['error']}", "red"))
    if figures.get("overlap") is not None:
        of = f"{percent_text(figures['overlap'])} of it overlapped with compute"
        parts.append(Text(f"communication {seconds_text(figures['communication_seconds'])} per step, {of}"))
    rows = figures.get("top_kernels") or figures.get("top_operators")
    if rows:
        title = "kernel" if figures.get("top_kernels") else "operator (time outside other operators)"
        cells = [(row["name"], seconds_text(row["seconds"]), f"{row['count']:.3g}") for row in rows[:_SHOWN]]
        parts.append(_table((title, "per step", "count"), cells))
    memory = figures.get("memory")
    if memory:
        held = f"{bytes_text(memory['peak_bytes'])} at most in tensors allocated in these steps"
        cells = [(row["name"], bytes_text(row["bytes"]), str(row["count"])) for row in memory["top"][:_SHOWN]]
        parts += [Text(""), Text(held), _table(("held by", "bytes", "tensors"), cells)]
    trace = figures.get("trace") or {}
    if trace and trace.get("file") is None:
        parts.append(Text(f"the trace has {bytes_text(trace['bytes'])} or more and was not kept; profile fewer steps"))
    if figures.get("snapshot"):
        parts.append(escaped_text(f"memory snapshot for https://pytorch.org/memory_viz: {figures['snapshot']}"))
    if figures.get("nvtx"):
        parts.append(Text("NVTX ranges were emitted between cudaProfilerStart and cudaProfilerStop"))
    return parts


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(titles[0], overflow="ellipsis", no_wrap=True, max_width=_WIDEST)
    for title in titles[1:]:
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(escaped_text(row[0]), *row[1:])
    return table
