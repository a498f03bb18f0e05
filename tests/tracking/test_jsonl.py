import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import scaletrain_cli
from scaletrain_cli.rundir.journal import append_lines, read_lines
from scaletrain_cli.tracking.jsonl import JsonlWriter


def steps(path: Path) -> list[Any]:
    return [line["step"] for line in read_lines(path)]


def test_lines_are_in_the_file_in_their_order_once_flushed(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl", append_lines)
    writer.flush()
    for step in range(500):
        writer.put({"step": step})
        if step % 100 == 0:
            writer.flush()
            assert steps(tmp_path / "metrics.jsonl") == list(range(step + 1))
    writer.close()
    assert steps(tmp_path / "metrics.jsonl") == list(range(500))
    assert not [thread for thread in threading.enumerate() if thread.name == "metrics"]


def test_a_slow_file_system_delays_a_flush_and_no_step(tmp_path: Path) -> None:
    writes, begun, may_end = list[int](), threading.Event(), threading.Event()

    def slowly(path: Path, lines: Sequence[dict[str, Any]]) -> None:
        begun.set()
        may_end.wait()
        writes.append(len(lines))
        append_lines(path, lines)

    writer = JsonlWriter(tmp_path / "metrics.jsonl", slowly)
    writer.put({"step": 0})
    assert begun.wait()
    for step in range(1, 30):
        writer.put({"step": step})
    may_end.set()
    writer.close()
    assert steps(tmp_path / "metrics.jsonl") == list(range(30))
    assert writes == [1, 29], "lines that arrive during a write go with the next one"


def test_short_steps_share_a_write_and_a_flush_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scaletrain_cli.tracking.jsonl._SECONDS_BETWEEN_WRITES", 3600.0)
    writes, first = list[int](), threading.Event()

    def counted(path: Path, lines: Sequence[dict[str, Any]]) -> None:
        writes.append(len(lines))
        append_lines(path, lines)
        first.set()

    writer = JsonlWriter(tmp_path / "metrics.jsonl", counted)
    writer.put({"step": 0})
    assert first.wait(), "the first line is written at once"
    for step in range(1, 10):
        writer.put({"step": step})
    writer.flush()
    assert writes == [1, 9]
    writer.put({"step": 10})
    writer.close()
    assert steps(tmp_path / "metrics.jsonl") == list(range(11))


def test_a_full_disk_is_reported_by_the_next_call_and_nothing_is_written_after_the_gap(tmp_path: Path) -> None:
    full = [False, True, False]

    def fails(path: Path, lines: Sequence[dict[str, Any]]) -> None:
        if full.pop(0):
            raise OSError(errno.ENOSPC, "No space left on device")
        append_lines(path, lines)

    writer = JsonlWriter(tmp_path / "metrics.jsonl", fails)
    writer.put({"step": 1})
    writer.flush()
    writer.put({"step": 2})
    with pytest.raises(OSError, match="No space left"):
        writer.flush()
    with pytest.raises(OSError, match="No space left"):
        writer.put({"step": 3})
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    assert steps(tmp_path / "metrics.jsonl") == [1]


KILLED = """
import os, signal, sys
from pathlib import Path
from scaletrain_cli.rundir.journal import append_lines
from scaletrain_cli.tracking.jsonl import JsonlWriter

writer = JsonlWriter(Path(sys.argv[1]), append_lines)
for step in range(2000):
    writer.put({"step": step})
    if step == 1000:
        writer.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_loses_no_flushed_line_and_leaves_no_gap(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(Path(str(scaletrain_cli.__file__)).parents[1])}
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], env=environment)
    assert done.returncode == -signal.SIGKILL
    written = steps(path)
    assert written == list(range(len(written)))
    assert len(written) > 1000
