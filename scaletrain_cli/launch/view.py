"""A run as `status`, `watch` and the report show it: its state, times, costs, curves, findings and hardware.

``read_view`` reads all of it once. ``ViewReader`` reads it again and again for a living view, at a bounded cost: each
part is read again only after the time that its last reading has earned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from scaletrain_cli.diagnosis.case import Case, read_case
from scaletrain_cli.diagnosis.checks import Diagnosis, diagnose
from scaletrain_cli.diagnosis.hardware import Hardware, read_hardware
from scaletrain_cli.diagnosis.timing import RunFigures, run_figures
from scaletrain_cli.event_texts import event_sentence
from scaletrain_cli.launch.attempts import AttemptRecord, read_attempts
from scaletrain_cli.launch.backends.base import Job
from scaletrain_cli.launch.status import RunStatus, is_over, run_status
from scaletrain_cli.rundir.journal import read_events
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, read_record

# What the engine's guard and the launcher record about a run that does not train as it should.
GUARD_EVENTS = (
    "rolled-back",
    "spike",
    "loss-scale-collapsed",
    "dead-gradients",
    "flat-loss",
    "stopped-early",
    "hang",
    "stragglers",
    "data-wait",
    "node-agent-stopped",
)
_MOST_GUARD_EVENTS = 20
ASK_SECONDS = 10.0  # between two requests to a scheduler
_ASK_HERE_SECONDS = 1.0  # of a supervisor on this machine: a file and a process


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
    return _view(run, record, status, case, diagnose(run.run_id, case), read_hardware(run), now)


def _view(
    run: RunDir,
    record: RunRecord,
    status: RunStatus,
    case: Case,
    diagnosis: Diagnosis,
    hardware: Hardware | None,
    now: float,
) -> RunView:
    over = is_over(run, status)
    figures = run_figures(run, record, case, step=status.step, is_over=over, now=now)
    attempts, events = tuple(read_attempts(run)), tuple(read_events(run))
    return RunView(run, record, status, over, attempts, events, case, figures, diagnosis, hardware, now)


def next_checkpoint_step(view: RunView) -> int | None:
    """Return the step of the next checkpoint by the interval of the spec, or as planned; None if none will follow."""
    if view.is_over or view.status.step >= view.status.total_steps:
        return None
    every = view.record.spec.checkpoint.every
    interval = every if isinstance(every, int) else view.record.plan.durability.interval_steps
    saved = view.status.last_checkpoint_step or 0
    return min(view.status.total_steps, saved + interval) if interval > 0 else None


_T = TypeVar("_T")


class _Paced(Generic[_T]):
    """Reads a value again once its last reading has cost no more than ``share`` of a core since then."""

    def __init__(self, read: Callable[[], _T], least_seconds: float, share: float) -> None:
        self._read, self._least_seconds, self._share = read, least_seconds, share
        self._value: _T | None = None
        self._due = 0.0

    def value(self, now: float) -> _T:
        """Return the value, read again if it is due; ``now``: seconds of a monotonic clock."""
        if self._value is None or now >= self._due:
            began = time.thread_time()
            self._value = self._read()
            self._due = now + max(self._least_seconds, (time.thread_time() - began) / self._share)
        return self._value


class ViewReader:
    """Reads a living run. The curves, the state and the hardware are read at their own pace, 4 % of a core together.

    The scheduler is asked at most every 10 seconds; in between its last answer stands.
    """

    def __init__(self, run: RunDir, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._job: Job | None = None
        self._asked = float("-inf")
        self._curves = _Paced(self._read_curves, 1.0, 0.015)
        self._hardware = _Paced(lambda: read_hardware(run), 2.0, 0.01)
        self._view = _Paced(self._read_view, 0.5, 0.015)

    def read(self) -> RunView:
        """Return the view. Raises UsageError for a damaged record."""
        now = self._clock()
        self._curves.value(now)
        self._hardware.value(now)
        return self._view.value(now)

    def _read_curves(self) -> tuple[RunRecord, Case, Diagnosis]:
        record = read_record(self._run)
        case = read_case(self._run, record)
        return record, case, diagnose(self._run.run_id, case)

    def _read_view(self) -> RunView:
        now = self._clock()
        record, case, diagnosis = self._curves.value(now)
        asks_every = _ASK_HERE_SECONDS if record.spec.cluster.traits.runs_here else ASK_SECONDS
        if now - self._asked >= asks_every:
            self._job, self._asked = None, now
        status = run_status(self._run, job=self._job)
        self._job = status.job
        return _view(self._run, record, status, case, diagnosis, self._hardware.value(now), time.time())
