"""Start the trackers of a run in a training process: those that the run spec names, beside metrics.jsonl."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any

from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.journal import read_metrics, record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.raised_findings import is_diagnosed
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.secret_text import hide_values, secret_values
from scaletrain_cli.tracking.base import TrackedRun, Tracker
from scaletrain_cli.tracking.guard import GuardedTracker, RunFiles, Trackers
from scaletrain_cli.worker.run_figures import run_figures

logger = logging.getLogger(__name__)


def start_trackers(run: RunDir, record: RunRecord, attempt: int) -> Trackers:
    """Start the trackers that the run spec names. Does not wait for them, and raises nothing that they raise."""
    tracked = TrackedRun(
        run_id=run.run_id,
        tracking_id=record.wandb_run_id,
        folder=run.path,
        config=record.spec.model_dump(mode="json", by_alias=True),
        attempt=attempt,
        figures=partial(run_figures, run, record),
    )
    files = RunFiles(
        metrics=partial(read_metrics, run),
        events=run.events,
        artifacts=[run.record],
        is_diagnosed=partial(is_diagnosed, run, attempt),
    )

    def report(event: str, tracker: str, reason: Reason) -> None:
        if "message" in reason.params:  # errors of libraries quote addresses and keys
            secrets = secret_values(os.environ, record.spec.secret_env)
            reason = Reason(reason.code, {**reason.params, "message": hide_values(reason.params["message"], secrets)})
        logger.warning("%s: %s", event, reason)
        record_event(run, event, tracker=tracker, code=reason.code, params=dict(reason.params), message=str(reason))

    return Trackers(
        [
            GuardedTracker(name, partial(_new_tracker, name, options), tracked, files, report)
            for name, options in record.spec.tracking.trackers.items()
            if name != "jsonl"  # metrics.jsonl is always written, and not by a tracker
        ]
    )


def _new_tracker(name: str, options: Any) -> Tracker[Any]:
    """Return a new tracker. Raises LookupError if the package that brings it is not installed on this node."""
    from scaletrain_cli.tracking.registry import tracker_class

    return tracker_class(name)(options)
