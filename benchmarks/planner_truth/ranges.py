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
from scaletrain_cli.plan.ranges import (
    Percentiles,
    Quantiles,
    architecture_of,
    find_error,
    regime_of,
    share_below,
    widened,
)
from scaletrain_cli.plan.result import Time

Quantity = Literal["time", "memory"]
COMMAND = "make bench-planner TRUTH=DIR ARGS=--write"
_FEWEST = 5  # runs in a cell
# Fewest runs and sources, with each source left out in turn, from which a regime has a spread of its own.
_FEWEST_COVERED = 20
_FEWEST_COVERED_SOURCES = 2
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
        # Not what nvidia-smi shows: the allocator gives up what it has cached before a run is out of memory.
        if row.measured.memory_bytes and row.measured.memory_kind != "cached":
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
        "source is left out, is about 80 %. apart: the same between kinds of runs, with each architecture and each "
        "regime of a framework left out, predicted from the nearest other.",
        "command": COMMAND,
        "date": datetime.date.today().isoformat(),
    }
    for quantity in ("time", "memory"):
        seen = observations(outcomes, quantity)
        apart = best_spread(kinds_left_out(seen))[0]
        found[quantity] = {"apart": apart, "frameworks": by_framework(seen, apart)}
    return found


def by_framework(seen: Sequence[Observation], apart: float = 0.0) -> dict[str, Any]:
    """Return the cells of each framework, and for each of its regimes the spread and the coverage.

    A regime with too few runs that other sources predict has the spread over all regimes of its framework, and if
    these are too few as well, ``apart``.
    """
    names = sorted({each.framework for each in seen})
    return {name: _of_framework([each for each in seen if each.framework == name], apart) for name in names}


def _of_framework(seen: Sequence[Observation], apart: float) -> dict[str, Any]:
    pairs = left_out(seen)
    overall, covered = best_spread(pairs)
    if covered.rows < _FEWEST_COVERED:
        overall = apart
    regimes = {}
    for regime in sorted({each.regime for each in seen}):
        own = [pair for pair in pairs if pair[0].regime == regime]
        spread, covered = best_spread(own)
        if covered.rows < _FEWEST_COVERED or len(covered.by_source) < _FEWEST_COVERED_SOURCES:
            spread, covered = overall, coverage(own, overall)
        regimes[regime] = {
            "runs": len(own),
            "runs_left_out": covered.rows,
            "inside": round(covered.inside, 3),
            "spread": spread,
        }
    return {
        "runs": len(seen),
        "regimes": regimes,
        "cells": _cells(seen, {name: each["spread"] for name, each in regimes.items()}),
    }


Predicted = tuple[Observation, Percentiles | None]


def best_spread(pairs: Sequence[Predicted]) -> tuple[float, Coverage]:
    """Return the spread between sources with which the shares of runs and of sources inside are nearest to 80 %.

    Compared is the mean of the share of runs and of the sources' mean share; the share of runs stays between 75 and
    85 % if it can. 0 if no run has a range once its source is left out.
    """
    tried = [(spread, coverage(pairs, spread)) for spread in _SPREADS]
    if not tried[0][1].rows:
        return 0.0, coverage(pairs, 0.0)

    def off(pair: tuple[float, Coverage]) -> tuple[float, float]:
        covered = pair[1]
        beyond = max(0.0, 0.75 - covered.inside, covered.inside - 0.85)
        return beyond, abs((covered.inside + covered.by_sources) / 2 - _INSIDE)

    return min(tried, key=off)


def kinds_left_out(seen: Sequence[Observation]) -> list[Predicted]:
    """Return runs with the percentiles of the nearest others, with their architecture or regime left out."""
    found: list[Predicted] = []
    known = by_framework(seen)
    for name in known:
        own = [each for each in seen if each.framework == name]
        for kind in ("hardware", "regime"):
            for value in sorted({getattr(each, kind) for each in own}):
                rest = [each for each in own if getattr(each, kind) != value]
                if not rest:
                    continue
                errors = {"apart": 0.0, "frameworks": {**known, **by_framework(rest)}}
                for each in (each for each in own if getattr(each, kind) == value):
                    found.append((each, find_error(errors, name, each.regime, each.hardware)))
    return found


