"""Count where the seconds of an attempt go, and write them every 15 seconds."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from scaletrain_cli.rundir.goodput import CATEGORIES, Category, Ledger, write_ledger
from scaletrain_cli.rundir.paths import RunDir

_WRITE_SECONDS = 15.0  # the most that a SIGKILL loses


class LedgerClock:
    """Counts each second for the innermost activity, otherwise as set-up, or as ``other`` once training has started.

    Rank 0 writes the ledger from a thread, so that long loads and steps are seen, too.
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
            threading.Thread(target=self._write_periodically, name="ledger", daemon=True).start()

    @contextlib.contextmanager
    def during(self, category: Category) -> Iterator[None]:
        """A context whose time counts for ``category``, except for contexts inside it."""
        self._settle()
        self._under_way.append(category)
        try:
            yield
        finally:
            self._settle()
            self._under_way.pop()

    def set_up_is_done(self) -> None:
        """Count time outside of contexts as ``other`` from now on."""
        self._settle()
        self._under_way[0] = "other"

    def step_trained(self) -> None:
        self._steps += 1

    def write(self) -> None:
        """Write the file on rank 0. A full disk loses the figures and does not stop the run."""
        with self._lock, contextlib.suppress(OSError):
            if self._active:
                self._account()
                passed = self._since - self._first  # monotonic, because the wall clock may be set back
                write_ledger(
                    self._run,
                    Ledger(
                        attempt=self._attempt,
                        began=round(self._began, 3),
                        updated=round(self._began + passed, 3),
                        closed=self._closed,
                        steps=self._steps,
                        seconds={name: round(value, 4) for name, value in self._seconds.items()},
                    ),
                )

    def close(self) -> None:
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

    def _write_periodically(self) -> None:
        while not self._end.wait(_WRITE_SECONDS):
            self.write()
