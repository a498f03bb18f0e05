"""The learning-rate item of a rehearsal: a range test, then trials at fixed rates that decide."""

import math
from typing import Any

from scaletrain_cli.diagnosis.curves import median
from scaletrain_cli.diagnosis.findings import Cause
from scaletrain_cli.diagnosis.rehearsal import Item
from scaletrain_cli.engine.rehearsal import range_test
from scaletrain_cli.engine.rehearsal.trials import Trials, finite
from scaletrain_cli.reasons import Reason

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

    A range test of real batches gives a rate (``range_test.suggest``); trials from the first weights on the same
    batches at a third, once and three times that rate, and at the spec's if that is elsewhere, decide. The rate fails
    if it is outside and learns less than half of what the best trial learns, or nothing in trials of fewer than 25
    steps; a lower one if it is ten times lower and learns less than a quarter, and not for loaded weights, whose loss
    may have nowhere to go.
    """
    case, spec = trials.case, trials.case.spec
    steps = trials.steps_in(_RANGE_SHARE, _FEWEST_STEPS, _MOST_STEPS)
    if not steps:
        needed = _FEWEST_STEPS * trials.step_seconds / _RANGE_SHARE
        params = {"budget": trials.budget_seconds, "needed": needed / 3, "steps": _FEWEST_STEPS}
        return Item("learning-rate", "skipped", Reason("rehearsal.budget-too-small", params))
    first = _FIRST if spec.is_from_scratch else _FIRST_OF_LOADED
    if steps < 100:
        first *= 10  # at least five steps for each factor of ten
    tried, losses, norms = _range_test(trials, range_test.rates(first, _LAST, steps))
    found = range_test.suggest(tried, losses, norms)
    figures: dict[str, Any] = {
        "lr": trials.peak_rate,
        "rates": [finite(rate) for rate in tried],
        "losses": [finite(loss) for loss in losses],
        "smoothed": [finite(loss) for loss in found.smooth],
        "norms": [finite(norm) for norm in norms],
        "steepest": None if found.steepest is None else finite(found.steepest),
        "lowest": None if found.lowest is None else finite(found.lowest),
        "diverges": None if found.diverges is None else finite(found.diverges),
        "by_range_test": None if found.rate is None else finite(found.rate),
        "global_batch_size": case.plan.layout.global_batch_size,
    }
    if found.rate is None:
        params = {"low": tried[0], "high": tried[-1] if tried else _LAST}
        cause = case.cause("diagnosis.cause-nothing-to-learn", "data")
        return Item("learning-rate", "failed", Reason("rehearsal.no-rate-learns", params), figures, (cause,))
    return _decided(trials, found, figures)


def _range_test(trials: Trials, rates: list[float]) -> tuple[list[float], list[float], list[float]]:
    """Train a step at each rate; return the rates, the losses after them and the norms, until the loss diverges."""
    before: list[float] = []
    norms: list[float] = []
    ahead = trials.trainer.record.spec.data.loader.read_ahead(trials.trainer.readers)
    for at, rate in enumerate([*rates, rates[-1]]):
        following = range(at + 2, min(at + 2 + ahead, len(rates) + 2))
        loss, norm = trials.step(trials.batches(at + 1, list(following)), rate)
        before.append(loss)
        norms.append(norm)
        if range_test.has_diverged(before):
            break
    trials.restore()
    count = len(before) - 1
    return rates[:count], before[1:], norms[:count]


def _decided(trials: Trials, found: range_test.Suggestion, figures: dict[str, Any]) -> Item:
    case, peak, near = trials.case, trials.peak_rate, found.rate
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
    best, low, high = range_test.choose(forks[: len(_FORKS)], start)
    best = near if best is None else best
    if found.diverges is not None:
        best = min(best, found.diverges / 2)
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
