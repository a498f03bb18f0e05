"""Functions that reader processes read with, in a module that is quick to import."""

import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from scaletrain_cli.data.chunk_hashes import CorruptDataError
from scaletrain_cli.engine.data.loader import Loader

FAILS, NO_PICKLE, CORRUPT, LARGE = 13, 14, 15, 1000
CPU = torch.device("cpu")
_large: list[weakref.ref[torch.Tensor]] = []  # of this process


class OddError(Exception):
    """An error that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("nothing to pickle")
        self.held = lambda: None


def read(number: int) -> dict[str, Any]:
    if number == FAILS:
        raise FileNotFoundError(2, "No such file or directory", "shard-7.bin")
    if number == NO_PICKLE:
        raise OddError
    if number == CORRUPT:
        raise CorruptDataError(Path("shard-8.bin"), "chunk 4 has changed", chunk=4)
    if number >= LARGE:
        _large[:] = [held for held in _large if held() is not None]
        large = torch.full((1 << 19,), number, dtype=torch.int32)  # 2 MB
        _large.append(weakref.ref(large))
        return {"large": large, "held": len(_large), "descriptors": len(os.listdir("/proc/self/fd"))}
    wide = torch.arange(6).view(2, 3).T + number  # not contiguous
    return {
        "tokens": wide,
        "halves": torch.full((3,), number, dtype=torch.bfloat16),
        "parts": (torch.tensor(float(number)), torch.empty(0, 4), [None, "text", number]),
        "process": os.getpid(),
        "stopped_by_sigterm": signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN,
    }


def both(first: Callable[[int], Any], second: Callable[[int], Any], number: int) -> tuple[Any, Any]:
    return first(number), second(number)


def slow(number: int) -> int:
    """Return the number after a time in which a test can end the rank."""
    time.sleep(600 if number > 1 else 0)
    return os.getpid()


if __name__ == "__main__":  # a rank, for a test that kills it
    from tests.engine.data import reading

    loader = Loader(reading.slow, CPU, workers=1)
    while loader.take(1) == os.getpid():  # while the other one starts
        time.sleep(0.05)
    print(loader.take(1, [2]), *loader._processes.pids, flush=True)  # type: ignore[union-attr]
    sys.stdin.read()
