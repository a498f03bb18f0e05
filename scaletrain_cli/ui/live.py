"""The live status line of a run on stderr; it is off if stderr is not a terminal."""

import math
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn

from scaletrain_cli.launch.run_status import RunStatus
from scaletrain_cli.ui.console import event_line, line, stderr_console
from scaletrain_cli.ui.status import measures_text
from scaletrain_cli.ui.tables import steps_text

_DRAW_EVERY_SECONDS = 0.25


class StatusLine:
    """A context manager: ``update`` redraws the line, ``note_event`` prints a permanent line above it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = stderr_console()
        self._progress = Progress(
            TextColumn("{task.fields[state]}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[measures]}", markup=False),
            console=self._console,
            transient=True,
            auto_refresh=False,  # 10 times a second over ssh, changed or not
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None, state="starting", measures="")
        self._clock, self._drawn = clock, -math.inf
        self._shown: tuple[object, ...] = ()

    def __enter__(self) -> "StatusLine":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, status: RunStatus) -> None:
        """Show the state and progress of the run."""
        state = f"{status.state} {steps_text(status)}"
        self.show(state, status.step, status.total_steps, measures_text(status))

    def show(self, state: str, done: int, total: int, measures: str) -> None:
        """Show a progress bar: ``done`` of ``total`` items; drawn 4 times a second at most, and only if it changed."""
        now, shown = self._clock(), (state, done, total, measures)
        if shown == self._shown or now - self._drawn < _DRAW_EVERY_SECONDS:
            return
        self._drawn, self._shown = now, shown
        self._progress.update(
            self._task, completed=done, total=total or None, state=state, measures=measures, refresh=True
        )

    def note_event(self, event: Mapping[str, Any]) -> None:
        """Print one event of the run above the status line."""
        line(self._console, event_line(event))
