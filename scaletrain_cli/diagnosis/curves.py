"""Robust statistics of curves: levels, noise, slopes, spikes. Plain arithmetic on lists, without numpy."""

import bisect
import itertools
import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_DEVIATION_PER_MAD = 1.4826  # a normal distribution's standard deviation in units of its median absolute deviation
_MOST_POINTS = 160  # of a slope: the cost of Theil-Sen is their square
SPIKE_WINDOW = 128
SPIKE_DEVIATIONS = 6.0
_SPIKE_FEWEST = 32
# The spread of the log of a value is taken as at least this, so that a curve that hardly varies has no spikes.
_LEAST_LOG_SPREAD = 0.01


def median(values: Sequence[float]) -> float:
    """Return the median. Raises IndexError without values."""
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def deviation(values: Sequence[float], center: float | None = None) -> float:
    """Return the standard deviation of a normal distribution with the same median absolute deviation from the center.

    ``center``: the median by default.
    """
    center = median(values) if center is None else center
    return _DEVIATION_PER_MAD * median([abs(value - center) for value in values])


def noise(values: Sequence[float]) -> float:
    """Return the standard deviation around the trend: by the differences of neighbors, which a slow trend leaves."""
    if len(values) < 3:
        return 0.0
    differences = [after - before for before, after in itertools.pairwise(values)]
    return _DEVIATION_PER_MAD * median([abs(value) for value in differences]) / math.sqrt(2)


def thinned(values: Sequence[float], most: int = _MOST_POINTS) -> list[float]:
    """Return at most ``most`` values at equal distances."""
    if len(values) <= most:
        return list(values)
    return [values[len(values) * number // most] for number in range(most)]


class Slope(NamedTuple):
    """A slope per unit of x, and its confidence interval of 95 %."""

    value: float
    low: float
    high: float


def theil_sen(x: Sequence[float], y: Sequence[float]) -> Slope:
    """Return the median of the slopes of all pairs of points (Sen 1968), with Sen's interval by Kendall's variance."""
    xs, ys = thinned(x), thinned(y)
    slopes = sorted(
        (ys[j] - ys[i]) / (xs[j] - xs[i]) for i in range(len(xs)) for j in range(i + 1, len(xs)) if xs[j] != xs[i]
    )
    if not slopes:
        return Slope(0.0, -math.inf, math.inf)
    n = len(xs)
    margin = 1.96 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    low = max(0, int((len(slopes) - margin) / 2))
    high = min(len(slopes) - 1, int((len(slopes) + margin) / 2))
    return Slope(median(slopes), slopes[low], slopes[high])


def fall_of(values: Sequence[float]) -> float:
    """Return by how much the values fall from the first to the last, by their robust slope."""
    return -theil_sen(range(len(values)), values).value * len(values)


def residuals(x: Sequence[float], y: Sequence[float]) -> list[float]:
    """Return the values minus their robust straight line."""
    slope = theil_sen(x, y).value
    level = median([value - slope * at for at, value in zip(x, y, strict=True)])
    return [value - level - slope * at for at, value in zip(x, y, strict=True)]


def autocorrelation(values: Sequence[float], lag: int = 1) -> float:
    """Return the correlation of values ``lag`` places apart, from -1 to 1; 0 for a constant."""
    mean = math.fsum(values) / len(values)
    total = math.fsum((value - mean) ** 2 for value in values)
    if total == 0:
        return 0.0
    return math.fsum((a - mean) * (b - mean) for a, b in zip(values, values[lag:], strict=False)) / total


class Swing(NamedTuple):
    """A period in places, and the correlations at half of it and at the whole."""

    period: int
    low: float
    back: float


def swing(values: Sequence[float], periods: int) -> Swing | None:
    """Return the swing of the values with the most negative correlation at half its period; None for fewer values.

    Periods of at least six places, of which the values have ``periods``.
    """
    longest = len(values) // periods
    if not (halves := range(3, longest // 2 + 1)):
        return None
    half = min(halves, key=lambda lag: autocorrelation(values, lag))
    return Swing(2 * half, autocorrelation(values, half), autocorrelation(values, 2 * half))


def smoothed(values: Sequence[float], width: int = 5) -> list[float]:
    """Return the medians of each value with its neighbors, ``width`` values in all."""
    half = width // 2
    return [median(values[max(0, place - half) : place + half + 1]) for place in range(len(values))]


class Spike(NamedTuple):
    """A run of outliers: the places of the first one and after the last one, the largest value, and the level before.

    ``returned``: a later value is back at the level.
    """

    first: int
    after: int
    peak: float
    level: float
    returned: bool


def spikes(values: Sequence[float]) -> list[Spike]:
    """Return the spikes of positive values: their logs exceed the median of 128 before by six standard deviations.

    Outliers do not enter the median. Values that are not positive are left out.
    """
    window: deque[float] = deque()
    ordered: list[float] = []
    peaks: list[Spike] = []
    spread, since = 0.0, 0
    open_at, peak, level = -1, 0.0, 0.0
    for place, value in enumerate(values):
        if value <= 0:
            continue
        log = math.log(value)
        if len(ordered) >= _SPIKE_FEWEST:
            if since == 0:
                center = median(ordered)
                spread = max(_LEAST_LOG_SPREAD, _DEVIATION_PER_MAD * median([abs(one - center) for one in ordered]))
            since = (since + 1) % 8
            center = ordered[len(ordered) // 2]
            if log > center + SPIKE_DEVIATIONS * spread:
                if open_at < 0:
                    open_at, peak, level = place, value, math.exp(center)
                peak = max(peak, value)
                continue
            if open_at >= 0:
                peaks.append(Spike(open_at, place, peak, level, True))
                open_at = -1
        window.append(log)
        bisect.insort(ordered, log)
        if len(window) > SPIKE_WINDOW:
            ordered.pop(bisect.bisect_left(ordered, window.popleft()))
    if open_at >= 0:
        peaks.append(Spike(open_at, len(values), peak, level, False))
    return peaks
