"""The learning-rate range test: the rates to try, when to stop, and what the curve suggests. Pure functions.

The rate grows exponentially (Smith, arXiv:1506.01186, section 3.3, with a linear growth). The loss of a step is that
before its update, so it is assigned to the rate of the step before.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scaletrain_cli.diagnosis.curves import deviation, median

# Of the rates in decades: half of it is a factor of 1.6, within which neighbors are averaged.
_KERNEL_DECADES = 0.2
_KERNEL_STEPS = 1.0
_RISE = 1.3  # times the best smoothed loss: diverged
_RETURN_SHARE = 0.02  # above its start, after a fall of as much: diverged; 1.3 x best is not reached near ln V
_NORM_DEVIATIONS = 6.0
_FEWEST_NORMS = 20
_BELOW_DIVERGENCE = 5.0
_SKIPPED = 3  # the first updates of Adam have the size of the rate, whatever the gradient is


def rates(first: float, last: float, steps: int) -> list[float]:
    """Return ``steps`` learning rates from ``first`` to ``last``, at equal ratios."""
    if steps < 2:
        return [last] * steps
    ratio = math.log(last / first) / (steps - 1)
    return [first * math.exp(ratio * step) for step in range(steps)]


@dataclass(frozen=True)
class Suggestion:
    """``rate``: the suggested one; None if the loss never falls. ``steepest`` and ``lowest``: where it falls fastest,
    and where it is least. ``diverges``: the first rate that is too high; None if none of the tried ones is.
    ``smooth``: the smoothed losses of the rates that were tried.
    """

    rate: float | None
    steepest: float | None
    lowest: float | None
    diverges: float | None
    smooth: tuple[float, ...]


def smoothed(rates: Sequence[float], losses: Sequence[float]) -> list[float]:
    """Return the losses averaged over neighboring rates with Gaussian weights, without a lag.

    An average over earlier losses alone would shift the curve to higher rates, by an order of magnitude for a test of
    few steps.
    """
    if len(rates) < 2:
        return list(losses)
    apart = math.log10(rates[-1] / rates[0]) / (len(rates) - 1)
    width = max(_KERNEL_DECADES / apart, _KERNEL_STEPS) if apart > 0 else _KERNEL_STEPS
    reach = math.ceil(3 * width)
    found = []
    for at in range(len(losses)):
        near = range(max(0, at - reach), min(len(losses), at + reach + 1))
        weights = [math.exp(-0.5 * ((each - at) / width) ** 2) for each in near]
        # a straight line through the neighbors, so that the ends of the curve are not pulled to its middle
        found.append(_line_at(near, weights, losses, at))
    return found


def _line_at(near: Sequence[int], weights: Sequence[float], losses: Sequence[float], at: int) -> float:
    total = math.fsum(weights)
    center = math.fsum(w * x for w, x in zip(weights, near, strict=True)) / total
    level = math.fsum(w * losses[x] for w, x in zip(weights, near, strict=True)) / total
    spread = math.fsum(w * (x - center) ** 2 for w, x in zip(weights, near, strict=True))
    if spread == 0:
        return level
    slope = math.fsum(w * (x - center) * losses[x] for w, x in zip(weights, near, strict=True)) / spread
    return level + slope * (at - center)


def has_diverged(losses: Sequence[float]) -> bool:
    """Return True if the test can stop: the mean of the last three losses is above its bound, or one is not finite.

    Bounds: 1.3 times the least mean of three so far; and, once that was 2 % below the start, 5 % above the start.
    """
    if losses and not math.isfinite(losses[-1]):
        return True
    if len(losses) < 8:
        return False
    means = [math.fsum(losses[at : at + 3]) / 3 for at in range(len(losses) - 2)]
    best, start = min(means), median(losses[:5])
    has_fallen = best < (1 - _RETURN_SHARE) * start
    return means[-1] > _RISE * best or (has_fallen and means[-1] > start + 0.05 * abs(start))


def suggest(rates: Sequence[float], losses: Sequence[float], norms: Sequence[float]) -> Suggestion:
    """Return what a range test suggests. ``losses``: after the update with each rate; ``norms``: of its gradient.

    The suggestion is the geometric mean of the rates at which the loss falls fastest, per factor of the rate, and at
    which it is least, and at most a fifth of the rate at which it diverges. The curve diverges at the first rate whose
    smoothed loss exceeds 1.3 times the least one before, or its start by 2 % after a fall of as much, or whose gradient
    norm exceeds its median by six robust deviations of the log for three steps. Rules that take the steepest point
    alone find the time since the start, since the first loss falls at any rate.
    """
    count = next((at for at, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    tried, finite = list(rates[:count]), list(losses[:count])
    if count <= _SKIPPED + 2:
        return Suggestion(None, None, None, rates[count] if count < len(losses) else None, tuple(finite))
    smooth = smoothed(tried, finite)
    limit = _divergence(finite, smooth, norms[:count])
    diverges = tried[limit] if limit < count else rates[count] if count < len(losses) else None
    inner = range(_SKIPPED, limit)
    if len(inner) < 3:
        return Suggestion(None, None, None, diverges, tuple(smooth))
    lowest = min(inner, key=smooth.__getitem__)
    falls = range(_SKIPPED, lowest + 1)
    slopes = {at: smooth[min(at + 1, count - 1)] - smooth[at - 1] for at in falls}
    steepest = min(slopes, key=slopes.__getitem__)
    start = median(finite[: max(3, _SKIPPED)])
    if slopes[steepest] >= 0 or smooth[lowest] >= start:
        return Suggestion(None, None, None, diverges, tuple(smooth))
    rate = math.sqrt(tried[steepest] * tried[lowest])
    if diverges is not None:
        rate = min(rate, diverges / _BELOW_DIVERGENCE)
    return Suggestion(rate, tried[steepest], tried[lowest], diverges, tuple(smooth))


def _divergence(losses: Sequence[float], smooth: Sequence[float], norms: Sequence[float]) -> int:
    """Return the place of the first rate that is too high, or the number of rates."""
    start, best = median(losses[:3]), math.inf
    logs = [math.log(norm) if norm > 0 else -math.inf for norm in norms]
    outside = 0
    for at, loss in enumerate(smooth):
        has_fallen = best < (1 - _RETURN_SHARE) * start
        if loss > _RISE * best or (has_fallen and loss > (1 + _RETURN_SHARE) * start):
            return at
        best = min(best, loss)
        known = logs[:at]
        if at >= _FEWEST_NORMS and len(logs) > at:
            spread = max(deviation(known), 0.1)
            outside = outside + 1 if logs[at] - median(known) > _NORM_DEVIATIONS * spread else 0
            if outside == 3 and loss > best:
                return at - 2
    return len(smooth)


def choose(forks: Sequence[tuple[float, float]], start: float) -> tuple[float | None, float, float]:
    """Return the rate of the fork that ended lowest, and the bracket of those that learned nearly as much.

    ``forks``: rate and loss at the end, of trials from the same weights on the same data; not finite: diverged.
    ``start``: their loss before the first step. "Nearly": at least 90 % of the best fall. None if no fork learned
    anything; the bracket is then (0, 0).
    """
    learned = [(rate, loss) for rate, loss in forks if math.isfinite(loss) and loss < start]
    if not learned:
        return None, 0.0, 0.0
    rate, least = min(learned, key=lambda fork: fork[1])
    near = [fork for fork, loss in learned if start - loss >= 0.9 * (start - least)]
    return rate, min(near), max(near)
