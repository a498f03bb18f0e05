"""Connections to ports of a node over the streams of one process on it: `scaletrain port-forward`.

The node's end opens a connection to the port for each channel that the user's end opens; both ends then pass the data
on in the same way.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable

from scaletrain_cli.launch.node.streams import Frame, Incoming, Kind, Link, Outgoing
from scaletrain_cli.reasons import Reason

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
            found = self._by_channel.get(frame.channel)
        if found is None:
            return
        if frame.kind == Kind.DATA:
            found.incoming.put(frame.data)
        elif frame.kind == Kind.END:
            found.incoming.end()
        elif frame.kind == Kind.TAKEN:
            found.outgoing.taken(frame.number)
        elif frame.kind == Kind.CLOSE:
            found.close()

    def close(self) -> None:
        """Close all connections."""
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
