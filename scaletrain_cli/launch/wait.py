"""Wait for the end of a run that this process has submitted, with a timeout."""

from __future__ import annotations

import time
from collections.abc import Callable

from scaletrain_cli.launch.backends.base import Backend
from scaletrain_cli.launch.status import RunStatus, is_over, run_status
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_record

_POLL_SECONDS = 0.5
_AFTER_CANCEL_SECONDS = 60.0


def wait_for_end(
    run: RunDir, scheduler: Backend, timeout_seconds: float, on_status: Callable[[RunStatus], None]
) -> RunStatus:
    """Return the status at the end; cancel at the timeout or on Ctrl-C. ``on_status`` gets each status."""
    record = read_record(run)
    deadline, cancelled = time.monotonic() + timeout_seconds, False
    try:
        while True:
            status = run_status(run, scheduler)
            on_status(status)
            # Its processes and its job end a moment later; they must not overlap with those of the next run.
            if is_over(run, status) and not scheduler.job(run, record).is_active:
                return status
            if time.monotonic() > deadline:
                if cancelled:
                    return status
                scheduler.cancel(run, record)
                grace = record.spec.cluster.grace_seconds
                deadline, cancelled = time.monotonic() + grace + _AFTER_CANCEL_SECONDS, True
            time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        scheduler.cancel(run, record)
        raise
