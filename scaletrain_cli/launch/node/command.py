"""The node's end of `scaletrain exec`, `shell` and `port-forward`.

``python -m scaletrain_cli.launch.node.command RUN_DIR --node-rank N``, started by the back end on a node of a running
job, with pipes as standard input and output; streams.py is the protocol on them. The first frame says what to do: run
a command in the environment of the ranks, or open ports of this node. When the pipes close, the command is ended.
"""

import argparse
import contextlib
import fcntl
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import ExitCode, ScaletrainError
from scaletrain_cli.launch.node.record import NodeRecord, RankRecord, read_node_records
from scaletrain_cli.launch.node.streams import (
    MOST_BYTES,
    Frame,
    Incoming,
    Kind,
    Link,
    Outgoing,
    PortServer,
    read_from,
    write_to,
)
from scaletrain_cli.own_processes import leave_current_folder
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.worker.heartbeat import HEARTBEAT_VARIABLE, STACKS_VARIABLE
from scaletrain_cli.worker.run_environment import RUN_DIR_VARIABLE

STDIN, STDOUT, STDERR = range(3)  # channels of a command
# Variables that only mean something to a child of the node agent.
_OF_THE_AGENT = (HEARTBEAT_VARIABLE, STACKS_VARIABLE, "SCALETRAIN_AGENT_PID")
# With these a program would wait for the other ranks of the run, or take their port.
_OF_ONE_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RANK_PID_VARIABLE = "SCALETRAIN_RANK_PID"
_HANG_UP_SECONDS = 5.0  # from SIGHUP to SIGKILL, for a command whose user is gone
_QUIET_SECONDS = 2.0  # after the end of a command: a background process may keep its output open
_LOOK_SECONDS = 0.05
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # as shells count
_SHELLS = ("/bin/bash", "/bin/sh")


class RefusedError(Exception):
    """The command cannot be run here; nothing was started."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


@dataclass(frozen=True)
class Place:
    """The environment of the ranks, and the folder, in which a command runs."""

    environment: Mapping[str, str]
    folder: Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one request; return the exit code of the process, which says nothing about the command."""
    leave_current_folder()
    parser = argparse.ArgumentParser(prog="node_command", description="Run a command beside the ranks of a node.")
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--node-rank", type=int, required=True)
    options = parser.parse_args(arguments)
    link, frames, first = accept_request()
    if first is None:
        return ExitCode.USAGE
    try:
        request = first.document
        if request.get("ports"):
            link.send(Kind.READY)
            PortServer(link).serve(frames)
            return ExitCode.DONE
        place = place_of(RunDir(options.run_folder.absolute()), options.node_rank, request.get("rank"))
        return _run(link, frames, request, place)
    except RefusedError as error:
        link.send_document(Kind.REFUSED, error.reason.to_document())
    except ScaletrainError as error:  # a damaged record
        why = error.reason or Reason("node.exec-failed", {"error": error.message})
        link.send_document(Kind.REFUSED, why.to_document())
    except OSError as error:
        link.send_document(Kind.REFUSED, Reason("node.exec-failed", {"error": str(error)}).to_document())
    return ExitCode.DONE  # the answer has the reason: srun and kubectl would report another code in words of their own


def accept_request() -> tuple[Link, Iterator[Frame], Frame | None]:
    """Return the link over the standard streams, its frames, and the first one; None if that is no request.

    The standard input of this process is then empty, and its standard output is standard errors, because what it prints
    must not be taken for frames.
    """
    link = Link(os.dup(0), os.dup(1))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    link.greet()
    frames = link.frames()
    first = next(frames, None)
    return link, frames, first if first is not None and first.kind == Kind.START else None


# ---- the environment of the ranks ------------------------------------------------------------------------------------


