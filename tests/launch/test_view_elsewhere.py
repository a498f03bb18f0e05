"""The near end of a view: which lines it shows again, what it sends at its end, and what it leaves unread."""

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scaletrain_cli.cli.app import parsed
from scaletrain_cli.cli.elsewhere import NowReachableError, await_files, switch_if_reachable
from scaletrain_cli.cli.events import _not_in
from scaletrain_cli.launch import view_elsewhere
from scaletrain_cli.launch.node.streams import Frame, Kind, Link
from scaletrain_cli.launch.node.view import KnownRun as FarRun
from scaletrain_cli.launch.node.view import View
from scaletrain_cli.launch.node_session import Streams
from scaletrain_cli.launch.run_status import OVER
from scaletrain_cli.launch.view_elsewhere import KnownRun, LinesOnce
from scaletrain_cli.rundir.paths import RunDir


def test_a_line_that_comes_between_known_ones_at_the_next_connection_is_shown_and_no_other_twice() -> None:
    shown: list[bytes] = []
    lines = LinesOnce(shown.append)
    lines.begin()
    lines.write(b"submitted\nstarted\nsaved\nsaved\n")
    lines.begin()
    lines.write(b"submitted\nstarted\nresumed\nsaved\nsaved\nsaved\n")
    assert b"".join(shown).split() == [b"submitted", b"started", b"saved", b"saved", b"resumed", b"saved"]


def test_lines_that_the_verb_has_shown_here_are_left_out_once_and_at_later_connections() -> None:
    shown: list[bytes] = []
    lines = LinesOnce(shown.append, 2)
    lines.begin()
    lines.write(b"submitted\nqueued\nstarted\n")
    lines.begin()
    lines.write(b"submitted\nqueued\nstarted\nsaved\n")
    assert b"".join(shown).split() == [b"started", b"saved"]
    assert lines.written == 4


def test_an_event_of_a_slow_clock_that_comes_before_shown_ones_is_new() -> None:
    submitted, started = {"event": "submitted", "time": 100}, {"event": "started", "time": 95}
    assert _not_in([started, submitted], [submitted]) == [started]
    assert _not_in([submitted, submitted], [submitted]) == [submitted]


def test_a_state_is_never_written_to_a_later_descriptor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked, answer = threading.Event(), threading.Event()

    def slow_status(run: RunDir) -> None:
        asked.set()
        answer.wait()

    monkeypatch.setattr(view_elsewhere, "_SEND_EVERY_SECONDS", 0.01)
    monkeypatch.setattr(view_elsewhere, "run_status", slow_status)
    monkeypatch.setattr(KnownRun, "document", lambda self, status: {"job": "running"})
    page = os.open(tmp_path / "page", os.O_CREAT | os.O_WRONLY)  # stands for the file that has got the number
    session: Any = SimpleNamespace(link=Link(0, page))
    before = set(threading.enumerate())
    with KnownRun(RunDir(tmp_path), ()).sent_to(session):
        assert asked.wait()
        (thread,) = set(threading.enumerate()) - before
    answer.set()
    thread.join()
    os.close(page)
    assert (tmp_path / "page").read_bytes() == b""


@pytest.mark.parametrize("answers", [False, True])
def test_a_view_with_a_silent_connection_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answers: bool) -> None:
    monkeypatch.setattr(view_elsewhere, "_SEND_EVERY_SECONDS", 0.02)
    now = [0.0]
    monkeypatch.setattr(view_elsewhere, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(view_elsewhere, "run_status", lambda run: None)
    monkeypatch.setattr(KnownRun, "document", lambda self, status: {"job": "running"})
    process = subprocess.Popen(["sleep", "100000"])

    def frames() -> Iterator[Frame]:
        """End with the process, as the frames of its output do."""
        while process.poll() is None:
            time.sleep(0.02)
            now[0] += 5.0
            if answers:
                yield Frame(Kind.HEARD, 0, b"")

    reads, writes = os.pipe()
    session: Any = SimpleNamespace(link=Link(reads, writes), process=process, frames=frames())
    with KnownRun(RunDir(tmp_path), ()).sent_to(session) as arriving:
        for _ in arriving:
            if now[0] > 3 * view_elsewhere._SILENT_SECONDS:
                break
    assert now[0] > view_elsewhere._SILENT_SECONDS
    assert (process.poll() is None) == answers
    process.kill()
    process.wait()
    os.close(reads)
    os.close(writes)


@pytest.mark.parametrize(
    ("state", "switches"),
    [("queued", False), ("unknown", False), ("running", True), *((state, True) for state in OVER)],
)
def test_a_view_that_waits_for_files_begins_again_once_the_run_runs_or_is_over(state: str, switches: bool) -> None:
    status: Any = SimpleNamespace(state=state, files_seen=False)
    switch_if_reachable(status)  # does not wait
    await_files(True)
    try:
        with pytest.raises(NowReachableError) if switches else contextlib.nullcontext():
            switch_if_reachable(status)
    finally:
        await_files(False)


def test_the_far_end_answers_each_state_that_it_gets(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    view = View(Link(reads, writes), ("true",), {}, tmp_path, None, FarRun(tmp_path / "run.json", RunDir(tmp_path)))
    view._act(Frame(Kind.RUN, 0, b'{"job": "running"}'))
    os.close(writes)
    assert [frame.kind for frame in Link(reads, writes).frames()] == [Kind.HEARD]
    assert "running" in (tmp_path / "run.json").read_text()
    os.close(reads)


def test_a_view_without_a_terminal_leaves_the_input_of_the_loop_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, writes = os.pipe()
    there, here = os.pipe()
    os.write(writes, b"next run\n")
    known = os.dup(0)
    os.dup2(reads, 0)
    try:
        frames = iter([Frame(Kind.EXITED, 0, (3).to_bytes(4, "big"))])
        session: Any = SimpleNamespace(link=Link(there, here), frames=frames)
        monkeypatch.setattr(Frame, "number", property(lambda self: 3))
        assert Streams(session, {}, reads=False).run() == 3
        assert os.read(0, 100) == b"next run\n"
    finally:
        os.dup2(known, 0)
        for descriptor in (reads, writes, there, here, known):
            os.close(descriptor)


def test_the_file_of_a_report_stays_an_option_where_the_run_follows_two_dashes() -> None:
    line = parsed(["report", "-o", "page.html", "--", "r1"])
    words = line.with_option(("--output", "-o"), "there")
    assert words == ["report", "--output", "there", "--", "r1"]
