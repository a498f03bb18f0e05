"""Linux processes: identities that are safe against pid reuse, signals, descendants and orphans.

psutil, which is imported lazily, lists descendants and command lines. The start time is read from /proc in clock ticks:
psutil's creation time in seconds changes when the clock is set, and a running agent would then count as ended.
"""

import contextlib
import ctypes
import errno
import logging
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.errors import UsageError
from scaletrain_cli.own_processes import boot_id, process_stat

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
STOPPED_SECONDS = 60.0  # until a process that a signal has stopped counts as hung
_LONGEST_PAUSE_SECONDS = 10.0  # between two polls of a process that was not stopped
_ESTABLISHED = "01"  # in /proc/net/tcp
_STALLED_TRIES = 3  # the third one comes after 1.4 seconds
_SIGSET_BYTES = 128  # sigset_t of every C library on Linux
_NICE = 19
_FIRST_TO_KILL = "1000"
_KILL_WAIT_SECONDS = 10.0  # a process in uninterruptible sleep (dead NFS server, hung driver) may never end
logger = logging.getLogger(__name__)


class HelperProcess:
    """A process of this node's agent beside the ranks, which ends when its standard input does. No method raises."""

    _process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id; None before the start."""
        return None if self._process is None else self._process.pid

    def launch(self, command: Sequence[str], without_it: str, environment: Mapping[str, str] | None = None) -> None:
        """Start the process; a warning ``without_it``, with the error, takes its place if that fails."""
        self.ask_for_the_last()
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment)
        except OSError as error:
            logger.warning("%s: %s", without_it, error)

    def ask_for_the_last(self) -> None:
        """Ask the process to do its work a last time and to end, without waiting for it."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()


@dataclass(frozen=True)
class ProcessIdentity:
    """A process on this machine, identified by its pid and its start time (clock ticks since boot), both of a boot.

    ``boot``: the id of the boot, empty where it is not known.
    """

    pid: int
    start_ticks: int
    boot: str = ""

    def is_alive(self) -> bool:
        """Return whether the process still runs; a zombie does not."""
        fields = _state_and_start(self.pid) if self.boot in ("", boot_id()) else None
        return fields is not None and fields[0] not in "ZX" and fields[1] == self.start_ticks


def identify(pid: int) -> ProcessIdentity | None:
    """Return the identity of a process; None when there is none with this pid."""
    fields = _state_and_start(pid)
    return ProcessIdentity(pid, fields[1], boot_id()) if fields else None


def own_identity() -> ProcessIdentity:
    """Return the identity of this process. Raises UsageError without /proc."""
    identity = identify(os.getpid())
    if identity is None:
        raise UsageError("/proc does not show the processes of this machine, by which a run finds its own. Mount it.")
    return identity


def process_state(pid: int) -> str:
    """Return the state of a process as a letter (R, S, D, T, ...); X when it has ended."""
    fields = _state_and_start(pid)
    return fields[0] if fields is not None else "X"


