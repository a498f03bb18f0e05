"""Cycles are collected after the given steps, and at no other time."""

from __future__ import annotations

import gc
import weakref

from scaletrain_cli.engine.trainer import GarbageCollection


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
