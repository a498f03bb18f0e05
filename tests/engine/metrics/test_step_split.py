import itertools
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scaletrain_cli.engine.metrics.step_split import CollectiveWaits, StepSplit
from tests.engine.ranks import on_ranks
from tests.waiting import wait_until


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


def split_of(host_seconds: float) -> StepSplit:
    """Return a split of steps on a GPU, whose host needs this long from one mark to the next."""
    moments = itertools.count()
    return StepSplit(torch.device("cuda", 0), clock=lambda: host_seconds * next(moments))


def run_step(split: StepSplit, step: int) -> None:
    split.begin()
    for _ in range(2):
        split.enter("forward")
        split.enter("backward")
        split.enter("optimizer")
    split.enter("other")
    split.end(step, {"data_wait_seconds": 0.25, "own_seconds": lambda: 0.5})


def test_events_are_read_once_they_have_passed_and_used_again(stream: Stream) -> None:
    split = split_of(host_seconds=0.01)
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
    expected = {"step_seconds": 0.176, "forward_seconds": 0.06, "backward_seconds": 0.1, "optimizer_seconds": 0.01}
    expected["host_seconds"] = 0.176 * 0.02 / 0.06  # the host took 20 ms of 60 ms
    assert found.values == pytest.approx({**expected, "data_wait_seconds": 0.25, "own_seconds": 0.5})
    made = stream.made
    run_step(split, 9)
    assert stream.made == made
    assert split.done() == []


def test_a_host_that_is_slower_than_the_device_needs_the_whole_step(stream: Stream) -> None:
    split = split_of(host_seconds=0.01)
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


class LateRank:
    """A clock of both ranks, which rank 1 alone sets on: it does so once rank 0 waits, and only then goes on itself."""

    def __init__(self) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._looks = 0  # of this rank, two for each wait

    def __call__(self) -> float:
        self._looks += 1
        found = float(self._store.add("clock", 0))
        if dist.get_rank() == 0:
            self._store.add("looks", 1)
        return found

    def arrive(self, looks: int) -> None:
        """Return on rank 1 once rank 0 has looked at the clock so often; a unit later than that."""
        if dist.get_rank() == 1:
            wait_until(lambda: self._store.add("looks", 0) >= looks, "rank 0 waits")
            self._store.add("clock", 1)


def waits() -> tuple[list[float], float]:
    """What this rank waited by that clock for each kind of collective, and outside of them."""
    found = []
    values, clock = torch.ones(4), LateRank()
    is_first = dist.get_rank() == 0
    with CollectiveWaits(clock) as counted:
        for number, collective in enumerate(
            (
                lambda: dist.all_reduce(values),
                lambda: dist.all_reduce(values, async_op=True).wait(),
                lambda: dist.broadcast(values, src=1),
                lambda: dist.all_gather_into_tensor(torch.empty(8), values),
                lambda: dist.barrier(),
                lambda: dist.recv(values, 1) if is_first else dist.send(values, 0),
            )
        ):
            before = counted.seconds
            clock.arrive(looks=2 * number + 1)
            collective()
            found.append(counted.seconds - before)
        before = counted.seconds
        other = threading.Thread(target=lambda: dist.all_reduce(values))
        other.start()
        other.join()
        others = counted.seconds - before
    before = counted.seconds
    dist.all_reduce(values)
    return found, others + counted.seconds - before + clock._looks - 2 * len(found)


def test_the_rank_that_others_wait_for_waits_least() -> None:
    assert on_ranks(2, waits) == [([1.0] * 6, 0), ([0.0] * 6, 0)]
