"""Find out that a run does nothing, announce it, and end it after ``cluster.idle_timeout``.

The agent of each node measures in windows of at most a minute, and records for how long its node has done nothing. The
agent of the first node decides from the records of all nodes: an event after half of the time; at its end a request in
the folder of the attempt, on which every agent signals its ranks to save and exit.
"""

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scaletrain_cli.launch.attempts import read_stop_request, request_stop
from scaletrain_cli.launch.node.heartbeats import LastBeat
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import parse_json, write_document
from scaletrain_cli.rundir.journal import record_event, size_here
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import make_folder
from scaletrain_cli.spec import ClusterSpec

# Below these a node does nothing. A process that waits, such as a notebook server or torchrun, uses about 1 % of a
# core; a monitor of GPUs shows up as 1 % of their time for a moment.
LEAST_GPU_SHARE = 0.02
LEAST_CORES = 0.05
LEAST_BYTES_PER_SECOND = 1e6
_LONGEST_WINDOW_SECONDS, _SHORTEST_WINDOW_SECONDS = 60.0, 0.5
_WINDOWS = 20  # in the whole time
_NOTICE_SHARE, _RECORD_SHARE = 0.5, 0.25
_UNMEASURED_SECONDS = 60.0  # a driver may take long for its first answer
_MOST_SAMPLES = 100_000
_LONGEST_PAUSE_SECONDS = 10.0  # between two checks; longer: the agent itself was stopped
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GpuUse:
    """The utilization of the GPUs of a node, from 0 to 1, as (index, share); another thread adds the samples."""

    samples: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_MOST_SAMPLES))

    def add(self, index: int, values: Mapping[str, float]) -> None:
        """Add what the driver reports about one GPU; nothing where it does not report the utilization."""
        if "utilization" in values:
            self.samples.append((index, values["utilization"]))

    def take(self) -> dict[int, float]:
        """Return the mean of each GPU since the last call; a GPU without a sample is missing."""
        by_gpu: dict[int, list[float]] = {}
        for _ in range(len(self.samples)):
            index, share = self.samples.popleft()
            by_gpu.setdefault(index, []).append(share)
        return {index: math.fsum(shares) / len(shares) for index, shares in by_gpu.items()}


@dataclass
class ProcessUse:
    """CPU seconds and bytes that the processes below the agent have used since the last reading."""

    _before: dict[int, tuple[float, float]] = field(default_factory=dict, init=False)

    def take(self, without: Collection[int] = ()) -> tuple[float, float]:
        """Return CPU seconds and bytes read and written since the last call; ``without``: pids of the agent's own."""
        from scaletrain_cli.launch.node.processes import descendants

        now = {pid: used for pid in descendants(without) if (used := _used(pid)) is not None}
        seconds = math.fsum(max(0.0, cpu - self._before.get(pid, (0.0, 0.0))[0]) for pid, (cpu, _) in now.items())
        size = math.fsum(max(0.0, size - self._before.get(pid, (0.0, 0.0))[1]) for pid, (_, size) in now.items())
        self._before = now
        return seconds, size


def _used(pid: int) -> tuple[float, float] | None:
    """Return the CPU seconds of a process and its ended children, and its bytes; None if it has ended."""
    import psutil

    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        size = 0.0
        with contextlib.suppress(psutil.AccessDenied):
            io = process.io_counters()
            # Of pages that are mapped the second is 0, and of cached ones the first.
            size = float(max(io.read_bytes, io.read_chars) + max(io.write_bytes, io.write_chars))
    except psutil.Error:
        return None
    return times.user + times.system + times.children_user + times.children_system, size


@dataclass(frozen=True)
class Window:
    """The measurements of one window on one node.

    ``seconds``: its length; ``gpus``: the utilization of each GPU by index, 0 to 1; ``cpu_seconds`` and ``size``: CPU
    time and bytes read and written by the processes of the ranks.
    """

    seconds: float
    gpus: Mapping[int, float]
    cpu_seconds: float
    size: float
    progressed: bool = False  # a heartbeat arrived, or metrics.jsonl grew
    announced: bool = False  # a rank is in a phase of limited time, such as loading, and within its limit

    def is_active(self, gpus: int) -> bool:
        """Return whether the node did anything. ``gpus``: how many must be measured; 0: its CPUs train.

        A node with a GPU whose use is not known counts as active.
        """
        if self.progressed or len(self.gpus) < gpus:
            return True
        works = self.cpu_seconds >= LEAST_CORES * self.seconds or self.size >= LEAST_BYTES_PER_SECOND * self.seconds
        if works and (self.announced or not gpus):
            return True
        return any(share >= LEAST_GPU_SHARE for share in self.gpus.values())


