"""The agent's side of the heartbeats: receives the beats of each rank and finds the hung rank.

scaletrain_cli.worker.heartbeat defines the format.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from scaletrain_cli.launch.node.processes import STOPPED_SECONDS
from scaletrain_cli.rundir.documents import parse_json, typed
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.worker.heartbeat import HEARTBEAT_VARIABLE, STACKS_VARIABLE, read_beat
from scaletrain_cli.worker.position import Position
from scaletrain_cli.worker.telemetry import RankRow, read_telemetry_line

START_SECONDS = 900.0  # for the first beat: the interpreter may start from a slow shared disk
_READ_BYTES = 1 << 16
_MOST_READS = 16  # at a time: a program that writes without end must not keep the agent from its other work
# A longer pause between two polls means that the agent itself was stopped, by the scheduler or a debugger.
_LONGEST_PAUSE_SECONDS = 10.0


@dataclass(frozen=True)
class LastBeat:
    """The last beat of a rank: received at the monotonic time ``received``, the next due within ``allowed_seconds``.

    ``turn`` counts how often the run went back to an earlier step; ``part`` is an index into PARTS.
    """

    step: int
    phase: str
    allowed_seconds: float
    received: float
    turn: int = 0
    part: int = 0

    def is_overdue(self, now: float) -> bool:
        """Return whether the rank has been silent for longer than it announced."""
        return now - self.received > self.allowed_seconds

    @property
    def progress(self) -> tuple[int, int, float]:
        """Sort key: all ranks pass the same phases, so within one step the rank with the older beat is behind."""
        return self.turn, self.step, self.received


def furthest_behind(beats: Mapping[int, LastBeat]) -> int:
    """Return the rank with the least progress; of ranks in one phase of a step the one in its earliest part."""
    last = min(beats.values(), key=lambda beat: beat.progress)
    phase = last.turn, last.step, last.phase
    same = [rank for rank, beat in beats.items() if (beat.turn, beat.step, beat.phase) == phase]
    return min(same, key=lambda rank: (beats[rank].part, beats[rank].received))


def stopped_seconds(spec: RunSpec) -> float:
    """Return how long a process of the run may be stopped by a signal before it counts as hung."""
    return STOPPED_SECONDS if spec.guard.hang == "auto" else min(STOPPED_SECONDS, spec.guard.hang)


def hung_rank(beats: Mapping[int, LastBeat], now: float) -> int | None:
    """Return the rank that is furthest behind if it is overdue, else None: ranks ahead of it only wait for it."""
    if not beats:
        return None
    behind = furthest_behind(beats)
    return behind if beats[behind].is_overdue(now) else None


class Channel:
    """The channel between one rank and its agent: a pipe for beats and telemetry, and an in-memory file for stacks.

    ``start_seconds``: limit for the first beat; infinite for a program that may never send one. ``take_row`` gets each
    row of telemetry.
    """

    def __init__(
        self, start_seconds: float = START_SECONDS, take_row: Callable[[RankRow], None] = lambda row: None
    ) -> None:
        self._take_row = take_row
        self._reads, self._writes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stacks = os.memfd_create("stacks", os.MFD_CLOEXEC)
        self._rest = b""
        self.beat = LastBeat(0, "start", start_seconds, time.monotonic())

    @contextlib.contextmanager
    def inherited(self) -> Iterator[dict[str, str]]:
        """Yield the variables that name the rank's two descriptors; any child started in this context inherits them.

        Start only the rank in it. On exit the agent's copy of the write end is closed.
        """
        for descriptor in (self._writes, self._stacks):
            os.set_inheritable(descriptor, True)
        try:
            yield {HEARTBEAT_VARIABLE: str(self._writes), STACKS_VARIABLE: str(self._stacks)}
        finally:
            os.close(self._writes)
            os.set_inheritable(self._stacks, False)

    def listen(self) -> None:
        """Read the beats and the rows that have arrived; ``beat`` is the last of them."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MOST_READS):
                if not (data := os.read(self._reads, _READ_BYTES)):
                    break
                *lines, self._rest = (self._rest + data).split(b"\n")
                self._rest = self._rest[-_READ_BYTES:]
                for line in lines:
                    if (beat := read_beat(line)) is not None:
                        arrived = time.monotonic()
                        self.beat = LastBeat(beat.step, beat.phase, beat.allowed_seconds, arrived, beat.turn, beat.part)
                    elif (row := read_telemetry_line(line)) is not None:
                        self._take_row(row)

    def extend(self, seconds: float) -> None:
        """Extend the deadline by ``seconds`` during which the agent or the rank was stopped."""
        self.beat = replace(self.beat, received=self.beat.received + seconds)

    def stacks(self) -> bytes:
        """Return the stacks that the rank has written so far; every dump is appended to those before."""
        return os.pread(self._stacks, os.fstat(self._stacks).st_size, 0)

    def position(self) -> Position | None:
        """Return where the rank was after its last dump of stacks; None if it has not written it."""
        lines = [line for line in self.stacks().splitlines() if line.startswith(b"{")]
        with contextlib.suppress(ValueError, TypeError):  # half written
            return typed(Position, parse_json(lines[-1])) if lines else None
        return None

    def close(self) -> None:
        """Close both ends after the rank has ended."""
        os.close(self._reads)
        os.close(self._stacks)


class PauseClock:
    """Measures how long this process was stopped: that time does not count as silence of a rank."""

    def __init__(self) -> None:
        self._looked = time.monotonic()

    def lost_seconds(self) -> float:
        """Return the seconds since the last call if they mean that this process was stopped; else 0."""
        now = time.monotonic()
        pause, self._looked = now - self._looked, now
        return pause if pause > _LONGEST_PAUSE_SECONDS else 0.0