def tcp_addresses(folder: str = "/proc/net") -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the own addresses of TCP connections, and those of peers that do not acknowledge data after three tries.

    The kernel waits for a quarter of an hour before it reports a peer that it cannot reach.
    """
    addresses, stalled = set(), set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"{folder}/{name}", encoding="ascii") as table:
            for _, own, peer, state, _, _, retransmissions, *_ in (line.split() for line in [*table][1:]):
                if state == _ESTABLISHED:
                    addresses.add(_address(own))
                    stalled |= {_address(peer)} if int(retransmissions, 16) >= _STALLED_TRIES else set()
    return tuple(sorted(addresses)), tuple(sorted(stalled))


def _address(field: str) -> str:
    """Return the address of ``0100007F:1F90``: words of 32 bits in the byte order of the machine, and the port."""
    words = bytes.fromhex(field.partition(":")[0])
    count = len(words) // 4
    ordered = struct.pack(f"={count}I", *struct.unpack(f">{count}I", words))
    return socket.inet_ntop(socket.AF_INET if count == 1 else socket.AF_INET6, ordered)


def command_line(pid: int) -> list[str]:
    """Return the command line that a process was started with; empty when it has ended."""
    import psutil

    try:
        return list(psutil.Process(pid).cmdline())
    except psutil.Error:
        return []


def descendants(without: Collection[int] = ()) -> list[int]:
    """Return the pids of all processes below this one, without zombies; ``without``: not these, nor any below them."""
    import psutil

    pids, passed_over = [], set(without)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if without and not passed_over.isdisjoint((process.pid, *(above.pid for above in process.parents()))):
                continue
            if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                pids.append(process.pid)
    return pids


def send_signal(identity: ProcessIdentity, signum: int) -> bool:
    """Send a signal to exactly this process; return False when it has ended."""
    if not identity.is_alive():
        return False
    try:
        os.kill(identity.pid, signum)
    except ProcessLookupError:
        return False
    return True


class StoppedProcesses:
    """Finds processes that stay stopped by a signal (state T). Those stopped by a debugger (state t) do not count."""

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._since: dict[int, float] = {}
        self._looked = time.monotonic()

    def longest(self, pids: Iterable[int]) -> int | None:
        """Return the pid that was stopped at every call of the last ``limit_seconds``. Call it about every second.

        All times start anew after this process was itself stopped: it is continued before the others.
        """
        now = time.monotonic()
        if now - self._looked > _LONGEST_PAUSE_SECONDS:
            self._since.clear()
        self._looked = now
        stopped = [pid for pid in pids if process_state(pid) == "T"]
        self._since = {pid: self._since.get(pid, now) for pid in stopped}
        return next((pid for pid, since in self._since.items() if now - since >= self._limit_seconds), None)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def next_signal(awaited: Collection[int], timeout_seconds: float) -> int | None:
    """Return the next of the ``awaited`` signals, which this thread blocks; None when none arrives in time.

    Not signal.sigtimedwait(): when the process is stopped and continued past the end of the wait, that returns
    uninitialized memory as if it were a signal. Here the return value of the C library decides. Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    signals = ctypes.create_string_buffer(_SIGSET_BYTES)
    libc.sigemptyset(signals)
    for signum in awaited:
        libc.sigaddset(signals, ctypes.c_int(int(signum)))
    whole, part = divmod(max(0.0, timeout_seconds), 1.0)
    arrived: int = libc.sigtimedwait(signals, None, ctypes.byref(_Timespec(int(whole), int(part * 1e9))))
    if arrived > 0:
        return arrived
    if ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
        raise OSError(ctypes.get_errno(), "sigtimedwait failed")
    return None


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, whatever session it is in."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int, signum: int) -> bool:
    """Receive ``signum`` when the parent dies. Return False when it has ended, or never was ``parent_pid``."""
    _prctl(_PR_SET_PDEATHSIG, signum)
    return os.getppid() == parent_pid


def yield_to_training() -> None:
    """Take the lowest priority for the CPU, and be the first process to be killed for lack of memory."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_KILL, encoding="ascii")


def kill_descendants(unawaited: Collection[int] = ()) -> None:
    """Send SIGKILL to all descendants until none is left. Requires an earlier call of ``adopt_orphans``.

    ``unawaited``: processes that hold nothing of the run, and are not waited for. Reaps all children: call it when no
    exit status of a child is needed any more.
    """
    deadline = time.monotonic() + _KILL_WAIT_SECONDS
    while True:
        alive = descendants()
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for _ in reap():
            pass
        # A process may fork between the listing and the kill: repeat until the list is empty.
        if not set(alive).difference(unawaited) or time.monotonic() > deadline:
            return
        time.sleep(0.01)


def reap() -> Iterator[tuple[int, int]]:
    """Yield (pid, exit code) of every child that has ended; minus the signal number for one that a signal killed."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(argument), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _state_and_start(pid: int) -> tuple[str, int] | None:
    try:
        fields = process_stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0].decode(), int(fields[19])
