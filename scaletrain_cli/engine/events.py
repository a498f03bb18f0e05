"""What happened, told once for all ranks: a line in events.jsonl and the same in rank 0's log."""

from __future__ import annotations

from typing import Any

from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir


def report_event(run: RunDir, rank: int, name: str, **details: Any) -> None:
    """Record an event on rank 0; does nothing elsewhere."""
    if rank == 0:
        record_event(run, name, **details)
        log_event(name, **details)


def log_event(name: str, **details: Any) -> None:
    """The event for who reads the log."""
    print(f"{name}: " + "  ".join(f"{key} {value}" for key, value in details.items()), flush=True)
