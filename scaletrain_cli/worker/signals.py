"""Preemption signals as a flag that the training loop reads between steps. Standard library only: runs before torch."""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from scaletrain_cli.own_processes import process_stat

_PR_SET_PDEATHSIG = 1
_PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# Time of the grace period that is left when the rank exits by itself.
_LAST_SECONDS, _LAST_SHARE = 5.0, 0.1


def own_exit_seconds(grace_seconds: float) -> float:
    """Return the seconds after the first signal at which a rank exits by itself, before it would be killed."""
    return grace_seconds - min(_LAST_SECONDS, _LAST_SHARE * grace_seconds)


class PreemptionFlag:
    """A flag that SIGTERM or SIGUSR1 raises: finish the step, commit a checkpoint, exit. Further signals do nothing."""

    def __init__(self) -> None:
        self.raised_at: float | None = None  # monotonic
        self._heard = threading.Event()

    @property
    def raised(self) -> bool:
        """Return whether a signal has arrived."""
        return self.raised_at is not None

    def install(self) -> None:
        """Install the handlers, then unblock the signals, which the agent blocked so that none is lost.

        A thread receives them at once; Python's handlers would wait for the main thread, which may compile for minutes.
        """
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(reads,), name="signals", daemon=True).start()
        self.set_handlers()

    def set_handlers(self) -> None:
        """Set the handlers of the signals, again where a library has replaced them, and unblock the signals."""
        for number in _PREEMPTION_SIGNALS:
            signal.signal(number, self._raise)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PREEMPTION_SIGNALS)

    def call_after(self, seconds: float, function: Callable[[], None]) -> None:
        """Call ``function`` in a thread ``seconds`` after the first signal, if the process still runs."""

        def wait() -> None:
            self._heard.wait()
            assert self.raised_at is not None
            time.sleep(max(0.0, self.raised_at + seconds - time.monotonic()))
            function()

        threading.Thread(target=wait, name="grace", daemon=True).start()

    def seconds_left(self, grace_seconds: float) -> float:
        """Return the remaining seconds of the grace period; infinity on a rank that has received no signal."""
        if self.raised_at is None:
            return float("inf")
        return self.raised_at + grace_seconds - time.monotonic()

    def _listen(self, descriptor: int) -> None:
        while numbers := os.read(descriptor, 64):
            if any(number in _PREEMPTION_SIGNALS for number in numbers):
                self._raise(0, None)
                self._heard.set()

    def _raise(self, number: int, frame: FrameType | None) -> None:
        """Set the time of the first signal. Also a signal handler, which may interrupt itself: it takes no lock."""
        if self.raised_at is None:
            self.raised_at = time.monotonic()


def die_with_agent() -> None:
    """Have the kernel kill this rank when its node agent dies, so that no rank is left on the node.

    A rank that a launcher of the user's started, such as torchrun, is not a child of the agent: the kernel kills the
    launcher, and this function only checks that the agent is an ancestor.
    """
    agent = os.environ.get("SCALETRAIN_AGENT_PID")
    if agent is None or os.getppid() == int(agent):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if agent is not None and int(agent) not in _ancestors():  # it died before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def _ancestors() -> Iterator[int]:
    """Yield the pids of the parent of this process, its parent, and so on."""
    pid = os.getppid()
    while pid > 0:
        yield pid
        try:
            pid = int(process_stat(pid)[1])
        except OSError:
            return