def place_of(run: RunDir, node_rank: int, rank: int | None, processes: Path = Path("/proc")) -> Place:
    """Return the environment and the folder of a node's ranks, as they were started in the latest attempt.

    With ``rank`` the variables of that rank are included, and its pid. Raises RefusedError if no attempt runs here.
    """
    attempt = max(run.attempts(), default=0)
    records = read_node_records(run, attempt) if attempt else []
    node = next((one for one in records if one.node_rank == node_rank and one.ended is None), None)
    if node is None:
        raise RefusedError(Reason("node.exec-no-attempt", {"run": run.run_id, "node_rank": node_rank}))
    alive = [one for one in node.ranks if one.exit_code is None]
    chosen = next((one for one in alive if rank is None or one.holds(rank)), None)
    if rank is not None and chosen is None:
        raise RefusedError(Reason("node.exec-no-rank", {"rank": rank, "node": node.name}))
    environment = _environment(run, attempt, node, chosen, processes)
    for name in _OF_THE_AGENT if rank is not None else (*_OF_THE_AGENT, *_OF_ONE_RANK):
        environment.pop(name, None)
    if rank is not None and chosen is not None:
        environment[RANK_PID_VARIABLE] = str(chosen.pid)
    # `python` is the interpreter of the ranks, which are not started by their PATH.
    interpreter = _interpreter(processes, None if chosen is None else chosen.pid)
    folder, path = os.path.dirname(interpreter), environment.get("PATH", os.defpath)
    if folder and shutil.which("python", path=path) != os.path.join(folder, "python"):
        environment["PATH"] = os.pathsep.join((folder, path))
    code = Path(environment.get("SCALETRAIN_CODE", ""))
    return Place(environment, code if code.is_absolute() and code.is_dir() else run.path)


def _environment(
    run: RunDir, attempt: int, node: NodeRecord, rank: RankRecord | None, processes: Path
) -> dict[str, str]:
    """Return the variables that a rank was started with; else those of the agent, or of this process, with the run's.

    The process may be in a namespace that is not visible here, or have ended in the meantime.
    """
    if rank is not None and (variables := _started_with(processes, rank.pid)).get(RUN_DIR_VARIABLE) == str(run.path):
        return variables
    own = {RUN_DIR_VARIABLE: str(run.path), "SCALETRAIN_ATTEMPT": str(attempt), "NODE_RANK": str(node.node_rank)}
    of_agent = _started_with(processes, node.agent_pid) if node.agent.is_alive() else {}
    return {**(of_agent or os.environ), **own}


