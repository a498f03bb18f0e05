"""Measure the bytes in a folder while other processes change it. No tests here."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Measured:
    """``most``: bytes in the folder at any moment that was seen; ``times``: number of moments."""

    def __init__(self) -> None:
        self.most, self.times = 0, 0


@contextmanager
def measured_folder(folder: Path) -> Iterator[Measured]:
    """Measure a folder again and again until the block ends.

    Looking at all files takes time in which some are removed and others written, and a sum over that time would count
    both. Only what two looks in a row agree on was there at one moment.
    """
    found, done = Measured(), threading.Event()

    def measure() -> None:
        before = _files(folder)
        while not done.is_set():
            now = _files(folder)
            if now == before:
                found.most, found.times = max(found.most, sum(now.values())), found.times + 1
            before = now
            time.sleep(0.003)

    watcher = threading.Thread(target=measure)
    watcher.start()
    try:
        yield found
    finally:
        done.set()
        watcher.join()


def _files(folder: Path) -> dict[str, int]:
    found = {}
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                found[os.path.join(path, name)] = os.stat(os.path.join(path, name)).st_size
            except FileNotFoundError:
                found[os.path.join(path, name)] = -1  # removed meanwhile: the next look differs
    return found
