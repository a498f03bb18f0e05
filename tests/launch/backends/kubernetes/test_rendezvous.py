"""The rendezvous of pods: which connections count, and which are ignored."""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from scaletrain_cli.launch.backends.kubernetes import rendezvous
from scaletrain_cli.launch.backends.kubernetes.rendezvous import (
    GangKey,
    RendezvousError,
    RendezvousServer,
    join,
)
from tests.ports import reserved_port

PORT = reserved_port()
SEAL = GangKey("gang", b"of the run")
LONG = 1e6  # seconds: longer than a test may take


@pytest.fixture
def host() -> Iterator[RendezvousServer]:
    host = RendezvousServer(PORT, SEAL, 2)
    yield host
    host.close()


def never() -> bool:
    return False


def listen_until(host: RendezvousServer, condition: Callable[[], bool]) -> None:
    with pytest.raises(RendezvousError, match="terminated before all pods of the gang had joined"):
        host.gather(LONG, condition)


def attending(number: int, words: dict[int, Any], seal: GangKey = SEAL, seconds: float = LONG) -> threading.Thread:
    def be_there() -> None:
        try:
            words[number] = join("127.0.0.1", PORT, seal, number, {"node": f"n{number}"}, seconds, never)
        except RendezvousError as error:
            words[number] = error

    thread = threading.Thread(target=be_there)
    thread.start()
    return thread


def test_connections_of_other_gangs_are_ignored(host: RendezvousServer) -> None:
    words: dict[int, Any] = {}
    threads = [attending(1, words, GangKey("an older gang", SEAL.key), seconds=1), attending(7, words, seconds=1)]
    with socket.create_connection(("127.0.0.1", PORT)) as scan:
        scan.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(RendezvousError, match="pods 1, 2 did not join"):
            host.gather(2, never)
    for thread in threads:
        thread.join()
    assert "timed out after 1 s" in str(words[1])


def test_a_pod_that_reconnects_counts_once(host: RendezvousServer) -> None:
    words: dict[int, Any] = {}
    with socket.create_connection(("127.0.0.1", PORT)) as gone:
        gone.sendall(SEAL.line({"number": 1, "node": "old"}))
        listen_until(host, lambda: 1 in host._joined)
        threads = [attending(1, words)]
        listen_until(host, lambda: host._joined[1][1] == {"node": "n1"})
    with pytest.raises(RendezvousError, match="pods 2 did not join"):
        host.gather(0, never)
    threads.append(attending(2, words))
    assert host.gather(LONG, never)[1]["node"] == "n1"
    host.broadcast({})
    for thread in threads:
        thread.join()


def test_a_pod_that_is_terminated_does_not_wait(host: RendezvousServer) -> None:
    with pytest.raises(RendezvousError, match="terminated before all pods of the gang had joined"):
        host.gather(LONG, lambda: True)
    with pytest.raises(RendezvousError, match="terminated before all pods of the gang had joined"):
        join("127.0.0.1", PORT, SEAL, 1, {}, LONG, lambda: True)


def test_a_process_without_the_key_of_the_gang_can_neither_join_nor_answer(host: RendezvousServer) -> None:
    words: dict[int, Any] = {}
    threads = [attending(number, words, GangKey("gang", b"guessed"), seconds=1) for number in (1, 2)]
    with socket.create_connection(("127.0.0.1", PORT)) as stranger:
        stranger.sendall(b'{"gang": "gang", "number": 1, "node": "old"}\n')
        with pytest.raises(RendezvousError, match="pods 1, 2 did not join"):
            host.gather(2, never)
    for thread in threads:
        thread.join()
    assert [str(words[number]).count("timed out") for number in (1, 2)] == [1, 1]
    assert SEAL.message(SEAL.line({"attempt": 3})) == {"attempt": 3}
    assert SEAL.message(GangKey("gang", b"guessed").line({"attempt": 3})) is None
    assert SEAL.message(SEAL.line({"attempt": 3}).replace(b"3", b"4")) is None
    for odd in (b"", b"[]", b"{}", b"null", b'{"body": 1, "code": 1}', b'{"body": "a", "code": null}', b"[" * 60000):
        assert SEAL.message(odd) is None


def test_a_connection_of_single_bytes_delays_no_other(host: RendezvousServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_LINE_SECONDS", LONG)  # one after the other, they would take that long each
    words: dict[int, Any] = {}
    slow = [socket.create_connection(("127.0.0.1", PORT)) for _ in range(20)]
    over = threading.Event()

    def trickle() -> None:
        while not over.wait(0.05):
            for one in slow:
                with contextlib.suppress(OSError):
                    one.send(b"x")

    dripping = threading.Thread(target=trickle)
    dripping.start()
    try:
        threads = [attending(number, words) for number in (1, 2)]
        assert host.gather(LONG, never).keys() == {1, 2}
        host.broadcast({"attempt": 1})
        for thread in threads:
            thread.join()
    finally:
        over.set()
        dripping.join()
        for one in slow:
            one.close()
    assert words == {1: {"attempt": 1}, 2: {"attempt": 1}}


def test_a_connection_of_single_bytes_delays_no_leave(host: RendezvousServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_LINE_SECONDS", LONG)  # a host that waits for the line never leaves
    with socket.create_connection(("127.0.0.1", PORT)) as slow:
        slow.send(b"{")
        listen_until(host, lambda: any(line.data for line in host._pending.values()))


def test_slow_large_and_many_connections_are_closed(host: RendezvousServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_LINE_SECONDS", LONG)
    monkeypatch.setattr(rendezvous, "_MOST_UNKNOWN_CONNECTIONS", 1)
    slow, *many = [socket.create_connection(("127.0.0.1", PORT)) for _ in range(6)]
    large = many.pop()
    with contextlib.suppress(OSError):
        large.sendall(b"x" * 100_000)
    listen_until(host, lambda: len(host._pending) == 3)
    assert all(line.deadline > LONG for line in host._pending.values())
    for line in host._pending.values():
        line.deadline = 0.0
    listen_until(host, lambda: not host._pending)
    for one in (slow, large, *many):
        with contextlib.suppress(ConnectionError):
            assert one.recv(1) == b""
        one.close()


def test_a_terminated_pod_exits_while_its_answer_arrives_a_byte_at_a_time() -> None:
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def answer() -> None:
            connection, _ = impostor.accept()
            with connection, contextlib.suppress(OSError):
                for number in itertools.count():  # until the pod has left
                    connection.send(b" ")
                    if number == 3:
                        stop.set()
                    time.sleep(0.05)

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(RendezvousError, match="terminated before all pods of the gang had joined"):
            join("127.0.0.1", impostor.getsockname()[1], SEAL, 1, {}, LONG, stop.is_set)
        answering.join()
