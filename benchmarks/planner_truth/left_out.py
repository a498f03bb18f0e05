"""Leave one source out: fit constants of DeepSpeed's time model on the other sources, and score the one left out.

Each fit starts from the planner's constants, and changes one at a time by the factors of ``FACTORS`` while that lowers
the mean over the other sources of the mean absolute logarithm of predicted over measured step time. Rows below 5 % of
the device's peak are scored, but do not take part in a fit.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planner_truth.evaluation import Judged, judge, without_update
from planner_truth.table import Table
from scaletrain_cli.plan.catalogue.hardware import Accelerator, find_accelerator
from scaletrain_cli.plan.frameworks.deepspeed import DeepSpeed
from scaletrain_cli.plan.speed import offload
from scaletrain_cli.plan.speed.step_time import plan_time

# Constants of DeepSpeed's profile, and the bandwidth of a thread of its optimizer on the CPU.
CONSTANTS = ("zero_3_most", "zero_3_overlap", "gather_host", "pipeline_host", "reduce_overlap", "thread_bandwidth")
FACTORS = (0.7, 1.0, 1.4)
_ROUNDS = 2
_FITTED_MFU = 0.05
# Overlaps are shares.
_LARGEST = {"zero_3_overlap": 1.0, "reduce_overlap": 1.0}

# Factors on CONSTANTS, in that order.
Scales = tuple[float, ...]


# What each constant would be if nothing were known of it: no limit, full overlap, no host seconds.
NEUTRAL = {
    "zero_3_most": math.inf,
    "zero_3_overlap": 1.0,
    "gather_host": 0.0,
    "pipeline_host": 0.0,
    "reduce_overlap": 1.0,
    "thread_bandwidth": math.inf,
}


@dataclass(frozen=True)
class LeftOut:
    """One source: the mean absolute errors with the planner's constants, and with those fitted without the source.

    ``fitted_rows``: of rows that may take part in fits.
    """

    source: str
    rows: int
    planner: float
    left_out: float
    fitted_rows: int
    fitted_planner: float
    fitted_left_out: float
    scales: Mapping[str, float]  # factors on the constants, where they differ from 1


@dataclass(frozen=True)
class _Run:
    source: str
    ratio: float  # predicted over measured
    fits: bool  # takes part in fits


def leave_one_out(table: Table, directory: Path) -> tuple[LeftOut, ...]:
    """Return a result for each source, a value of the column ``set``."""
    judged = [row for row in judge(table, directory).rows if row.measured.step_seconds]
    devices = [find_accelerator(row.case.spec.cluster) for row in judged]
    known: dict[Scales, tuple[_Run, ...]] = {}

    def runs(scales: Scales) -> tuple[_Run, ...]:
        if scales not in known:
            with scaled(scales):
                known[scales] = tuple(_timed(row, device) for row, device in zip(judged, devices, strict=True))
        return known[scales]

    start = (1.0,) * len(CONSTANTS)
    found = []
    for source in sorted({run.source for run in runs(start)}):
        best = start
        for index in [*range(len(CONSTANTS))] * _ROUNDS:
            tried = [(*best[:index], factor, *best[index + 1 :]) for factor in FACTORS]
            best = min(tried, key=lambda scales: (_spread(runs(scales), source), _changes(scales)))
        changed = {name: scale for name, scale in zip(CONSTANTS, best, strict=True) if scale != 1.0}
        before, after = ([run for run in runs(scales) if run.source == source] for scales in (start, best))
        usual, refitted = ([run for run in each if run.fits] for each in (before, after))
        found.append(
            LeftOut(
                source=source,
                rows=len(before),
                planner=_error(before),
                left_out=_error(after),
                fitted_rows=len(usual),
                fitted_planner=_error(usual),
                fitted_left_out=_error(refitted),
                scales=changed,
            )
        )
    return tuple(found)


def without_each_constant(table: Table, directory: Path) -> Iterator[str]:
    """Yield a table: the mean over sources of the absolute logarithm of planned / measured without each constant.

    Beside it the sources whose error changes by more than 0.01, as with the constant and without.
    """
    judged = [row for row in judge(table, directory).rows if row.measured.step_seconds]
    devices = [find_accelerator(row.case.spec.cluster) for row in judged]

    def errors() -> dict[str, float]:
        found: dict[str, list[float]] = {}
        for row, device in zip(judged, devices, strict=True):
            run = _timed(row, device)
            found.setdefault(run.source, []).append(abs(math.log(run.ratio)))
        return {source: statistics.fmean(values) for source, values in found.items()}

    known = errors()
    yield f"| all constants | {statistics.fmean(known.values()):.3f} | |"
    for name in CONSTANTS:
        profile, bandwidth = DeepSpeed.profile, offload.THREAD_BANDWIDTH
        try:
            if name == "thread_bandwidth":
                offload.THREAD_BANDWIDTH = NEUTRAL[name]
            else:
                neutral: dict[str, Any] = {name: NEUTRAL[name]}
                DeepSpeed.profile = replace(profile, **neutral)
            found = errors()
        finally:
            DeepSpeed.profile, offload.THREAD_BANDWIDTH = profile, bandwidth
        changed = (f"{source} {known[source]:.2f} → {found[source]:.2f}" for source in sorted(known))
        moved = [text for source, text in zip(sorted(known), changed, strict=True) if _moves(known, found, source)]
        yield f"| without `{name}` | {statistics.fmean(found.values()):.3f} | {', '.join(moved)} |"


def _moves(known: Mapping[str, float], found: Mapping[str, float], source: str) -> bool:
    return abs(found[source] - known[source]) > 0.01


def _timed(row: Judged, device: Accelerator) -> _Run:
    planned = plan_time(row.case.spec, row.case.layout, device)[0]
    seconds = without_update(row.case, device, planned).step
    ratio = seconds / (row.measured.step_seconds or math.nan)
    return _Run(row.row.inputs["set"], ratio, (row.measured.mfu or 0.0) >= _FITTED_MFU)


def _changes(scales: Scales) -> float:
    """Return how far the constants are from the planner's, which decides between fits that are equally good."""
    return sum(abs(math.log(scale)) for scale in scales)


