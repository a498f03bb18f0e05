"""Where the pods of a gang meet before anything else: the first one learns who is there and gives all the same word.

One TCP connection for each pod and one line of JSON each way. A file on the shared volume could be an earlier gang's;
what answers a connection is alive. Knows no runs, no attempts and no Kubernetes objects.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from scaletrain_cli.errors import ExitCode, ScaletrainError

_POLL_SECONDS = 0.5
_LONGEST_LINE = 65536
Word = dict[str, Any]


class NoMeetingError(ScaletrainError):
    """The gang did not come together: no attempt began, so nothing was lost and nothing is charged for it."""

    exit_code = ExitCode.PREEMPTED


class InterruptedMeetingError(NoMeetingError):
    """This pod was told to leave before all had come."""


class Host:
    """The first pod's side. Others may come, go and come again; the last connection of each counts."""

    def __init__(self, port: int, gang: str, others: int) -> None:
        """Listen on ``port`` for ``others`` pods, numbered from 1, of the same ``gang``. Raises OSError."""
        self._gang, self._others = gang, others
        both = socket.has_dualstack_ipv6()  # pods of an IPv6 cluster have no IPv4 address
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server(("", port), family=family, backlog=max(8, others), dualstack_ipv6=both)
        self._listener.setblocking(False)
        self._silent: list[socket.socket] = []  # connected, nothing said yet
        self._guests: dict[int, tuple[socket.socket, Word]] = {}

    def gather(self, seconds: float, interrupted: Callable[[], bool]) -> dict[int, Word]:
        """What each has said of itself, by number, once all are there.

        Raises NoMeetingError when somebody is missing after ``seconds``, InterruptedMeetingError when told to leave.
        """
        for _ in _until(seconds, interrupted):
            if len(self._guests) == self._others:
                return {number: said for number, (_, said) in sorted(self._guests.items())}
            self._listen()
        missing = sorted(set(range(1, self._others + 1)) - self._guests.keys())
        raise NoMeetingError(
            f"pods {', '.join(map(str, missing))} did not come to pod 0 within {seconds:.0f} s. Their events say why "
            "they wait: no room, an image that cannot be pulled, a volume that cannot be mounted."
        )

    def tell(self, word: Word) -> None:
        """Give all the same word and close. A pod that is gone meanwhile misses it, and its job's end ends the gang."""
        for connection, _ in self._guests.values():
            with contextlib.suppress(OSError):
                connection.sendall(_line(word))
        self.close()

    def close(self) -> None:
        """Hang up."""
        for connection in (*self._silent, *(connection for connection, _ in self._guests.values())):
            connection.close()
        self._listener.close()

    def _listen(self) -> None:
        for one in _readable([self._listener, *self._silent]):
            if one is self._listener:
                with contextlib.suppress(OSError):  # who has hung up again already
                    connection, _ = self._listener.accept()
                    connection.settimeout(_POLL_SECONDS)
                    self._silent.append(connection)
            else:
                self._silent.remove(one)
                self._welcome(one)

    def _welcome(self, connection: socket.socket) -> None:
        said = _read_line(connection)
        if said is None or said.get("gang") != self._gang or said.get("number") not in range(1, self._others + 1):
            connection.close()  # a port scan, or a pod of another gang
            return
        number = int(said["number"])
        if number in self._guests:
            self._guests[number][0].close()
        self._guests[number] = (connection, said)


def attend(
    address: str, port: int, gang: str, number: int, said: Word, seconds: float, interrupted: Callable[[], bool]
) -> Word:
    """The word of the first pod, to which this one, ``number``, has said what it is.

    Raises NoMeetingError when there is none after ``seconds``, InterruptedMeetingError when told to leave.
    """
    trouble = "no answer"
    for _ in _until(seconds, interrupted):
        try:
            with socket.create_connection((address, port), timeout=_POLL_SECONDS) as connection:
                connection.sendall(_line({**said, "gang": gang, "number": number}))
                for _ in _until(seconds, interrupted):
                    ready = _readable([connection])
                    if ready and (word := _read_line(connection)):
                        return word
                    if ready:  # hung up: it is not the one, or gone
                        break
        except OSError as error:  # its name is not known yet, or nobody listens yet
            trouble = str(error)
        time.sleep(_POLL_SECONDS)
    raise NoMeetingError(f"pod 0 at {address}:{port} gave no word within {seconds:.0f} s: {trouble}")


def _readable(connections: Iterable[socket.socket]) -> list[socket.socket]:
    """Those that have something to say, after a while at most. Not select(), which knows no more than 1024 files."""
    with selectors.DefaultSelector() as selector:
        for one in connections:
            selector.register(one, selectors.EVENT_READ)
        ready = [key.fileobj for key, _ in selector.select(_POLL_SECONDS)]
    return [one for one in ready if isinstance(one, socket.socket)]


def _until(seconds: float, interrupted: Callable[[], bool]) -> Iterator[None]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if interrupted():
            raise InterruptedMeetingError("told to leave before all pods of the gang were there")
        yield


def _line(word: Word) -> bytes:
    return json.dumps(word).encode() + b"\n"


def _read_line(connection: socket.socket) -> Word | None:
    """None for anything but an object on one line. What is said is short, so it comes in few pieces."""
    data = b""
    with contextlib.suppress(OSError):
        while not data.endswith(b"\n") and len(data) < _LONGEST_LINE:
            piece = connection.recv(4096)
            if not piece:
                break
            data += piece
    try:
        word = json.loads(data)
    except ValueError:
        return None
    return word if isinstance(word, dict) else None
