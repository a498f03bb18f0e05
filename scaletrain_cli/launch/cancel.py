"""`scaletrain cancel`: let the ranks of a run save and stop; with force, remove its remains on dead nodes.

And wait for the end of a run that this process has submitted, which is cancelled at a timeout.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from scaletrain_cli.errors import SchedulerError, UsageError
from scaletrain_cli.launch.backends.base import Backend
from scaletrain_cli.launch.backends.registry import backend_for
from scaletrain_cli.launch.run_status import OVER, RunStatus
from scaletrain_cli.launch.status import is_over, run_status
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_record, require_cancellable


@dataclass(frozen=True)
class Cancellation:
    """The result of cancel(). ``state``: before the call; ``cancelled``: False if the run had already ended.

    ``removed``: what force removed in the cluster.
    """

    run_id: str
    state: str
    cancelled: bool
    removed: tuple[str, ...] = ()


def cancel(
    run: RunDir, *, force: bool = False, trust_owner: bool = False, seen: RunStatus | None = None
) -> Cancellation:
    """Cancel the run, without waiting for its ranks; no further attempt starts. Raises UsageError as require_cancel().

    ``force`` also removes what is left on dead nodes. ``seen`` is the latest status, if the caller has it.
    """
    record = read_record(run)
    seen = require_cancel(run, force=force, trust_owner=trust_owner, seen=seen)
    if seen.state in OVER:
        return Cancellation(run.run_id, seen.state, cancelled=False)
    backend = backend_for(record.spec.cluster.scheduler)
    backend.cancel(run, record)
    removed = tuple(backend.force(run, record)) if force else ()
    return Cancellation(run.run_id, seen.state, cancelled=True, removed=removed)


def require_cancel(
    run: RunDir, *, force: bool = False, trust_owner: bool = False, seen: RunStatus | None = None
) -> RunStatus:
    """Return the status, which is ``seen`` where the caller has it.

    Raises UsageError where this user may not cancel the run, or the back end does not implement force.
    """
    backend = backend_for(read_record(run).spec.cluster.scheduler)
    if force and not backend.can_force:
        raise UsageError(Reason("launch.no-force", {"run": run.run_id, "scheduler": backend.traits.display_name}))
    seen = seen or run_status(run)
    if seen.state not in OVER:
        require_cancellable(run, trust_owner=trust_owner)
    return seen


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
            with contextlib.suppress(SchedulerError):  # asked again: it is down for a moment
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
