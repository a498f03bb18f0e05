"""The screen of `drill`: a row per fault, and the JSON answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scaletrain_cli.launch.drill import Course, DrillResult
from scaletrain_cli.text import seconds_text
from scaletrain_cli.ui.console import escaped_text, line, show, stdout_console
from scaletrain_cli.ui.grids import titled_table

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
