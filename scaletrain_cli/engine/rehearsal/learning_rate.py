"""The learning-rate item of a rehearsal: a range test, then trials at fixed rates that decide.

The learning-rate range test: the rates to try, when to stop, and what the curve suggests. Pure functions.

The rate grows exponentially (Smith, arXiv:1506.01186, section 3.3, with a linear growth). The loss of a step is that
before its update, so it is assigned to the rate of the step before.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scaletrain_cli.diagnosis.curves import deviation, median
from scaletrain_cli.diagnosis.findings import Cause
from scaletrain_cli.diagnosis.rehearsal import Item
from scaletrain_cli.engine.rehearsal.trials import Trials, finite
from scaletrain_cli.reasons import Reason

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
    averages = []
    for at in range(len(losses)):
        near = range(max(0, at - reach), min(len(losses), at + reach + 1))
        weights = [math.exp(-0.5 * ((neighbor - at) / width) ** 2) for neighbor in near]
        # a straight line through the neighbors, so that the ends of the curve are not pulled to its middle
        averages.append(_line_at(near, weights, losses, at))
    return averages


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
    slopes = {at: smooth[min(at + 1, count - 1)] - smooth[at - 1] for at in range(_SKIPPED, lowest + 1)}
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


_FIRST, _FIRST_OF_LOADED, _LAST = 1e-6, 1e-7, 1.0
_RANGE_SHARE, _FORK_SHARE = 0.4, 0.3  # of the budget
_FEWEST_STEPS, _MOST_STEPS = 24, 180
_FEWEST_FORK_STEPS, _MOST_FORK_STEPS = 6, 40
_FORKS = (1 / 3, 1.0, 3.0)
_NEAR = 3.5  # a rate within this factor of the suggestion needs no trial of its own
_TOO_LOW = 10.0
_LEARNS, _LEARNS_SLOWLY = 0.5, 0.25  # of the fall of the best trial
_TELLING_STEPS = 25  # in fewer a rate that learns at all is not judged: the noise of a loss is as large as its fall


def learning_rate(trials: Trials) -> Item:
    """Return where the spec's learning rate is in the range that learns; the state is restored.

    A range test of real batches gives a rate (``suggest``); trials from the first weights on the same
    batches at a third, once and three times that rate, and at the spec's if that is elsewhere, decide. The rate fails
    if it is outside and learns less than half of what the best trial learns, or nothing in trials of fewer than 25
    steps; a lower one if it is ten times lower and learns less than a quarter, and not for loaded weights, whose loss
    may have nowhere to go.
    """
    case, spec = trials.case, trials.case.spec
    if not (steps := trials.steps_in(_RANGE_SHARE, _FEWEST_STEPS, _MOST_STEPS)):
        needed = _FEWEST_STEPS * trials.step_seconds / _RANGE_SHARE
        params = {"budget": trials.budget_seconds, "needed": needed / 3, "steps": _FEWEST_STEPS}
        return Item("learning-rate", "skipped", Reason("rehearsal.budget-too-small", params))
    first = _FIRST if spec.is_from_scratch else _FIRST_OF_LOADED
    if steps < 100:
        first *= 10  # at least five steps for each factor of ten
    tried, losses, norms = _range_test(trials, rates(first, _LAST, steps))
    suggestion = suggest(tried, losses, norms)
    figures: dict[str, Any] = {
        "lr": trials.peak_rate,
        "rates": [finite(rate) for rate in tried],
        "losses": [finite(loss) for loss in losses],
        "smoothed": [finite(loss) for loss in suggestion.smooth],
        "norms": [finite(norm) for norm in norms],
        "steepest": None if suggestion.steepest is None else finite(suggestion.steepest),
        "lowest": None if suggestion.lowest is None else finite(suggestion.lowest),
        "diverges": None if suggestion.diverges is None else finite(suggestion.diverges),
        "by_range_test": None if suggestion.rate is None else finite(suggestion.rate),
        "global_batch_size": case.plan.layout.global_batch_size,
    }
    if suggestion.rate is None:
        params = {"low": tried[0], "high": tried[-1] if tried else _LAST}
        cause = case.cause("diagnosis.cause-nothing-to-learn", "data")
        return Item("learning-rate", "failed", Reason("rehearsal.no-rate-learns", params), figures, (cause,))
    return _decided(trials, suggestion, figures)


def _range_test(trials: Trials, rates: list[float]) -> tuple[list[float], list[float], list[float]]:
    """Train a step at each rate; return the rates, the losses after them and the norms, until the loss diverges."""
    before: list[float] = []
    norms: list[float] = []
    ahead = trials.trainer.context.spec.data.loader.read_ahead(trials.trainer.readers)
    for at, rate in enumerate([*rates, rates[-1]]):
        following = range(at + 2, min(at + 2 + ahead, len(rates) + 2))
        loss, norm = trials.step(trials.batches(at + 1, list(following)), rate)
        before.append(loss)
        norms.append(norm)
        if has_diverged(before):
            break
    trials.restore()
    count = len(before) - 1
    return rates[:count], before[1:], norms[:count]


def _decided(trials: Trials, suggestion: Suggestion, figures: dict[str, Any]) -> Item:
    case, peak, near = trials.case, trials.peak_rate, suggestion.rate
    assert near is not None
    rates = [factor * near for factor in _FORKS]
    apart = peak > _NEAR * near or peak < near / _NEAR
    if apart:
        rates.append(peak)
    steps = trials.steps_in(_FORK_SHARE / len(rates), _FEWEST_FORK_STEPS, _MOST_FORK_STEPS) or _FEWEST_FORK_STEPS
    forks, start = [], math.inf
    for rate in rates:
        losses = _fork(trials, rate, steps)
        start = losses[0] if losses and math.isfinite(losses[0]) else start
        whole = len(losses) > steps and all(map(math.isfinite, losses))
        tail = losses[-max(2, steps // 4) :]
        forks.append((rate, sum(tail) / len(tail) if whole else math.inf))
    best, low, high = choose(forks[: len(_FORKS)], start)
    best = near if best is None else best
    if suggestion.diverges is not None:
        best = min(best, suggestion.diverges / 2)
    trials.suggested_rate = best
    figures |= {
        "suggestion": finite(best),
        "bracket": [finite(low or best), finite(high or best)],
        "forks": [{"rate": finite(rate), "loss": finite(loss)} for rate, loss in forks],
        "fork_steps": steps,
        "start_loss": finite(start),
    }
    params: dict[str, Any] = {"lr": peak, "suggestion": best, "low": low or best, "high": high or best, "steps": steps}
    change = case.change("training.optimizer.lr", float(f"{best:.2g}"))
    if apart:
        own, least = forks[-1][1], min(loss for _, loss in forks[: len(_FORKS)])
        fall, most = start - own, start - least
        figures["share_of_best_fall"] = finite(fall / most) if most > 0 and math.isfinite(fall) else None
        params |= {"loss": finite(own), "best_loss": least}
        if peak > best and fall < (_LEARNS * most if steps >= _TELLING_STEPS else 0):
            cause = Cause(Reason("diagnosis.cause-rate-too-high", {"lr": peak}), change)
            code = Reason("rehearsal.rate-too-high" if math.isfinite(own) else "rehearsal.rate-diverges", params)
            return Item("learning-rate", "failed", code, figures, (cause,))
        if peak < best / _TOO_LOW and fall < _LEARNS_SLOWLY * most and case.spec.is_from_scratch:
            cause = Cause(Reason("diagnosis.cause-rate-too-low", {"lr": peak}), change)
            return Item("learning-rate", "failed", Reason("rehearsal.rate-too-low", params), figures, (cause,))
    return Item("learning-rate", "passed", Reason("rehearsal.rate-in-range", params), figures)


def _fork(trials: Trials, rate: float, steps: int) -> list[float]:
    """Train from the first weights at a fixed rate, reached after a quarter of the steps; return the losses.

    One more than steps, the last one after the last update; fewer if a loss is not finite or far above the start. The
    state is restored.
    """
    losses: list[float] = []
    warm = max(1, steps // 4)
    for at in range(steps + 1):
        loss, _ = trials.step(trials.batches(at + 1, [at + 2]), rate * min(1.0, (at + 1) / warm))
        losses.append(loss)
        if not math.isfinite(loss) or loss > 3 * abs(median(losses[:1])) + 1:
            break
    trials.restore()
    return losses
