"""What Linux knows of processes: an identity that outlives pid reuse, descendants, and who adopts orphans.

Reads /proc and calls prctl; knows nothing of runs, ranks or schedulers.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
STOPPED_SECONDS = 60.0  # until a process that is stopped counts as hanging
_LONGEST_PAUSE_SECONDS = 10.0  # between two looks of a process that runs
_SIGSET_BYTES = 128  # sigset_t of every C library on Linux
_KILL_WAIT_SECONDS = 10.0  # a process in uninterruptible sleep (dead NFS, hung driver) may never go


@dataclass(frozen=True)
class ProcessIdentity:
    """A process on this machine; the start time (clock ticks since boot) tells it from a later one with its pid."""

    pid: int
    start_ticks: int

    def is_alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        entry = _stat(self.pid)
        return entry is not None and entry.state not in "ZX" and entry.start_ticks == self.start_ticks


@dataclass(frozen=True)
class _Stat:
    pid: int
    state: str
    parent: int
    start_ticks: int


def identify(pid: int) -> ProcessIdentity | None:
    """The identity of a process that runs now."""
    entry = _stat(pid)
    return ProcessIdentity(pid, entry.start_ticks) if entry else None


def command_line(pid: int) -> list[str]:
    """Return the words that a process was started with; none when it has gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(word) for word in words.split(b"\0")[:-1]]


def process_state(pid: int) -> str:
    """The kernel's letter for what a process does: R, S, D, T and so on; X when there is none."""
    entry = _stat(pid)
    return entry.state if entry is not None else "X"


def own_identity() -> ProcessIdentity:
    """The identity of this process."""
    identity = identify(os.getpid())
    assert identity is not None
    return identity


def send_signal(identity: ProcessIdentity, signum: int) -> bool:
    """Signal that very process; False when it has gone."""
    if not identity.is_alive():
        return False
    try:
        os.kill(identity.pid, signum)
    except ProcessLookupError:
        return False
    return True


class Standstill:
    """Notices processes that a signal has stopped (state T) and nobody continues; one under a debugger is none."""

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._since: dict[int, float] = {}
        self._looked = time.monotonic()

    def found(self, pids: Iterable[int]) -> int | None:
        """Return one that was stopped at every look of the last seconds. Call it about every second.

        When this process was stopped itself, all begin anew: they are continued after it.
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
    """Return the next of the ``awaited`` signals, which this thread blocks; None when none comes in time.

    Not signal.sigtimedwait(): when the process is stopped and continued past the end of the wait, that returns memory
    that was never written as if it were a signal. Here the C library's own return value decides.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    wanted = ctypes.create_string_buffer(_SIGSET_BYTES)
    libc.sigemptyset(wanted)
    for signum in awaited:
        libc.sigaddset(wanted, ctypes.c_int(int(signum)))
    whole, part = divmod(max(0.0, timeout_seconds), 1.0)
    found: int = libc.sigtimedwait(wanted, None, ctypes.byref(_Timespec(int(whole), int(part * 1e9))))
    if found > 0:
        return found
    if ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
        raise OSError(ctypes.get_errno(), "sigtimedwait failed")
    return None


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, however it detached itself."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int, signum: int) -> bool:
    """Get ``signum`` when the parent dies. False when it is already gone, or was never ``parent_pid``."""
    _prctl(_PR_SET_PDEATHSIG, signum)
    return os.getppid() == parent_pid


def descendants() -> list[int]:
    """Pids of all living processes below this one, zombies not counted."""
    children: dict[int, list[_Stat]] = {}
    for entry in _all_stats():
        children.setdefault(entry.parent, []).append(entry)
    found, below = [], [os.getpid()]
    while below:
        entries = children.get(below.pop(), [])
        below += [entry.pid for entry in entries]
        found += [entry.pid for entry in entries if entry.state not in "ZX"]
    return found


def kill_descendants() -> None:
    """SIGKILL and reap everything below this process, until nothing is left. Needs adopt_orphans() at the start.

    Takes over all waiting: call it when no child's exit status is still of interest.
    """
    deadline = time.monotonic() + _KILL_WAIT_SECONDS
    while True:
        alive = descendants()
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for _ in reap():
            pass
        # A process may fork between the look and the kill; only an empty look ends this.
        if not alive or time.monotonic() > deadline:
            return
        time.sleep(0.01)


def reap() -> Iterator[tuple[int, int]]:
    """(pid, exit code) of every child that has ended; minus the signal number for one that a signal killed."""
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


def _all_stats() -> Iterator[_Stat]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (entry := _stat(int(name))):
            yield entry


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses is the program's own choice and may hold blanks and parentheses.
    fields = text.rpartition(b")")[2].split()
    return _Stat(pid, fields[0].decode(), int(fields[1]), int(fields[19]))
