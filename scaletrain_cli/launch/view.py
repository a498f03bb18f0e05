"""A run as `status`, `watch` and the report show it: its state, times, costs, curves, findings and hardware."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scaletrain_cli.diagnosis.case import Case, read_case
from scaletrain_cli.diagnosis.checks import Diagnosis, diagnose_run
from scaletrain_cli.diagnosis.hardware import Hardware, read_hardware
from scaletrain_cli.diagnosis.timing import RunFigures, run_figures
from scaletrain_cli.event_texts import event_sentence
from scaletrain_cli.launch.attempts import AttemptRecord, read_attempts
from scaletrain_cli.launch.status import RunStatus, is_over, run_status
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
