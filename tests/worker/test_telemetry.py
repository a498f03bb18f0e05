import contextlib
import math
import os
import select
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaletrain_cli.worker.heartbeat import Heartbeat, read_beat
from scaletrain_cli.worker.telemetry import (
    RankRow,
    RankTelemetry,
    StepTimes,
    memory_columns,
    read_telemetry_line,
    telemetry_line,
)
from tests.waiting import Clock

NUMBERS = st.floats(width=32, allow_nan=False)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reads, writes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    yield reads, writes
    for descriptor in (reads, writes):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def lines(reads: int) -> list[bytes]:
    try:
        return os.read(reads, 1 << 17).splitlines()
    except BlockingIOError:
        return []


def sender(writes: int) -> tuple[RankTelemetry, Clock]:
    clock = Clock(100.0)
    return RankTelemetry(writes, interval_seconds=1.0, clock=clock, wall_clock=lambda: 1e9 + clock.now), clock


def test_a_line_has_mean_and_range_of_the_steps_since_the_last(pipe: tuple[int, int]) -> None:
    telemetry, clock = sender(pipe[1])
    telemetry.add(1, {"step_seconds": 9.0})
    for step, seconds in ((2, 0.25), (3, 0.5), (4, 0.75)):
        clock.now += 0.4
        telemetry.add(step, {"step_seconds": seconds, "memory_bytes": 5e9, "absent": math.nan})
    found = [read_telemetry_line(line) for line in lines(pipe[0])]
    assert found == [
        RankRow(1, 1e9 + 100, 1, *[{"step_seconds": 9.0}] * 3),
        RankRow(
            4,
            1e9 + 101.2,
            3,
            {"step_seconds": 0.5, "memory_bytes": 5e9},
            {"step_seconds": 0.25, "memory_bytes": 5e9},
            {"step_seconds": 0.75, "memory_bytes": 5e9},
        ),
    ]
    telemetry.add(5, {"step_seconds": 1.0})
    assert lines(pipe[0]) == []
    telemetry.send()
    telemetry.send()
    assert len(lines(pipe[0])) == 1


@given(
    values=st.dictionaries(st.text(max_size=20), st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=20),
    step=st.integers(0, 1 << 60),
    count=st.integers(1, 1 << 40),
)
def test_a_line_returns_its_row(values: dict[str, tuple[float, float, float]], step: int, count: int) -> None:
    lowest, mean, highest = ({name: sorted(three)[place] for name, three in values.items()} for place in range(3))
    found = read_telemetry_line(telemetry_line(RankRow(step, 1.5e9, count, mean, lowest, highest)))
    assert (found.step, found.time, found.count) == (step, 1.5e9, count)
    for got, given_values in ((found.mean, mean), (found.lowest, lowest), (found.highest, highest)):
        assert got == pytest.approx(given_values, rel=1e-6)


def test_beats_and_telemetry_pass_over_each_other(pipe: tuple[int, int]) -> None:
    telemetry, _ = sender(pipe[1])
    Heartbeat(pipe[1]).beat(7, "step", 3.0)
    telemetry.add(7, {"step_seconds": 1.0})
    beat, row = lines(pipe[0])
    assert read_beat(beat) is not None
    assert read_telemetry_line(beat) is None
    assert read_beat(row) is None
    assert read_telemetry_line(row) is not None


@given(st.one_of(st.binary(max_size=80), st.sampled_from([b"[]", b'{"telemetry": 2}', b'{"telemetry":1,"step":-1}'])))
def test_other_text_is_passed_over(text: bytes) -> None:
    assert read_telemetry_line(text) is None


def test_a_reader_that_does_not_read_leaves_the_pipe_to_heartbeats(pipe: tuple[int, int]) -> None:
    telemetry, clock = sender(pipe[1])
    for step in range(2000):
        clock.now += 1
        telemetry.add(step, {f"column_{number}_seconds": step / 7 for number in range(13)})
    heartbeat = Heartbeat(pipe[1])
    for step in range(300):
        heartbeat.beat(step, "step", 30.0)
    found = lines(pipe[0])
    assert [line for line in found if read_telemetry_line(line)]
    assert [beat.step for line in found if (beat := read_beat(line))] == list(range(300))


def test_a_row_too_long_for_one_atomic_write_is_lost_alone(pipe: tuple[int, int]) -> None:
    telemetry, clock = sender(pipe[1])
    telemetry.add(1, {f"{number:060d}": number / 7 for number in range(64)})
    clock.now += 1
    telemetry.add(2, {"step_seconds": 1.0})
    found = [read_telemetry_line(line) for line in lines(pipe[0])]
    assert [row.step for row in found if row] == [2]
    assert all(len(line) < select.PIPE_BUF for line in lines(pipe[0]))


def test_a_closed_or_missing_pipe_is_no_error(pipe: tuple[int, int]) -> None:
    telemetry, _ = sender(pipe[1])
    os.close(pipe[0])
    telemetry.add(1, {"step_seconds": 1.0})
    assert RankTelemetry.from_environment({}).add(1, {"step_seconds": 1.0}) is None


def test_steps_of_a_program_take_from_one_beat_to_the_next_without_other_phases(pipe: tuple[int, int]) -> None:
    telemetry, wall = sender(pipe[1])
    clock = Clock(100.0)
    times = StepTimes(telemetry, interval_seconds=1.5, memory=lambda: {"memory_bytes": 5e9}, clock=clock)
    heartbeat = Heartbeat(clock=clock)
    heartbeat.observer = times.beat
    # (step, phase, seconds until the next beat, of which it waits for data)
    for step, phase, seconds, waited in (
        (0, "restore", 9.0, 0.0),
        (1, "step", 0.25, 0.125),
        (2, "step", 0.25, 0.0625),
        (2, "step", 0.25, 0.0625),  # another micro-batch
        (3, "step", 0.25, 0.0),
        (3, "save", 7.0, 0.0),
        (4, "step", 0.5, 0.0),
        (2, "step", 0.5, 0.0),  # rolled back
        (3, "step", 0.75, 0.0),
        (4, "step", 0.0, 0.0),
    ):
        heartbeat.beat(step, phase)
        times.add({"data_wait_seconds": waited} if waited else {})
        clock.now += seconds
        wall.now += 2.0  # each step has a row
    rows = [row for row in map(read_telemetry_line, lines(pipe[0])) if row is not None]
    assert [row.step for row in rows] == [1, 2, 2, 3]
    assert [row.mean["step_seconds"] for row in rows] == [0.25, 0.5, 0.5, 0.75]
    assert [row.mean.get("data_wait_seconds") for row in rows] == [0.125, 0.125, None, None]
    assert [row.mean.get("memory_bytes") for row in rows] == [5e9, None, 5e9, 5e9], "read at most every half interval"
    assert times.means() == {"step_seconds": 0.5, "data_wait": 0.125}
    assert times.means() == {}


def test_the_memory_of_a_program_is_resident_or_what_torch_has_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False)))
    (resident,) = memory_columns().values()
    assert 1e6 < resident < 1e12
    stats = {"allocated_bytes.all.peak": 7, "reserved_bytes.all.current": 9, "num_alloc_retries": 1}
    cuda = SimpleNamespace(is_initialized=lambda: True, memory_stats=lambda: stats)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert memory_columns() == {"memory_bytes": 7.0, "memory_reserved_bytes": 9.0, "allocation_retries": 1.0}

    def fails() -> dict[str, float]:
        raise RuntimeError("no statistics")

    times = StepTimes(None, memory=fails)
    for step in (1, 2, 3):
        times.beat(step, "step")
    assert set(times.means()) == {"step_seconds"}
