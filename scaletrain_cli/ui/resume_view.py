"""What resuming a run means: why it ended, what it goes on from, what is lost."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from scaletrain_cli.launch.resumption import ResumeReport
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.ui.console import show, talk, words
from scaletrain_cli.ui.units import bytes_text


def show_resume(run_id: str, report: ResumeReport) -> None:
    """The report, on stderr."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("run", words(run_id, "bold"))
    table.add_row("ended", words(report.why_ended))
    if report.finished or report.active:  # it will not be resumed, so nothing goes on or is lost
        show(talk(), table)
        return
    table.add_row("goes on", words(_from(report)))
    if report.checkpoint or report.had_checkpoint:
        table.add_row("lost", words(_lost(report), "yellow" if report.steps_lost else ""))
    for problem in report.passed_over:
        table.add_row("damaged", words(problem, "yellow"))
    show(talk(), table)


def resume_json(run: RunDir, report: ResumeReport) -> dict[str, Any]:
    """The same for programs."""
    return {
        "run_id": run.run_id,
        "run_dir": str(run.path),
        "why_ended": report.why_ended,
        "checkpoint_step": report.checkpoint.step if report.checkpoint else None,
        "checkpoint": str(report.checkpoint.path) if report.checkpoint else None,
        "steps_lost": report.steps_lost,
        "passed_over": report.passed_over,
    }


def _from(report: ResumeReport) -> str:
    checkpoint = report.checkpoint
    if checkpoint is None:
        return "from the start; there is no sound checkpoint"
    return f"after step {checkpoint.step}, from {checkpoint.path} ({bytes_text(checkpoint.size_bytes)}, verified)"


def _lost(report: ResumeReport) -> str:
    if not report.steps_lost:
        return "nothing"
    steps = f"{report.steps_lost} step{'s' if report.steps_lost > 1 else ''}"
    return f"{steps}, up to step {report.last_step_logged}, will be trained again"
