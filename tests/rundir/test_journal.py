"""Journals: each line is one record, with concurrent writers and after interrupted writes."""

import fcntl
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from scaletrain_cli.rundir import documents, journal
from scaletrain_cli.rundir.documents import DamagedError, read_document, undamaged_document
from scaletrain_cli.rundir.journal import (
    append_line,
    last_logged_step,
    read_events,
    read_lines,
    read_lines_backwards,
    read_metrics,
    record_event,
    steps_logged_since_begun,
    withdraw_event,
)
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import locked

Read = Callable[[Path], list[dict[str, object]]]


def forwards(path: Path) -> list[dict[str, object]]:
    return list(read_lines(path))


def backwards(path: Path) -> list[dict[str, object]]:
    return list(read_lines_backwards(path))[::-1]


either_way = pytest.mark.parametrize("read", [forwards, backwards])


@either_way
def test_an_incomplete_line_is_skipped_and_not_joined_with_the_next(tmp_path: Path, read: Read) -> None:
    path = tmp_path / "events.jsonl"
    append_line(path, {"n": 1})
    with path.open("ab") as file:
        file.write(b'{"n": 2, "half')
    append_line(path, {"n": 3})
    with path.open("ab") as file:
        file.write(b'{"n": 4')
    assert read(path) == [{"n": 1}, {"n": 3}]


@either_way
def test_a_line_cut_inside_a_character_or_filled_with_zeros_is_skipped(tmp_path: Path, read: Read) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"text": "\xc3\n' + b"\0" * 4096 + b'\n{"n": 1}\n[1, 2]\n7\n\n{"n": 2}\n')
    assert read(path) == [{"n": 1}, {"n": 2}]


def test_reading_backwards_gets_every_line_of_a_file_of_many_blocks(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "pad": "{"x" * (step * 37 % 300)}"}}\n' for step in range(3000)))
    assert [line["step"] for line in read_lines_backwards(path)] == list(range(2999, -1, -1))


def test_lines_of_concurrent_writers_stay_complete(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(path, number)) for number in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    found = [(record["writer"], record["n"]) for record in read_lines(path)]
    assert sorted(found) == [(writer, n) for writer in range(3) for n in range(200)]


def write_many(path: Path, writer: int) -> None:
    for n in range(200):
        append_line(path, {"writer": writer, "n": n, "pad": "x" * (n * 50)})


def test_nan_is_rejected_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(ValueError):
        append_line(path, {"loss": float("nan")})
    assert not path.exists()


