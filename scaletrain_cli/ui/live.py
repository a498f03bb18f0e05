"""Live lines on stderr, of a run and of files; they are off if stderr is not a terminal."""

from collections.abc import Mapping
from typing import Any, TypeVar

from rich.progress import BarColumn, Progress, TextColumn

from scaletrain_cli.launch.run_status import RunStatus
from scaletrain_cli.text import bytes_text
from scaletrain_cli.ui.console import event_line, line, stderr_console
from scaletrain_cli.ui.status import measures_text
from scaletrain_cli.ui.tables import steps_text

_Line = TypeVar("_Line", bound="_ProgressLine")


class _ProgressLine:
    """A context manager: a bar between two texts."""

    def __init__(self, before: str, total: int | None = None, **options: bool) -> None:
        self._console = stderr_console()
        self._progress = Progress(
            TextColumn("{task.fields[before]}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[after]}", markup=False),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
            **options,  # type: ignore[arg-type]
        )
        self._task = self._progress.add_task("", total=total, before=before, after="")

    def __enter__(self: _Line) -> _Line:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


class BytesLine(_ProgressLine):
    """The bytes of files that are read or received."""

    def __init__(self, total_bytes: int = 0) -> None:
        super().__init__("", total_bytes or None)
        self.total_bytes = total_bytes
        self._read = 0

    def begin(self, name: str) -> None:
        """Show the checkpoint that is being read."""
        self._progress.update(self._task, before=name)

    def advance(self, name: str, size: int) -> None:
        """Add the size of a file that has been read."""
        self._read += size
        self.show(self._read, self.total_bytes)

    def show(self, done: int, total: int) -> None:
        """Show a number of bytes, of all of them, as of a download."""
        self.total_bytes = total
        amount = f"{bytes_text(done)} of {bytes_text(total)}"
        self._progress.update(self._task, completed=done, total=total, after=amount)


class StatusLine(_ProgressLine):
    """The state of a run: ``update`` redraws the line, ``note_event`` prints a permanent line above it."""

    def __init__(self) -> None:
        # A refresh would redraw 10 times a second over ssh; callers look twice a second at most.
        super().__init__("starting", auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._shown: dict[str, Any] = {}

    def update(self, status: RunStatus) -> None:
        """Show the state and progress of the run."""
        self.show(f"{status.state} {steps_text(status)}", status.step, status.total_steps, measures_text(status))

    def show(self, state: str, done: int, total: int, measures: str) -> None:
        """Show a progress bar: ``done`` of ``total`` items; drawn only if it changed."""
        shown: dict[str, Any] = {"completed": done, "total": total or None, "before": state, "after": measures}
        if shown != self._shown:
            self._shown = shown
            self._progress.update(self._task, refresh=True, **shown)

    def note_event(self, event: Mapping[str, Any]) -> None:
        """Print one event of the run above the status line."""
        line(self._console, event_line(event))
