"""The screen of `rehearse`: a row per item, the curve of the range test as text or picture, and what to change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from scaletrain_cli.diagnosis.rehearsal import Item, Rehearsal
from scaletrain_cli.launch.rehearse import RehearsalResult
from scaletrain_cli.safe_files import replace_file
from scaletrain_cli.text import counted, seconds_text
from scaletrain_cli.ui.console import escaped_text, line, show, stdout_console, supports_unicode
from scaletrain_cli.ui.diagnosis import cause_rows
from scaletrain_cli.ui.plots import image
from scaletrain_cli.ui.watch.plot import Line, Mark, plot

_STYLES = {"passed": "green", "failed": "bold red", "skipped": "dim"}
_SHOWN = {"skipped": "n/a"}
PLOT_KINDS = (".png", ".svg", ".pdf")


def show_rehearsal(result: RehearsalResult) -> None:
    """Print a row per item to stdout, the curve of the range test, and for each failure what to change."""
    console, found = stdout_console(), result.rehearsal
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for item in found.items:
        verdict = _SHOWN.get(item.verdict, item.verdict)
        table.add_row(item.name, Text(verdict, _STYLES[item.verdict]), escaped_text(str(item.reason)))
    show(console, table)
    rate = found.item("learning-rate")
    if rate is not None and (curve := curve_text(rate, unicode=supports_unicode(console))):
        show(console, Group("", Text("loss by learning rate", "dim"), *curve))
    for item in found.items:
        if item.verdict == "failed" and item.causes:
            headline = Text.assemble((item.name, "bold"), " ", escaped_text(str(item.reason)))
            show(console, Group("", headline, Padding(cause_rows(item.causes), (0, 0, 0, 2))))
    failed = [item.name for item in found.items if item.verdict == "failed"]
    end = f"failed: {', '.join(failed)}" if failed else f"{counted(len(found.items), 'item')}, none failed"
    line(console, f"{end} ({seconds_text(result.seconds)}); see {result.run.path}")


def curve_text(item: Item, width: int = 70, height: int = 12, *, unicode: bool = True) -> list[Text]:
    """Return the smoothed curve of a range test in characters, with its axes and marks; empty without a curve.

    On the axis of the rates: ``^`` the suggestion, ``!`` the rate that diverges, ``*`` the rate of the spec.
    """
    points = _points(item)
    top = max((loss for _, loss in points[: max(2, len(points) // 2)]), default=0.0)
    losses = [min(loss, top) for _, loss in points]  # what is far above the start hides the rest
    if len(set(losses)) < 2:
        return []
    rates = {label: item.figures.get(key) for key, label in (("diverges", "!"), ("suggestion", "^"), ("lr", "*"))}
    drawn = plot(
        [Line([math.log10(rate) for rate, _ in points], losses)],
        width,
        height,
        x_text=lambda place: f"{10**place:.0e}",
        y_text=lambda loss: f"{loss:.3g}",
        marks=[Mark(math.log10(rate), label) for label, rate in rates.items() if rate],
        unicode=unicode,
        logarithmic=False,
    )
    return [*drawn, Text(f"{' ' * 9}^ suggested  * training.optimizer.lr  ! diverges")]


def _points(item: Item) -> list[tuple[float, float]]:
    """Return the rates with their smoothed losses, as far as both are finite."""
    rates, losses = item.figures.get("rates") or (), item.figures.get("smoothed") or ()
    return [(rate, loss) for rate, loss in zip(rates, losses, strict=False) if rate and loss is not None]


def write_plot(found: Rehearsal, path: Path) -> bool:
    """Write the curve of the range test; return False if there is none. Raises OSError."""
    item = found.item("learning-rate")
    if item is None or len(_points(item)) < 2:
        return False
    replace_file(path, image(partial(draw, item), path.suffix.lower().removeprefix(".")))
    return True


def draw(item: Item) -> Any:
    """Return a matplotlib figure of the losses by rate: as measured, smoothed, and of the trials at fixed rates."""
    from matplotlib.figure import Figure

    figures = item.figures
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    rates: Sequence[Any] = figures["rates"]
    axes.plot(
        rates, [math.nan if loss is None else loss for loss in figures["losses"]], color="#BBBBBB", lw=1, label="loss"
    )
    axes.plot(*zip(*_points(item), strict=True), color="#0072B2", lw=2, label="smoothed")
    trials = [(fork["rate"], fork["loss"]) for fork in figures.get("forks", ()) if fork["loss"] is not None]
    if trials:
        label = f"after {counted(figures['fork_steps'], 'step')} at a fixed rate"
        axes.plot(*zip(*trials, strict=True), "o", color="#009E73", label=label)
    if "bracket" in figures:
        axes.axvspan(*figures["bracket"], color="#009E73", alpha=0.12, label="learns best")
    for key, color, label in (
        ("suggestion", "#009E73", "suggested"),
        ("lr", "#2B2B2B", "training.optimizer.lr"),
        ("diverges", "#D55E00", "diverges"),
    ):
        if figures.get(key) is not None:
            axes.axvline(figures[key], color=color, lw=1.2, ls="--", label=f"{label}: {figures[key]:.2g}")
    known = [loss for _, loss in _points(item)]
    span = max(known[: max(2, len(known) // 2)]) - min(known)
    axes.set_ylim(min(known) - 0.1 * span, max(known[: max(2, len(known) // 2)]) + 0.4 * span)
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss")
    axes.set_title("Learning-rate range test", loc="left")
    axes.legend(frameon=False, fontsize=8)
    return figure
