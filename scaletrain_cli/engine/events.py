"""Events of a run: a line in events.jsonl, and the same in the log of rank 0."""

from __future__ import annotations

import logging
from typing import Any

from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir

logger = logging.getLogger(__name__)


def report_event(run: RunDir, rank: int, name: str, **details: Any) -> None:
    """Record and log an event on rank 0; do nothing on other ranks."""
    if rank == 0:
        record_event(run, name, **details)
        log_event(name, **details)


def log_event(name: str, **details: Any) -> None:
    """Write an event to the log."""
    logger.info("%s: %s", name, "  ".join(f"{key} {value}" for key, value in details.items()))
