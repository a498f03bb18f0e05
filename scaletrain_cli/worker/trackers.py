"""Start the trackers of a run in a training process: those that the run spec names, beside metrics.jsonl."""

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from statistics import median
from typing import Any

from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.evaluations import ended_evaluations
from scaletrain_cli.rundir.goodput import (
    cost_so_far,
    cost_to_come,
    newest_steps,
    planned_step_seconds,
    remaining_seconds,
    run_goodput,
    typical_seconds,
    without_first_steps,
)
from scaletrain_cli.rundir.journal import is_diagnosed, raised_findings, read_events, read_metrics, record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.secret_text import hide_values, secret_values
from scaletrain_cli.telemetry.run import Telemetry, read_telemetry
from scaletrain_cli.telemetry.series import Series
from scaletrain_cli.tracking.base import RunFigures, Spread, TrackedRun, Tracker
from scaletrain_cli.tracking.guard import GuardedTracker, RunFiles, Trackers

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


def log_evaluations(run: RunDir, trackers: Trackers, first_step: int) -> None:
    """Log the metrics of the evaluations of ``first_step`` and later steps that have ended.

    Not of one step alone: TensorBoard drops what it has of a metric from that step on.
    """
    for one in ended_evaluations(run):
        if one.step >= first_step:
            trackers.log({"step": one.step, **one.metrics, "time": one.time})


def _new_tracker(name: str, options: Any) -> Tracker[Any]:
    """Return a new tracker. Raises LookupError if the package that brings it is not installed on this node."""
    from scaletrain_cli.tracking.registry import tracker_class

    return tracker_class(name)(options)


# Of these the least is the worst: a slow rank waits least for the others, and a throttled GPU has a low clock.
_WORST_IS_LEAST = ("communication_seconds", "utilization", "sm_clock_hertz", "power_watts", "memory_available_bytes")
_UNITS = {"utilization": "utilization_ratio", "cpu_utilization": "cpu_utilization_ratio"}
_RATIOS = ("throttled_by_power", "throttled_by_heat", "throttled_by_hardware", "cpu_throttled")
_OF_ONE = ("noise_scale", "tokens_per_second", "mfu")  # which rank 0 alone measures


def run_figures(run: RunDir, record: RunRecord) -> RunFigures:
    """Return the figures of a run whose newest attempt lives, from its directory: those of `scaletrain status`."""
    plan, steps, goodput = record.plan, newest_steps(run), run_goodput(run)
    telemetry = read_telemetry(run, newest=1)
    step = steps[-1].step if steps else 0
    seconds = typical_seconds(without_first_steps(steps))
    remaining = remaining_seconds(run, record.spec.total_steps - step, seconds)
    return RunFigures(
        total_steps=record.spec.total_steps,
        ranks=plan.layout.world_size,
        planned_step_seconds=planned_step_seconds(plan, step),
        goodput=None if goodput is None else goodput.share,
        remaining_seconds=remaining,
        cost_usd=cost_so_far(run, record, is_over=False, now=time.time()),
        cost_to_come_usd=cost_to_come(record, remaining),
        findings=Counter(finding.severity for finding in raised_findings(read_events(run)).values()),
        spreads=_spreads(telemetry),
        measured_ranks=len(telemetry.ranks) or None,
    )


def _spreads(telemetry: Telemetry) -> dict[tuple[str, str], Spread]:
    """Return the spread of the newest value of each measure over ranks, GPUs and nodes."""
    groups: dict[str, Mapping[str, Series]] = {
        "rank": {str(rank): series for rank, series in telemetry.ranks.items()},
        "gpu": telemetry.gpus,
        "node": telemetry.nodes,
    }
    spreads: dict[tuple[str, str], Spread] = {}
    for subject, members in groups.items():
        newest: dict[str, dict[str, float]] = {}
        for name, series in members.items():
            for column, values in series.mean.items():
                if len(values) and not math.isnan(values[-1]) and column not in _OF_ONE:
                    newest.setdefault(column, {})[name] = float(values[-1])
        for column, values_by_name in newest.items():
            worst = min if column in _WORST_IS_LEAST else max
            values = list(values_by_name.values())
            named = f"{column}_ratio" if column in _RATIOS else _UNITS.get(column, column)
            spreads[subject, named] = Spread(
                min(values), median(values), max(values), worst(values_by_name, key=values_by_name.__getitem__)
            )
    return spreads
