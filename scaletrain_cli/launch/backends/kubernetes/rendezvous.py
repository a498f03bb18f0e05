"""The rendezvous of a gang's pods: pod 0 waits until all others have joined, and sends the same message to all.

One TCP connection per pod with one line of JSON in each direction: unlike a file on the shared volume, an answer proves
that the process is alive and of this gang. Every line has an authentication code that only pods with the run's
documents can compute; other lines, and connections that send too slowly or too much, are ignored.
"""

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
from scaletrain_cli.launch.backends.kubernetes.messages import reason

_POLL_SECONDS = 0.5
_LONGEST_LINE = 65536
_LINE_SECONDS = 10.0  # for one line, from the connection on
_MOST_UNKNOWN_CONNECTIONS = 256  # connections without a complete line, beyond the expected pods
Message = dict[str, Any]


class RendezvousError(ScaletrainError):
    """Not all pods joined: no attempt began, so nothing was lost and nothing is charged."""

    exit_code = ExitCode.PREEMPTED


@dataclass(frozen=True)
class GangKey:
    """The name of a gang, and the key by which its pods authenticate messages."""

    gang: str
    key: bytes = field(repr=False)

    def line(self, message: Message) -> bytes:
        """Return the message as one line of JSON with its authentication code."""
        body = json.dumps({"gang": self.gang, "message": message})
        return json.dumps({"body": body, "code": self._code(body)}).encode() + b"\n"

    def message(self, line: bytes) -> Message | None:
        """Return the message of a line; None unless it is a message of this gang."""
        try:
            outer = json.loads(line)
            body, code = outer["body"], outer["code"]
            if not hmac.compare_digest(self._code(body).encode(), str(code).encode()):
                return None
            inner = json.loads(body)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        message = inner["message"]
        return message if inner["gang"] == self.gang and isinstance(message, dict) else None

    def _code(self, body: str) -> str:
        return hmac.new(self.key, body.encode(), hashlib.sha256).hexdigest()


@dataclass
class _Line:
    """The bytes of one connection so far."""

    connection: socket.socket
    deadline: float
    data: bytearray = field(default_factory=bytearray)

    def read(self) -> bool:
        """Read without waiting. Return whether the line is complete or the connection has ended."""
        try:
            chunk = self.connection.recv(min(4096, _LONGEST_LINE - len(self.data)))
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True
        self.data += chunk
        return not chunk or chunk.endswith(b"\n") or len(self.data) >= _LONGEST_LINE


class RendezvousServer:
    """The server in pod 0. Pods may reconnect; the last connection of each is used."""

    def __init__(self, port: int, gang_key: GangKey, others: int) -> None:
        """Listen on ``port`` for ``others`` pods, numbered from 1, of the same gang. Raises OSError."""
        self._key, self._others = gang_key, others
        both = socket.has_dualstack_ipv6()  # pods of an IPv6-only cluster have no IPv4 address
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server(
            ("", port), family=family, backlog=others + _MOST_UNKNOWN_CONNECTIONS, dualstack_ipv6=both
        )
        self._listener.setblocking(False)
        self._pending: dict[socket.socket, _Line] = {}  # connected, without a complete line yet; the oldest first
        self._joined: dict[int, tuple[socket.socket, Message]] = {}

    def gather(self, seconds: float, interrupted: Callable[[], bool]) -> dict[int, Message]:
        """Return the message of each pod by number, once all have joined.

        Raises RendezvousError if a pod is missing after ``seconds``, or if ``interrupted``.
        """
        for _ in _until(seconds, interrupted):
            if len(self._joined) == self._others:
                return {number: said for number, (_, said) in sorted(self._joined.items())}
            self._listen()
        missing = sorted(set(range(1, self._others + 1)) - self._joined.keys())
        raise RendezvousError(reason("pods-not-joined", pods=", ".join(map(str, missing)), seconds=seconds))

    def broadcast(self, message: Message) -> None:
        """Send the message to all and close. A pod that has ended meanwhile misses it; its failed job ends the gang."""
        for connection, _ in self._joined.values():
            with contextlib.suppress(OSError):
                connection.settimeout(_POLL_SECONDS)
                connection.sendall(self._key.line(message))
        self.close()

    def close(self) -> None:
        """Close the listening socket and all connections."""
        for connection in (*self._pending, *(connection for connection, _ in self._joined.values())):
            connection.close()
        self._listener.close()

    def _listen(self) -> None:
        for one in _readable([self._listener, *self._pending]):
            if one is self._listener:
                self._accept()
            elif self._pending[one].read():
                self._add(one, bytes(self._pending.pop(one).data))
        now = time.monotonic()
        for line in [line for line in self._pending.values() if now > line.deadline]:
            self._drop(line)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # none is left, or one was closed again
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._pending[connection] = _Line(connection, time.monotonic() + _LINE_SECONDS)
                if len(self._pending) > self._others + _MOST_UNKNOWN_CONNECTIONS:
                    self._drop(next(iter(self._pending.values())))

    def _drop(self, line: _Line) -> None:
        del self._pending[line.connection]
        line.connection.close()

    def _add(self, connection: socket.socket, line: bytes) -> None:
        said = self._key.message(line)
        number = said.pop("number", None) if said is not None else None
        if said is None or type(number) is not int or not 1 <= number <= self._others:
            connection.close()  # a port scan, or a pod of another gang
            return
        if number in self._joined:
            self._joined[number][0].close()
        self._joined[number] = (connection, said)


def join(
    address: str,
    port: int,
    gang_key: GangKey,
    number: int,
    said: Message,
    seconds: float,
    interrupted: Callable[[], bool],
) -> Message:
    """Join pod 0 as pod ``number`` with the message ``said``; return the message of pod 0.

    Raises RendezvousError if there is none after ``seconds``, or if ``interrupted``.
    """
    why, deadline = "no answer", time.monotonic() + seconds
    for _ in _until(seconds, interrupted):
        try:
            with socket.create_connection((address, port), timeout=_POLL_SECONDS) as connection:
                connection.sendall(gang_key.line({**said, "number": number}))
                connection.setblocking(False)
                line = _Line(connection, deadline)
                for _ in _until(deadline - time.monotonic(), interrupted):
                    if _readable([connection]) and line.read():
                        if (message := gang_key.message(bytes(line.data))) is not None:
                            return message
                        why = "it closed the connection, or is not pod 0 of this gang"
                        break
        except OSError as error:  # pod 0 is not in DNS yet, or does not listen yet
            why = str(error)
        time.sleep(_POLL_SECONDS)
    raise RendezvousError(reason("rendezvous-timeout", address=f"{address}:{port}", seconds=seconds, said=why))


def _readable(connections: Iterable[socket.socket]) -> list[socket.socket]:
    """Return the connections with data, after _POLL_SECONDS at most. select() is limited to 1024 file descriptors."""
    with selectors.DefaultSelector() as selector:
        for one in connections:
            selector.register(one, selectors.EVENT_READ)
        ready = [key.fileobj for key, _ in selector.select(_POLL_SECONDS)]
    return [one for one in ready if isinstance(one, socket.socket)]


def _until(seconds: float, interrupted: Callable[[], bool]) -> Iterator[None]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if interrupted():
            raise RendezvousError(reason("rendezvous-interrupted"))
        yield
