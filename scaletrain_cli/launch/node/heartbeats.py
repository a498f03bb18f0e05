"""The agent's end of the ranks' heartbeats: what each rank said last, and whether the node has come to a stand.

Knows the format of a beat (worker/heartbeat.py writes it), and nothing of what follows from silence.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from scaletrain_cli.launch.node.processes import STOPPED_SECONDS
from scaletrain_cli.spec import RunSpec

START_SECONDS = 900.0  # for the first beat: an interpreter that starts off a slow shared disk
_READ_BYTES = 1 << 16
# Between two looks of an agent that is not stopped itself, by the scheduler or a debugger, with all its ranks.
_LONGEST_PAUSE_SECONDS = 10.0


@dataclass(frozen=True)
class Beat:
    """The last sign of life of a rank: ``heard`` at this monotonic time, the next due within ``allowed_seconds``.

    ``turn`` counts how often the run went back to an earlier step.
    """

    step: int
    phase: str
    allowed_seconds: float
    heard: float
    turn: int = 0

    def is_overdue(self, now: float) -> bool:
        """Whether the rank has been silent for longer than it said it might be."""
        return now - self.heard > self.allowed_seconds

    @property
    def progress(self) -> tuple[int, int, float]:
        """Orders ranks: all pass the same places, so of two in one step the one heard of earlier is behind."""
        return self.turn, self.step, self.heard


def stopped_seconds(spec: RunSpec) -> float:
    """Return how long a process of the run may be stopped by a signal before it counts as hanging."""
    return STOPPED_SECONDS if spec.guard.hang == "auto" else min(STOPPED_SECONDS, spec.guard.hang)


def hung_rank(beats: Mapping[int, Beat], now: float) -> int | None:
    """The rank that is furthest behind, if it is overdue. Ranks ahead of it only wait for it, however long."""
    if not beats:
        return None
    behind = min(beats, key=lambda rank: beats[rank].progress)
    return behind if beats[behind].is_overdue(now) else None


class Channel:
    """What one rank and its agent share: a pipe for beats, and a file in memory for stacks.

    ``start_seconds``: until the first beat; infinite for a program that may never send one.
    """

    def __init__(self, start_seconds: float = START_SECONDS) -> None:
        self._reads, self._writes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stacks = os.memfd_create("stacks", os.MFD_CLOEXEC)
        self._rest = b""
        self.beat = Beat(0, "start", start_seconds, time.monotonic())

    @contextlib.contextmanager
    def inherited(self) -> Iterator[dict[str, str]]:
        """While the rank is started: the variables that tell it its two descriptors. Nothing else is started then."""
        for descriptor in (self._writes, self._stacks):
            os.set_inheritable(descriptor, True)
        try:
            yield {"SCALETRAIN_HEARTBEAT_FD": str(self._writes), "SCALETRAIN_STACKS_FD": str(self._stacks)}
        finally:
            os.close(self._writes)
            os.set_inheritable(self._stacks, False)

    def listen(self) -> None:
        """Take what has come; the newest beat counts."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._reads, _READ_BYTES):
                *lines, self._rest = (self._rest + data).split(b"\n")
                self._rest = self._rest[-_READ_BYTES:]
                for line in lines:
                    self._take(line)

    def _take(self, line: bytes) -> None:
        """Take one beat; what is none, as a program of the user's may write, is passed over."""
        with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
            told = json.loads(line)
            step, turn, allowed = int(told["step"]), int(told["turn"]), float(told["allowed"])
            if not math.isnan(allowed):
                self.beat = Beat(step, str(told["phase"]), allowed, time.monotonic(), turn)

    def forgive(self, seconds: float) -> None:
        """Time in which nobody could be heard, or could speak."""
        self.beat = replace(self.beat, heard=self.beat.heard + seconds)

    def stacks(self) -> bytes:
        """What the rank has written there; the place of its end moves with every further dump."""
        return os.pread(self._stacks, os.fstat(self._stacks).st_size, 0)

    def close(self) -> None:
        """Nothing more will come."""
        os.close(self._reads)
        os.close(self._stacks)


class HangTimeout:
    """When the agent itself was stopped, nobody's silence in that time counts."""

    def __init__(self) -> None:
        self._looked = time.monotonic()

    def lost_seconds(self) -> float:
        """How long this process was away between two looks; 0 for a pause that is no more than a busy machine's."""
        now = time.monotonic()
        pause, self._looked = now - self._looked, now
        return pause if pause > _LONGEST_PAUSE_SECONDS else 0.0
