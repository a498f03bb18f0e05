"""Where this attempt's seconds go, counted as they pass and written down every few of them. Knows no model."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from scaletrain_cli.rundir.goodput import CATEGORIES, Category, Ledger, write_ledger
from scaletrain_cli.rundir.paths import RunDir

_WRITE_SECONDS = 15.0  # at most so much is unknown after a SIGKILL


class LedgerClock:
    """Each second counts once: for the innermost of what is under way, else as set-up, and as ``other`` once training.

    Rank 0 writes it, from a thread of its own, so that a long load or step is seen too.
    """

    def __init__(self, run: RunDir, attempt: int, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._attempt, self._clock = run, attempt, clock
        self._began, self._since = time.time(), clock()
        self._first = self._since
        self._under_way: list[Category] = ["restore"]
        self._seconds: dict[Category, float] = dict.fromkeys(CATEGORIES, 0.0)
        self._steps = 0
        self._closed = False
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._active = rank == 0
        if self._active:
            threading.Thread(target=self._write_now_and_then, name="ledger", daemon=True).start()

    @contextlib.contextmanager
    def during(self, category: Category) -> Iterator[None]:
        """What passes within counts for ``category``, but for what is entered inside it."""
        self._settle()
        self._under_way.append(category)
        try:
            yield
        finally:
            self._settle()
            self._under_way.pop()

    def set_up_is_done(self) -> None:
        """From here on time that nobody claims is ``other``."""
        self._settle()
        self._under_way[0] = "other"

    def step_trained(self) -> None:
        """One more."""
        self._steps += 1

    def write(self) -> None:
        """Replace the file, if this is rank 0. A disk that is full costs the figures, not the run."""
        with self._lock, contextlib.suppress(OSError):
            if self._active:
                write_ledger(self._run, self._ledger())

    def close(self) -> None:
        """Write the last of it."""
        self._end.set()
        self._closed = True
        self.write()

    def _settle(self) -> None:
        with self._lock:
            self._account()

    def _account(self) -> None:
        now = self._clock()
        self._seconds[self._under_way[-1]] += now - self._since
        self._since = now

    def _ledger(self) -> Ledger:
        self._account()
        passed = self._since - self._first  # the wall clock may be set back meanwhile
        return Ledger(
            attempt=self._attempt,
            began=round(self._began, 3),
            updated=round(self._began + passed, 3),
            closed=self._closed,
            steps=self._steps,
            seconds={name: round(value, 4) for name, value in self._seconds.items()},
        )

    def _write_now_and_then(self) -> None:
        while not self._end.wait(_WRITE_SECONDS):
            self.write()