def left_out(seen: Sequence[Observation]) -> list[Predicted]:
    """Return the runs of one framework, each with the percentiles of all other sources, or None without."""
    found: list[Predicted] = []
    for source in sorted({each.source for each in seen}):
        others = [each for each in seen if each.source != source]
        known = {"cells": _cells(others, {}), "runs": 0}
        for each in (each for each in seen if each.source == source):
            errors = {"apart": 0.0, "frameworks": {each.framework: known}}
            error = find_error(errors, each.framework, each.regime, each.hardware)
            found.append((each, error if error and error.calibrated else None))
    return found


def coverage(pairs: Sequence[Predicted], spread: float) -> Coverage:
    """Return the share of runs inside their range, with ``spread`` between sources."""
    inside: dict[str, list[bool]] = {}
    for each, error in pairs:
        if error is not None:
            inside.setdefault(each.source, []).append(side(widened(error, spread), each) == 0)
    counted = {source: (len(hits), fmean(hits)) for source, hits in inside.items()}
    rows = sum(count for count, _ in counted.values())
    share = sum(count * share for count, share in counted.values()) / rows if rows else 0.0
    return Coverage(rows, share, counted, len(pairs) - rows)


def side(error: Percentiles, each: Observation) -> int:
    """Return 0 if the range of a run contains what was measured, -1 if that is below, and 1 if it is above.

    The planned value is always inside.
    """
    if each.time is None:
        return (each.ratio > max(1.0, error.p90)) - (each.ratio < min(1.0, error.p10))
    share, longer = share_below(each.time, error, each.measured), each.measured > each.time.step
    return int(share > 0.9) if longer else -int(share < 0.1)


def _cells(seen: Sequence[Observation], spreads: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the cells with enough runs, each regime first over all architectures. ``spreads``: of regimes, else 0."""
    found = []
    for regime in sorted({each.regime for each in seen}):
        of_regime = [each for each in seen if each.regime == regime]
        for hardware in ("", *sorted({each.hardware for each in of_regime})):
            rows = [each for each in of_regime if hardware in ("", each.hardware)]
            sources = Counter(each.source for each in rows)
            if len(rows) < _FEWEST:
                continue
            error = widened(_quantiles(rows, sources), spreads.get(regime, 0.0))
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
    """Yield a table: the share of runs inside p10 to p90 if their source is left out, by framework and regime."""
    errors = error_file(outcomes)
    for quantity in ("time", "memory"):
        yield ""
        yield f"{'inside p10 to p90, source left out: ' + quantity:<56}{'n':>5}{'inside':>9}{'p90/p10':>9}   spread"
        for framework, found in errors[quantity]["frameworks"].items():
            for regime, each in found["regimes"].items():
                shown = f"{each['inside']:.1%}" if each["runs_left_out"] else "-"
                wide = _width(found, regime)
                yield (
                    f"{framework + ', ' + regime:<56}{each['runs_left_out']:>5}{shown:>9}"
                    f"{'-' if wide is None else format(wide, '.2f'):>9}   {each['spread']:+.2f}"
                )
        yield f"between kinds of runs: {errors[quantity]['apart']:+.2f}"


def _width(found: Mapping[str, Any], regime: str) -> float | None:
    """Return the mean of p90 / p10 over the cells of a regime by their runs, those of one architecture if there are."""
    cells = [cell for cell in found["cells"] if cell["regime"] == regime]
    cells = [cell for cell in cells if cell["hardware"]] or cells
    runs = sum(cell["n"] for cell in cells)
    return sum(cell["n"] * cell["p90"] / cell["p10"] for cell in cells) / runs if runs else None


def markdown(errors: Mapping[str, Any]) -> Iterable[str]:
    """Yield the coverage of the ranges in errors.json by framework and regime, as lines of Markdown."""
    yield "| framework | measured | regime | runs | with a range if their source is left out | inside | p90 / p10 |"
    yield "|---|---|---|---|---|---|---|"
    for quantity, name in (("time", "step time"), ("memory", "memory")):
        for framework, found in errors[quantity]["frameworks"].items():
            for regime, each in found["regimes"].items():
                inside = f"{100 * each['inside']:.0f} %" if each["runs_left_out"] else ""
                wide = _width(found, regime)
                shown = f"{each['runs']} | {each['runs_left_out']} | {inside} | {'' if wide is None else f'{wide:.2f}'}"
                yield f"| {framework} | {name} | {regime} | {shown} |"
