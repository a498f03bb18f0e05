"""Where the pods of a gang meet before anything else: the first one learns who is there and gives all the same word.

One TCP connection for each pod and one line of JSON each way. A file on the shared volume could be an earlier gang's;
what answers a connection is alive. Every line carries a code that only pods with the run's documents can compute: other
lines, and connections that send too slowly or too much, are ignored. Knows no runs, attempts and Kubernetes objects.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from scaletrain_cli.errors import ExitCode, ScaletrainError

_POLL_SECONDS = 0.5
_LONGEST_LINE = 65536
_LINE_SECONDS = 10.0  # for one line, from the connection on
_STRANGERS = 256  # connections that have said nothing yet, beyond the pods that are awaited
Word = dict[str, Any]


class NoMeetingError(ScaletrainError):
    """The gang did not come together: no attempt began, so nothing was lost and nothing is charged for it."""

    exit_code = ExitCode.PREEMPTED


class InterruptedMeetingError(NoMeetingError):
    """This pod was told to leave before all had come."""


@dataclass(frozen=True)
class Seal:
    """What the pods of one gang have in common: its name, and a key that nobody else can know."""

    gang: str
    key: bytes = field(repr=False)

    def line(self, word: Word) -> bytes:
        """Return the word as one line of JSON with its code."""
        body = json.dumps({"gang": self.gang, "word": word})
        return json.dumps({"body": body, "code": self._code(body)}).encode() + b"\n"

    def word(self, line: bytes) -> Word | None:
        """Return the word of a line; None for anything but a word of this gang."""
        try:
            outer = json.loads(line)
            body, code = outer["body"], outer["code"]
            if not hmac.compare_digest(self._code(body).encode(), str(code).encode()):
                return None
            inner = json.loads(body)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        word = inner["word"]
        return word if inner["gang"] == self.gang and isinstance(word, dict) else None

    def _code(self, body: str) -> str:
        return hmac.new(self.key, body.encode(), hashlib.sha256).hexdigest()


@dataclass
class _Line:
    """What has come over one connection so far."""

    connection: socket.socket
    deadline: float
    data: bytearray = field(default_factory=bytearray)

    def read(self) -> bool:
        """Take what is there, without waiting. Return whether the line is complete, or none will follow."""
        try:
            piece = self.connection.recv(min(4096, _LONGEST_LINE - len(self.data)))
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True
        self.data += piece
        return not piece or piece.endswith(b"\n") or len(self.data) >= _LONGEST_LINE


class RendezvousServer:
    """The first pod's side. Others may come, go and come again; the last connection of each counts."""

    def __init__(self, port: int, seal: Seal, others: int) -> None:
        """Listen on ``port`` for ``others`` pods, numbered from 1, of the same gang. Raises OSError."""
        self._seal, self._others = seal, others
        both = socket.has_dualstack_ipv6()  # pods of an IPv6 cluster have no IPv4 address
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server(
            ("", port), family=family, backlog=others + _STRANGERS, dualstack_ipv6=both
        )
        self._listener.setblocking(False)
        self._silent: dict[socket.socket, _Line] = {}  # connected, no whole line yet; the oldest first
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
                connection.settimeout(_POLL_SECONDS)
                connection.sendall(self._seal.line(word))
        self.close()

    def close(self) -> None:
        """Hang up."""
        for connection in (*self._silent, *(connection for connection, _ in self._guests.values())):
            connection.close()
        self._listener.close()

    def _listen(self) -> None:
        for one in _readable([self._listener, *self._silent]):
            if one is self._listener:
                self._accept()
            elif self._silent[one].read():
                self._welcome(one, bytes(self._silent.pop(one).data))
        now = time.monotonic()
        for line in [line for line in self._silent.values() if now > line.deadline]:
            self._drop(line)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # none is left, or one has hung up again already
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._silent[connection] = _Line(connection, time.monotonic() + _LINE_SECONDS)
                if len(self._silent) > self._others + _STRANGERS:
                    self._drop(next(iter(self._silent.values())))

    def _drop(self, line: _Line) -> None:
        del self._silent[line.connection]
        line.connection.close()

    def _welcome(self, connection: socket.socket, line: bytes) -> None:
        said = self._seal.word(line)
        number = said.pop("number", None) if said is not None else None
        if said is None or type(number) is not int or not 1 <= number <= self._others:
            connection.close()  # a port scan, or a pod of another gang
            return
        if number in self._guests:
            self._guests[number][0].close()
        self._guests[number] = (connection, said)


def join(
    address: str, port: int, seal: Seal, number: int, said: Word, seconds: float, interrupted: Callable[[], bool]
) -> Word:
    """The word of the first pod, to which this one, ``number``, has said what it is.

    Raises NoMeetingError when there is none after ``seconds``, InterruptedMeetingError when told to leave.
    """
    trouble, deadline = "no answer", time.monotonic() + seconds
    for _ in _until(seconds, interrupted):
        try:
            with socket.create_connection((address, port), timeout=_POLL_SECONDS) as connection:
                connection.sendall(seal.line({**said, "number": number}))
                connection.setblocking(False)
                line = _Line(connection, deadline)
                for _ in _until(deadline - time.monotonic(), interrupted):
                    if _readable([connection]) and line.read():
                        if (word := seal.word(bytes(line.data))) is not None:
                            return word
                        trouble = "it hung up, or is not the first pod of this gang"
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
