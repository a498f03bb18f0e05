"""Signals become a flag that the training loop reads between steps. Standard library only: runs before torch loads."""

from __future__ import annotations

import ctypes
import os
import signal
from types import FrameType

_PR_SET_PDEATHSIG = 1
_ASKS_TO_LEAVE = (signal.SIGTERM, signal.SIGUSR1)


class PreemptionFlag:
    """Raised by SIGTERM or SIGUSR1: finish the step, commit a checkpoint, leave. A second signal changes nothing."""

    def __init__(self) -> None:
        self.raised = False

    def install(self) -> None:
        """Take the signals over, then let in those that came while the interpreter started (the agent blocks them)."""
        for number in _ASKS_TO_LEAVE:
            signal.signal(number, self._raise)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASKS_TO_LEAVE)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self.raised = True


def die_with_agent() -> None:
    """Have the kernel kill this rank when its node agent dies, so that none is left on the node."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    agent = os.environ.get("SCALETRAIN_AGENT_PID")
    if agent is not None and os.getppid() != int(agent):  # it died before the line above
        os.kill(os.getpid(), signal.SIGKILL)
