"""Cycles are collected after the given steps, and at no other time; free blocks of the C library are returned then."""

import ctypes
import gc
import weakref
from types import SimpleNamespace

import pytest

from scaletrain_cli.engine import trainer
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


def test_free_blocks_are_returned_once_the_process_has_grown_much(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hasattr(ctypes.CDLL(None), "malloc_trim")
    resident = [10**9]
    returned: list[int] = []
    monkeypatch.setattr(trainer, "resident_bytes", lambda: resident[-1])
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=lambda kept: returned.append(step)))
    with GarbageCollection() as garbage:
        for step, now in ((50, 10**9), (100, 10**9 + 10**7), (149, 10**10), (150, 10**10), (200, 10**10)):
            resident.append(now)
            garbage.after_step(step)
    assert returned == [50, 150]
