"""What the screen of `watch` shows, read by one thread, so that keys are answered while a scheduler is asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.logs import LogFile, end_of, is_for_people, log_files
from scaletrain_cli.launch.node.record import NodeRecord, read_node_records
from scaletrain_cli.launch.view import RunView, ViewReader
from scaletrain_cli.rundir.paths import RunDir

_LOG_LINES = 500
_NODES_SECONDS = 5.0


@dataclass(frozen=True)
class Log:
    """The end of the log of one rank; ``number`` of ``count`` logs of the attempt, from 0."""

    file: LogFile
    number: int
    count: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Shown:
    """What the pages show. ``problem``: why the last reading failed; the values are then those of the one before."""

    view: RunView
    nodes: tuple[NodeRecord, ...] = ()
    log: Log | None = None
    problem: str = ""


def read_shown(reader: ViewReader, run: RunDir, log_number: int | None, before: Shown | None = None) -> Shown:
    """Return what the pages show; of the logs only the one with this number. Raises UsageError, OSError."""
    view = reader.read()
    nodes = tuple(read_node_records(run, view.status.attempt)) if before is None else before.nodes
    return Shown(view, nodes, None if log_number is None else read_log(run, log_number))


def read_log(run: RunDir, number: int) -> Log | None:
    """Return the end of one log of the newest attempt; ``number`` counts from 0 and begins again after the last."""
    files: Sequence[LogFile] = log_files(run)
    if not files:
        return None
    file = files[number % len(files)]
    lines = [line for line in end_of(file.path).splitlines() if is_for_people(line)]
    return Log(file, number % len(files), len(files), tuple(lines[-_LOG_LINES:]))


class Reading:
    """A thread that reads a run until ``stop``. ``shown`` is replaced as a whole; ``changed`` is set with it."""

    def __init__(self, run: RunDir, seconds: float) -> None:
        """Read at most every ``seconds``. Raises UsageError for a damaged record."""
        self._run, self._seconds = run, seconds
        self._reader = ViewReader(run)
        self._wake, self._ended = threading.Event(), threading.Event()
        self._nodes_at = time.monotonic()
        self._log_number: int | None = None
        self.changed = threading.Event()
        self.shown = read_shown(self._reader, run, None)
        self._thread = threading.Thread(target=self._read_on, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a request to a scheduler in progress is not waited for."""
        self._ended.set()
        self._wake.set()

    def follow_log(self, number: int | None) -> None:
        """Read the log with this number from now on; None for no log."""
        if number != self._log_number:
            self._log_number = number
            self._wake.set()

    def _read_on(self) -> None:
        while not self._ended.is_set():
            self._wake.wait(self._seconds)
            self._wake.clear()
            before = self.shown
            refresh_nodes = time.monotonic() - self._nodes_at >= _NODES_SECONDS
            try:
                found = read_shown(self._reader, self._run, self._log_number, None if refresh_nodes else before)
            except (UsageError, OSError) as error:  # the run may be removed while it is watched
                found = replace(before, problem=str(error))
            if refresh_nodes:
                self._nodes_at = time.monotonic()
            is_new = found.view is not before.view or found.nodes is not before.nodes
            if is_new or found.problem != before.problem or found.log != before.log:
                self.shown = found
                self.changed.set()
