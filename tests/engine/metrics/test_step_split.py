"""Phases of a step: by events that are read after they have passed, and by host clocks."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scaletrain_cli.engine.metrics.step_split import CollectiveWaits, StepSplit
from tests.engine.ranks import on_ranks


class Stream:
    """A GPU's stream: events pass at the times that are set, in the order in which they are recorded."""

    def __init__(self) -> None:
        self.times: list[float] = []  # in ms, of the events to record
        self.passed = 0
        self.made = 0
        self.recorded = 0


def event_of(stream: Stream) -> type:
    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            stream.made += 1

        def record(self, _: Any) -> None:
            self.number, stream.recorded = stream.recorded, stream.recorded + 1

        def query(self) -> bool:
            return self.number < stream.passed

        def elapsed_time(self, end: Any) -> float:
            assert self.query()
            assert end.query()
            return stream.times[end.number] - stream.times[self.number]

    return Event


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", event_of(stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    return stream


def run_step(split: StepSplit, step: int) -> None:
    split.begin()
    for _ in range(2):
        split.enter("forward")
        time.sleep(0.01)  # of the host
        split.enter("backward")
        split.enter("optimizer")
    split.enter("other")
    split.end(step, {"data_wait_seconds": 0.25, "own_seconds": lambda: 0.5})


def test_events_are_read_once_they_have_passed_and_used_again(stream: Stream) -> None:
    split = StepSplit(torch.device("cuda", 0))
    # begin; two micro-batches of 30 ms forward, 50 ms backward and 1 or 9 ms of the update; the loss; the end
    stream.times = [0.0, 5.0, 35.0, 85.0, 86.0, 116.0, 166.0, 175.0, 176.0]
    run_step(split, 7)
    assert split.done() == []
    run_step(split, 8)
    stream.passed = 8
    assert split.done() == []
    stream.passed = 9
    [found] = split.done()
    assert found.step == 7
    host = found.values.pop("host_seconds")
    expected = {"step_seconds": 0.176, "forward_seconds": 0.06, "backward_seconds": 0.1, "optimizer_seconds": 0.01}
    assert found.values == pytest.approx({**expected, "data_wait_seconds": 0.25, "own_seconds": 0.5})
    assert 0.176 * 0.02 / 0.06 <= host <= 0.176  # the host took 20 ms, or more on a busy machine, of 60 ms
    made = stream.made
    run_step(split, 9)
    assert stream.made == made
    assert split.done() == []


def test_a_host_that_is_slower_than_the_device_needs_the_whole_step(stream: Stream) -> None:
    split = StepSplit(torch.device("cuda", 0))
    stream.times, stream.passed = [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0, 36.0], 9
    run_step(split, 1)
    [found] = split.done()
    assert found.values["host_seconds"] == found.values["step_seconds"] == pytest.approx(0.036)


def test_steps_whose_events_never_pass_do_not_add_up(stream: Stream) -> None:
    split = StepSplit(torch.device("cuda", 0))
    for step in range(100):
        split.begin()
        split.end(step, {})
    stream.times, stream.passed = [0.0] * 200, 200
    assert [found.step for found in split.done()] == list(range(84, 100))


def test_nothing_is_marked_outside_of_a_step() -> None:
    split = StepSplit(torch.device("cpu"))
    split.enter("forward")
    assert split.done() == []
    split.begin()
    split.end(1, {})
    split.enter("backward")
    [found] = split.done()
    assert found.values.keys() == {"step_seconds", "host_seconds"}


def waits() -> tuple[list[float], float]:
    """Seconds that this rank waited for each kind of collective while rank 1 was 50 ms late, and outside of them."""
    found = []
    late = 0.05 if dist.get_rank() == 1 else 0.0
    values = torch.ones(4)
    with CollectiveWaits() as counted:
        for collective in (
            lambda: dist.all_reduce(values),
            lambda: dist.all_reduce(values, async_op=True).wait(),
            lambda: dist.broadcast(values, src=1),
            lambda: dist.all_gather_into_tensor(torch.empty(8), values),
            lambda: dist.barrier(),
            lambda: dist.send(values, 1) if late == 0 else dist.recv(values, 0),
        ):
            dist.all_reduce(values)
            before = counted.seconds
            time.sleep(late)
            collective()
            found.append(counted.seconds - before)
        before = counted.seconds
        other = threading.Thread(target=lambda: dist.all_reduce(values))
        other.start()
        other.join()
        others = counted.seconds - before
    before = counted.seconds
    dist.all_reduce(values)
    return found, others + counted.seconds - before


def test_the_rank_that_others_wait_for_waits_least() -> None:
    (first, first_outside), (late, late_outside) = on_ranks(2, waits)
    assert all(seconds > 0.03 for seconds in first[:-1]), first  # a message this small is sent without waiting
    assert all(seconds < 0.03 for seconds in late), late
    assert first_outside == late_outside == 0
