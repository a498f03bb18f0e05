"""Byte streams of several channels over one pair of pipes, between this machine and a process on a node.

Both ends use this module. A frame is a header (kind, channel, length), the data, and a newline: srun passes on whole
lines at once, and the rest of one only later. Each channel has a window of bytes that may be on their way, so that a
slow reader of one channel stops neither the others nor the frames with signals.
"""

import contextlib
import json
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from scaletrain_cli.reasons import Reason

WINDOW_BYTES = 1 << 18
MOST_BYTES = 1 << 15  # in one frame
_HEADER = struct.Struct(">BII")
_NUMBER = struct.Struct(">I")
# The first line of the node's end: what programs print before it, such as `module load`, is not part of the streams.
GREETING = b"\0scaletrain-streams/1\n"


class Kind(IntEnum):
    """The kind of a frame. All but START, READY, REFUSED and EXITED are about one channel."""

    START = 1  # JSON: what to run
    READY = 2  # it runs, or the ports can be opened
    REFUSED = 3  # JSON: the Reason; on a channel: why the port could not be opened
    DATA = 4
    END = 5  # no more data in this direction
    TAKEN = 6  # number of bytes that have been written, and no longer count for the window
    CLOSE = 7  # neither direction is used any more
    OPEN = 8  # number of the port that the channel is for
    SIGNAL = 9  # number of the signal
    SIZE = 10  # rows and columns of the terminal, 16 bits each
    EXITED = 11  # exit code
    RUN = 12  # JSON: what the machine that shows a view knows of the run
    HEARD = 13  # the answer to it


@dataclass(frozen=True)
class Frame:
    """One frame; ``data`` as its kind defines it."""

    kind: Kind
    channel: int
    data: bytes

    @property
    def number(self) -> int:
        """The number in the data. Raises ValueError if there is none."""
        if len(self.data) != _NUMBER.size:
            raise ValueError(f"a frame {self.kind.name} has {_NUMBER.size} bytes, not {len(self.data)}")
        return int(_NUMBER.unpack(self.data)[0])

    @property
    def document(self) -> dict[str, Any]:
        """The JSON object in the data. Raises ValueError if there is none."""
        content = json.loads(self.data)
        if not isinstance(content, dict):
            raise ValueError(f"a frame {self.kind.name} has a JSON object")
        return content


class Link:
    """The two pipes to the other end, as descriptors. ``send`` may be called by every thread, ``frames`` by one."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = reads, writes
        self._sending = threading.Lock()
        self._rest = b""

    def greet(self) -> None:
        """Send the first line of the node's end."""
        with self._sending:
            _write_all(self._writes, GREETING)

    def await_greeting(self, show: Callable[[bytes], None]) -> bool:
        """Read up to the first line of the other end; ``show`` gets what comes before it. Return False at the end."""
        while GREETING not in self._rest:
            kept = len(GREETING) - 1  # may be the beginning of the line
            if len(self._rest) > kept:
                show(self._rest[:-kept])
                self._rest = self._rest[-kept:]
            if not self._read_more():
                show(self._rest)
                return False
        before, _, self._rest = self._rest.partition(GREETING)
        show(before)
        return True

    def send(self, kind: Kind, channel: int = 0, data: bytes = b"") -> bool:
        """Send a frame; return False if the other end is gone."""
        with self._sending, contextlib.suppress(OSError):
            _write_all(self._writes, b"%b%b\n" % (_HEADER.pack(kind, channel, len(data)), data))
            return True
        return False

    def send_number(self, kind: Kind, channel: int, number: int) -> bool:
        """Send a frame with one number."""
        return self.send(kind, channel, _NUMBER.pack(number))

    def send_document(self, kind: Kind, document: dict[str, Any], channel: int = 0) -> bool:
        """Send a frame with a JSON object."""
        return self.send(kind, channel, json.dumps(document).encode())

    def frames(self) -> Iterator[Frame]:
        """Yield the frames of the other end until it is gone. Raises ValueError for what is not a frame."""
        while True:
            while len(self._rest) < _HEADER.size:
                if not self._read_more():
                    return
            kind, channel, length = _HEADER.unpack_from(self._rest)
            whole = _HEADER.size + length + 1
            while len(self._rest) < whole:
                if not self._read_more():
                    return
            data, self._rest = self._rest[_HEADER.size : whole], self._rest[whole:]
            if not data.endswith(b"\n"):
                raise ValueError("a frame ends with a newline")
            yield Frame(Kind(kind), channel, data[:-1])

    def _read_more(self) -> bool:
        try:
            data = os.read(self._reads, 1 << 16)
        except OSError:
            return False
        self._rest += data
        return bool(data)


class Outgoing:
    """The data that one channel sends: at most WINDOW_BYTES that the other end has not taken."""

    def __init__(self, link: Link, channel: int) -> None:
        self._link, self._channel = link, channel
        self._window = WINDOW_BYTES
        self._changed = threading.Condition()
        self._is_closed = False
        self.sent = 0  # bytes

    def copy(self, read: Callable[[int], bytes]) -> None:
        """Send what ``read`` returns, which takes a number of bytes, up to its end (no bytes, or OSError)."""
        while most := self._room():
            try:
                data = read(most)
            except OSError:  # such as EIO of a terminal whose last process has ended
                data = b""
            if not data:
                break
            with self._changed:
                self._window -= len(data)
            if not self._link.send(Kind.DATA, self._channel, data):
                return
            self.sent += len(data)
        self._link.send(Kind.END, self._channel)

    def taken(self, count: int) -> None:
        """Note that the other end has taken bytes."""
        with self._changed:
            self._window += count
            self._changed.notify()

    def close(self) -> None:
        """Send nothing more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _room(self) -> int:
        """Wait until bytes may be sent; return how many, 0 after close()."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._window > 0)
            return 0 if self._is_closed else min(self._window, MOST_BYTES)


