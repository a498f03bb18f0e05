"""``metrics.jsonl``: the record of measurements, from which every other tracker is filled. Always on."""

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scaletrain_cli.tracking.base import TrackerOptions

_SECONDS_BETWEEN_WRITES = 0.2


class JsonlOptions(TrackerOptions):
    """metrics.jsonl in the run directory, which is always written; it has no options."""


class JsonlWriter:
    """Append lines in their order in a thread: on a slow shared file system one write takes as long as several steps.

    Unlike a tracker it may stop training: an error of the thread is raised by the next call. The thread starts with the
    first line. ``append`` writes JSON objects to a file, one line each. Lines of short steps are written together, at
    most every 0.2 seconds unless ``flush`` waits for them; the thread uses the interpreter while it writes.
    """

    def __init__(self, path: Path, append: Callable[[Path, Sequence[dict[str, Any]]], None]) -> None:
        self._path, self._append = path, append
        self._queue: queue.SimpleQueue[dict[str, Any] | threading.Event | None] = queue.SimpleQueue()
        self._awaited = threading.Event()  # something in the queue is not to be delayed
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def put(self, line: dict[str, Any]) -> None:
        """Queue a line."""
        self._raise()
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="metrics", daemon=True)
            self._thread.start()
        self._queue.put(line)

    def flush(self) -> None:
        """Wait until every line is in the file. Raises OSError if it could not be written."""
        if self._thread is not None:
            written = threading.Event()
            self._queue.put(written)
            self._awaited.set()
            written.wait()
        self._raise()

    def close(self) -> None:
        """Write the remaining lines, and end the thread."""
        try:
            self.flush()
        finally:
            if self._thread is not None:
                self._queue.put(None)
                self._awaited.set()
                self._thread.join()
                self._thread = None

    def _write_all(self) -> None:
        written = -math.inf
        while True:
            items = [self._queue.get()]
            if isinstance(items[0], dict) and not self._awaited.is_set():
                self._awaited.wait(max(0.0, written + _SECONDS_BETWEEN_WRITES - time.monotonic()))
            # No wake-up is lost: flush() and close() put an item before they set the event; the loop below takes it.
            self._awaited.clear()
            while not self._queue.empty():  # lines that arrived since the last write
                items.append(self._queue.get())
            lines = [item for item in items if isinstance(item, dict)]
            try:
                if lines and self._error is None:
                    self._append(self._path, lines)
            except Exception as error:
                self._error = error
            written = time.monotonic()
            for item in items:
                if isinstance(item, threading.Event):
                    item.set()
            if None in items:
                return

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
