"""A session on one node of a running run, for `scaletrain exec`, `shell` and `port-forward`.

The back end starts launch/node/command.py on the node, by srun, kubectl or directly; everything else is the same under
every scheduler and passes through the pipes of that one process.
"""

import contextlib
import fcntl
import itertools
import os
import queue
import select
import shutil
import signal
import socket
import struct
import subprocess
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any, NoReturn

from scaletrain_cli.errors import SchedulerError, UsageError
from scaletrain_cli.launch.attempts import read_attempts
from scaletrain_cli.launch.backends.base import Backend, JobNode, NodeCommand
from scaletrain_cli.launch.backends.registry import backend_for, failures_of_plugin
from scaletrain_cli.launch.node.command import STDERR, STDIN, STDOUT
from scaletrain_cli.launch.node.streams import Connections, Frame, Incoming, Kind, Link, Outgoing, write_to
from scaletrain_cli.launch.status import run_status
from scaletrain_cli.reasons import Reason, reason_from
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, read_record, require_own_run

_END_SECONDS = 10.0  # for the process to end once its pipes are closed


@dataclass(frozen=True)
class NodeSession:
    """An open session: ``frames`` of the node after its first answer; ``failure()`` says why they ended early.

    ``where``: the name of the node, or of another place, for messages.
    """

    where: str
    link: Link
    frames: Iterator[Frame]
    process: subprocess.Popen[bytes]
    words: tuple[str, ...]

    def failure(self) -> SchedulerError:
        """Return the error for frames that ended without an answer: the connection to the node is lost."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_SECONDS)
        params = {"node": self.where, "command": self.words[0], "exit_code": self.process.returncode}
        return SchedulerError(Reason("launch.session-lost", params))


def node_of_run(run: RunDir, node: str | None = None, rank: int | None = None) -> tuple[RunRecord, JobNode]:
    """Return the node of a running run that ``node`` (its number or name) or ``rank`` names; by default the first.

    Raises UsageError if both are given, if the run is not this user's, does not run, or has no such node;
    SchedulerError if the scheduler does not answer.
    """
    if node is not None and rank is not None:
        raise UsageError("--node and --rank exclude each other: --rank chooses the node of that rank.")
    record = read_record(run)
    require_own_run(run, trust_owner=False, remedy="Ask that user to do it")
    status = run_status(run)
    if status.state == "unknown" and status.job.state == "unknown" and not status.job.forgotten and status.job.id:
        raise SchedulerError(Reason("launch.session-unknown", {"run": run.run_id, "why": status.reason}))
    if status.state != "running":
        raise UsageError(Reason("launch.session-not-running", {"run": run.run_id, "state": status.state}))
    count = record.spec.cluster.nodes
    names = status.nodes
    if len(names) != count:  # the job holds more nodes than the run uses, or they are not known
        latest = next(reversed(read_attempts(run)), None)
        names = latest.nodes if latest is not None and latest.job_id == status.job_id else ()
    names = names if len(names) == count else ()
    number = _number(run, record, names, node, rank)
    return record, JobNode(status.job_id, number, names[number] if names else f"node {number}", named=bool(names))


def _number(run: RunDir, record: RunRecord, names: tuple[str, ...], node: str | None, rank: int | None) -> int:
    """Return the number of the node, from 0. Raises UsageError for one that the run does not have."""
    count, per_node = record.spec.cluster.nodes, record.spec.cluster.gpus_per_node
    if rank is not None:
        if not 0 <= rank < count * per_node:
            raise UsageError(Reason("launch.session-no-rank", {"rank": rank, "last": count * per_node - 1}))
        return rank // per_node
    if node is None:
        return 0
    if node in names:
        return names.index(node)
    if node.isascii() and node.isdigit() and len(node) < 10 and int(node) < count:
        return int(node)
    params = {"run": run.run_id, "node": node, "last": count - 1, "names": list(names)}
    raise UsageError(Reason("launch.session-no-node" if names else "launch.session-no-node-number", params))


@contextlib.contextmanager
def node_session(run: RunDir, record: RunRecord, node: JobNode, request: Mapping[str, Any]) -> Iterator[NodeSession]:
    """Start the process on the node, send the request, and yield the session once the node has accepted it.

    Raises UsageError if the back end cannot do it, or if the node refuses; SchedulerError if the node is not reached.
    Whatever ends the block also ends what was started on the node.
    """
    with open_session(command_on_node(run, record, node), node.name, request) as session:
        yield session


def command_on_node(run: RunDir, record: RunRecord, node: JobNode) -> NodeCommand:
    """Return the command for open_session(). Raises UsageError if the back end has none."""
    scheduler = record.spec.cluster.scheduler
    backend: Backend = backend_for(scheduler)
    with failures_of_plugin(scheduler):
        return backend.node_command(run, record, node)


def become(command: NodeCommand) -> NoReturn:
    """Replace this process, whose standard streams then are those of the session. Raises SchedulerError and OSError."""
    _require(command)
    os.execvpe(command.words[0], command.words, os.environ if command.environment is None else command.environment)


def _require(command: NodeCommand) -> None:
    if shutil.which(command.words[0]) is None:
        raise SchedulerError(Reason("launch.session-no-command", {"command": command.words[0]}))


@contextlib.contextmanager
def open_session(
    command: NodeCommand,
    where: str,
    request: Mapping[str, Any],
    errors: IO[bytes] | None = None,
    within_seconds: float | None = None,
) -> Iterator[NodeSession]:
    """Start the command, send the request, and yield the session once the far end has accepted it.

    ``errors``: the file that gets what the command itself prints to standard errors; None: that of this process.
    ``within_seconds``: until the far end has answered; None: no limit. Raises as node_session().
    """
    words = command.words
    _require(command)
    # In a session of its own: Ctrl-C is for the command on the node, to which it is passed on. To ask it needs
    # the terminal.
    process = subprocess.Popen(
        words,
        env=command.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        bufsize=0,
        start_new_session=not command.asks,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    link = Link(process.stdout.fileno(), process.stdin.fileno())
    is_open = False
    limit = threading.Timer(within_seconds or threading.TIMEOUT_MAX, process.terminate)
    limit.daemon = True
    limit.start()
    session = NodeSession(where, link, link.frames(), process, words)
    try:
        if not link.await_greeting(_show) or not link.send_document(Kind.START, dict(request)):
            raise session.failure()
        answer = next(session.frames, None)
        limit.cancel()
        if answer is None:
            raise session.failure()
        if answer.kind == Kind.REFUSED:
            raise UsageError(reason_from(answer.document))
        if answer.kind != Kind.READY:
            raise ValueError(f"{answer.kind.name} in place of the first answer")
        is_open = True
        yield session
    except ValueError as error:  # what the process prints is not of this protocol
        raise SchedulerError(Reason("launch.session-damaged", {"node": where, "error": str(error)})) from error
    finally:
        limit.cancel()
        if not is_open:  # nothing runs there
            process.terminate()
        process.stdin.close()  # the node's end then ends what it has started
        assert process.stdout is not None
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout.close()


def _show(data: bytes) -> None:
    """Show what the scheduler or the start-up files of the node print before the session."""
    with contextlib.suppress(OSError):
        os.write(2, data)


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
        self, session: NodeSession, outputs: Mapping[int, Callable[[bytes], object]], *, reads: bool = True
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

    def __enter__(self) -> "Signals":
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


def forward_ports(
    connect: Callable[[], NodeCommand],
    where: str,
    pairs: Sequence[PortPair],
    on_open: Callable[[PortPair], None],
    on_refusal: Callable[[Reason], None],
) -> None:
    """Forward connections until the process is interrupted, which closes all of them (KeyboardInterrupt).

    ``connect`` returns the command for open_session(). ``on_open`` gets each pair once it is served, with the local
    port that it has; ``on_refusal`` gets, in another thread, why a connection could not be opened on the node. Raises
    UsageError if a local port is in use, and the errors of open_session(); SchedulerError when the connection to the
    node is lost, as at the end of the run.
    """
    with contextlib.ExitStack() as open_ports:
        listeners = [(open_ports.enter_context(_listener(pair.local)), pair.remote) for pair in pairs]
        with open_session(connect(), where, {"ports": True}) as session:
            forwarding = _Forwarding(session, on_refusal)
            for listener, remote in listeners:
                on_open(PortPair(listener.getsockname()[1], remote))
                threading.Thread(target=forwarding.accept, args=(listener, remote), daemon=True).start()
            try:
                for frame in session.frames:
                    forwarding.act(frame)
            finally:
                for listener, _ in listeners:
                    with contextlib.suppress(OSError):
                        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
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
