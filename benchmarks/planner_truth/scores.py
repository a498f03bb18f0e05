"""Statistics of predictions against measurements. Errors are shares of the measured value."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Errors:
    """Median of the relative error, mean and 90th percentile of its absolute value.

    ``factor``: geometric mean of the larger of predicted and measured value over the smaller.
    """

    n: int
    median: float
    mape: float
    p90: float
    factor: float


@dataclass(frozen=True)
class Verdicts:
    """Shares of all rows. ``false_fits``: predicted to fit, but did not run; ``false_rejections``: the reverse."""

    n: int
    accuracy: float
    false_fits: float
    false_rejections: float


@dataclass(frozen=True)
class Ranking:
    """Kendall's tau over panels of competing runs, and the regret: how much slower than the best the choice is.

    ``regret_by_time``: that of the run with the least predicted time, even if the planner says that it does not fit.
    """

    panels: int
    runs: int
    tau: float
    regret: float
    regret_median: float
    regret_worst: float
    regret_by_time: float


class Run(NamedTuple):
    """One candidate of a panel."""

    predicted_seconds: float
    measured_seconds: float
    fits: bool = True  # as the planner says
    expected_seconds: float = 0.0  # predicted, with the chance that the run stalls; 0: as predicted

    @property
    def preference(self) -> tuple[float, float]:
        """Return the sort key by which the planner chooses, smallest first."""
        return self.expected_seconds or self.predicted_seconds, self.measured_seconds


def errors(pairs: Sequence[tuple[float, float]]) -> Errors | None:
    """Return the errors of (predicted, measured) pairs; None without any. Measured values must be positive."""
    if not pairs:
        return None
    signed = [predicted / measured - 1 for predicted, measured in pairs]
    absolute = sorted(abs(error) for error in signed)
    logs = [abs(math.log(predicted / measured)) if predicted > 0 else math.inf for predicted, measured in pairs]
    return Errors(
        len(pairs),
        statistics.median(signed),
        statistics.fmean(absolute),
        quantile(absolute, 0.9),
        math.exp(statistics.fmean(logs)),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile, interpolated linearly as numpy does by default."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def verdicts(pairs: Sequence[tuple[bool, bool]]) -> Verdicts | None:
    """Return the verdicts of (predicted to fit, ran) pairs; None without any."""
    if not pairs:
        return None
    n = len(pairs)
    false_fits = sum(fits and not ran for fits, ran in pairs)
    false_rejections = sum(ran and not fits for fits, ran in pairs)
    return Verdicts(n, 1 - (false_fits + false_rejections) / n, false_fits / n, false_rejections / n)


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return tau-b, which excludes ties; None if a ranking is constant or has fewer than two entries."""
    concordant = discordant = tied_first = tied_second = 0
    for place, (a, b) in enumerate(pairs):
        for c, d in pairs[place + 1 :]:
            first, second = (a > c) - (a < c), (b > d) - (b < d)
            if first and second:
                concordant += first == second
                discordant += first != second
            else:
                tied_first += second != 0
                tied_second += first != 0
    ranked = concordant + discordant
    scale = float((ranked + tied_first) * (ranked + tied_second)) ** 0.5
    return (concordant - discordant) / scale if scale else None


def ranking(panels: Sequence[Sequence[Run]]) -> Ranking | None:
    """Return the ranking over panels of runs that ran; panels with fewer than two runs are ignored.

    The planner chooses the one with the least time to expect of those that it says fit; if none does, of all.
    """
    chosen = [panel for panel in panels if len(panel) >= 2]
    if not chosen:
        return None
    taus = [tau for panel in chosen if (tau := kendall_tau([run[:2] for run in panel])) is not None]
    regrets = [_regret(panel, min(panel, key=lambda run: (not run.fits, run.preference))) for panel in chosen]
    return Ranking(
        len(chosen),
        sum(map(len, chosen)),
        statistics.fmean(taus) if taus else 0.0,
        statistics.fmean(regrets),
        statistics.median(regrets),
        max(regrets),
        statistics.fmean(_regret(panel, min(panel)) for panel in chosen),
    )


def _regret(panel: Sequence[Run], pick: Run) -> float:
    return pick.measured_seconds / min(run.measured_seconds for run in panel) - 1
