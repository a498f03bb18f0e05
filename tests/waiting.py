"""Wait for the effects of other processes and threads, or set on a clock of the test."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def wait_until(condition: Callable[[], Any], what: str) -> None:
    """Poll until the condition is true, with no limit but pytest's own, whose traceback shows ``what``."""
    pause = 0.01
    while not condition():
        time.sleep(pause)
        pause = min(1.3 * pause, 0.2)  # what takes seconds is not asked for a hundred times


@dataclass
class Clock:
    """In place of ``time.monotonic`` or the module ``time``: seconds that the test, or code that sleeps, sets on."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    time = monotonic = __call__

    def sleep(self, seconds: float) -> None:
        self.now += seconds