def _spread(runs: Sequence[_Run], without: str) -> float:
    logs: dict[str, list[float]] = {}
    for run in runs:
        if run.source != without and run.fits:
            logs.setdefault(run.source, []).append(abs(math.log(run.ratio)))
    return statistics.fmean(statistics.fmean(values) for values in logs.values()) if logs else 0.0


def _error(runs: Sequence[_Run]) -> float:
    return statistics.fmean(abs(run.ratio - 1) for run in runs) if runs else 0.0


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
    """Yield a table: each source, all rows, and the mean over sources; for all rows, then for those of fits."""
    head = f"{'source left out':<24}{'n':>5}{'planner':>9}{'left out':>10}"
    yield f"{head}   {'MFU ≥ 5 %: n':>13}{'planner':>9}{'left out':>10}   factors that the others imply"
    for each in results:
        changed = ", ".join(f"{name} {scale:g}" for name, scale in each.scales.items()) or "none"
        yield _line(
            each.source,
            (each.rows, each.planner, each.left_out),
            (each.fitted_rows, each.fitted_planner, each.fitted_left_out),
            changed,
        )
    every = [(each.rows, each.planner, each.left_out) for each in results]
    usual = [(each.fitted_rows, each.fitted_planner, each.fitted_left_out) for each in results if each.fitted_rows]
    if usual:
        yield _line("all rows", _by_row(every), _by_row(usual))
        yield _line("mean over sources", _by_source(every), _by_source(usual))


_Scores = tuple[int, float, float]  # rows, error with the planner's constants, error left out


def _line(name: str, every: _Scores, usual: _Scores, changed: str = "") -> str:
    left = f"{name:<24}{every[0]:>5}{every[1]:>9.1%}{every[2]:>10.1%}"
    return f"{left}   {usual[0]:>13}{usual[1]:>9.1%}{usual[2]:>10.1%}   {changed}".rstrip()


def _by_row(scores: Sequence[_Scores]) -> _Scores:
    rows = sum(score[0] for score in scores)
    planner, left = (sum(score[0] * score[place] for score in scores) / rows for place in (1, 2))
    return rows, planner, left


def _by_source(scores: Sequence[_Scores]) -> _Scores:
    planner, left = (statistics.fmean(score[place] for score in scores) for place in (1, 2))
    return len(scores), planner, left