class Incoming:
    """The data that one channel receives, written by a thread of its own.

    ``write`` takes bytes and writes all of them; ``finish`` is called once: after the last byte, or after ``write`` has
    raised OSError. In the second case ``failed`` gets the error.
    """

    def __init__(
        self,
        link: Link,
        channel: int,
        write: Callable[[bytes], object],
        finish: Callable[[], None] = lambda: None,
        failed: Callable[[OSError], None] = lambda error: None,
    ) -> None:
        self._link, self._channel = link, channel
        self._write, self._finish, self._failed = write, finish, failed
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"channel {channel}", daemon=True)
        self._thread.start()

    def put(self, data: bytes) -> None:
        """Add data, in order. Never waits: the window of the other end limits what waits here."""
        self._waiting.put(data)

    def end(self) -> None:
        """Note that no more data follow."""
        self._waiting.put(None)

    def join(self, seconds: float | None = None) -> None:
        """Wait until everything is written."""
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while (data := self._waiting.get()) is not None:
                self._write(data)
                self._link.send_number(Kind.TAKEN, self._channel, len(data))
        except OSError as error:
            self._failed(error)
        with contextlib.suppress(OSError):
            self._finish()


def read_from(descriptor: int) -> Callable[[int], bytes]:
    """Return a function that reads at most a number of bytes from a descriptor."""
    return lambda most: os.read(descriptor, most)


def write_to(descriptor: int) -> Callable[[bytes], None]:
    """Return a function that writes all bytes to a descriptor."""
    return lambda data: _write_all(descriptor, data)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


_CONNECT_SECONDS = 10.0


class Connection:
    """One connection of a channel: a socket, and the threads that pass its data on in both directions."""

    def __init__(self, link: Link, channel: int, end: socket.socket, closed: Callable[[int], None]) -> None:
        self._link, self._channel, self._socket, self._closed = link, channel, end, closed
        self._left = 2  # directions
        self._lock = threading.Lock()
        self.outgoing = Outgoing(link, channel)
        self.incoming = Incoming(link, channel, end.sendall, self._sent, lambda error: self.reset())

    def start(self) -> None:
        """Begin to send what the socket receives; the other end must know the channel by now."""
        threading.Thread(target=self._copy, name=f"connection {self._channel}", daemon=True).start()

    def reset(self) -> None:
        """Close both directions, here and at the other end."""
        self._link.send(Kind.CLOSE, self._channel)
        self.close()

    def close(self) -> None:
        """Close both directions here."""
        self.outgoing.close()
        self.incoming.end()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads

    def _copy(self) -> None:
        self.outgoing.copy(self._socket.recv)
        self._one_direction_less()

    def _sent(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._one_direction_less()

    def _one_direction_less(self) -> None:
        with self._lock:
            self._left -= 1
            is_over = self._left == 0
        if is_over:
            self._socket.close()
            self._closed(self._channel)


class Connections:
    """The connections of a link by channel; ``act`` passes them the frames of the other end."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._by_channel: dict[int, Connection] = {}
        self._lock = threading.Lock()

    def add(self, channel: int, end: socket.socket) -> Connection:
        """Write what the other end sends to a connected socket, and return the connection, which is to be started."""
        with self._lock:
            connection = self._by_channel[channel] = Connection(self._link, channel, end, self._forget)
        return connection

    def act(self, frame: Frame) -> None:
        """Act on a frame; one of a connection that is closed already is ignored."""
        with self._lock:
            connection = self._by_channel.get(frame.channel)
        if connection is None:
            return
        if frame.kind == Kind.DATA:
            connection.incoming.put(frame.data)
        elif frame.kind == Kind.END:
            connection.incoming.end()
        elif frame.kind == Kind.TAKEN:
            connection.outgoing.taken(frame.number)
        elif frame.kind == Kind.CLOSE:
            connection.close()

    def close(self) -> None:
        with self._lock:
            left = list(self._by_channel.values())
        for connection in left:
            connection.close()

    def _forget(self, channel: int) -> None:
        with self._lock:
            self._by_channel.pop(channel, None)


class PortServer:
    """Opens a connection to a port of this node for each channel that the user's end opens."""

    def __init__(self, link: Link) -> None:
        self._link, self._connections = link, Connections(link)

    def serve(self, frames: Iterable[Frame]) -> None:
        """Serve until the user's end is gone."""
        with contextlib.suppress(ValueError):
            for frame in frames:
                if frame.kind == Kind.OPEN:
                    threading.Thread(target=self._open, args=(frame.channel, frame.number), daemon=True).start()
                else:
                    self._connections.act(frame)
        self._connections.close()

    def _open(self, channel: int, port: int) -> None:
        try:
            end = connected(port)
        except OSError as error:
            why = Reason("node.port-not-open", {"port": port, "error": error.strerror or str(error)})
            self._link.send_document(Kind.REFUSED, why.to_document(), channel)
            return
        connection = self._connections.add(channel, end)
        self._link.send(Kind.READY, channel)
        connection.start()


def connected(port: int) -> socket.socket:
    """Return a connection to a port of this machine. Raises OSError of the last address."""
    last = OSError("no loopback address")
    for address in ("127.0.0.1", "::1"):
        try:
            end = socket.create_connection((address, port), _CONNECT_SECONDS)
        except OSError as error:
            last = error if address == "127.0.0.1" or not isinstance(last, ConnectionRefusedError) else last
            continue
        end.settimeout(None)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return end
    raise last
