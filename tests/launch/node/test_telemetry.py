"""The agent's thread of telemetry: what it writes, and that nothing it waits for delays the agent."""

import json
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.launch.node import telemetry as module
from scaletrain_cli.launch.node.heartbeats import Channel
from scaletrain_cli.launch.node.telemetry import NodeTelemetry
from scaletrain_cli.telemetry.series import SeriesWriter, read_series
from scaletrain_cli.worker.heartbeat import HEARTBEAT_VARIABLE, Heartbeat
from scaletrain_cli.worker.telemetry import RankRow, RankTelemetry
from tests.launch.conftest import make_spec
from tests.launch.node.test_gpu_health import FAKE
from tests.waiting import wait_until

CPU = make_spec()
GPUS = make_spec("cluster.gpu=h100-sxm-80gb")


def row(step: int, seconds: float) -> RankRow:
    return RankRow(step, 1e9 + step, 1, *[{"step_seconds": seconds}] * 3)


def node(path: Path, rows: deque[tuple[int, RankRow]] | None = None, interval: float = 0.05) -> NodeTelemetry:
    return NodeTelemetry(path, interval, deque() if rows is None else rows, lambda: 7)


def test_beats_and_rows_of_a_rank_are_told_apart() -> None:
    rows: list[RankRow] = []
    channel = Channel(take_row=rows.append)
    with channel.inherited() as variables:
        descriptor = os.dup(int(variables[HEARTBEAT_VARIABLE]))
    Heartbeat(descriptor).beat(3, "step", 5.0)
    RankTelemetry(descriptor).add(3, {"step_seconds": 0.5})
    os.write(descriptor, b"text of a program\n")
    os.close(descriptor)
    channel.listen()
    channel.close()
    assert (channel.beat.step, channel.beat.phase) == (3, "step")
    assert [(found.step, found.mean) for found in rows] == [(3, {"step_seconds": 0.5})]


def test_a_program_that_writes_without_end_does_not_keep_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = Channel()
    reads: list[int] = []

    def endless(descriptor: int, size: int) -> bytes:
        reads.append(size)
        assert len(reads) < 100
        return b"x" * size

    with monkeypatch.context() as patch:
        patch.setattr(os, "read", endless)
        channel.listen()
    assert len(reads) == 16
    with channel.inherited():
        pass
    channel.close()


@pytest.mark.process
def test_ranks_gpus_and_the_node_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = os.pathsep.join([str(FAKE), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", search)
    monkeypatch.setenv("FAKE_NVML", json.dumps({"gpus": [{}, {"busy": 3}, {}]}))
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(module, "FLUSH_SECONDS", 0.0)
    monkeypatch.setattr(module, "_FIRST_FLUSH_SECONDS", 0.0)
    rows = deque([(0, row(1, 0.5)), (1, row(1, 0.75))])
    telemetry = node(tmp_path / "x.jsonl.gz", rows)
    monkeypatch.setattr(module, "FINISH_SECONDS", threading.TIMEOUT_MAX)
    began = time.time()
    telemetry.start(GPUS)
    assert len(telemetry.pids) == 1
    wait_until((tmp_path / "x.jsonl.gz").exists, "the file is written")
    wait_until(lambda: "gpu 1" in read_series(tmp_path / "x.jsonl.gz"), "GPUs are written")
    rows.append((0, row(2, 0.25)))
    telemetry.finish(threading.TIMEOUT_MAX)
    found = read_series(tmp_path / "x.jsonl.gz")
    assert found.keys() == {"rank 0", "rank 1", "gpu 0", "gpu 1", "node"}  # the ranks have two of the GPUs
    assert list(found["rank 0"].mean["step_seconds"]) == [0.5, 0.25]
    assert list(found["rank 0"].steps) == [1, 2]
    assert found["gpu 1"].mean["utilization"][0] == pytest.approx(0.03)
    assert set(found["gpu 1"].steps) == set(found["node"].steps) == {7}
    assert round(began, 3) <= found["node"].times[0] <= time.time()


@pytest.mark.parametrize("call", ["host", "file"])
def test_a_call_that_never_returns_delays_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    entered, released = threading.Event(), threading.Event()

    def hang(*_: Any) -> dict[str, float]:
        entered.set()
        released.wait()
        return {}

    monkeypatch.setattr(module, "FINISH_SECONDS", 0.3)
    monkeypatch.setattr(module, "_FIRST_FLUSH_SECONDS", 0.0)
    telemetry = node(tmp_path / "x.jsonl.gz")
    if call == "host":
        monkeypatch.setattr(telemetry.host, "sample", hang)
    else:
        monkeypatch.setattr(SeriesWriter, "flush", hang)
    telemetry.start(CPU)
    assert entered.wait()
    telemetry.finish()
    assert telemetry._thread.is_alive()
    released.set()


def test_a_node_that_cannot_be_measured_loses_its_own_rows_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> dict[str, float]:
        raise RuntimeError("unexpected")

    telemetry = node(tmp_path / "x.jsonl.gz", deque([(0, row(1, 0.5))]))
    monkeypatch.setattr(telemetry.host, "sample", fail)
    telemetry.start(CPU)
    wait_until(lambda: not telemetry.rows and not telemetry._measures_host, "a row is taken")
    telemetry.rows.append((0, row(2, 0.25)))
    monkeypatch.setattr(module, "FINISH_SECONDS", threading.TIMEOUT_MAX)
    telemetry.finish(threading.TIMEOUT_MAX)
    assert caplog.text.count("the node is not measured: RuntimeError: unexpected") == 1
    found = read_series(tmp_path / "x.jsonl.gz")
    assert found.keys() == {"rank 0"}
    assert list(found["rank 0"].steps) == [1, 2]


def test_an_error_ends_telemetry_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("unexpected")

    monkeypatch.setattr(SeriesWriter, "add", fail)
    telemetry = node(tmp_path / "x.jsonl.gz", deque([(0, row(1, 0.5))]))
    telemetry.start(CPU)
    telemetry._thread.join()
    telemetry.finish()
    assert "no more telemetry is written: RuntimeError: unexpected" in caplog.text


def test_a_run_folder_that_cannot_be_written_loses_telemetry_alone(tmp_path: Path) -> None:
    (tmp_path / "telemetry").touch()
    telemetry = node(tmp_path / "telemetry/x.jsonl.gz")
    telemetry.start(CPU)
    telemetry.finish()
    telemetry._thread.join()
    assert (tmp_path / "telemetry").stat().st_size == 0
