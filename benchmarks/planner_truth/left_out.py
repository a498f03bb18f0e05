"""Leave one source out: fit constants of DeepSpeed's time model on the other sources, and score the one left out.

Each fit starts from the planner's constants, and changes one at a time by the factors of ``FACTORS`` while that lowers
the mean over the other sources of the mean absolute logarithm of predicted over measured step time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from planner_truth.evaluation import judge
from planner_truth.table import Table
from scaletrain_cli.plan.frameworks.deepspeed import DeepSpeed
from scaletrain_cli.plan.speed import offload

# Constants of DeepSpeed's profile, and the bandwidth of a thread of its optimizer on the CPU.
CONSTANTS = ("zero_3_most", "zero_3_overlap", "gather_host", "pipeline_host", "reduce_overlap", "thread_bandwidth")
FACTORS = (0.5, 0.7, 1.0, 1.4, 2.0)
_ROUNDS = 2
# Overlaps are shares.
_LARGEST = {"zero_3_overlap": 1.0, "reduce_overlap": 1.0}

# Factors on CONSTANTS, in that order.
Scales = tuple[float, ...]


@dataclass(frozen=True)
class LeftOut:
    """One source: its rows, the mean absolute errors with the planner's constants and with those fitted without it."""

    source: str
    rows: int
    planner: float
    fitted: float
    scales: Mapping[str, float]  # the fitted factors that differ from 1


@dataclass(frozen=True)
class _Run:
    source: str
    ratio: float  # predicted over measured


def leave_one_out(table: Table, directory: Path) -> tuple[LeftOut, ...]:
    """Return a result for each source, a value of the column ``set``."""
    known: dict[Scales, tuple[_Run, ...]] = {}

    def runs(scales: Scales) -> tuple[_Run, ...]:
        if scales not in known:
            with scaled(scales):
                rows = judge(table, directory).rows
            known[scales] = tuple(
                _Run(row.row.inputs["set"], row.step_seconds / row.measured.step_seconds)
                for row in rows
                if row.measured.step_seconds
            )
        return known[scales]

    start = (1.0,) * len(CONSTANTS)
    found = []
    for source in sorted({run.source for run in runs(start)}):
        best = start
        for index in [*range(len(CONSTANTS))] * _ROUNDS:
            tried = [(*best[:index], factor, *best[index + 1 :]) for factor in FACTORS]
            best = min(tried, key=lambda scales: (_spread(runs(scales), source), _changes(scales)))
        changed = {name: scale for name, scale in zip(CONSTANTS, best, strict=True) if scale != 1.0}
        rows = sum(run.source == source for run in runs(start))
        found.append(LeftOut(source, rows, _error(runs(start), source), _error(runs(best), source), changed))
    return tuple(found)


def _changes(scales: Scales) -> float:
    """Return how far the constants are from the planner's, which decides between fits that are equally good."""
    return sum(abs(math.log(scale)) for scale in scales)


def _spread(runs: Sequence[_Run], without: str) -> float:
    logs: dict[str, list[float]] = {}
    for run in runs:
        if run.source != without:
            logs.setdefault(run.source, []).append(abs(math.log(run.ratio)))
    return statistics.fmean(statistics.fmean(values) for values in logs.values()) if logs else 0.0


def _error(runs: Sequence[_Run], source: str) -> float:
    return statistics.fmean(abs(run.ratio - 1) for run in runs if run.source == source)


@contextmanager
def scaled(scales: Scales) -> Iterator[None]:
    """Multiply the constants of DeepSpeed's time model by these factors."""
    profile, bandwidth = DeepSpeed.profile, offload.THREAD_BANDWIDTH
    factors = dict(zip(CONSTANTS, scales, strict=True))
    offload.THREAD_BANDWIDTH *= factors.pop("thread_bandwidth")
    changed = {
        name: min(getattr(profile, name) * factor, _LARGEST.get(name, math.inf)) for name, factor in factors.items()
    }
    DeepSpeed.profile = replace(profile, **changed)
    try:
        yield
    finally:
        DeepSpeed.profile, offload.THREAD_BANDWIDTH = profile, bandwidth


def lines(results: Sequence[LeftOut]) -> Iterator[str]:
    """Yield a table: each source, all rows, and the mean over sources."""
    yield f"{'source left out':<30}{'n':>5}{'planner':>10}{'left out':>10}   constants that the others change"
    for result in results:
        changed = ", ".join(f"{name} x {scale:g}" for name, scale in result.scales.items()) or "none"
        yield f"{result.source:<30}{result.rows:>5}{result.planner:>10.1%}{result.fitted:>10.1%}   {changed}"
    rows = sum(result.rows for result in results)
    if rows:
        planner = sum(result.rows * result.planner for result in results) / rows
        fitted = sum(result.rows * result.fitted for result in results) / rows
        yield f"{'all rows':<30}{rows:>5}{planner:>10.1%}{fitted:>10.1%}"
        mean = [statistics.fmean(values) for values in zip(*((r.planner, r.fitted) for r in results), strict=True)]
        yield f"{'mean over sources':<30}{len(results):>5}{mean[0]:>10.1%}{mean[1]:>10.1%}"
