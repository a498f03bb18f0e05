"""`scaletrain exec` and `shell`: run a command on a node of a running run, with the streams of this process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import select
import signal
import struct
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from scaletrain_cli.launch.backends.base import JobNode
from scaletrain_cli.launch.node.command import STDERR, STDIN, STDOUT
from scaletrain_cli.launch.node.streams import Frame, Incoming, Kind, Outgoing, write_to
from scaletrain_cli.launch.node_session import NodeSession, node_session
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
_INTERRUPTS, _INTERRUPTS_SECONDS = 3, 2.0  # number of Ctrl-C within this time that leave a command which ignores them


def run_on_node(run: RunDir, record: RunRecord, node: JobNode, words: Sequence[str], *, rank: int | None = None) -> int:
    """Run a command with the standard streams of this process, and return its exit code.

    Signals are passed on; the third Ctrl-C within two seconds ends the session (KeyboardInterrupt). Raises
    BrokenPipeError if the output is closed, and the errors of node_session().
    """
    request: dict[str, Any] = {"words": list(words), "rank": rank}
    with Signals() as signals, node_session(run, record, node, request) as session:
        signals.pass_on(session)
        return Streams(session, {STDOUT: write_to(1), STDERR: write_to(2)}).run()


def open_shell(
    run: RunDir, record: RunRecord, node: JobNode, words: Sequence[str] = (), *, rank: int | None = None
) -> int:
    """Run an interactive shell, or ``words``, in a terminal on the node, and return its exit code.

    Standard input and output must be a terminal; it is in raw mode meanwhile.
    """
    request: dict[str, Any] = {"words": list(words), "rank": rank, "terminal": list(terminal_size())}
    request["term"] = os.environ.get("TERM")
    with node_session(run, record, node, request) as session, raw_terminal(), resizing(session):
        return Streams(session, {STDOUT: write_to(1)}).run()


class Streams:
    """Standard input of this process, and a writer for each channel of output, connected to those of the command."""

    def __init__(
        self, session: NodeSession, outputs: Mapping[int, Callable[[bytes], None]], *, reads: bool = True
    ) -> None:
        """``reads``: False leaves standard input of this process unread; that of the command is then empty."""
        self._session, self._reads = session, reads
        self._failure: OSError | None = None
        self._input = Outgoing(session.link, STDIN)
        self._outputs = {
            channel: Incoming(session.link, channel, write, failed=self._failed) for channel, write in outputs.items()
        }

    def run(self) -> int:
        """Pass everything on until the command has ended; return its exit code."""
        code = None
        with self._reading():
            for frame in self._session.frames:
                if frame.kind == Kind.EXITED:
                    code = frame.number
                    break
                self._act(frame)
            self._input.close()
        for output in self._outputs.values():
            output.end()
            output.join()
        if self._failure is not None:
            raise self._failure
        if code is None:
            raise self._session.failure()
        return code

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Return a context in which standard input is passed on; what is typed later is left for the next reader."""
        if not self._reads:
            self._session.link.send(Kind.END, STDIN)
            yield
            return
        woken, wake = os.pipe()

        def read(most: int) -> bytes:
            ready, _, _ = select.select((0, woken), (), ())
            return b"" if woken in ready else os.read(0, most)

        thread = threading.Thread(target=self._input.copy, args=(read,), name="input", daemon=True)
        thread.start()
        try:
            yield
        finally:
            os.close(wake)
            thread.join()
            os.close(woken)

    def _act(self, frame: Frame) -> None:
        if frame.kind == Kind.TAKEN and frame.channel == STDIN:
            self._input.taken(frame.number)
        elif frame.channel in self._outputs and frame.kind == Kind.DATA:
            self._outputs[frame.channel].put(frame.data)
        elif frame.channel in self._outputs and frame.kind == Kind.END:
            self._outputs[frame.channel].end()

    def _failed(self, error: OSError) -> None:
        """End the session: nobody reads the output any more, as after `| head`."""
        self._failure = error
        self._session.process.terminate()


class Signals:
    """Queues the signals of this process from the start of a session on, and passes them on once it is open."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[int] = queue.SimpleQueue()  # may be filled by a signal handler
        self._interrupts: deque[float] = deque(maxlen=_INTERRUPTS)
        self._before: dict[int, Any] = {}
        self._is_open = False

    def __enter__(self) -> Signals:
        self._before = {signum: signal.signal(signum, self._handle) for signum in _PASSED_ON}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def pass_on(self, session: NodeSession) -> None:
        """Send each signal to the command."""
        self._is_open = True
        threading.Thread(target=self._send, args=(session,), name="signals", daemon=True).start()

    def _handle(self, signum: int, _: FrameType | None) -> None:
        if not self._is_open:
            raise KeyboardInterrupt  # nothing runs yet
        if signum == signal.SIGINT:
            self._interrupts.append(time.monotonic())
            if len(self._interrupts) == _INTERRUPTS and self._interrupts[-1] - self._interrupts[0] < (
                _INTERRUPTS_SECONDS
            ):
                raise KeyboardInterrupt
        self._waiting.put(signum)

    def _send(self, session: NodeSession) -> None:
        while session.link.send_number(Kind.SIGNAL, 0, self._waiting.get()):
            pass


@contextlib.contextmanager
def raw_terminal() -> Iterator[None]:
    """Return a context in which every key reaches the node, Ctrl-C and Ctrl-Z too."""
    before = termios.tcgetattr(0)
    try:
        tty.setraw(0, termios.TCSANOW)
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


@contextlib.contextmanager
def resizing(session: NodeSession) -> Iterator[None]:
    """Return a context in which the terminal on the node has the size of this one."""
    changes: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def send() -> None:
        while changes.get() and session.link.send(Kind.SIZE, 0, struct.pack(">HH", *terminal_size())):
            pass

    threading.Thread(target=send, name="size", daemon=True).start()
    before = signal.signal(signal.SIGWINCH, lambda signum, frame: changes.put(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)
        changes.put(False)


def terminal_size() -> tuple[int, int]:
    """Return rows and columns of this terminal."""
    rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(1, termios.TIOCGWINSZ, b"\0" * 8))
    return rows or 24, columns or 80
