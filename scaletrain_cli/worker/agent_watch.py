"""A watchdog in each rank over its node agent: a stopped agent (state T) forwards no signals and ends no hang.

On Slurm and Kubernetes no other process watches the agent, so each rank does, in a thread beside the training loop. It
runs before torch loads.
"""

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

from scaletrain_cli.own_processes import process_stat
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir

# Less than the grace period of most schedulers, and than the 60 s after which a local supervisor kills the agent.
_LIMIT_SECONDS, _LOOK_SECONDS = 30.0, 5.0
_RESERVE_FACTOR = 1.5  # times the limit, for all ranks of a node but the first
_LAST_SECONDS = 3.0  # for the other ranks to exit before an agent that stays stopped is killed
logger = logging.getLogger(__name__)


class AgentWatch:
    """Continues a node agent that stays stopped; if that has no effect, the rank exits as for a preemption.

    Time is counted in polls, one every ``look_seconds``: no poll happens while the whole job is suspended.
    ``report`` gets the seconds and whether this rank exits now. A process under a debugger (state t) is not stopped.
    """

    def __init__(
        self,
        agent: int | None,
        report: Callable[[float, bool], None],
        *,
        limit_seconds: float = _LIMIT_SECONDS,
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        self._agent, self._report = agent, report
        self._limit_seconds, self._look_seconds = limit_seconds, look_seconds
        self._looks = 0  # consecutive polls that found the agent stopped
        self._reported = self._exits = False
        self._at_work = threading.Lock()

    @classmethod
    def of_rank(
        cls, run: RunDir, attempt: int, *, limit_seconds: float = _LIMIT_SECONDS, look_seconds: float = _LOOK_SECONDS
    ) -> "AgentWatch":
        """Return the watchdog of this rank; without an agent it does nothing.

        The first rank of a node acts and records the event; the others wait longer, and act if it cannot.
        """
        environment = os.environ
        node = environment.get("SCALETRAIN_NODE_NAME") or environment.get("SLURMD_NODENAME") or socket.gethostname()
        first = environment.get("LOCAL_RANK", "0") == "0"

        def report(seconds: float, exits: bool) -> None:
            then = "the ranks save and exit" if exits else "a rank continued it"
            logger.warning("the node agent was stopped by a signal for %.0f s; %s", seconds, then)
            if first:
                with contextlib.suppress(OSError):  # a full disk must not prevent the reaction
                    record_event(
                        run, "node-agent-stopped", node=node, attempt=attempt, seconds=round(seconds), ends=exits
                    )

        agent = environment.get("SCALETRAIN_AGENT_PID")
        limit_seconds *= 1.0 if first else _RESERVE_FACTOR
        return cls(
            int(agent) if agent is not None else None, report, limit_seconds=limit_seconds, look_seconds=look_seconds
        )

    def start(self) -> None:
        """Start the watchdog thread, which runs until this process ends."""
        if self._agent is not None:
            threading.Thread(target=self._run, name="agent-watch", daemon=True).start()

    def leave(self) -> None:
        """Continue a stopped agent once more. Call before this rank ends, or the job might never end."""
        if self._at_work.acquire(timeout=_LAST_SECONDS):  # wait until the event is recorded, unless the disk hangs
            self._at_work.release()
        if self._is_stopped():
            self._signal(signal.SIGCONT)
        if self._exits:  # the agent stays stopped: kill it, and the kernel ends the remaining ranks
            time.sleep(min(_LAST_SECONDS, self._limit_seconds))
            if self._is_stopped():
                self._signal(signal.SIGKILL)

    def _run(self) -> None:
        while not self._exits:
            time.sleep(self._look_seconds)
            with self._at_work:
                self._look()

    def _look(self) -> None:
        if not self._is_stopped():
            self._looks, self._reported = 0, False
            return
        self._looks += 1
        seconds = self._looks * self._look_seconds
        if seconds < self._limit_seconds:
            return
        self._signal(signal.SIGCONT)  # before any access to a disk, which may be slow
        self._exits = seconds >= 2 * self._limit_seconds
        if self._exits:
            os.kill(os.getpid(), signal.SIGTERM)
        if self._exits or not self._reported:
            self._reported = True
            self._report(seconds, self._exits)

    def _is_stopped(self) -> bool:
        try:
            return process_stat(self._agent)[0] == b"T"
        except OSError:  # the agent has ended, so the kernel ends this rank, too
            return False

    def _signal(self, number: int) -> None:
        assert self._agent is not None
        with contextlib.suppress(OSError):  # no permission, or it has ended
            os.kill(self._agent, number)
