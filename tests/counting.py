"""Count the calls and the bytes read of a piece of work: unlike seconds, they are the same on every machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any


def calls_of(work: Callable[[], Any]) -> int:
    """Return how many functions of Python and of C ``work`` calls in this thread."""
    calls, before, collects = 0, sys.getprofile(), gc.isenabled()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()  # finalizers of what other tests have left are no calls of the work
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return calls


def bytes_read_by(work: Callable[[], Any]) -> int:
    """Return how many bytes this process reads from files during ``work``."""
    before = _bytes_read()
    work()
    return _bytes_read() - before


def _bytes_read() -> int:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))
