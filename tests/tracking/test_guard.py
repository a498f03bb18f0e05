import errno
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.journal import append_line, is_diagnosed, mark_diagnosis
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.tracking import guard
from scaletrain_cli.tracking.base import Outcome, TrackedRun, Tracker, TrackerOptions
from scaletrain_cli.tracking.guard import GuardedTracker, RunFiles, Trackers
from tests.waiting import wait_until


class Recorder(Tracker[TrackerOptions]):
    """Records its calls; ``rows`` and ``calls`` belong to the class, as those of a service would outlive an attempt."""

    options_model = TrackerOptions
    rows: ClassVar[list[tuple[int, dict[str, float]]]] = []
    calls: ClassVar[list[tuple[Any, ...]]] = []

    def start(self, run: TrackedRun) -> Mapping[str, int] | None:
        self.calls.append(("start", run.tracking_id, run.attempt, run.last_step))
        return None

    def log(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        self.rows.append((step, dict(values)))

    def event(self, name: str, details: Mapping[str, Any], seconds: float) -> None:
        self.calls.append(("event", name, details))

    def artifact(self, path: Path) -> None:
        self.calls.append(("artifact", path.name))

    def finish(self, outcome: Outcome) -> None:
        self.calls.append(("finish", outcome))


class Rewinder(Recorder):
    rewinds = True

    def rewind(self, step: int) -> None:
        self.calls.append(("rewind", step))
        self.rows[:] = [row for row in self.rows if row[0] <= step]


class Attempt:
    """One attempt of a run with a tracker; ``lines`` are those of metrics.jsonl."""

    def __init__(self, folder: Path, make: Callable[[], Tracker[Any]], lines: list[dict[str, Any]], number: int = 1):
        self.reports: list[tuple[str, Reason]] = []
        self.lines = lines
        run = TrackedRun("run", "abcd1234", folder, {}, number)
        diagnosed = partial(is_diagnosed, RunDir(folder), 1)
        files = RunFiles(lambda: list(lines), folder / "events.jsonl", [folder / "run.json"], diagnosed)
        self.one = GuardedTracker(
            "toy", make, run, files, lambda event, tracker, why: self.reports.append((event, why))
        )
        self.trackers = Trackers([self.one])

    def train(self, first: int, last: int, **values: float) -> None:
        for step in range(first, last + 1):
            line = {"step": step, "loss": 1 / step, "mfu": None, "attempt": 1, "time": 100.0 + step, **values}
            self.lines.append(line)
            self.trackers.log(line)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "rows", [])
    monkeypatch.setattr(Recorder, "calls", [])
    monkeypatch.setattr(guard, "_IDLE_SECONDS", 0.02)
    monkeypatch.setattr(guard, "_FIRST_RETRY_SECONDS", 0.05)


def recorder() -> Recorder:
    return Recorder(TrackerOptions())


def rewinder() -> Rewinder:
    return Rewinder(TrackerOptions())


def steps() -> list[int]:
    return [step for step, values in Recorder.rows if "loss" in values]


