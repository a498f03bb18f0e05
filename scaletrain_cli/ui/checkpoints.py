"""The screens of `checkpoint`: the table of checkpoints, and the progress of verification."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn

from scaletrain_cli.rundir.inventory import Entry
from scaletrain_cli.text import bytes_text, seconds_text
from scaletrain_cli.ui.console import escaped_text, show, stderr_console, stdout_console, titled_table

_TITLES = ("step", "age", "size", "ranks", "clean", "attempt", "")
_MIRRORED = "mirrored"


def show_entries(entries: Sequence[Entry], mirrored: Collection[int] | None = None) -> None:
    """Print a table of checkpoints in the given order; the latest without a problem is marked.

    ``mirrored``: steps of the checkpoints in the mirror; None if the run has none.
    """
    titles = _TITLES if mirrored is None else (*_TITLES[:-1], _MIRRORED, _TITLES[-1])
    table = titled_table(titles, "r" * (len(titles) - 1) + "w")
    valid = [entry for entry in entries if not entry.problem]
    for entry in entries:
        checkpoint = entry.checkpoint
        stated = ["", "", "", ""]
        if checkpoint is not None:
            clean = "yes" if checkpoint.clean else "no"
            stated = [bytes_text(checkpoint.size_bytes), str(checkpoint.world_size), clean, str(checkpoint.attempt)]
        note = (
            escaped_text("latest", "bold")
            if valid and entry is valid[-1]
            else escaped_text(entry.problem and f"invalid: {entry.problem}", "red")
        )
        if mirrored is not None:
            stated.append("yes" if checkpoint is not None and entry.step in mirrored else "no")
        age = seconds_text(max(0, round(time.time() - entry.written)))
        table.add_row(str(entry.step), age, *stated, note)
    show(stdout_console(), table)


def entry_json(entry: Entry, mirrored: Collection[int] | None = None) -> dict[str, Any]:
    """Return the same as a JSON object; ``mirrored`` is null if the run has no mirror."""
    checkpoint = entry.checkpoint
    return {
        "name": entry.path.name,
        "step": entry.step,
        "written": entry.written,
        "problem": entry.problem or None,
        "bytes": checkpoint.size_bytes if checkpoint else None,
        "world_size": checkpoint.world_size if checkpoint else None,
        "clean": checkpoint.clean if checkpoint else None,
        "attempt": checkpoint.attempt if checkpoint else None,
        "mirrored": None if mirrored is None else checkpoint is not None and entry.step in mirrored,
    }


class BytesLine:
    """A context manager with a progress line on stderr; it is off if stderr is not a terminal."""

    def __init__(self, total_bytes: int = 0) -> None:
        console = stderr_console()
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[amount]}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.total_bytes = total_bytes
        self._task = self._progress.add_task("", total=total_bytes or None, amount="")
        self._read = 0

    def __enter__(self) -> BytesLine:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, name: str) -> None:
        """Show the checkpoint that is being read."""
        self._progress.update(self._task, description=name)

    def advance(self, name: str, size: int) -> None:
        """Add the size of a file that has been read."""
        self._read += size
        self.show(self._read, self.total_bytes)

    def show(self, done: int, total: int) -> None:
        """Show a number of bytes, of all of them, as of a download."""
        self.total_bytes = total
        amount = f"{bytes_text(done)} of {bytes_text(total)}"
        self._progress.update(self._task, completed=done, total=total, amount=amount)
