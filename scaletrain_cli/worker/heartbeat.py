"""The heartbeat of a rank: its format, the writer in the rank, and the reader for the node agent.

A rank writes one JSON line per beat to a pipe: ``{"turn": 0, "step": 12, "phase": "step", "allowed": 30.0}``.
``allowed`` is how many seconds may pass until the next beat; ``turn`` counts how often the run went back to an earlier
step. On SIGUSR2 the rank writes the stacks of all its threads to an in-memory file. The agent opens both and
passes their descriptors in the environment. Nothing here may fail or delay training. It runs before torch loads.
"""

import contextlib
import faulthandler
import json
import math
import os
import signal
import stat
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from scaletrain_cli.worker.position import answer_requests

HEARTBEAT_VARIABLE, STACKS_VARIABLE = "SCALETRAIN_HEARTBEAT_FD", "SCALETRAIN_STACKS_FD"

# Time limits of phases that may take long on a healthy cluster: a save, a rollback, a wait for a slow disk.
LONG_SECONDS = 1800.0
IMPORT_SECONDS = 900.0  # import of torch by all nodes at once from one shared disk
# Base limit of the set-up and of the first steps; the size of the run, its step time and compilation are added.
_SET_UP_SECONDS, _FIRST_STEP_SECONDS, _COMPILE_SECONDS = 600.0, 300.0, 900.0
_SLOWEST_BYTES_PER_SECOND = 50e6  # for a node that loads its shards from a busy shared disk
_PLANNED_STEPS = 20.0  # a first step loads kernels, creates communicators and fills caches; CPU plans are rough
# Minimum for the first steps, independent of guard.hang: loading kernels and setting up NCCL take a minute or more.
_SMALLEST_FIRST_STEP_SECONDS = 120.0
DATA_SECONDS = 24 * 3600.0  # rank 0 prepares data and verifies a checkpoint while the others wait
_FLOOR_SECONDS = 30.0
_MEDIANS = 5.0
_TIMED_BEFORE_TRUSTED = 3
_TIMES_KEPT = 64
# Phases with an even duration, whose limit is a multiple of the median.
_EVEN_PHASES = ("step", "evaluation")
_SET_UP_PHASES = ("connect", "preflight", "set-up", "restore")


# Parts of a phase, in the order in which a rank passes them.
PARTS = ("", "with its batch", "waiting for the other ranks")


class Beat(NamedTuple):
    """One beat: the rank is in ``phase`` of ``step`` and sends its next beat within ``allowed_seconds``.

    ``turn`` counts how often the run went back to an earlier step; ``part`` is an index into PARTS.
    """

    step: int
    phase: str
    allowed_seconds: float
    turn: int = 0
    part: int = 0


def beat_line(beat: Beat) -> bytes:
    """Return the beat as a line of JSON, as a rank writes it."""
    fields = {"turn": beat.turn, "step": beat.step, "phase": beat.phase, "part": beat.part}
    return json.dumps(fields | {"allowed": round(beat.allowed_seconds, 3)}).encode() + b"\n"


