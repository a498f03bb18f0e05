"""The pods' meeting: who counts as there, and who does not."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from scaletrain_cli.launch.kubernetes.meeting import Host, InterruptedMeetingError, NoMeetingError, attend
from scaletrain_cli.launch.ports import free_port

PORT = free_port("127.0.0.1")


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host(PORT, "gang", 2)
    yield host
    host.close()


def never() -> bool:
    return False


def attending(number: int, words: dict[int, Any], gang: str = "gang", seconds: float = 20) -> threading.Thread:
    def be_there() -> None:
        try:
            words[number] = attend("127.0.0.1", PORT, gang, number, {"node": f"n{number}"}, seconds, never)
        except NoMeetingError as error:
            words[number] = error

    thread = threading.Thread(target=be_there)
    thread.start()
    return thread


def test_all_hear_the_same_word_and_the_first_learns_who_is_there(host: Host) -> None:
    words: dict[int, Any] = {}
    threads = [attending(number, words) for number in (2, 1)]
    said = host.gather(20, never)
    host.tell({"attempt": 3})
    for thread in threads:
        thread.join()
    assert {number: word["node"] for number, word in said.items()} == {1: "n1", 2: "n2"}
    assert words == {1: {"attempt": 3}, 2: {"attempt": 3}}


def test_strangers_are_not_counted(host: Host) -> None:
    words: dict[int, Any] = {}
    threads = [attending(1, words, "an older gang", seconds=1), attending(7, words, seconds=1)]
    with socket.create_connection(("127.0.0.1", PORT)) as scan:
        scan.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(NoMeetingError, match="pods 1, 2 did not come"):
            host.gather(2, never)
    for thread in threads:
        thread.join()
    assert "gave no word within 1 s" in str(words[1])


def test_a_pod_that_went_and_came_again_counts_once(host: Host) -> None:
    words: dict[int, Any] = {}
    with socket.create_connection(("127.0.0.1", PORT)) as gone:
        gone.sendall(b'{"gang": "gang", "number": 1, "node": "old"}\n')
        threads = [attending(1, words)]
        with pytest.raises(NoMeetingError, match="pods 2 did not come"):
            host.gather(2, never)
    threads.append(attending(2, words))
    assert host.gather(20, never)[1]["node"] == "n1"
    host.tell({})
    for thread in threads:
        thread.join(timeout=5)


def test_who_is_told_to_leave_does_not_wait(host: Host) -> None:
    with pytest.raises(InterruptedMeetingError):
        host.gather(20, lambda: True)
    with pytest.raises(InterruptedMeetingError):
        attend("127.0.0.1", PORT, "gang", 1, {}, 20, lambda: True)