def test_events_have_a_time_and_their_details(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    record_event(run, "signal", signal="SIGTERM", attempt=1)
    (event,) = read_events(run)
    assert event == {"time": event["time"], "event": "signal", "signal": "SIGTERM", "attempt": 1}


def test_a_repeated_step_has_the_metrics_of_its_last_repetition(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert last_logged_step(run) is None
    for step, loss in ((1, 3.0), (2, 2.5), (3, 2.2), (2, 2.4)):
        append_line(run.metrics, {"step": step, "loss": loss})
    assert [(line["step"], line["loss"]) for line in read_metrics(run)] == [(1, 3.0), (2, 2.4), (3, 2.2)]
    assert last_logged_step(run) == 2


def test_rolled_back_steps_are_not_in_the_metrics(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step in (10, 20, 30):
        append_line(run.metrics, {"step": step, "loss": 1.0, "validation_loss": 2.0, "time": time.time() - 5})
    record_event(run, "rolled-back", to_step=10)
    append_line(run.metrics, {"step": 20, "loss": 3.0, "time": time.time() + 5})
    assert [line["step"] for line in read_metrics(run)] == [10, 20]
    assert "validation_loss" not in read_metrics(run)[1]


def test_a_clock_that_is_set_back_hides_no_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, now = RunDir(tmp_path), [1e9]
    monkeypatch.setattr("scaletrain_cli.rundir.journal.time.time", lambda: now[0])

    def log(step: int, loss: float) -> None:
        append_line(run.metrics, {"step": step, "loss": loss, "time": now[0]})

    for change in (-3600.0, 3600.0, 0.0):  # between what is undone and what undoes it, and after
        run.events.unlink(missing_ok=True)
        run.metrics.unlink(missing_ok=True)
        record_event(run, "started", step=0)
        for step in (1, 2, 3):
            log(step, 9.0)
        now[0] += change
        assert steps_logged_since_begun(run) == [1, 2, 3]
        record_event(run, "rolled-back", to_step=1)
        assert steps_logged_since_begun(run) == []
        now[0] += change
        log(2, 5.0)
        assert [(line["step"], line["loss"]) for line in read_metrics(run)] == [(1, 9.0), (2, 5.0)]
        assert steps_logged_since_begun(run) == [2]
        record_event(run, "from-scratch")
        assert read_metrics(run) == []
        now[0] += change
        log(1, 4.0)
        assert [(line["step"], line["loss"]) for line in read_metrics(run)] == [(1, 4.0)]


def test_only_the_latest_event_of_a_name_can_be_withdrawn(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for event in ("submitted", "from-scratch"):
        record_event(run, event)
    before = run.events.read_bytes()
    withdraw_event(run, "submitted")
    assert run.events.read_bytes() == before
    withdraw_event(run, "from-scratch")
    assert [event["event"] for event in read_events(run)] == ["submitted"]
    withdraw_event(run, "submitted")
    assert run.events.read_bytes() == b""
    withdraw_event(run, "submitted")
    record_event(run, "again")
    assert len(read_events(run)) == 1


def test_no_lock_that_a_reader_can_hold_delays_a_line(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    record_event(run, "submitted")
    append_line(run.metrics, {"step": 1})
    with run.events.open("rb") as events, run.metrics.open("rb") as metrics:
        for opened in (events, metrics):
            fcntl.flock(opened, fcntl.LOCK_EX)
        append_line(run.metrics, {"step": 2})
        record_event(run, "started")
        withdraw_event(run, "started")
    assert last_logged_step(run) == 2
    assert [event["event"] for event in read_events(run)] == ["submitted"]
    assert [path.stat().st_mode & 0o777 for path in tmp_path.glob("*.lock")] == [0o600]


def test_a_line_is_written_although_another_has_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_LOCK_SECONDS", 0.0)
    append_line(tmp_path / "a.jsonl", {"n": 1})
    (lock,) = tmp_path.glob("*.lock")
    with locked(lock, wait_seconds=0) as alone:
        assert alone
        append_line(tmp_path / "a.jsonl", {"n": 2})
    assert forwards(tmp_path / "a.jsonl") == [{"n": 1}, {"n": 2}]


HOSTILE_LINES = {
    "nested too deeply": "[" * 100_000,
    "deep object": '{"step": 1, "a":' * 50_000,
    "infinity": '{"step": 7, "loss": Infinity}',
    "NaN": '{"step": 7, "loss": NaN}',
    "beyond every number": '{"step": 7, "loss": 1e999}',
    "too many digits": f'{{"step": {"9" * 5000}}}',
    "no text": "\x00\x01",
}


@either_way
@pytest.mark.parametrize("line", HOSTILE_LINES.values(), ids=HOSTILE_LINES)
def test_an_unknown_line_is_skipped(tmp_path: Path, read: Read, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n', encoding="utf-8")
    assert read(path) == [{"step": 1}, {"step": 2}]


@either_way
def test_a_named_pipe_as_journal_does_not_block_readers(tmp_path: Path, read: Read) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    assert read(tmp_path / "events.jsonl") == []


def test_a_document_that_appears_late_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_early(path: Path) -> None:
        path.write_text("{}", encoding="utf-8")
        raise FileNotFoundError

    monkeypatch.setattr(documents, "open_to_read", too_early)
    assert read_document(tmp_path / "submission.json") is None


def test_a_named_pipe_or_an_invalid_document_is_damaged_and_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "deep.json").write_text("[" * 100_000, encoding="utf-8")
    for name in ("pipe.json", "deep.json"):
        with pytest.raises(DamagedError, match=f"{name} is damaged"):
            read_document(tmp_path / name)
        assert undamaged_document(tmp_path / name) is None
