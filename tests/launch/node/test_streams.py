"""The streams between this machine and a node: frames, windows and ends, over real pipes."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scaletrain_cli.launch.node import command
from scaletrain_cli.launch.node.processes import process_state
from scaletrain_cli.launch.node.streams import WINDOW_BYTES, Incoming, Kind, Link, Outgoing
from tests.waiting import wait_until


@pytest.fixture
def pipe() -> Iterator[tuple[Link, int, int]]:
    """A link whose frames come back to itself, and the two ends of its pipe."""
    reads, writes = os.pipe()
    yield Link(reads, writes), reads, writes
    os.close(reads)
    os.close(writes)


def test_frames_arrive_as_they_were_sent(pipe: tuple[Link, int, int]) -> None:
    link = pipe[0]
    link.send(Kind.DATA, 7, b"a\nb\0\n")
    link.send_number(Kind.EXITED, 0, 200)
    link.send_document(Kind.START, {"words": ["é"]})
    frames = link.frames()
    first, second, third = next(frames), next(frames), next(frames)
    assert (first.kind, first.channel, first.data) == (Kind.DATA, 7, b"a\nb\0\n")
    assert (second.kind, second.number, third.document) == (Kind.EXITED, 200, {"words": ["é"]})
    with pytest.raises(ValueError, match="4 bytes"):
        _ = first.number


def test_every_frame_ends_a_line_for_schedulers_that_pass_on_whole_lines(pipe: tuple[Link, int, int]) -> None:
    pipe[0].send(Kind.DATA, 1, b"prompt> ")
    assert os.read(pipe[1], 100).endswith(b"prompt> \n")


def test_what_is_printed_before_the_greeting_is_shown_and_not_taken_for_frames(pipe: tuple[Link, int, int]) -> None:
    link, _, writes = pipe
    os.write(writes, b"module loaded\n")
    link.greet()
    link.send(Kind.READY)
    shown: list[bytes] = []
    assert link.await_greeting(shown.append)
    assert b"".join(shown) == b"module loaded\n"
    assert next(link.frames()).kind == Kind.READY


def test_an_end_before_the_greeting_is_reported() -> None:
    reads, writes = os.pipe()
    os.write(writes, b"error: no such job\n")
    os.close(writes)
    shown: list[bytes] = []
    assert not Link(reads, -1).await_greeting(shown.append)
    assert b"".join(shown) == b"error: no such job\n"
    os.close(reads)


@pytest.mark.parametrize("damage", [b"Traceback (most recent call last):\n", b"\x04\0\0\0\0\0\0\0\1aX", b"\xff" * 40])
def test_other_text_is_not_a_frame(damage: bytes) -> None:
    reads, writes = os.pipe()
    os.write(writes, damage)
    os.close(writes)
    found = []
    with contextlib.suppress(ValueError):  # none for a length beyond the end
        found += list(Link(reads, -1).frames())
    assert found == []
    os.close(reads)


def test_a_sender_stops_at_the_window_and_goes_on_when_data_are_taken(pipe: tuple[Link, int, int]) -> None:
    """Otherwise data of a command that reads nothing would keep a Ctrl-C from it."""
    link = pipe[0]
    sent = 0

    def read(most: int) -> bytes:
        nonlocal sent
        sent += most
        return b"x" * most

    outgoing = Outgoing(link, 3)
    threading.Thread(target=outgoing.copy, args=(read,), daemon=True).start()
    got = 0
    frames = link.frames()
    while got < WINDOW_BYTES:
        got += len(next(frames).data)
    time.sleep(0.1)
    assert (got, sent) == (WINDOW_BYTES, WINDOW_BYTES)
    outgoing.taken(10)
    frame = next(frames)
    assert (frame.kind, len(frame.data)) == (Kind.DATA, 10)
    outgoing.close()
    assert next(frames).kind == Kind.END


def test_received_data_are_acknowledged_once_written_and_a_failure_is_told(pipe: tuple[Link, int, int]) -> None:
    link = pipe[0]
    written: list[bytes] = []
    failures: list[OSError] = []

    def write(data: bytes) -> None:
        if data == b"bad":
            raise BrokenPipeError("closed")
        written.append(data)

    finished = threading.Event()
    incoming = Incoming(link, 2, write, finished.set, failures.append)
    incoming.put(b"four")
    frame = next(link.frames())
    assert (frame.kind, frame.channel, frame.number, written) == (Kind.TAKEN, 2, 4, [b"four"])
    incoming.put(b"bad")
    incoming.join()
    assert (len(failures), finished.is_set()) == (1, True)


def test_a_link_whose_other_end_is_gone_says_so() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    assert not Link(-1, writes).send(Kind.READY)
    os.close(writes)


def test_all_that_a_command_has_written_is_sent_however_late_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_QUIET_SECONDS", 0.0)
    reads, writes = os.pipe()
    link, size = Link(reads, writes), WINDOW_BYTES + 30_000  # the rest fits into the pipe of the command, which ends
    started = command.Command(link, ["head", "-c", str(size), "/dev/zero"], os.environ, Path("/"), None)
    started.start()
    started.copy_output()
    taken, frames = 0, link.frames()
    while taken < WINDOW_BYTES:
        taken += len(next(frames).data)
    with ThreadPoolExecutor() as pool:
        ended = pool.submit(started.wait)
        wait_until(lambda: process_state(started._process.pid) == "X", "it has ended, and is waited for")
        started._outputs[command.STDOUT].taken(taken)
        assert ended.result() == 0
    link.send(Kind.EXITED)
    while (frame := next(frames)).kind != Kind.EXITED:
        taken += len(frame.data)
    assert taken == size
    started._process.communicate()  # closes its pipes
    os.close(reads)
    os.close(writes)