def read_beat(line: bytes) -> Beat | None:
    """Return the beat in a line; None for any other text, such as the output of a user's program."""
    try:
        fields = json.loads(line)
        part = min(max(0, int(fields.get("part", 0))), len(PARTS) - 1)
        beat = Beat(int(fields["step"]), str(fields["phase"]), float(fields["allowed"]), int(fields["turn"]), part)
    except (AttributeError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return None if math.isnan(beat.allowed_seconds) else beat


def collective_seconds(hang_seconds: float | None) -> float:
    """Return the timeout of collectives in seconds: longer than any silence that the agent allows in training."""
    return max(LONG_SECONDS, hang_seconds or 0.0) + 600.0


class Heartbeat:
    """The writer of a rank's heartbeat. ``hang_seconds``: the user's limit for a step (``guard.hang``), if any.

    Without a descriptor (in a process without an agent) nothing is sent. ``observer`` is called with the step and the
    phase of each beat; it must not raise.
    """

    def __init__(
        self, descriptor: int | None = None, *, several_nodes: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.hang_seconds: float | None = None
        self.observer: Callable[[int, str], None] | None = None
        self.set_up_seconds = self.first_step_seconds = LONG_SECONDS
        self._descriptor = descriptor
        self._several_nodes = several_nodes
        self._clock = clock
        self._turn, self._step, self._phase, self._begun = 0, 0, "", clock()
        self._allowed_seconds = LONG_SECONDS
        self._times: dict[str, deque[float]] = {phase: deque(maxlen=_TIMES_KEPT) for phase in _EVEN_PHASES}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Heartbeat":
        """Return the heartbeat for the agent's pipe, which child processes of the rank do not inherit."""
        several = environment.get("LOCAL_WORLD_SIZE") != environment.get("WORLD_SIZE")
        return cls(private_descriptor(environment, HEARTBEAT_VARIABLE, stat.S_ISFIFO), several_nodes=several)

    def allow(self, *, hang_seconds: float | None, step_seconds: float, bytes_per_node: float, compiled: bool) -> None:
        """Set the time limits for the set-up and the first steps, which have no measured median yet.

        ``hang_seconds``: the user's limit for a step; ``step_seconds``: the planned step time; ``bytes_per_node``: the
        bytes that each node loads; ``compiled``: the first step compiles the model.
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
        """Return the longest time limit of any phase except data preparation, in seconds."""
        return max(LONG_SECONDS, self.hang_seconds or 0.0, self.set_up_seconds, self.first_step_seconds)

    def beat(self, step: int, phase: str, allowed_seconds: float | None = None) -> None:
        """Report that the rank enters ``phase`` of ``step``. Default limit: five times the median of that phase.

        All ranks must pass the same phases in the same order: the agent suspects the rank that is furthest behind.
        """
        if self.observer is not None:
            self.observer(step, phase)
        now, before = self._clock(), self._phase
        if phase == before and phase in self._times:
            self._times[phase].append(now - self._begun)
        self._turn += step < self._step  # after a rollback the step decreases; the turn keeps beats ordered
        self._step, self._phase, self._begun = step, phase, now
        if allowed_seconds is None:
            # Inside the step this rank may wait for a rank of another node, which still waits for its disk.
            waits = before == "save" and self._several_nodes
            allowed_seconds = self._long() if waits else self._usual(phase)
        self._allowed_seconds = allowed_seconds
        self._write(phase, allowed_seconds)

    def has_batch(self) -> None:
        """Report that the rank has the batch of its step, whose work it begins, within the time limit of the step.

        Ranks that wait in a collective of the step are distinguished from one that is stuck before it.
        """
        self._write(self._phase, self._allowed_seconds, part=1)

    def wait_for_ranks(self) -> None:
        """Report that the rank waits for the other ranks between two steps."""
        self._write(self._phase, self._usual(self._phase), part=2)

    def _usual(self, phase: str) -> float:
        times = self._times.get(phase, ())
        if phase in _SET_UP_PHASES:
            return self.set_up_seconds
        if len(times) < _TIMED_BEFORE_TRUSTED:
            return self.first_step_seconds if phase == "step" else self._long()
        return self.hang_seconds or max(_FLOOR_SECONDS, _MEDIANS * _median(times))

    def _long(self) -> float:
        return max(LONG_SECONDS, self.hang_seconds or 0.0)

    def _write(self, phase: str, allowed_seconds: float, part: int = 0) -> None:
        if self._descriptor is None:
            return
        # Non-blocking; a write this short is atomic. A line that does not fit may be lost: an agent that has not read
        # the earlier ones does not consider any rank hung.
        with contextlib.suppress(OSError):
            os.write(self._descriptor, beat_line(Beat(self._step, phase, allowed_seconds, self._turn, part)))


def install_stack_dump(environment: Mapping[str, str]) -> None:
    """Install a SIGUSR2 handler in C that writes all threads' stacks for the agent, even in a hung collective.

    After it a thread writes the position of the rank, unless code outside Python keeps all threads from running.
    """
    descriptor = private_descriptor(environment, STACKS_VARIABLE, stat.S_ISREG)
    if descriptor is None:
        return
    faulthandler.register(signal.SIGUSR2, file=descriptor, all_threads=True)
    answer_requests(descriptor)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR2,))  # blocked by the agent: by default it terminates


def private_descriptor(environment: Mapping[str, str], name: str, is_kind: Callable[[int], bool]) -> int | None:
    """Return the descriptor that a variable names, made non-inheritable; None without the variable.

    Also None where a process between the agent and this one has closed it, as ``subprocess`` does: the number may then
    be that of another file.
    """
    if name not in environment:
        return None
    descriptor = int(environment[name])
    try:
        # The agent's end of the pipe is non-blocking, and its memory files have no name in a folder.
        status = os.fstat(descriptor)
        own = not os.get_blocking(descriptor) if stat.S_ISFIFO(status.st_mode) else status.st_nlink == 0
        if not (is_kind(status.st_mode) and own):
            return None
        os.set_inheritable(descriptor, False)
    except OSError:
        return None
    return descriptor


def _median(values: deque[float] | tuple[()]) -> float:
    ordered = sorted(values)  # importing `statistics` takes longer than the rest of this package
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
