"""The screens of short jobs: `rehearse` with the curve of the range test, `drill` and `preflight`."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from scaletrain_cli.diagnosis.rehearsal import Item, Rehearsal
from scaletrain_cli.launch.drill import Course, DrillResult
from scaletrain_cli.launch.short_jobs import Preflight, RehearsalResult
from scaletrain_cli.safe_files import replace_file
from scaletrain_cli.text import bytes_text, counted, seconds_text
from scaletrain_cli.ui.console import escaped_text, grid, line, show, stdout_console, supports_unicode, titled_table
from scaletrain_cli.ui.diagnosis import cause_rows
from scaletrain_cli.ui.plots import image
from scaletrain_cli.ui.watch.plot import Line, Mark, plot

_STYLES = {"passed": "green", "failed": "bold red", "skipped": "dim"}
_SHOWN = {"skipped": "n/a"}
PLOT_KINDS = (".png", ".svg", ".pdf")


def show_rehearsal(result: RehearsalResult) -> None:
    """Print a row per item to stdout, the curve of the range test, and for each failure what to change."""
    console, rehearsal = stdout_console(), result.rehearsal
    table = grid("llw")
    for item in rehearsal.items:
        verdict = _SHOWN.get(item.verdict, item.verdict)
        table.add_row(item.name, Text(verdict, _STYLES[item.verdict]), escaped_text(str(item.reason)))
    show(console, table)
    rate = rehearsal.item("learning-rate")
    if rate is not None and (curve := curve_text(rate, unicode=supports_unicode(console))):
        show(console, Group("", Text("loss by learning rate", "dim"), *curve))
    for item in rehearsal.items:
        if item.verdict == "failed" and item.causes:
            headline = Text.assemble((item.name, "bold"), " ", escaped_text(str(item.reason)))
            show(console, Group("", headline, Padding(cause_rows(item.causes), (0, 0, 0, 2))))
    failed = [item.name for item in rehearsal.items if item.verdict == "failed"]
    end = f"failed: {', '.join(failed)}" if failed else f"{counted(len(rehearsal.items), 'item')}, none failed"
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


def write_plot(rehearsal: Rehearsal, path: Path) -> bool:
    """Write the curve of the range test; return False if there is none. Raises OSError."""
    item = rehearsal.item("learning-rate")
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


_TITLES = ("drill", "survived", "attempts", "steps lost", "time lost", "matches undisturbed run")


def show_verdicts(verdicts: Sequence[DrillResult]) -> None:
    """Print a row per drill to stdout, and below the table the failures."""
    table = titled_table(_TITLES, "llrrrw")
    for verdict in verdicts:
        table.add_row(
            escaped_text(verdict.kind),
            escaped_text("survived", "green") if verdict.survived else escaped_text("NO", "bold red"),
            str(verdict.attempts),
            str(verdict.steps_lost),
            seconds_text(max(0.0, verdict.seconds_lost)),
            escaped_text(verdict.sameness),
        )
    show(stdout_console(), table)
    for verdict in verdicts:
        for complaint in verdict.complaints:
            line(stdout_console(), f"{verdict.kind}: {complaint}; see {verdict.run_dir}")


def verdicts_json(folder: Path, undisturbed: Course, verdicts: Sequence[DrillResult]) -> dict[str, Any]:
    """Return the JSON answer (scaletrain.drill/v1)."""
    return {
        "schema": "scaletrain.drill/v1",
        "folder": str(folder),
        "undisturbed_seconds": undisturbed.seconds,
        "survived": all(verdict.survived for verdict in verdicts),
        "drills": [
            {
                "kind": verdict.kind,
                "survived": verdict.survived,
                "attempts": verdict.attempts,
                "steps_lost": verdict.steps_lost,
                "seconds_lost": verdict.seconds_lost,
                "sameness": verdict.sameness,
                "match": verdict.match.to_document(),
                "complaints": list(verdict.complaints),
                "failures": [failure.to_document() for failure in verdict.failures],
                "run_dir": verdict.run_dir,
            }
            for verdict in verdicts
        ],
    }


_MOST_ROWS = 64


def show_preflight(preflight: Preflight) -> None:
    """Print the result to stdout."""
    console = stdout_console()
    if preflight.ranks:
        ranks = preflight.ranks[:_MOST_ROWS]
        table = titled_table(("rank", "node", "device", "free", "TFLOP/s", "links"), "rwwrrw")
        for rank in ranks:
            links = ", ".join(f"{bytes_text(link)}/s" for link in rank["links"])
            free = bytes_text(rank["free_bytes"]) if rank["total_bytes"] else "-"
            row = (str(rank["rank"]), rank["node"], rank["device"], free, f"{rank['flops'] / 1e12:.3g}", links or "-")
            table.add_row(*(escaped_text(cell) for cell in row))
        show(console, table)
        if len(preflight.ranks) > _MOST_ROWS:
            line(console, f"{counted(len(preflight.ranks) - _MOST_ROWS, 'more rank')}; --json lists all", "dim")
    if preflight.all_reduce_seconds is not None:
        planned = preflight.all_reduce_planned_seconds
        beside = f", planned {seconds_text(planned)}" if planned else ""
        line(console, f"all-reduce over all ranks: {seconds_text(preflight.all_reduce_seconds)}{beside}")
    for node in preflight.nodes:
        for problem in node["problems"]:
            line(console, Text.assemble(("bad   ", "bold red"), escaped_text(f"{node['node']}: {problem}")))
        for note in node["notes"]:
            line(console, Text.assemble(("note  ", "yellow"), escaped_text(f"{node['node']}: {note}")))
    for finding in preflight.findings:
        mark = ("bad   ", "bold red") if finding["keeps_off"] else ("note  ", "yellow")
        who = f"rank {finding['rank']} on {finding['node']}: " if finding["rank"] >= 0 else ""
        line(console, Text.assemble(mark, escaped_text(f"{who}{finding['message']}")))
    if preflight.exit_code != 0:
        line(console, preflight.why, "bold red")
        line(console, f"the run directory is kept in {preflight.folder}", "dim")
        return
    seen = f"{counted(len(preflight.nodes), 'node')}, {counted(len(preflight.ranks), 'rank')}: the nodes match the plan"
    unseen = "the nodes match the plan; the measurements are on the pods' volume, which is not visible here"
    line(console, seen if preflight.ranks else unseen, "green")
