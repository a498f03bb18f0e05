"""Figures of a run for trackers: goodput, time and money to come, findings, and spreads over ranks, GPUs and nodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from statistics import median

from scaletrain_cli.rundir.goodput import CATEGORIES, read_ledger, run_goodput
from scaletrain_cli.rundir.journal import read_events, read_lines_backwards
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.raised_findings import raised_findings
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.telemetry.run import read_telemetry
from scaletrain_cli.telemetry.series import Series
from scaletrain_cli.tracking.base import RunFigures, Spread

_RECENT_LINES = 200
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
    """Return the figures, from the run directory. Costs and the remaining time are those of the present plan."""
    plan, spec = record.plan, record.spec
    goodput = run_goodput(run)
    price, gpus = plan.cost.price_per_gpu_hour, plan.layout.world_size
    usd_per_second = None if price is None else price * gpus / 3600
    remaining = _remaining_seconds(run, spec.total_steps)
    replanned = record.revision > 0  # earlier attempts may have had other GPUs at another price
    spent = None if goodput is None else goodput.wall - goodput.idle
    return RunFigures(
        total_steps=spec.total_steps,
        ranks=gpus,
        planned_step_seconds=plan.time.step,
        goodput=None if goodput is None else goodput.share,
        remaining_seconds=remaining,
        cost_usd=None if usd_per_second is None or spent is None or replanned else usd_per_second * spent,
        cost_to_come_usd=None if usd_per_second is None or remaining is None else usd_per_second * remaining,
        findings=Counter(finding.severity for finding in raised_findings(read_events(run)).values()),
        spreads=_spreads(run),
    )


def _remaining_seconds(run: RunDir, total_steps: int) -> float | None:
    """Return the seconds until the last step at the median of the newest steps, with saves and evaluations."""
    lines = [line for line in islice(read_lines_backwards(run.metrics), _RECENT_LINES) if "step_seconds" in line]
    seconds = [float(line["step_seconds"]) for line in lines if isinstance(line["step_seconds"], int | float)]
    if len(seconds) < 5:
        return None
    pauses = 0.0
    for number in reversed(run.attempts()):
        ledger = read_ledger(run, number)
        if ledger is not None and ledger.steps:
            spent = (ledger.seconds.get(name, 0.0) for name in CATEGORIES if name in ("save", "evaluation"))
            pauses = sum(spent) / ledger.steps
            break
    return max(0, total_steps - int(lines[0]["step"])) * (median(seconds) + pauses)


def _spreads(run: RunDir) -> dict[tuple[str, str], Spread]:
    """Return the spread of the newest value of each measure over ranks, GPUs and nodes."""
    telemetry = read_telemetry(run, newest=1)
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
