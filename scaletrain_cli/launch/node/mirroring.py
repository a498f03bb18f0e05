"""The agent's side of the process that mirrors the run (launch/mirroring.py): start it, and wait for it at the end."""

from __future__ import annotations

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
from scaletrain_cli.rundir.mirror_state import read_mirror_state
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord

MODULE = "scaletrain_cli.launch.mirroring"
_AGAIN_SECONDS = 60.0  # after the start of a process that has ended, as for lack of memory
_IDLE_SECONDS = 120.0  # for which a copy may make no progress after the last step
_FAILED_SECONDS = 2.0  # after a failure: the next attempt continues the copy
_POLL_SECONDS = 0.5
_KILL_SECONDS = 1.0
_PREEMPTION = frozenset(AGENT_SIGNALS[:3])
logger = logging.getLogger(__name__)


@dataclass
class MirrorProcess(HelperProcess):
    """Starts the process, and starts it again if it has ended. No method raises."""

    run: RunDir
    record: RunRecord
    _started: float = field(default=float("-inf"), init=False)

    def start_if_due(self) -> None:
        """Start the process unless it runs, or has ended a short time ago. Called about every second."""
        if time.monotonic() - self._started < _AGAIN_SECONDS:
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