def _started_with(processes: Path, pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty if it cannot be read."""
    try:
        entries = (processes / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if b"=" in entry)
    return {name: value for name, _, value in pairs}


def _interpreter(processes: Path, rank_pid: int | None) -> str:
    """Return the path of the Python that a rank runs; empty for another program, this process's if it is not known."""
    if rank_pid is None:
        return sys.executable
    try:
        words = (processes / str(rank_pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return sys.executable
    path = os.fsdecode(words[0])
    return path if os.path.isabs(path) and os.path.basename(path).startswith("python") else ""


# ---- a command -------------------------------------------------------------------------------------------------------


def _run(link: Link, frames: Iterable[Frame], request: Mapping[str, Any], place: Place) -> int:
    """Run the command of a request, and send its exit code."""
    size, words = request.get("terminal"), list(map(str, request.get("words") or ()))
    environment = dict(place.environment)
    if size is not None:
        environment["TERM"] = str(request.get("term") or "xterm")
    shells = (environment.get("SHELL", ""), *_SHELLS)
    shell = next((path for path in shells if os.access(path, os.X_OK)), "sh")
    command = Command(link, words or [shell], environment, place.folder, size)
    try:
        command.start()
    except OSError as error:
        said = error.strerror if error.filename in (None, str(place.folder)) else f"{error.filename}: {error.strerror}"
        link.send(Kind.READY)
        link.send(Kind.DATA, STDERR, f"{command.words[0]}: {said}\n".encode()[:1000])
        missing = isinstance(error, FileNotFoundError)
        link.send_number(Kind.EXITED, 0, _NOT_FOUND if missing else _NOT_EXECUTABLE)
        return ExitCode.DONE
    link.send(Kind.READY)  # before any output
    command.copy_output()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # of a scheduler that ends the job
        signal.signal(signum, lambda number, _: command.signal(number))
    threading.Thread(target=command.follow, args=(frames,), name="frames", daemon=True).start()
    link.send_number(Kind.EXITED, 0, command.wait())
    return ExitCode.DONE


@dataclass
class Command:
    """A process in a session of its own, and the threads that pass its streams on.

    ``size``: rows and columns of its terminal; without it, its streams are pipes.
    """

    link: Link
    words: list[str]
    environment: Mapping[str, str]
    folder: Path
    size: Sequence[int] | None
    _process: subprocess.Popen[bytes] = field(init=False)
    _outputs: dict[int, Outgoing] = field(default_factory=dict, init=False)
    _copies: dict[int, tuple[threading.Thread, Outgoing]] = field(default_factory=dict, init=False)  # by descriptor
    _input: Incoming = field(init=False)
    _terminal: int | None = field(default=None, init=False)

    def start(self) -> None:
        """Start the process. Raises OSError."""
        if self.size is None:
            pipe = subprocess.PIPE
            self._process = self._popen(stdin=pipe, stdout=pipe, stderr=pipe)
            given, printed, errors = self._process.stdin, self._process.stdout, self._process.stderr
            assert given is not None
            assert printed is not None
            assert errors is not None
            self._input = Incoming(self.link, STDIN, write_to(given.fileno()), given.close)
            reads = {STDOUT: printed.fileno(), STDERR: errors.fileno()}
        else:
            own, of_process = pty.openpty()
            self._terminal = own
            self._resize(*self.size)
            try:
                # In the child: its session gets the terminal, so that Ctrl-C becomes a signal to what is in front.
                self._process = self._popen(
                    stdin=of_process,
                    stdout=of_process,
                    stderr=of_process,
                    preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
                )
            finally:
                os.close(of_process)
            self._input = Incoming(self.link, STDIN, write_to(own))
            reads = {STDOUT: own}
        for channel, descriptor in reads.items():
            outgoing = self._outputs[channel] = Outgoing(self.link, channel)
            copy = threading.Thread(target=outgoing.copy, args=(read_from(descriptor),), daemon=True)
            self._copies[descriptor] = (copy, outgoing)

    def copy_output(self) -> None:
        """Begin to send the output."""
        for copy, _ in self._copies.values():
            copy.start()

    def _popen(self, **streams: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.words, env=dict(self.environment), cwd=self.folder, start_new_session=True, **streams
        )

    def follow(self, frames: Iterable[Frame]) -> None:
        """Act on the frames of the user's end. At their end, which nobody waits for, end the process."""
        with contextlib.suppress(ValueError):
            for frame in frames:
                self._act(frame)
        # The user is gone, as when a terminal is closed.
        for outgoing in self._outputs.values():
            outgoing.close()
        self._input.end()
        self.signal(signal.SIGHUP)
        self.signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_HANG_UP_SECONDS)
        self.signal(signal.SIGKILL)

    def _act(self, frame: Frame) -> None:
        if frame.kind == Kind.DATA:
            self._input.put(frame.data)
        elif frame.kind == Kind.END:
            self._input.end()
        elif frame.kind == Kind.TAKEN and frame.channel in self._outputs:
            self._outputs[frame.channel].taken(frame.number)
        elif frame.kind == Kind.SIGNAL:
            self.signal(frame.number)
        elif frame.kind == Kind.SIZE and len(frame.data) == 4:
            self._resize(*struct.unpack(">HH", frame.data))

    def signal(self, signum: int) -> None:
        """Send a signal to the process and those that it has started in its group."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signum)

    def wait(self) -> int:
        """Wait for the process and its output; return its exit code, 128 and its number for a signal.

        All that it has written is sent, however slowly the other end takes it, and not all that a background process
        still writes.
        """
        code = self._process.wait()
        since = time.monotonic()
        # What is unread, and what a thread has read and not sent yet.
        ends = {pipe: out.sent + _unread(pipe) + MOST_BYTES for pipe, (_, out) in self._copies.items()}
        while left := [pipe for pipe, (copy, out) in self._copies.items() if copy.is_alive() and out.sent < ends[pipe]]:
            if select.select(left, (), (), 0)[0]:  # not sent yet, or at its end
                since = time.monotonic()
            elif time.monotonic() >= since + _QUIET_SECONDS:
                break
            self._copies[left[0]][0].join(_LOOK_SECONDS)
        return code if code >= 0 else 128 - code

    def _resize(self, rows: int, columns: int) -> None:
        if self._terminal is not None:
            with contextlib.suppress(OSError):
                fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _unread(descriptor: int) -> int:
    """Return the bytes that a pipe or terminal holds."""
    count = fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4)
    return int.from_bytes(count, sys.byteorder)


if __name__ == "__main__":
    sys.exit(main())
