"""The live status line of a run on stderr; it is off if stderr is not a terminal."""

from collections.abc import Mapping
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn

from scaletrain_cli.launch.run_status import RunStatus
from scaletrain_cli.ui.console import event_line, line, stderr_console
from scaletrain_cli.ui.status import measures_text
from scaletrain_cli.ui.tables import steps_text


class StatusLine:
    """A context manager: ``update`` redraws the line, ``note_event`` prints a permanent line above it."""

    def __init__(self) -> None:
        self._console = stderr_console()
        self._progress = Progress(
            TextColumn("{task.fields[state]}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[measures]}", markup=False),
            console=self._console,
            transient=True,
            auto_refresh=False,  # would redraw 10 times a second over ssh; callers look twice a second at most
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None, state="starting", measures="")
        self._shown: dict[str, Any] = {}

    def __enter__(self) -> "StatusLine":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, status: RunStatus) -> None:
        """Show the state and progress of the run."""
        self.show(f"{status.state} {steps_text(status)}", status.step, status.total_steps, measures_text(status))

    def show(self, state: str, done: int, total: int, measures: str) -> None:
        """Show a progress bar: ``done`` of ``total`` items; drawn only if it changed."""
        shown: dict[str, Any] = {"completed": done, "total": total or None, "state": state, "measures": measures}
        if shown != self._shown:
            self._shown = shown
            self._progress.update(self._task, refresh=True, **shown)

    def note_event(self, event: Mapping[str, Any]) -> None:
        """Print one event of the run above the status line."""
        line(self._console, event_line(event))
