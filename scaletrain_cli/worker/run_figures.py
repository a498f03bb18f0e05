"""Figures of a run for trackers: goodput, time and money to come, findings, and spreads over ranks, GPUs and nodes."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping
from statistics import median

from scaletrain_cli.rundir.goodput import run_goodput
from scaletrain_cli.rundir.journal import read_events
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.raised_findings import raised_findings
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.rundir.times_and_costs import (
    cost_so_far,
    cost_to_come,
    newest_steps,
    planned_step_seconds,
    remaining_seconds,
    typical_seconds,
    without_first_steps,
)
from scaletrain_cli.telemetry.run import Telemetry, read_telemetry
from scaletrain_cli.telemetry.series import Series
from scaletrain_cli.tracking.base import RunFigures, Spread

# Of these the least is the worst: a slow rank waits least for the others, and a throttled GPU has a low clock.
_WORST_IS_LEAST = (
    "communication_seconds",
    "utilization",
    "sm_clock_hertz",
    "power_watts",
    "memory_available_bytes",
)
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
        cost_to_come_usd=cost_to_come(plan, remaining),
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
    found: dict[tuple[str, str], Spread] = {}
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
            found[subject, named] = Spread(
                min(values), median(values), max(values), worst(values_by_name, key=values_by_name.__getitem__)
            )
    return found
