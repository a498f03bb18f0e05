"""The screens of `evaluation`: a table of metrics by step, and one evaluation with its generated texts."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from scaletrain_cli.rundir.evaluations import Evaluation
from scaletrain_cli.ui.console import escaped_text, show, stdout_console

_MOST_COLUMNS = 8


def show_evaluations(evaluations: Sequence[Evaluation]) -> None:
    """Print a table with a row per evaluation and a column per metric, without standard errors."""
    names = list(dict.fromkeys(name for one in evaluations for name in one.metrics if not name.endswith("_stderr")))
    table = Table.grid(padding=(0, 2, 0, 0))
    shown = names[:_MOST_COLUMNS]
    table.add_row(*(Text(title, "dim") for title in ("step", "state", *shown)))
    for one in evaluations:
        values = [f"{one.metrics[name]:.4f}" if name in one.metrics else "" for name in shown]
        state = escaped_text(_state(one), "red" if one.errors else "")
        table.add_row(str(one.step), state, *values)
    show(stdout_console(), table)


def show_evaluation(evaluation: Evaluation) -> None:
    """Print the metrics, errors and generated texts of one evaluation."""
    console = stdout_console()
    show(console, escaped_text(f"step {evaluation.step}, {_state(evaluation)}, run {evaluation.run_id}"))
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, value in evaluation.metrics.items():
        table.add_row(escaped_text(name), f"{value:.4f}")
    show(console, table)
    for task, error in evaluation.errors.items():
        show(console, escaped_text(f"{task}: {error}", "red"))
    for one in evaluation.generations:
        show(console, escaped_text(f"{one['task']}: {one['prompt']}", "bold"))
        show(console, escaped_text(one["text"]))


def _state(evaluation: Evaluation) -> str:
    return f"failed: {', '.join(evaluation.errors)}" if evaluation.errors else evaluation.state
