"""The agent's side of two processes beside the ranks: start them, and wait for them at the end.

One diagnoses the run while it trains, and notifies (launch/live_diagnosis.py); one mirrors it (launch/mirroring.py).
"""

import contextlib
import logging
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from scaletrain_cli.launch.node.options import AGENT_SIGNALS
from scaletrain_cli.launch.node.processes import HelperProcess, next_signal
from scaletrain_cli.own_processes import python_command
from scaletrain_cli.rundir.journal import size_here
from scaletrain_cli.rundir.mirror_state import read_mirror_state
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord

_MODULE = "scaletrain_cli.launch.live_diagnosis"
_START_SECONDS = 10.0  # shorter attempts are diagnosed at their end, and only if they failed
_LAST_SECONDS = 5.0
_AGAIN_SECONDS = 600.0  # after the start of a process that has ended, as for lack of memory
logger = logging.getLogger(__name__)


@dataclass
class Observer(HelperProcess):
    """Starts the process once the attempt has trained for some seconds, and asks it for a last diagnosis at the end.

    ``notifies``: the run has receivers of notifications, so that the process is needed before the first step, too. No
    method raises or waits, except ``finish`` for at most 5 seconds.
    """

    run: RunDir
    attempt: int
    notifies: bool = False
    start_seconds: float = _START_SECONDS
    _began: float = field(default_factory=time.monotonic, init=False)
    _is_tried: bool = field(default=False, init=False)
    _started: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._size_before = size_here(self.run.metrics)

    def start_if_due(self) -> None:
        """Start the process if the attempt is old enough and is measured. Called about every second."""
        is_old = time.monotonic() - self._began >= self.start_seconds
        if not self._is_tried and is_old and (self.notifies or self._has_trained()):
            self._start()
        elif self._process is not None and time.monotonic() - self._started >= _AGAIN_SECONDS:
            self._started = time.monotonic()
            if self._process.poll() is not None:
                self._start()

    def finish(self, seconds: float = _LAST_SECONDS, *, failed: bool) -> None:
        """Ask for a last diagnosis, and wait for it for at most ``seconds``, and at most 5; then kill the process.

        ``failed``: the attempt did, so that it is worth a process of its own even if it was short.
        """
        if failed and not self._is_tried and self._has_trained():
            self._start()
        process = self._process
        if process is None:
            return
        self.ask_for_the_last()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, min(seconds, _LAST_SECONDS)))
        with contextlib.suppress(OSError):
            process.kill()

    def _start(self) -> None:
        self._is_tried, self._started = True, time.monotonic()
        words = (str(self.run.path), "--attempt", str(self.attempt), "--parent-pid", str(os.getpid()))
        self.launch(python_command(_MODULE, *words), "the run is not diagnosed while it trains")

    def _has_trained(self) -> bool:
        return size_here(self.run.metrics) > self._size_before


MODULE = "scaletrain_cli.launch.mirroring"
_MIRROR_AGAIN_SECONDS = 60.0  # after the start of a process that has ended, as for lack of memory
_IDLE_SECONDS = 120.0  # for which a copy may make no progress after the last step
_FAILED_SECONDS = 2.0  # after a failure: the next attempt continues the copy
_POLL_SECONDS = 0.5
_KILL_SECONDS = 1.0
_PREEMPTION = frozenset(AGENT_SIGNALS[:3])


@dataclass
class MirrorProcess(HelperProcess):
    """Starts the process, and starts it again if it has ended. No method raises."""

    run: RunDir
    record: RunRecord
    _started: float = field(default=float("-inf"), init=False)

    def start_if_due(self) -> None:
        """Start the process unless it runs, or has ended a short time ago. Called about every second."""
        if time.monotonic() - self._started < _MIRROR_AGAIN_SECONDS:
            return
        self._started = time.monotonic()
        if self._process is not None and self._process.poll() is None:
            return
        from scaletrain_cli.notify.notifier import receivers_environment

        command = python_command(MODULE, str(self.run.path), "--parent-pid", str(os.getpid()))
        self.launch(command, "the run is not mirrored", receivers_environment(self.run, self.record))

    def finish(self, *, failed: bool, seconds_left: Callable[[], float], grace_seconds: float) -> None:
        """Wait until the newest checkpoint is in the mirror, then end the process.

        ``seconds_left``: of the grace period, infinite without a signal; one that comes now begins it. Without one the
        copy may take as long as it makes progress. ``failed``: the attempt did, and the next one continues the copy.
        """
        process = self._process
        if process is None:
            return
        self.ask_for_the_last()
        end = time.monotonic() + (_FAILED_SECONDS if failed else seconds_left())
        progress, since = self._progress(), time.monotonic()
        while process.poll() is None and time.monotonic() < end:
            signum = next_signal(AGENT_SIGNALS, _POLL_SECONDS)
            if signum in _PREEMPTION:
                end = min(end, time.monotonic() + grace_seconds)
            if (now := self._progress()) != progress:
                progress, since = now, time.monotonic()
            if time.monotonic() - since > _IDLE_SECONDS:
                logger.warning("the mirror made no progress for %.0f s; its process ends", _IDLE_SECONDS)
                break
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            process.kill()
            process.wait(_KILL_SECONDS)

    def _progress(self) -> object:
        with contextlib.suppress(OSError):
            state = read_mirror_state(self.run)
            return None if state is None else (state.step, state.uploading_step, state.sent_bytes)
        return None
