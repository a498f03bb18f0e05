"""Turns of the processes that run the suite on one cluster (`-n`): a test that takes nodes away runs alone."""

import contextlib
import fcntl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Turns:
    """Locks in a folder that all processes see."""

    folder: Path

    @contextlib.contextmanager
    def beside_others(self) -> Iterator[None]:
        """Hold the turn of a test that runs beside others, and begins after one that waits to run alone."""
        with self._turn(fcntl.LOCK_SH):
            yield

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the turn of a test beside which no other runs."""
        with self._turn(fcntl.LOCK_EX):
            yield

    @contextlib.contextmanager
    def _turn(self, how: int) -> Iterator[None]:
        with (self.folder / "running.lock").open("a") as running:
            with (self.folder / "waiting.lock").open("a") as waiting:
                fcntl.flock(waiting, how)
                fcntl.flock(running, how)
            yield
