"""The next batch is read ahead, and no result depends on the time of the read."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from scaletrain_cli.engine.data.batches import Prefetcher, StepBatch

CPU = torch.device("cpu")


def batch(step: int) -> StepBatch:
    tokens = torch.full((2, 1, 4), step)
    return StepBatch(tokens, tokens + 1, torch.zeros(2, 1, dtype=torch.int64), torch.arange(4), None)


class Reading:
    """Records what was read, and fails at one step."""

    def __init__(self, fails_at: int = 0) -> None:
        self.fails_at, self.steps = fails_at, [0]
        self.threads: set[str] = set()
        self.advanced = threading.Condition()

    def __call__(self, step: int) -> StepBatch:
        with self.advanced:
            self.steps.append(step)
            self.threads.add(threading.current_thread().name)
            self.advanced.notify_all()
        if step == self.fails_at:
            raise OSError("the disk is gone")
        return batch(step)

    def wait_for(self, step: int) -> None:
        with self.advanced:
            assert self.advanced.wait_for(lambda: self.steps[-1] == step, timeout=60)


@pytest.fixture
def feeds() -> Iterator[list[Prefetcher]]:
    opened: list[Prefetcher] = []
    yield opened
    for feed in opened:
        feed.close()


def open_feed(feeds: list[Prefetcher], reading: Reading) -> Prefetcher:
    feeds.append(Prefetcher(reading, CPU))
    return feeds[-1]


def test_only_the_next_batch_is_read_ahead(feeds: list[Prefetcher]) -> None:
    reading = Reading()
    feed = open_feed(feeds, reading)
    for step in (1, 2, 3):
        micro_batches = feed.take(step)
        assert [int(micro.tokens[0, 0]) for micro in micro_batches] == [step, step]
        reading.wait_for(step + 1)
    feed.close()
    assert reading.steps == [0, 1, 2, 3, 4]
    assert reading.threads.isdisjoint({threading.current_thread().name})


def test_batches_may_be_taken_in_any_order(feeds: list[Prefetcher]) -> None:
    feed = open_feed(feeds, Reading())
    assert [int(feed.take(step)[0].tokens[0, 0]) for step in (7, 8, 30, 2, 3)] == [7, 8, 30, 2, 3]


def test_an_error_in_the_thread_is_raised_when_its_batch_is_taken(feeds: list[Prefetcher]) -> None:
    reading = Reading(fails_at=2)
    feed = open_feed(feeds, reading)
    feed.take(1)
    reading.wait_for(2)
    with pytest.raises(OSError, match="the disk is gone"):
        feed.take(2)


def test_closing_ends_the_thread() -> None:
    before = threading.active_count()
    feed = Prefetcher(Reading(), CPU)
    feed.take(1)
    feed.close()
    assert threading.active_count() == before
