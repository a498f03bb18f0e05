"""The data of a run in `scaletrain plan`: tokens and epochs of each source, and files that the run could not use."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from scaletrain_cli.errors import sentences
from scaletrain_cli.launch.data_summary import DataSummary, PlannedSource
from scaletrain_cli.text import bytes_text, count_text, counted, percent_text, seconds_text
from scaletrain_cli.ui.console import escaped_text, show, stdout_console, warn


def show_data(data: DataSummary, console: Console | None = None) -> None:
    """Print the sources to stdout, and problems and what is not checked to stderr."""
    rows = list(_rows(data))
    if rows:
        table = Table.grid(padding=0)
        table.add_column(width=2)
        table.add_column(overflow="fold")
        for said, style in rows:
            table.add_row(Text("• ", style), escaped_text(said, style))
        show(console or stdout_console(), Group("", escaped_text("Data", "bold"), table))
    for problem in data.absent:
        warn(f"submit would reject this: {problem}")
    for note in data.notes:
        warn(sentences(note))


def _rows(data: DataSummary) -> Iterator[tuple[str, str]]:
    for source in data.sources:
        advice = "" if source.advice is None else f". It {sentences(source.advice)}"
        yield f"{source.name}: {_use(source)}{advice}", "" if source.advice is None else "yellow"
    if data.preparation_seconds:
        yield f"preparation on this machine: about {seconds_text(data.preparation_seconds)}", ""


def _use(source: PlannedSource) -> str:
    """Return ``about 1.3 epochs of about 2.1B tokens in 12 files (8.4 GB), 70 % of the samples``."""
    size = source.size
    about = "" if size is not None and size.exact else "about "
    parts = []
    if size is None:
        parts.append("tokens not known here")
    else:
        stored = "" if not size.files else f" in {counted(size.files, 'file')} ({bytes_text(size.stored_bytes)})"
        epochs = "" if source.epochs is None else f"{about}{epochs_text(source.epochs)} of "
        parts.append(f"{epochs}{about}{count_text(size.tokens)} tokens{stored}")
    if source.share is not None and source.share < 1:
        parts.append(f"{percent_text(source.share)} of the samples")
    return ", ".join(parts)


def epochs_text(epochs: float) -> str:
    """Return ``1.3 epochs``."""
    return f"{epochs:.2g} epochs" if epochs < 100 else f"{epochs:,.0f} epochs"
