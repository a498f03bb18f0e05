"""The errors of predictions for measured runs: the data of a plan's ranges, and the share of runs within these.

``error_file`` returns the content of scaletrain_cli/plan/catalogue/errors.json. A cell is a framework, a regime and an
architecture of GPUs. Each source of runs has the same weight in a cell, except that those with fewer than five runs
have less. ``left_out`` predicts the runs of each source from the cells of all others, which measures the range of a new
run. Percentiles are widened about the median until the share of the runs within them is the nominal one, 80 %.
"""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from planner_truth.evaluation import Judged, Outcome
from planner_truth.table import Table
from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.plan.ranges import Quantiles, architecture_of, find_cell, regime_of, share_below
from scaletrain_cli.plan.result import Time

Quantity = Literal["time", "memory"]
COMMAND = "make bench-planner TRUTH=DIR ARGS=--write"
# Fewest runs in a cell. A cell of one architecture needs two sources, or a third of its error would be their author's.
_FEWEST = 5
_FEWEST_SOURCES = 2
_SHARES = (0.1, 0.5, 0.9)
_INSIDE = 0.8
# Spreads to try, as the logarithm of a ratio at its 90th percentile; negative: see ``_widened``.
_SPREADS = [step / 100 for step in range(-20, 81)]


@dataclass(frozen=True)
class Observation:
    """One measured run; ``ratio``: measured / planned, of the step time or of memory. ``time``: as planned."""

    framework: str
    regime: str
    hardware: str
    source: str
    ratio: float
    measured: float
    time: Time | None  # None: of memory


@dataclass(frozen=True)
class Coverage:
    """The share of runs inside their range if their source is left out; ``without``: runs that then have no range."""

    rows: int
    inside: float
    by_source: Mapping[str, tuple[int, float]]
    without: int

    @property
    def by_sources(self) -> float:
        """Return the mean of the sources' shares."""
        return fmean(share for _, share in self.by_source.values()) if self.by_source else 0.0


def observations(outcomes: Mapping[Table, Outcome], quantity: Quantity) -> list[Observation]:
    """Return the measured runs of all tables, those of faithful rows only."""
    found: list[Observation] = []
    for table, outcome in outcomes.items():
        for row in outcome.rows:
            source = table.source(row.row.inputs)
            if source and (table.usual_kernels or quantity == "memory"):
                found += _observed(row, source, quantity)
    return found


def _observed(row: Judged, source: str, quantity: Quantity) -> Iterable[Observation]:
    spec, layout = row.case.spec, row.case.layout
    kind = (spec.planner.framework, regime_of(spec, layout), architecture_of(find_accelerator(spec.cluster)), source)
    if quantity == "memory":
        if row.measured.memory_bytes:
            yield Observation(*kind, row.measured.memory_bytes / row.memory_bytes, row.measured.memory_bytes, None)
        return
    seconds = row.measured.step_seconds
    if seconds:
        yield Observation(*kind, _time_ratio(seconds, row.time), seconds, row.time)


def _time_ratio(seconds: float, time: Time) -> float:
    """Return measured / planned; of a run that may stall, with the nearer of both plans."""
    ratios = [seconds / time.unstalled]
    if time.stall_probability:
        ratios.append(seconds / (time.unstalled + time.stall_seconds))
    return min(ratios, key=lambda ratio: abs(math.log(ratio)))


def error_file(outcomes: Mapping[Table, Outcome]) -> dict[str, Any]:
    """Return errors.json: for each quantity and framework its cells, and the coverage with each source left out."""
    found: dict[str, Any] = {
        "about": "Measured / planned over published runs: percentiles by framework, regime (plan/ranges.py regime_of) "
        "and architecture of the GPUs (empty: all). spread: between sources, as the logarithm of a ratio at its 90th "
        "percentile; added to the variance of each cell, so that `inside`, the share of runs in their range if their "
        "source is left out, is about 80 %.",
        "command": COMMAND,
        "date": datetime.date.today().isoformat(),
    }
    for quantity in ("time", "memory"):
        seen = observations(outcomes, quantity)
        frameworks = sorted({each.framework for each in seen})
        found[quantity] = {
            name: _of_framework([each for each in seen if each.framework == name]) for name in frameworks
        }
    return found


def _of_framework(seen: Sequence[Observation]) -> dict[str, Any]:
    spread, covered = best_spread(seen)
    return {
        "hardware": sorted({each.hardware for each in seen}),
        "runs": len(seen),
        "spread": spread,
        "inside": round(covered.inside, 3),
        "runs_left_out": covered.rows,
        "cells": _cells(seen, spread),
    }


def best_spread(seen: Sequence[Observation]) -> tuple[float, Coverage]:
    """Return the spread between sources with which the shares of runs and of sources inside are nearest to 80 %.

    Compared is the mean of the share of runs and of the sources' mean share; the share of runs stays between 75 and
    85 % if it can. 0 if no run has a range once its source is left out.
    """
    pairs = left_out(seen)
    tried = [(spread, coverage(pairs, spread)) for spread in _SPREADS]
    if not tried[0][1].rows:
        return 0.0, tried[0][1]

    def off(pair: tuple[float, Coverage]) -> tuple[float, float]:
        covered = pair[1]
        beyond = max(0.0, 0.75 - covered.inside, covered.inside - 0.85)
        return beyond, abs((covered.inside + covered.by_sources) / 2 - _INSIDE)

    return min(tried, key=off)