def test_a_tracker_gets_steps_events_and_artifacts_and_the_next_attempt_goes_on_from_there(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    append_line(tmp_path / "events.jsonl", {"time": 1.0, "event": "started", "step": 0})
    lines: list[dict[str, Any]] = []
    first = Attempt(tmp_path, recorder, lines)
    first.train(1, 5)
    first.trackers.log({"step": 5, "validation_loss": 2.0, "attempt": 1, "time": 105.0})
    first.trackers.finish("preempted")
    append_line(tmp_path / "events.jsonl", {"time": 2.0, "event": "resumed", "step": 5})
    second = Attempt(tmp_path, recorder, lines, number=2)
    second.train(6, 9)
    second.trackers.finish("finished")
    assert steps() == list(range(1, 10))
    assert Recorder.rows[5] == (5, {"validation_loss": 2.0})
    assert Recorder.rows[0] == (1, {"loss": 1.0, "attempt": 1})
    assert [call for call in Recorder.calls if call[0] != "event"] == [
        ("start", "abcd1234", 1, 0),
        ("artifact", "run.json"),
        ("finish", "preempted"),
        ("start", "abcd1234", 2, 5),
        ("finish", "finished"),
    ]
    assert [call[1] for call in Recorder.calls if call[0] == "event"] == ["started", "resumed"]
    assert first.reports == second.reports == []


@pytest.mark.parametrize(("make", "kept"), [(recorder, 1.0), (rewinder, 2.0)])
def test_steps_that_are_trained_again_come_once(make: Callable[[], Tracker[Any]], kept: float, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []
    one = Attempt(tmp_path, make, lines)
    one.train(1, 8, loss=1.0)
    one.train(5, 10, loss=2.0)  # after a rollback to step 4
    one.trackers.finish("preempted")
    again = Attempt(tmp_path, make, lines[:-2], number=2)  # from the checkpoint of step 8
    again.train(9, 12, loss=2.0)
    again.trackers.finish("finished")
    assert steps() == list(range(1, 13))
    assert [values["loss"] for step, values in Recorder.rows if step == 6] == [kept]


def test_what_a_killed_process_did_not_send_comes_from_metrics_jsonl(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 1.0, "time": 1.0} for step in range(1, 6)]
    one = Attempt(tmp_path, rewinder, lines)
    one.train(6, 7)
    one.trackers.finish("finished")
    assert steps() == list(range(1, 8))


@pytest.mark.parametrize("make", [recorder, rewinder])
def test_an_evaluation_that_ends_after_that_of_a_later_step_undoes_nothing(
    make: Callable[[], Tracker[Any]], tmp_path: Path
) -> None:
    one = Attempt(tmp_path, make, [])
    one.train(1, 8)
    for step in (6, 4, 6):
        one.trackers.log({"step": step, "arc/acc": step / 10, "time": 200.0})
    one.train(9, 10)
    one.trackers.finish("finished")
    assert steps() == list(range(1, 11))
    assert [row for row in Recorder.rows if "arc/acc" in row[1]] == [
        (each, {"arc/acc": each / 10}) for each in (6, 4, 6)
    ]


def test_the_next_attempt_takes_back_only_what_it_trains_again(tmp_path: Path) -> None:
    """TensorBoard would lose the events of all steps that are taken back."""
    lines: list[dict[str, Any]] = []
    one = Attempt(tmp_path, rewinder, lines)
    one.train(1, 8)
    one.trackers.finish("preempted")
    lines.append({"step": 8, "validation_loss": 2.0, "attempt": 1, "time": 108.0})  # of which the kill kept it
    Recorder.calls.clear()
    again = Attempt(tmp_path, rewinder, lines, number=2)
    again.train(7, 9)
    again.trackers.finish("finished")
    assert [call[1] for call in Recorder.calls if call[0] == "rewind"] == [8, 6]
    assert steps() == list(range(1, 10))


class Answering(Recorder):
    def start(self, run: TrackedRun) -> Mapping[str, int] | None:
        return {"loss": max(steps(), default=0)}


def test_the_steps_that_a_tracker_reports_override_its_state_file(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []
    one = Attempt(tmp_path, lambda: Answering(TrackerOptions()), lines)
    one.train(1, 5)
    one.trackers.finish("preempted")
    (tmp_path / "tracking" / "toy.json").unlink()
    two = Attempt(tmp_path, lambda: Answering(TrackerOptions()), lines)
    two.train(4, 7)
    two.trackers.finish("finished")
    assert steps() == list(range(1, 8))


class Flaky(Recorder):
    failures: ClassVar[list[str]] = []

    def log(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        if step == 3 and self.failures:
            raise ConnectionError(self.failures.pop())
        super().log(step, values, seconds)


def test_a_tracker_that_fails_is_reported_once_tried_again_and_misses_nothing(tmp_path: Path) -> None:
    Flaky.failures = ["no route to host"] * 3
    one = Attempt(tmp_path, lambda: Flaky(TrackerOptions()), [])
    one.train(1, 6)
    wait_until(lambda: steps() == list(range(1, 7)), "all steps have arrived")
    one.trackers.finish("finished")
    assert steps() == list(range(1, 7))
    assert [(event, reason.code) for event, reason in one.reports] == [
        ("tracker-off", "tracking.log-failed"),
        ("tracker-on", "tracking.on"),
    ]
    assert one.reports[0][1].params["message"] == "ConnectionError: no route to host"


def test_a_file_system_that_fails_for_a_moment_turns_no_tracker_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append_line(tmp_path / "events.jsonl", {"time": 1.0, "event": "started"})
    read, errors = guard.open_to_read, [OSError(errno.ESTALE, "Stale file handle")] * 2

    def open_to_read(path: Path) -> Any:
        if path.name == "events.jsonl" and errors:
            raise errors.pop()
        return read(path)

    monkeypatch.setattr(guard, "open_to_read", open_to_read)
    one = Attempt(tmp_path, recorder, [])
    wait_until(lambda: ("event", "started", {}) in Recorder.calls, "the event has arrived")
    one.trackers.finish("preempted")
    assert (one.reports, errors) == ([], [])


def test_metrics_that_cannot_be_read_leave_no_tracker_open(tmp_path: Path) -> None:
    """One that has a port would keep it from those after it."""

    class ReadLater(list[dict[str, Any]]):
        errors: ClassVar = [OSError(errno.ESTALE, "Stale file handle")]

        def __iter__(self) -> Iterator[dict[str, Any]]:
            if self.errors:
                raise self.errors.pop()
            return super().__iter__()

    one = Attempt(tmp_path, recorder, ReadLater([{"step": 1, "loss": 1.0}]))
    wait_until(lambda: steps() == [1], "the step has arrived")
    one.trackers.finish("preempted")
    assert [call[0] for call in Recorder.calls] == ["start", "finish"]


def missing() -> Tracker[Any]:
    raise ModuleNotFoundError("No module named 'toy'")


def test_a_tracker_that_is_not_installed_is_off_for_the_attempt(tmp_path: Path) -> None:
    one = Attempt(tmp_path, missing, [])
    one.train(1, 3)
    one.trackers.finish("finished")
    assert [reason.code for _, reason in one.reports] == ["tracking.not-installed"]


class Hanging(Recorder):
    release: ClassVar[threading.Event]

    def log(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        self.release.wait()


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Hanging]]:
    monkeypatch.setattr(Hanging, "release", release := threading.Event(), raising=False)
    yield lambda: Hanging(TrackerOptions())
    release.set()


def test_a_tracker_that_hangs_delays_neither_a_step_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hanging: Callable[[], Hanging]
) -> None:
    monkeypatch.setattr(guard, "FINISH_SECONDS", {"preempted": 0.2})
    one = Attempt(tmp_path, hanging, [])
    one.train(1, 1000)
    one.trackers.finish("preempted")
    assert [reason.code for _, reason in one.reports] == ["tracking.finish-timeout"]


def test_a_queue_that_is_full_turns_the_tracker_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hanging: Callable[[], Hanging]
) -> None:
    monkeypatch.setattr(guard, "_QUEUED", 50)
    one = Attempt(tmp_path, hanging, [])
    one.train(1, 100)
    assert [reason.code for _, reason in one.reports] == ["tracking.queue-full"]
    Hanging.release.set()
    one.trackers.finish("failed")


