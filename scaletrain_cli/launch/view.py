"""A run as `status`, `watch` and the report show it: its state, times, costs, curves, findings and hardware."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from scaletrain_cli.diagnosis.case import Case, read_case
from scaletrain_cli.diagnosis.checks import Diagnosis, diagnose_run
from scaletrain_cli.diagnosis.hardware import Hardware, read_hardware
from scaletrain_cli.diagnosis.speed import RunFigures, run_figures
from scaletrain_cli.errors import UsageError
from scaletrain_cli.event_texts import event_sentence
from scaletrain_cli.launch.attempts import AttemptRecord, read_attempts
from scaletrain_cli.launch.job import Job
from scaletrain_cli.launch.logs import LogFile, end_of, is_for_people, log_files
from scaletrain_cli.launch.node.record import NodeRecord, read_node_records
from scaletrain_cli.launch.run_status import RunStatus
from scaletrain_cli.launch.status import is_over, run_status
from scaletrain_cli.rundir.journal import read_events
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, is_elsewhere, read_record

# What the engine's guard and the launcher record about a run that does not train as it should.
GUARD_EVENTS = (
    "rolled-back",
    "spike",
    "loss-scale-collapsed",
    "dead-gradients",
    "flat-loss",
    "stopped-early",
    "hang",
    "corruption",
    "stragglers",
    "data-wait",
    "node-agent-stopped",
)
_MOST_GUARD_EVENTS = 20


@dataclass(frozen=True)
class RunView:
    """A run at the time ``now`` (Unix seconds). ``is_over``: only a resume continues it."""

    run: RunDir
    record: RunRecord
    status: RunStatus
    is_over: bool
    attempts: tuple[AttemptRecord, ...]
    events: tuple[Mapping[str, Any], ...]
    case: Case
    figures: RunFigures
    diagnosis: Diagnosis
    hardware: Hardware | None
    now: float

    @property
    def guard_events(self) -> list[Mapping[str, Any]]:
        """The latest events of the guard and of slow or hung ranks, oldest first."""
        return [event for event in self.events if event.get("event") in GUARD_EVENTS][-_MOST_GUARD_EVENTS:]

    @property
    def next_checkpoint_step(self) -> int | None:
        """The step of the next checkpoint by the interval of the spec, or as planned; None if none will follow."""
        if self.is_over or not self.status.files_seen or self.status.step >= self.status.total_steps:
            return None
        every = self.record.spec.checkpoint.every
        interval = every if isinstance(every, int) else self.record.plan.durability.interval_steps
        saved = self.status.last_checkpoint_step or 0
        return min(self.status.total_steps, saved + interval) if interval > 0 else None

    @property
    def is_elsewhere(self) -> bool:
        """True if the run directory is on a volume that this machine does not see."""
        return is_elsewhere(self.run, self.record)

    def to_json(self) -> dict[str, Any]:
        """Return the stable JSON object of `status` (docs/json.md), without the attempts."""
        return {
            **self.status.to_json(),
            **self.figures.to_json(),
            "hardware": None if self.hardware is None else self.hardware.to_json(),
            "guard_events": [{**event, "text": event_sentence(event)} for event in self.guard_events],
            "findings": [finding.to_json() for finding in self.diagnosis.findings],
        }


def read_view(run: RunDir, status: RunStatus | None = None) -> RunView:
    """Return the view of a run; ``status``: as it was asked for just now. Raises UsageError for a damaged record."""
    now = time.time()
    record = read_record(run)
    status = run_status(run) if status is None else status
    case = read_case(run, record)
    return make_view(run, record, status, case, diagnose_run(run, record, case), read_hardware(run), now)


def make_view(
    run: RunDir,
    record: RunRecord,
    status: RunStatus,
    case: Case,
    diagnosis: Diagnosis,
    hardware: Hardware | None,
    now: float,
) -> RunView:
    """Return the view of parts that were read before; times, costs, attempts and events are read now."""
    over = is_over(run, status)
    figures = run_figures(run, record, case, step=status.step, is_over=over, now=now)
    attempts, events = tuple(read_attempts(run)), tuple(read_events(run))
    return RunView(run, record, status, over, attempts, events, case, figures, diagnosis, hardware, now)


ASK_SECONDS = 10.0  # between two requests to a scheduler
_ASK_HERE_SECONDS = 1.0  # of a supervisor on this machine: a file and a process
_LOG_LINES = 500

_T = TypeVar("_T")


class _Paced(Generic[_T]):
    """Reads a value again once its last reading has cost no more than ``share`` of a core since then."""

    def __init__(
        self, read: Callable[[], _T], least_seconds: float, share: float, cpu_clock: Callable[[], float]
    ) -> None:
        self._read, self._least_seconds, self._share, self._cpu_clock = read, least_seconds, share, cpu_clock
        self._value: _T | None = None
        self._due = 0.0

    def value(self, now: float) -> _T:
        """Return the value, read again if it is due; ``now``: seconds of a monotonic clock."""
        if self._value is None or now >= self._due:
            began = self._cpu_clock()
            self._value = self._read()
            self._due = now + max(self._least_seconds, (self._cpu_clock() - began) / self._share)
        return self._value


class ViewReader:
    """Reads a living run: curves, state, hardware and nodes, each at its own pace, with 3 % of a core together.

    The scheduler is asked at most every 10 seconds; in between its last answer stands.
    """

    def __init__(
        self,
        run: RunDir,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._run, self._clock = run, clock
        self._job: Job | None = None
        self._asked = float("-inf")
        self._curves = _Paced(self._read_curves, 1.0, 0.01, cpu_clock)
        self._nodes = _Paced(
            lambda: tuple(read_node_records(run, max(run.attempts(), default=0))), 2.0, 0.005, cpu_clock
        )
        self._hardware = _Paced(lambda: read_hardware(run), 2.0, 0.005, cpu_clock)
        self._view = _Paced(self._read_view, 0.5, 0.01, cpu_clock)

    def read(self) -> RunView:
        """Return the view. Raises UsageError for a damaged record."""
        now = self._clock()
        self._curves.value(now)
        self._hardware.value(now)
        return self._view.value(now)

    def nodes(self) -> tuple[NodeRecord, ...]:
        """Return the records of the nodes of the newest attempt."""
        return self._nodes.value(self._clock())

    def _read_curves(self) -> tuple[RunRecord, Case, Diagnosis]:
        record = read_record(self._run)
        case = read_case(self._run, record)
        return record, case, diagnose_run(self._run, record, case)

    def _read_view(self) -> RunView:
        now = self._clock()
        record, case, diagnosis = self._curves.value(now)
        asks_every = _ASK_HERE_SECONDS if record.spec.cluster.traits.runs_here else ASK_SECONDS
        if now - self._asked >= asks_every:
            self._job, self._asked = None, now
        status = run_status(self._run, job=self._job)
        self._job = status.job
        return make_view(self._run, record, status, case, diagnosis, self._hardware.value(now), time.time())


@dataclass(frozen=True)
class Log:
    """The end of the log of one rank; ``number`` of ``count`` logs of the attempt, from 0."""

    file: LogFile
    number: int
    count: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Shown:
    """The data of all pages. ``problem``: why the last reading failed; the other values are then those before it."""

    view: RunView
    nodes: tuple[NodeRecord, ...] = ()
    log: Log | None = None
    problem: str = ""

    def differs_from(self, other: "Shown") -> bool:
        """Return True if another one was read since; views and nodes are not compared by value."""
        is_same = self.view is other.view and self.nodes is other.nodes
        return not is_same or self.problem != other.problem or self.log != other.log


def read_log(run: RunDir, number: int) -> Log | None:
    """Return the end of one log of the newest attempt; ``number`` counts from 0 and begins again after the last."""
    files: Sequence[LogFile] = log_files(run)
    if not files:
        return None
    file = files[number % len(files)]
    lines = [line for line in end_of(file.path).splitlines() if is_for_people(line)]
    return Log(file, number % len(files), len(files), tuple(lines[-_LOG_LINES:]))


class Reading:
    """A context manager with a thread that reads a run. ``shown`` is replaced as a whole, and ``changed`` set with it.

    ``shown`` is None before the first reading; ``failure`` is why that failed.
    """

    def __init__(self, run: RunDir, seconds: float) -> None:
        """Read at most every ``seconds``."""
        self.run = run
        self._seconds = seconds
        self._reader = ViewReader(run)
        self._wake, self._ended = threading.Event(), threading.Event()
        self._log_number: int | None = None
        self.changed = threading.Event()
        self.shown: Shown | None = None
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._read_on, name="watch", daemon=True)

    def __enter__(self) -> "Reading":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """End the thread; a request to a scheduler in progress is not waited for."""
        self._ended.set()
        self._wake.set()

    def follow_log(self, number: int | None) -> None:
        """Read the log with this number from now on; None for no log."""
        if number != self._log_number:
            self._log_number = number
            self._wake.set()

    def _read_on(self) -> None:
        while not self._ended.is_set():
            before = self.shown
            try:
                shown = self._read()
            except Exception as error:
                self.failure = error
                if before is None or not isinstance(error, UsageError | OSError):
                    self.shown = None
                    self.changed.set()
                    return
                shown = replace(before, problem=str(error))  # the run may be removed while it is watched
            if before is None or shown.differs_from(before):
                self.shown = shown
                self.changed.set()
            self._wake.wait(self._seconds)
            self._wake.clear()

    def _read(self) -> Shown:
        view = self._reader.read()
        log = None if self._log_number is None else read_log(self.run, self._log_number)
        return Shown(view, self._reader.nodes(), log)
