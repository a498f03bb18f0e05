"""Cycles are collected after the given steps, and at no other time; free blocks of the C library are returned then."""

from __future__ import annotations

import gc
import weakref

from scaletrain_cli.engine.trainer import GarbageCollection
from scaletrain_cli.worker.telemetry import resident_bytes


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_after_every_50th_step_only() -> None:
    with GarbageCollection() as garbage:
        found = weakref.ref(Node())
        for _ in range(3000):  # more than enough for a collection of its own
            Node()
        garbage.after_step(49)
        assert found() is not None
        garbage.after_step(50)
        assert found() is None
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_free_blocks_are_returned_once_the_process_has_grown_much() -> None:
    with GarbageCollection() as garbage:
        garbage.after_step(50)
        before = resident_bytes()
        size = 100_000
        blocks = [b"x" * size for _ in range(3000)]  # below the size that malloc maps and unmaps apart
        kept = blocks[::100]  # so that none is at the end of the heap, which malloc returns by itself
        del blocks
        assert resident_bytes() - before > 180e6
        garbage.after_step(99)
        assert resident_bytes() - before > 180e6
        garbage.after_step(100)
        assert resident_bytes() - before < 50e6
        assert len(kept) == 30
