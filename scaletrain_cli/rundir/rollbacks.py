"""What a run has rolled back and which batches it leaves out since: in events.jsonl, which is the truth of it.

Not in checkpoints: the one that a run goes back to is older than the decision, and a kill may follow at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scaletrain_cli.rundir.journal import read_events, record_event
from scaletrain_cli.rundir.paths import RunDir

EVENT = "rolled-back"


@dataclass(frozen=True)
class Rollback:
    """Steps after ``to_step`` are forgotten, up to ``from_step``; batches ``skip``, both ends in, are left out."""

    from_step: int
    to_step: int
    skip: tuple[int, int]


def record_rollback(run: RunDir, rollback: Rollback, **evidence: Any) -> None:
    """Append the event. Only then may the run train on."""
    lost = rollback.from_step - rollback.to_step
    record_event(run, EVENT, **vars(rollback), lost_steps=lost, **evidence)


def read_rollbacks(run: RunDir) -> list[Rollback]:
    """Those since the run last started from scratch, oldest first."""
    found: list[Rollback] = []
    for event in read_events(run):
        if event["event"] == "from-scratch":
            found = []
        elif event["event"] == EVENT:
            first, last = event["skip"]
            found.append(Rollback(event["from_step"], event["to_step"], (first, last)))
    return found
