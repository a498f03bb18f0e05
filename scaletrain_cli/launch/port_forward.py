"""`scaletrain port-forward`: ports of a node of a running run as ports of this machine, on 127.0.0.1 only.

One process on the node serves all connections, each a channel of its streams (node/ports.py).
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.backends.base import JobNode
from scaletrain_cli.launch.node.ports import Connections
from scaletrain_cli.launch.node.streams import Frame, Kind
from scaletrain_cli.launch.node_session import NodeSession, node_session
from scaletrain_cli.reasons import Reason, reason_from
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord

ADDRESS = "127.0.0.1"
_LARGEST_PORT = 65535


@dataclass(frozen=True)
class PortPair:
    """A port of this machine, 0 for any free one, and the port of the node that it leads to."""

    local: int
    remote: int


def port_pair(text: str) -> PortPair:
    """Return the ports in ``[LOCAL:]REMOTE``. Raises UsageError."""
    local, _, remote = text.rpartition(":")
    for part in filter(None, (local, remote)):
        if not (part.isascii() and part.isdigit() and len(part) < 6 and int(part) <= _LARGEST_PORT):
            raise UsageError(Reason("launch.port-invalid", {"given": text}))
    if not remote or int(remote) == 0 or (":" in text and not local):
        raise UsageError(Reason("launch.port-invalid", {"given": text}))
    return PortPair(int(local or remote), int(remote))


def is_here(record: RunRecord, pair: PortPair) -> bool:
    """Return whether the port of the node is that port of this machine already."""
    return record.spec.cluster.traits.runs_here and pair.local == pair.remote


def forward_ports(
    run: RunDir,
    record: RunRecord,
    node: JobNode,
    pairs: Sequence[PortPair],
    on_open: Callable[[PortPair], None],
    on_refusal: Callable[[Reason], None],
) -> None:
    """Forward connections until the process is interrupted, which closes all of them (KeyboardInterrupt).

    ``on_open`` gets each pair once it is served, with the local port that it has; ``on_refusal`` gets, in another
    thread, why a connection could not be opened on the node. Raises UsageError if a local port is in use, and the
    errors of node_session(); SchedulerError when the connection to the node is lost, as at the end of the run.
    """
    with contextlib.ExitStack() as open_ports:
        listeners = [(open_ports.enter_context(_listener(pair.local)), pair.remote) for pair in pairs]
        with node_session(run, record, node, {"ports": True}) as session:
            forwarding = _Forwarding(session, on_refusal)
            for listener, remote in listeners:
                on_open(PortPair(listener.getsockname()[1], remote))
                threading.Thread(target=forwarding.accept, args=(listener, remote), daemon=True).start()
            try:
                for frame in session.frames:
                    forwarding.act(frame)
            finally:
                for listener, _ in listeners:
                    _shut(listener)
                forwarding.connections.close()
            raise session.failure()


class _Forwarding:
    """The connections of one session. A connection waits until the node has opened its end."""

    def __init__(self, session: NodeSession, on_refusal: Callable[[Reason], None]) -> None:
        self._session, self._on_refusal = session, on_refusal
        self.connections = Connections(session.link)
        self._opening: dict[int, socket.socket] = {}
        self._lock = threading.Lock()
        self._channels = itertools.count(1)

    def accept(self, listener: socket.socket, remote: int) -> None:
        """Accept connections until the listener is closed, and ask the node to open its end of each."""
        while True:
            try:
                end, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                channel = next(self._channels)
                self._opening[channel] = end
            self._session.link.send_number(Kind.OPEN, channel, remote)

    def act(self, frame: Frame) -> None:
        """Act on a frame of the node."""
        if frame.kind in (Kind.READY, Kind.REFUSED):
            with self._lock:
                end = self._opening.pop(frame.channel, None)
            if end is None:
                return
            if frame.kind == Kind.READY:
                self.connections.add(frame.channel, end).start()
            else:
                end.close()
                self._on_refusal(reason_from(frame.document))
        else:
            self.connections.act(frame)


@contextlib.contextmanager
def _listener(port: int) -> Iterator[socket.socket]:
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((ADDRESS, port))
        except OSError as error:
            why = Reason("launch.port-in-use", {"port": port, "error": error.strerror or str(error)})
            raise UsageError(why) from error
        listener.listen()
        yield listener
    finally:
        listener.close()


def _shut(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
