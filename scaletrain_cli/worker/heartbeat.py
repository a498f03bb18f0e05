"""Signs of life for the node agent: where this rank is, how long it may be silent, and its stacks when it is asked.

Standard library only: it runs before torch loads. Nothing here may ever fail or delay training, and nothing is left
on a disk: the agent holds the other end of both files.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median

# What may take as long as it takes on a healthy cluster: a save, a rollback, a wait for a slow disk.
LONG_SECONDS = 1800.0
IMPORT_SECONDS = 900.0  # of torch, by all nodes at once from one shared disk
# Of the set-up and of the first steps: without what the size of the run, its planned step and compilation add.
_SET_UP_SECONDS, _FIRST_STEP_SECONDS, _COMPILE_SECONDS = 600.0, 300.0, 900.0
_SLOWEST_BYTES_PER_SECOND = 50e6  # of a node that loads its part of the states from a busy shared disk
_PLANNED_STEPS = 20.0  # a first step loads kernels, makes communicators and fills caches; plans of CPUs are rough
# Whatever guard.hang says of steps: first ones load kernels and set up NCCL, a minute or more over hundreds of GPUs.
_SMALLEST_FIRST_STEP_SECONDS = 120.0
DATA_SECONDS = 24 * 3600.0  # others wait while rank 0 prepares data and verifies a checkpoint
_FLOOR_SECONDS = 30.0
_MEDIANS = 5.0
_TIMED_BEFORE_TRUSTED = 3
_TIMES_KEPT = 64
# What repeats itself so evenly that its own median says what is too long.
_EVEN_PHASES = ("step", "evaluation")
_SET_UP_PHASES = ("connect", "preflight", "set-up", "restore")


def collective_seconds(hang_seconds: float | None) -> float:
    """How long a collective may wait: the last net, below every silence that the agent allows in training."""
    return max(LONG_SECONDS, hang_seconds or 0.0) + 600.0


class Heartbeat:
    """One rank's line to its agent. ``hang_seconds`` is the user's own limit for a step, if there is one."""

    def __init__(
        self, descriptor: int | None, *, several_nodes: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.hang_seconds: float | None = None
        self.set_up_seconds = self.first_step_seconds = LONG_SECONDS
        self._descriptor = descriptor
        self._several_nodes = several_nodes
        self._clock = clock
        self._turn, self._step, self._phase, self._begun = 0, 0, "", clock()
        self._times: dict[str, deque[float]] = {phase: deque(maxlen=_TIMES_KEPT) for phase in _EVEN_PHASES}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Heartbeat:
        """The line that the agent opened, which no process of the rank's inherits; a mute one without an agent."""
        several = environment.get("LOCAL_WORLD_SIZE") != environment.get("WORLD_SIZE")
        return cls(_own(environment, "SCALETRAIN_HEARTBEAT_FD"), several_nodes=several)

    def allow(self, *, hang_seconds: float | None, step_seconds: float, bytes_per_node: float, compiled: bool) -> None:
        """Set the limits of a run: how long its set-up and its first steps may be silent, before any step is timed.

        ``hang_seconds`` is the user's own limit for steps, ``step_seconds`` the planned time of one, ``bytes_per_node``
        what each node loads.
        """
        self.hang_seconds = hang_seconds
        compilation = _COMPILE_SECONDS if compiled else 0.0
        self.set_up_seconds = _SET_UP_SECONDS + bytes_per_node / _SLOWEST_BYTES_PER_SECOND
        planned = _FIRST_STEP_SECONDS + _PLANNED_STEPS * step_seconds
        self.first_step_seconds = compilation + (
            planned if hang_seconds is None else max(hang_seconds, _SMALLEST_FIRST_STEP_SECONDS)
        )

    @property
    def longest_seconds(self) -> float:
        """The longest silence that any phase but the preparation of data allows itself."""
        return max(LONG_SECONDS, self.hang_seconds or 0.0, self.set_up_seconds, self.first_step_seconds)

    def beat(self, step: int, phase: str, allowed_seconds: float | None = None) -> None:
        """Now in ``phase`` of ``step``; the next beat comes within ``allowed_seconds``, or what experience says.

        Every rank passes the same phases in the same order: who is behind is what the agent sees.
        """
        now, before = self._clock(), self._phase
        if phase == before and phase in self._times:
            self._times[phase].append(now - self._begun)
        self._turn += step < self._step  # rolled back: what comes is ahead of what was
        self._step, self._phase, self._begun = step, phase, now
        if allowed_seconds is None:
            # A rank of another node may still wait for its disk, and this one for it, inside the step.
            waits = before == "save" and self._several_nodes
            allowed_seconds = self._long() if waits else self._usual(phase)
        self._say(phase, allowed_seconds)

    def meet(self) -> None:
        """At the agreement between two steps, where a rank that is ahead waits for the others."""
        self._say(f"{self._phase}, at the agreement", self._usual(self._phase))

    def _usual(self, phase: str) -> float:
        times = self._times.get(phase, ())
        if phase in _SET_UP_PHASES:
            return self.set_up_seconds
        if len(times) < _TIMED_BEFORE_TRUSTED:
            return self.first_step_seconds if phase == "step" else self._long()
        return self.hang_seconds or max(_FLOOR_SECONDS, _MEDIANS * median(times))

    def _long(self) -> float:
        return max(LONG_SECONDS, self.hang_seconds or 0.0)

    def _say(self, phase: str, allowed_seconds: float) -> None:
        if self._descriptor is None:
            return
        told = {"turn": self._turn, "step": self._step, "phase": phase, "allowed": round(allowed_seconds, 3)}
        line = json.dumps(told) + "\n"
        # The pipe does not block, and takes a line this short as a whole or not at all. One that does not fit is no
        # loss: an agent that has not read the ones before it judges nobody.
        with contextlib.suppress(OSError):
            os.write(self._descriptor, line.encode())


def show_stacks_when_asked(environment: Mapping[str, str]) -> None:
    """On SIGUSR2 write the stacks of all threads for the agent. In C, so it works inside a collective that hangs."""
    descriptor = _own(environment, "SCALETRAIN_STACKS_FD")
    if descriptor is None:
        return
    faulthandler.register(signal.SIGUSR2, file=descriptor, all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR2,))  # the agent blocks it: by default it would kill


def _own(environment: Mapping[str, str], name: str) -> int | None:
    """The descriptor of that name, closed to whatever this process starts."""
    if name not in environment:
        return None
    descriptor = int(environment[name])
    os.set_inheritable(descriptor, False)
    return descriptor
