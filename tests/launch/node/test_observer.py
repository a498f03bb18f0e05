"""The process that diagnoses a run while it trains, with measurements that a test writes."""

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.launch.live_diagnosis import LiveDiagnosis, pause_seconds
from scaletrain_cli.launch.node.observer import Observer
from scaletrain_cli.rundir.journal import is_diagnosed, record_event
from tests.launch.conftest import MadeRun, MakeRun, is_running
from tests.waiting import wait_until


def log_steps(made: MadeRun, first: int, last: int, *, rises: bool) -> None:
    """Append measured steps whose loss rises from 4 to 8, or falls."""
    with made.run.metrics.open("a", encoding="utf-8") as file:
        for step in range(first, last + 1):
            loss = 4 + 4 * min(1.0, step / 100) if rises else 4 - 2 * min(1.0, step / 100)
            line = {"step": step, "loss": loss + 0.01 * (-1) ** step, "attempt": 1, "step_seconds": 0.1}
            file.write(json.dumps(line | {"time": float(step)}) + "\n")


def test_a_process_raises_what_is_logged(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_run("code.command=[python, train.py]", run_id=f"observed-{tmp_path.name}")
    made.run.attempt(1).mkdir(parents=True)
    observer = Observer(made.run, 1, start_seconds=0.0)
    observer.start_if_due()
    assert observer.pid is None  # nothing is measured yet
    log_steps(made, 1, 200, rises=True)
    observer.start_if_due()
    assert observer.pid is not None
    wait_until(lambda: os.getpriority(os.PRIO_PROCESS, observer.pid or 0) == 19, "it yields to training")
    wait_until(lambda: not is_diagnosed(made.run, 1), "trackers wait for its findings")
    record_event(made.run, "finished", step=200)
    wait_until(lambda: is_diagnosed(made.run, 1), "the last diagnosis, before the agent asks for it")
    assert made.events("finding")
    monkeypatch.setattr("scaletrain_cli.launch.node.observer._LAST_SECONDS", 1e6)
    observer.finish(1e6, failed=False)
    assert observer._process.returncode == 0
    (raised,) = made.events("finding")
    assert (raised["code"], raised["severity"], raised["change"]) == ("diagnosis.loss-above-start", "error", "raised")
    assert raised["text"].startswith("the loss diverges: 8.0")
    assert raised["step"] == 200


def test_a_short_attempt_is_diagnosed_if_it_failed(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Observer] = []
    monkeypatch.setattr(Observer, "_start", lambda self: started.append(self))
    made = make_run()
    before = Observer(made.run, 1)
    log_steps(made, 1, 200, rises=True)
    before.finish(failed=False)
    Observer(made.run, 2).finish(failed=True)  # it has trained nothing
    assert started == []
    before.finish(failed=True)
    assert started == [before]


def test_findings_are_raised_once_over_attempts_and_cleared(make_run: MakeRun) -> None:
    made = make_run("code.command=[python, train.py]")
    log_steps(made, 1, 200, rises=True)
    first = LiveDiagnosis(made.run, made.record, 1)
    first.look()
    first.look()  # nothing new
    assert made.events("finding") == []
    log_steps(made, 201, 210, rises=True)
    first.look()
    second = LiveDiagnosis(made.run, made.record, 2)
    for last in (220, 230):
        log_steps(made, last - 9, last, rises=True)
        second.look()
    assert [event["attempt"] for event in made.events("finding")] == [1]
    for last in (330, 340, 350):
        log_steps(made, last - 99, last, rises=False)
        assert not made.events("finding-cleared")
        second.look()
    (cleared,) = made.events("finding-cleared")
    assert (cleared["code"], cleared["attempt"], cleared["step"]) == ("diagnosis.loss-above-start", 2, 350)


def test_a_failed_diagnosis_is_logged_once_and_the_next_one_may_succeed(
    make_run: MakeRun, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_run()
    live = LiveDiagnosis(made.run, made.record, 1)
    with monkeypatch.context() as patch:
        patch.setattr("scaletrain_cli.launch.live_diagnosis.read_case", lambda *_: 1 / 0)
        log_steps(made, 1, 100, rises=True)
        live.look()
        live.look()
    assert [one.getMessage() for one in caplog.records] == ["a diagnosis failed: ZeroDivisionError('division by zero')"]
    live.look(is_last=True)
    assert made.events("finding")


def test_a_finding_that_was_not_recorded_is_raised_later(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    made = make_run()
    live = LiveDiagnosis(made.run, made.record, 1)
    log_steps(made, 1, 200, rises=True)
    with monkeypatch.context() as patch:
        patch.setattr("scaletrain_cli.launch.live_diagnosis.record_event", full)
        live.look(is_last=True)
    live.look(is_last=True)
    assert "diagnosis.loss-above-start" in [event["code"] for event in made.events("finding")]


def test_a_killed_process_is_started_again_after_a_time(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scaletrain_cli.launch.node.observer.python_command", lambda *_: ["sleep", "100000"])
    observer = Observer(make_run().run, 1, notifies=True, start_seconds=0.0)
    observer.start_if_due()
    first = observer.pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not is_running(first), "it has ended")
    observer.start_if_due()
    assert observer.pid == first
    monkeypatch.setattr("scaletrain_cli.launch.node.observer._AGAIN_SECONDS", 0.0)
    observer.start_if_due()
    second = observer.pid
    assert second not in (None, first)
    observer.start_if_due()
    assert observer.pid == second
    observer.finish(0.0, failed=False)
    assert observer._process.wait() == -signal.SIGKILL


def test_the_pause_bounds_the_share_of_a_core() -> None:
    assert pause_seconds(5.0, 0.02) == 10
    assert pause_seconds(5.0, 0.5) == pytest.approx(50)  # 1 % in the first minutes
    assert pause_seconds(1000.0, 0.02) == 60
    assert pause_seconds(1000.0, 0.3) == pytest.approx(300)  # 0.1 % later
    assert pause_seconds(1000.0, 60.0) == 1800
