"""The ranks' logs: found, read and followed across attempts."""

import os
from pathlib import Path

import pytest

from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.logs import LogFollower, end_of, log_files, read_logs
from tests.counting import bytes_read_by
from tests.launch.conftest import MadeRun, MakeRun


@pytest.fixture
def made(make_run: MakeRun) -> MadeRun:
    return make_run()


def log(made: MadeRun, attempt: int, rank: int) -> Path:
    return made.run.attempt(attempt) / "logs" / f"node-a-{rank:05d}.log"


def test_the_logs_of_the_last_attempt_are_given_by_rank(made: MadeRun) -> None:
    for attempt in (1, 2):
        made.run.new_attempt()
        for rank in (10, 2):
            log(made, attempt, rank).write_text(f"attempt {attempt} rank {rank}\n")
    assert [(file.attempt, file.node, file.rank) for file in log_files(made.run)] == [
        (2, "node-a", 2),
        (2, "node-a", 10),
    ]
    assert [line.text for line in read_logs(made.run, attempt=1, rank=10)] == ["attempt 1 rank 10"]


def test_only_the_last_lines_are_read_on_request(made: MadeRun) -> None:
    made.run.new_attempt()
    log(made, 1, 0).write_bytes(b"one\r\ntwo\nbad \xff byte\rprogress\nlast, torn")
    assert [line.text for line in read_logs(made.run, last_lines=2)] == ["bad � byte\rprogress", "last, torn"]
    assert next(iter(read_logs(made.run))).text == "one"


def test_an_attempt_or_rank_that_is_not_there_is_a_usage_error(made: MadeRun) -> None:
    assert log_files(made.run) == []
    with pytest.raises(UsageError, match="none has started"):
        log_files(made.run, attempt=1)
    made.run.new_attempt()
    assert log_files(made.run, rank=3) == []  # its ranks have not started
    log(made, 1, 0).touch()
    with pytest.raises(UsageError, match="no attempt 2; it has the attempts 1 to 1"):
        log_files(made.run, attempt=2)
    with pytest.raises(UsageError, match="no rank 3"):
        log_files(made.run, rank=3)


def test_following_returns_each_complete_line_once_and_continues_with_the_next_attempt(made: MadeRun) -> None:
    follower = LogFollower(made.run)
    assert follower.new_lines() == []
    made.run.new_attempt()
    log(made, 1, 0).write_text("one\ntw")
    assert [line.text for line in follower.new_lines()] == ["one"]
    with log(made, 1, 0).open("a") as file:
        file.write("o\nthree")
    assert [line.text for line in follower.new_lines()] == ["two"]
    made.run.new_attempt()
    log(made, 2, 1).write_text("again\n")
    assert [(line.source.attempt, line.source.rank, line.text) for line in follower.new_lines()] == [(2, 1, "again")]
    assert [line.text for line in follower.new_lines(to_the_end=True)] == ["three"]
    assert follower.new_lines(to_the_end=True) == []


def test_a_fifo_or_a_device_in_place_of_a_log_is_not_read(make_run: MakeRun) -> None:
    made = make_run()
    logs = made.run.new_attempt()
    folder = made.run.attempt(logs) / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    os.mkfifo(folder / "n-00000.log")
    (folder / "n-00001.log").symlink_to("/dev/zero")
    assert list(read_logs(made.run)) == []
    assert LogFollower(made.run).new_lines(to_the_end=True) == []
    assert end_of(folder / "n-00000.log") == ""


def test_lines_of_libraries_and_progress_lines_are_hidden(make_run: MakeRun) -> None:
    made = make_run()
    lines = [
        "2026-03-01T12:00:03.512Z INFO rank 0: step 1/20",
        '{"scaletrain": "progress", "step": 1, "total_steps": 20, "loss": 1.5}',
        "2026-03-01T12:00:03.512Z WARNING rank 0 [py.warnings]: deprecated",
        "2026-03-01T12:00:03.512Z ERROR rank 0 [DeepSpeed]: broken",
        "NCCL WARN what a library prints itself",
    ]
    folder = made.run.attempt(1) / "logs"
    folder.mkdir(parents=True)
    (folder / "n0-00000.log").write_text("\n".join(lines) + "\n")
    assert [line.text for line in read_logs(made.run)] == lines
    assert [line.text for line in read_logs(made.run, everything=False)] == [lines[0], *lines[3:]]
    assert [line.text for line in read_logs(made.run, last_lines=3, everything=False)] == [lines[0], *lines[3:]]


def test_the_last_lines_of_a_huge_log_are_read_alone(made: MadeRun) -> None:
    """Twenty gigabytes without a line end before them: a progress bar, or a hole of a sparse file."""
    made.run.new_attempt()
    path = log(made, 1, 0)
    path.touch()
    os.truncate(path, 20 << 30)
    with path.open("ab") as file:
        file.write(b"\n" + b"a line\n" * 100 + b"\nlast\n")
    shown: list[str] = []
    assert bytes_read_by(lambda: shown.extend(line.text for line in read_logs(made.run, last_lines=3))) < 1_000_000
    assert shown == ["a line", "", "last"]
    follower = LogFollower(made.run, last_lines=2)
    assert bytes_read_by(lambda: shown.extend(line.text for line in follower.new_lines())) < 1_000_000
    assert shown[3:] == ["", "last"]
