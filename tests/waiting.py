"""Wait for the effects of other processes and threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_until(condition: Callable[[], Any], what: str) -> None:
    """Poll until the condition is true, with no limit but pytest's own, whose traceback shows ``what``."""
    pause = 0.01
    while not condition():
        time.sleep(pause)
        pause = min(1.3 * pause, 0.2)  # what takes seconds is not asked for a hundred times
