"""Checks of the learning rate and its warm-up, by what the loss did at each rate.

Not concluded: a rate that is a few times too high or too low, at which the loss falls, only less than it could. That
needs a trial with another rate.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from scaletrain_cli.diagnosis.case import FEWEST, Case, check, recent
from scaletrain_cli.diagnosis.curves import median
from scaletrain_cli.diagnosis.findings import Finding, warning_if
from scaletrain_cli.reasons import Reason, Texts
from scaletrain_cli.spec import ModelSpec

TEXTS: Texts = {
    "learning-rate-too-high": "the learning rate is too high: from step {step:whole} on, at a rate of {rate:.2g}, the "
    "loss rose to {peak:.3f}, above its start of {start:.3f}; the peak rate is {lr:.2g}",
    "warm-up-too-short": "the warm-up of {steps:of step} is too short: from step {step:whole} on the loss rose to "
    "{peak:.3f}, above its start of {start:.3f}, and came back",
    "learning-rate-too-low": "the learning rate of {lr:.2g} is too low: in {steps:of step} no weight can have moved "
    "by more than {share:percent} of the spread of the first weights; the loss fell from {start:.3f} to {now:.3f}",
    "batch-too-large": "the global batch of {batch:whole} is {times:.3g} times the gradient noise scale of "
    "{scale:.3g}: training needs more samples than with smaller batches",
    "cause-rate-too-high": "the learning rate ({lr:.2g}) is too high",
    "cause-rate-too-low": "the learning rate ({lr:.2g}) is too low",
    "cause-short-warm-up": "the warm-up ({steps:of step}) is too short",
    "cause-large-batch": "the batch averages gradients that agree already; smaller ones need fewer samples",
    "cause-rate-for-batch": "the learning rate ({lr:.2g}) does not use the batch: larger batches bear larger rates",
    "cause-few-steps": "{steps:of step} are too few to learn",
}

_OF_A_HIGH_RATE = ("loss-spikes", "gradient-norm-spikes", "loss-swings")
_RISE_SHARE = 0.05
_RISE_NOISES = 4.0
_RISE_STEPS = 5  # measured steps in a row; fewer are a spike
_AT_PEAK = 0.9
_WARM_UP_SHARE = 0.01
_FEWEST_STEPS = 50
_SHORT_RUN = 100
_LITTLE_FALL = 0.1
_WASTE, _MUCH_WASTE = 5.0, 20.0


class _Rise(NamedTuple):
    """The first rise of the loss above its start: first step, worst value, rate then, and whether it was undone."""

    step: int
    peak: float
    rate: float
    recovered: bool


@check(of_engine=True, explains={"learning-rate-too-high": (*_OF_A_HIGH_RATE, "order-not-learned", "underfitting")})
def too_high(case: Case) -> Iterator[Finding]:
    """Yield a warning if the loss rose above its start while the learning rate was still rising, or never came back.

    A rise: the medians of five steps are above the start by 5 % and four standard deviations, for five steps in a row.
    If that happens below the peak of the schedule, no warm-up makes this peak safe (seed 004: "spikes immediately").
    """
    rise = _rise(case)
    if rise is None or _is_of_warm_up(case, rise):
        return
    curve = case.curve
    assert curve is not None
    evidence = {"step": rise.step, "peak": rise.peak, "start": curve.start, "rate": rise.rate, "lr": case.peak_rate}
    causes = (
        case.rate_too_high(min(case.lower_rate, float(f"{rise.rate / 3:.1g}"))),
        case.short_warm_up(_usual_warm_up(case)),
    )
    yield Finding(Reason("diagnosis.learning-rate-too-high", evidence), "warning", "medium", causes)


@check(of_engine=True, explains={"warm-up-too-short": _OF_A_HIGH_RATE})
def warm_up_too_short(case: Case) -> Iterator[Finding]:
    """Yield a warning if the loss rose above its start right after a short warm-up, and came back.

    Short: fewer steps than 2 / (1 - beta2), the untuned warm-up of Ma and Yarats (arXiv:1910.04209), within which
    Adam's second moments have not settled, and than 1 % of the steps (seed 004: 1 to 5 %).
    """
    rise = _rise(case)
    if rise is None or not _is_of_warm_up(case, rise):
        return
    curve = case.curve
    assert curve is not None
    warm_up, usual = case.spec.training.schedule.warmup_steps, _usual_warm_up(case)
    evidence = {"step": rise.step, "peak": rise.peak, "start": curve.start, "steps": warm_up, "usual": usual}
    causes = (case.short_warm_up(usual), case.rate_too_high(case.lower_rate))
    yield Finding(Reason("diagnosis.warm-up-too-short", evidence), "warning", "medium", causes)


@check(of_engine=True, explains={"learning-rate-too-low": ("loss-flat", "underfitting")})
def too_low(case: Case) -> Iterator[Finding]:
    """Yield a warning if the rates of the whole run cannot move a new model, and its loss has hardly fallen.

    One update of Adam changes a weight by about the learning rate at most (Kingma and Ba, arXiv:1412.6980, section
    2.1), so that the sum of the rates bounds the distance from the first weights. Below the standard deviation of these
    (``initializer_range``) no weight can have left their distribution. With less than 10 % of the loss gone, and 50
    steps after the warm-up. Only for Adam and Lion on new language models; fine-tuning moves weights little. A note for
    runs of less than 100 steps, for which every usual rate is too low.
    """
    curve, model = case.curve, case.spec.model
    schedule, optimizer = case.spec.training.schedule, case.spec.training.optimizer
    if curve is None or not case.is_fresh_text or not isinstance(model, ModelSpec) or optimizer.traits.kind != "adam":
        return
    last, total = curve.steps[-1], case.spec.total_steps
    if last < schedule.warmup_steps + min(_FEWEST_STEPS, total // 4) or len(curve.values) < _FEWEST_STEPS:
        return
    if curve.start - curve.now > _LITTLE_FALL * curve.start:
        return
    # The sum of the rates of all steps so far, between measured steps by their mean.
    steps, rates = case.history.known("learning_rate")
    parts = [rates[0] * steps[0]] if steps else []
    for at in range(1, len(steps)):
        parts.append((steps[at] - steps[at - 1]) * (rates[at] + rates[at - 1]) / 2)
    so_far = math.fsum(parts)
    most = so_far + case.peak_rate * max(0, total - last)
    if most >= model.initializer_range:
        return
    share = so_far / model.initializer_range
    evidence = {"lr": case.peak_rate, "share": share, "start": curve.start, "now": curve.now, "steps": last}
    to = float(f"{case.peak_rate * 10 * model.initializer_range / most:.0e}")
    cause = case.rate_too_low(min(to, 1e-3) if to > case.peak_rate else to)
    few = case.cause("diagnosis.cause-few-steps", "training.steps", steps=total)
    code = Reason("diagnosis.learning-rate-too-low", evidence)
    if total < _SHORT_RUN:
        yield Finding(code, "note", "low", (few, cause))
    else:
        yield Finding(code, "warning", "medium", (cause, few))


@check(of_engine=True)
def batch_too_large(case: Case) -> Iterator[Finding]:
    """Yield a finding if the global batch is over five times the gradient noise scale: a warning from twenty times.

    At a batch of B sequences training needs 1 + B / B_noise times the sequences that small batches would need
    (arXiv:1812.06162, appendix A), so a larger learning rate is what a batch is for, or fewer sequences do. The noise
    scale is a rough measure of that (arXiv:2505.23971), and grows during training: after a quarter of the steps, by the
    higher one of the medians of two halves of the recent rows; low confidence.
    """
    rank = case.telemetry.ranks.get(0)
    values = [] if rank is None else recent(case, rank, "noise_scale")
    batch, last = case.spec.training.global_batch_size, case.history.last_step
    if len(values) < FEWEST or last < case.spec.total_steps / 4 or last <= case.spec.training.schedule.warmup_steps:
        return
    half = len(values) // 2
    scale = max(median(values[:half]), median(values[half:]))
    if scale <= 0 or batch <= _WASTE * scale:
        return
    evidence = {"batch": batch, "scale": scale, "times": 1 + batch / scale, "lr": case.peak_rate}
    smaller = max(1, 2 ** round(math.log2(scale)))
    causes = (
        case.cause("diagnosis.cause-large-batch", "training.global_batch_size", smaller),
        case.cause("diagnosis.cause-rate-for-batch", "training.optimizer.lr", lr=case.peak_rate),
    )
    yield Finding(Reason("diagnosis.batch-too-large", evidence), warning_if(batch > _MUCH_WASTE * scale), "low", causes)


def _rise(case: Case) -> _Rise | None:
    curve = case.curve
    if curve is None or case.spec.training.objective == "dpo":
        return None
    limit = curve.start + max(_RISE_SHARE * abs(curve.start), _RISE_NOISES * curve.noise)
    above = [value > limit for value in curve.smooth]
    begins = next((at for at in range(len(above)) if all(above[at : at + _RISE_STEPS]) and len(above) - at > 5), None)
    if begins is None or curve.steps[begins] > max(
        3 * case.spec.training.schedule.warmup_steps, case.spec.total_steps // 5, 100
    ):
        return None
    ends = next((at for at in range(begins, len(above)) if not above[at]), len(above))
    rates = dict(zip(case.history.steps, case.history.column("learning_rate"), strict=True))
    rate = rates.get(curve.steps[begins], math.nan)
    peak = max(curve.smooth[begins:ends])
    recovered = median(curve.values[-min(50, len(curve.values) // 4) :]) < curve.start
    return _Rise(curve.steps[begins], peak, case.peak_rate if rate != rate else rate, recovered)


def _is_of_warm_up(case: Case, rise: _Rise) -> bool:
    """Return whether the rise began at the peak rate, after a short warm-up, and was undone."""
    short = case.spec.training.schedule.warmup_steps < _usual_warm_up(case)
    return short and rise.recovered and rise.rate >= _AT_PEAK * case.peak_rate


def _usual_warm_up(case: Case) -> int:
    optimizer, total = case.spec.training.optimizer, case.spec.total_steps
    has_memory = optimizer.traits.kind == "adam" and optimizer.betas[1] < 1
    by_moments = math.ceil(2 / (1 - optimizer.betas[1])) if has_memory else 0
    return max(1, min(total // 10, max(by_moments, math.ceil(_WARM_UP_SHARE * total))))