def test_a_tracker_whose_report_fails_is_off_without_an_error_in_training(tmp_path: Path) -> None:
    one = Attempt(tmp_path, missing, [])
    one.reports = None  # type: ignore[assignment]
    one.train(1, 3)
    one.trackers.finish("finished")
    assert one.one._off.is_set()
    assert not one.one._thread.is_alive()


def test_findings_of_the_last_diagnosis_come_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def events() -> list[str]:
        return [call[1] for call in Recorder.calls if call[0] == "event"]

    run = RunDir(tmp_path)
    run.attempt(1).mkdir(parents=True)
    mark_diagnosis(run, 1, is_over=False)
    monkeypatch.setattr(guard, "_FINDINGS_SECONDS", 1e6)
    append_line(run.events, {"time": 1.0, "event": "finished", "step": 5})
    first = Attempt(tmp_path, recorder, [])
    first.train(1, 5)
    first.one.finish("finished")
    wait_until(lambda: steps() == [1, 2, 3, 4, 5], "the steps")
    assert ("finish", "finished") not in Recorder.calls
    append_line(run.events, {"time": 2.0, "event": "finding", "step": 5})
    mark_diagnosis(run, 1, is_over=True)
    first.one.join(threading.TIMEOUT_MAX)
    assert events() == ["finished", "finding"]
    assert Recorder.calls[-1] == ("finish", "finished")

    monkeypatch.setattr(guard, "_FINDINGS_SECONDS", 0.1)
    mark_diagnosis(run, 1, is_over=False)  # the process was killed
    second = Attempt(tmp_path, recorder, [], number=2)
    second.trackers.finish("finished")
    assert Recorder.calls[-1] == ("finish", "finished")
    assert second.reports == []