@dataclass
class IdleWatch:
    """The watch of one agent. ``node``: its name in files; ``interval_seconds``: between two samples of ``gpus``."""

    run: RunDir
    attempt: int
    node: str
    node_rank: int
    cluster: ClusterSpec
    interval_seconds: float
    gpus: GpuUse = field(default_factory=GpuUse)
    processes: ProcessUse = field(default_factory=ProcessUse)
    clock: Callable[[], float] = time.monotonic
    idle_seconds: float = field(default=0.0, init=False)
    _beats: dict[int, float] = field(default_factory=dict, init=False)
    _progressed: bool = field(default=False, init=False)
    _metrics_bytes: int = field(default=0, init=False)
    _window_began: float = field(default=0.0, init=False)
    _looked: float = field(default=0.0, init=False)
    _measured_at: float = field(default=0.0, init=False)
    _unmeasured: bool = field(default=False, init=False)  # and this was recorded
    _announced: bool = field(default=False, init=False)
    _recorded: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        assert self.cluster.idle_timeout is not None
        self.timeout_seconds = self.cluster.idle_timeout
        usual = min(_LONGEST_WINDOW_SECONDS, self.timeout_seconds / _WINDOWS)
        self._window = max(_SHORTEST_WINDOW_SECONDS, usual, 2 * self.interval_seconds)
        self._window_began = self._looked = self._measured_at = self.clock()
        self._metrics_bytes = self._size_of_metrics()
        self.processes.take()

    def check(self, beats: Mapping[int, LastBeat], own_pids: Collection[int] = ()) -> Reason | None:
        """Look at the node; return why the ranks must save and exit, or None. Called about every second.

        ``beats``: the last ones of the living ranks; ``own_pids``: processes of the agent that are no ranks.
        """
        now = self.clock()
        paused, self._looked = now - self._looked, now
        before_pause = self._progressed  # the time limits of beats are extended by a pause, as if they had just arrived
        received = {rank: beat.received for rank, beat in beats.items() if beat.phase != "start"}
        self._progressed = self._progressed or any(
            self._beats.get(rank) != arrived for rank, arrived in received.items()
        )
        self._beats = received
        if paused > _LONGEST_PAUSE_SECONDS:  # of a suspended job: the ranks were stopped, too
            if before_pause:
                self.idle_seconds = 0.0
            self._window_began, self._progressed = now, False
            self.gpus.take()
            self.processes.take(own_pids)
        elif now - self._window_began >= self._window:
            self._end_window(now, beats, own_pids)
            if self.node_rank == 0:
                self._decide()
        return self._request()

    def _request(self) -> Reason | None:
        with contextlib.suppress(OSError):
            return read_stop_request(self.run, self.attempt, "idle")
        return None

    def _end_window(self, now: float, beats: Mapping[int, LastBeat], own_pids: Collection[int]) -> None:
        cpu_seconds, size = self.processes.take(own_pids)
        announced = any(math.isfinite(beat.allowed_seconds) and not beat.is_overdue(now) for beat in beats.values())
        before, self._metrics_bytes = self._metrics_bytes, self._size_of_metrics()
        seconds, grown = now - self._window_began, self._metrics_bytes != before
        window = Window(seconds, self.gpus.take(), cpu_seconds, size, self._progressed or grown, announced)
        self._window_began, self._progressed = now, False
        needed = 0 if self.cluster.gpu == "cpu" else self.cluster.gpus_per_node
        # Where the use of the GPUs is not known, which is recorded once, the run is never idle.
        measured = len(window.gpus) >= needed
        if measured:
            self._measured_at = now
        elif not self._unmeasured and now - self._measured_at >= max(_UNMEASURED_SECONDS, 3 * self._window):
            self._unmeasured = True
            logger.warning("the use of the GPUs is not known here, so cluster.idle_timeout has no effect")
            self._event("idle-unmeasured", node=self.node)
        self.idle_seconds = 0.0 if window.is_active(needed) else self.idle_seconds + seconds
        if self.node_rank > 0 and (self.idle_seconds >= _RECORD_SHARE * self.timeout_seconds or self._recorded):
            # For how long this node has done nothing; 0 once it does something again.
            path = idle_folder(self.run, self.attempt) / f"{self.node}.json"
            with contextlib.suppress(OSError):
                make_folder(path.parent)
                write_document(path, {"time": time.time(), "idle_seconds": round(self.idle_seconds, 1)})
                self._recorded = self.idle_seconds > 0

    def _size_of_metrics(self) -> int:
        """Return the bytes of metrics.jsonl, to which the first rank or the user's program adds steps."""
        return size_here(self.run.metrics) if self.node_rank == 0 else 0

    # ---- between the nodes ------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Announce that the run is idle, withdraw that, or request its end."""
        seconds = self.idle_seconds
        if seconds >= _NOTICE_SHARE * self.timeout_seconds and self.cluster.nodes > 1:
            seconds = min(seconds, *idle_seconds_of_others(self.run, self.attempt, self.cluster.nodes - 1))
        params = {"attempt": self.attempt, "timeout": self.timeout_seconds, "measured": self._what}
        if seconds < _NOTICE_SHARE * self.timeout_seconds:
            if self._announced:
                self._event("idle-over", **params)
            self._announced = False
            return
        if not self._announced:
            left = max(0.0, self.timeout_seconds - seconds)
            self._event("idle", **params, seconds=round(seconds), ends_in_seconds=round(left))
            self._announced = True
        if seconds >= self.timeout_seconds and self._request() is None:
            why = Reason("launch.ended-idle", {"seconds": round(seconds), "what": self._what})
            try:
                request_stop(self.run, self.attempt, "idle", why)  # first: without it the end would be a preemption
            except OSError as error:
                logger.warning("the run is idle, and its end cannot be recorded: %s", error)

    @property
    def _what(self) -> str:
        return "processes" if self.cluster.gpu == "cpu" else "GPUs"

    def _event(self, name: str, **details: object) -> None:
        try:
            record_event(self.run, name, **details)
        except OSError as error:
            logger.warning("%s could not be recorded: %s", name, error)


def idle_folder(run: RunDir, attempt: int) -> Path:
    """Return the folder in which the agents of an attempt record for how long their nodes have done nothing."""
    return run.attempt(attempt) / "idle"


def idle_seconds_of_others(run: RunDir, attempt: int, others: int) -> list[float]:
    """Return for how long each of the ``others`` nodes has done nothing; 0 for one without a readable record."""
    seconds = []
    for path in sorted(idle_folder(run, attempt).glob("[!.]*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            seconds.append(float(parse_json(path.read_bytes())["idle_seconds"]))
    return seconds + [0.0] * max(0, others - len(seconds))