def left_out(seen: Sequence[Observation]) -> list[tuple[Observation, Quantiles | None]]:
    """Return the runs of one framework, each with the percentiles of all other sources, or None without."""
    found: list[tuple[Observation, Quantiles | None]] = []
    for source in sorted({each.source for each in seen}):
        others = [each for each in seen if each.source != source]
        known = {"cells": _cells(others, 0.0), "hardware": sorted({each.hardware for each in others})}
        for each in (each for each in seen if each.source == source):
            cell = find_cell({each.framework: known}, each.framework, each.regime, each.hardware)
            found.append((each, None if cell is None else cell.quantiles))
    return found


def coverage(pairs: Sequence[tuple[Observation, Quantiles | None]], spread: float) -> Coverage:
    """Return the share of runs inside their range, with ``spread`` between sources."""
    inside: dict[str, list[bool]] = {}
    for each, error in pairs:
        if error is not None:
            inside.setdefault(each.source, []).append(side(_widened(error, spread), each) == 0)
    counted = {source: (len(hits), fmean(hits)) for source, hits in inside.items()}
    rows = sum(count for count, _ in counted.values())
    share = sum(count * share for count, share in counted.values()) / rows if rows else 0.0
    return Coverage(rows, share, counted, len(pairs) - rows)


def side(error: Quantiles, each: Observation) -> int:
    """Return 0 if the range of a run contains what was measured, -1 if that is below, and 1 if it is above.

    The planned value is always inside.
    """
    if each.time is None:
        return (each.ratio > max(1.0, error.p90)) - (each.ratio < min(1.0, error.p10))
    share, longer = share_below(each.time, error, each.measured), each.measured > each.time.step
    return int(share > 0.9) if longer else -int(share < 0.1)


def _widened(error: Quantiles, spread: float) -> Quantiles:
    """Return the percentiles for a new source: its own shift adds its variance to that of the runs of known sources.

    A negative spread subtracts it: the known sources differ more from each other than new runs do from them.
    """

    def widened(distance: float) -> float:
        return math.sqrt(max(distance**2 + math.copysign(spread**2, spread), distance**2 / 4))

    low, high = (widened(math.log(end / error.p50)) for end in (error.p10, error.p90))
    return Quantiles(error.p50 * math.exp(-low), error.p50, error.p50 * math.exp(high))


def _cells(seen: Sequence[Observation], spread: float) -> list[dict[str, Any]]:
    """Return the cells with enough runs, each regime first over all architectures."""
    found = []
    for regime in sorted({each.regime for each in seen}):
        of_regime = [each for each in seen if each.regime == regime]
        for hardware in ("", *sorted({each.hardware for each in of_regime})):
            rows = [each for each in of_regime if hardware in ("", each.hardware)]
            sources = Counter(each.source for each in rows)
            if len(rows) < _FEWEST or (hardware and len(sources) < _FEWEST_SOURCES):
                continue
            error = _widened(_quantiles(rows, sources), spread)
            percentiles = {name: round(value, 4) for name, value in error._asdict().items()}
            found.append(
                {"regime": regime, "hardware": hardware, **percentiles, "n": len(rows), "sources": sorted(sources)}
            )
    return found


def _quantiles(rows: Sequence[Observation], sources: Counter[str]) -> Quantiles:
    """Return the weighted percentiles, interpolated in logarithms between the middles of the weights."""
    weighted = sorted(
        (math.log(each.ratio), min(1.0, sources[each.source] / _FEWEST) / sources[each.source]) for each in rows
    )
    whole, before, places = sum(weight for _, weight in weighted), 0.0, []
    for value, weight in weighted:
        places.append(((before + weight / 2) / whole, value))
        before += weight
    return Quantiles(*(math.exp(_interpolated(places, share)) for share in _SHARES))


def _interpolated(places: Sequence[tuple[float, float]], share: float) -> float:
    after = next((index for index, (at, _) in enumerate(places) if at >= share), len(places) - 1)
    (x0, y0), (x1, y1) = places[max(0, after - 1)], places[after]
    if x1 <= x0 or share <= x0:
        return y1 if share >= x1 else y0 if after else y1
    return y0 + (y1 - y0) * min(1.0, (share - x0) / (x1 - x0))


def lines(outcomes: Mapping[Table, Outcome]) -> Iterable[str]:
    """Yield a table: the share of runs inside p10 to p90 if their source is left out, by framework and source."""
    for quantity in ("time", "memory"):
        seen = observations(outcomes, quantity)
        yield ""
        yield f"{'inside p10 to p90, source left out: ' + quantity:<48}{'n':>5}{'inside':>9}   spread between sources"
        for framework in sorted({each.framework for each in seen}):
            spread, covered = best_spread([each for each in seen if each.framework == framework])
            shown = f"{covered.inside:.1%}" if covered.rows else "-"
            without = f"{covered.without} runs then have no range"
            yield f"{framework:<48}{covered.rows:>5}{shown:>9}   {spread:+.2f}; {without}"
            for source, (count, share) in covered.by_source.items():
                yield f"  {source:<46}{count:>5}{share:>9.1%}"


def markdown(errors: Mapping[str, Any]) -> Iterable[str]:
    """Yield the coverage of the ranges in errors.json by framework, as lines of Markdown."""
    yield "| framework | measured | runs | with a range if their source is left out | inside | spread between sources |"
    yield "|---|---|---|---|---|---|"
    for quantity, name in (("time", "step time"), ("memory", "memory")):
        for framework, found in errors[quantity].items():
            inside = f"{100 * found['inside']:.0f} % | {100 * math.expm1(found['spread']):+.0f} %"
            shown = inside if found["runs_left_out"] else "|"
            yield f"| {framework} | {name} | {found['runs']} | {found['runs_left_out']} | {shown} |"
