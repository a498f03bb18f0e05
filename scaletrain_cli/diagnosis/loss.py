"""Checks of the training loss: its start, its level, its trend, spikes and values that are not finite."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from scaletrain_cli.diagnosis.case import Case, Curve, check
from scaletrain_cli.diagnosis.curves import autocorrelation, deviation, median, residuals, spikes, swing, theil_sen
from scaletrain_cli.diagnosis.findings import Cause, Finding, Severity, warning_if
from scaletrain_cli.reasons import Reason, Texts
from scaletrain_cli.spec import ModelSpec

TEXTS: Texts = {
    "first-loss-high": "the first loss is {loss:.3f}, above the {expected:.3f} of equal outputs (ln {vocab_size}; at "
    "most {high:.2f} is usual)",
    "first-loss-low": "the first loss is {loss:.3f}, below the {expected:.3f} of equal outputs (ln {vocab_size}), "
    "which a new model cannot reach",
    "loss-above-start": "the loss diverges: {now:.3f} at step {step:whole}, {start:.3f} at the start",
    "loss-above-uninformed": "the loss is {now:.3f} at step {step:whole}, above the {uninformed:.3f} of equal outputs",
    "loss-rising": "the loss rises: {now:.3f} at step {step:whole}, {best:.3f} around step {best_step:whole}",
    "loss-flat": "the loss does not fall: {start:.3f} at the start, {now:.3f} after {steps:of step}",
    "loss-oscillating": "the loss alternates by {band:.3g} around {now:.3f}: neighboring steps have a correlation of "
    "{correlation:.2f}",
    "loss-spikes": "{count:of spike} of the loss; the largest at step {step:whole}: {peak:.3f} from a level of "
    "{level:.3f}; {rollbacks:of rollback}",
    "not-finite": "a loss or gradient was NaN or infinite at step {step:whole} ({count:of time}); gradient norm "
    "before: {norm:.3g}, usually {usual_norm:.3g}",
    "loss-swings": "the loss swings by {band:.3g} around {now:.3f}, with a period of {period:of step}: the "
    "correlation is {correlation:.2f} after half of it",
    "cause-much-momentum": "gradients of many steps add up (momentum or beta1 {beta:g})",
    "cause-alternating-data": "batches of two kinds alternate in the data",
    "cause-bad-batch": "unusual samples around step {step:whole}; `scaletrain data show` prints a batch",
    "cause-changed-data": "other data came later, or the data are damaged",
    "cause-fp16-overflow": "fp16 overflows at 65,504; bf16 has the range of fp32",
    "cause-no-gradient": "hardly any gradient reaches the weights (norm {norm:.3g})",
    "cause-nothing-to-learn": "the targets do not follow from the inputs: wrong labels or random data",
    "cause-slow-second-moment": "Adam's beta2 of {beta:g} follows larger gradients slowly (arXiv:2304.13013)",
    "cause-small-vocabulary": "the data use a part of the vocabulary, or the weights are not new",
    "cause-targets-of-other-tokens": "the loss counts padding, or another tokenizer's tokens",
    "cause-visible-targets": "targets are visible in the inputs, or few distinct tokens occur",
    "cause-wide-weights": "the first weights are too large: initializer_range {given:g}, usually {usual:g}",
}

_FIRST_LOSS_SHARE = 0.1
_USUAL_DEVIATION = 0.02
_NOISES = 6.0
_LEAST_SHARE = 0.02
_FLAT_STEPS = 100
_MIXED_STEPS = 64
_OSCILLATION = -0.3
_OSCILLATION_SHARE = 0.05
_SWING, _SWING_BACK = -0.4, 0.25
_SWINGS = 3  # periods
_RETURN_STEPS = 50
_MANY_SPIKES = 0.01


@check()
def not_finite(case: Case) -> Iterator[Finding]:
    """Yield an error if a loss or a gradient was NaN or infinite, as the guard or the program of the user recorded it.

    A warning once steps have followed it.
    Ranked by what came before: a gradient norm that rose tenfold speaks for the learning rate, fp16 for overflow, and a
    normal norm for one bad batch (seeds 000 and 004).
    """
    events = [event for event in case.events_named("rolled-back") if event.get("cause") == "nan"]
    events += [event for event in case.events_named("attempt-ended") if event.get("reason") == "nan"]
    last, logged = case.history.last_step, case.history.not_finite
    bad_steps = [last + 1 if (step := _step_of(event)) is None else step for event in events]
    if not bad_steps and not logged:
        return
    # The newest one; of a loss that has been so ever since, the first.
    since = next((step for step in logged if step > last), None)
    step = max(bad_steps) if bad_steps else logged[-1] if since is None else since
    steps, norms = case.history.known("grad_norm")
    earlier = [norm for at, norm in zip(steps, norms, strict=True) if at < step]
    usual, before = (median(earlier), max(earlier[-5:])) if earlier else (0.0, 0.0)
    evidence = {"step": step, "count": len(bad_steps) or len(logged), "norm": before, "usual_norm": usual}
    high = case.rate_too_high(case.lower_rate)
    batch = case.cause("diagnosis.cause-bad-batch", "data", step=step)
    half = case.cause("diagnosis.cause-fp16-overflow", "training.precision", "bf16")
    grows = usual > 0 and before > 10 * usual
    ranked = [high, batch] if grows else [batch, high]
    if case.spec.training.precision == "fp16":
        ranked.insert(0, half)
    severity: Severity = "warning" if last >= step else "error"
    yield Finding(Reason("diagnosis.not-finite", evidence), severity, "high", tuple(ranked))


def first_loss_band(model: ModelSpec) -> tuple[float, float]:
    """Return the lowest and the highest first loss of a new language model, in nats (see ``first_loss``)."""
    expected = math.log(model.vocab_size)
    spread = model.hidden_size * _USUAL_DEVIATION**2 / 2
    return (1 - _FIRST_LOSS_SHARE) * expected, (1 + _FIRST_LOSS_SHARE) * expected + spread


def high_first_loss(case: Case, model: ModelSpec) -> tuple[Cause, Cause]:
    """Return the causes of a first loss above the band: wide weights, and targets of other tokens."""
    spread = {"given": model.initializer_range, "usual": _USUAL_DEVIATION}
    wide = case.cause("diagnosis.cause-wide-weights", "model.initializer_range", _USUAL_DEVIATION, **spread)
    return wide, case.cause("diagnosis.cause-targets-of-other-tokens", "data.tokenizer")


def low_first_loss(case: Case) -> tuple[Cause, Cause]:
    """Return the causes of a first loss below the band."""
    visible = case.cause("diagnosis.cause-visible-targets", "data")
    return visible, case.cause("diagnosis.cause-small-vocabulary", "model.vocab_size")


@check(
    explains={"loss-above-start": ("loss-rising", "loss-flat", "loss-swings"), "loss-above-uninformed": ("loss-flat",)}
)
def diverging(case: Case) -> Iterator[Finding]:
    """Yield an error if the last measured steps (up to 50) are above the start, or above equal outputs.

    "Above" is by two standard deviations of a step, which are more than six of a median of 16, and by 2 %: a healthy
    loss ends below its start.
    """
    curve = case.curve
    if curve is None or case.changes_while_training:
        return
    margin = _margin(curve, curve.start)
    uninformed = case.uninformed_loss
    evidence: dict[str, Any] = {"now": curve.now, "start": curve.start, "step": curve.steps[-1], "noise": curve.noise}
    if curve.now > curve.start + margin:
        yield Finding(Reason("diagnosis.loss-above-start", evidence), "error", "high", _too_high(case))
    elif uninformed is not None and curve.now > uninformed + margin and curve.steps[-1] >= _after_warm_up(case):
        evidence |= {"uninformed": uninformed}
        yield Finding(Reason("diagnosis.loss-above-uninformed", evidence), "error", "high", _too_high(case))


@check()
def first_loss(case: Case) -> Iterator[Finding]:
    """Yield a warning if the first loss of a new language model is not ln V.

    Logits with variance s^2 give ln V + s^2 / 2; after the final norm s^2 = hidden_size x initializer_range^2, 0.82 for
    a width of 4,096 and 0.02. So the band is 10 % of ln V (the engine's ``first-loss``), and above it that half
    variance for the usual 0.02. Not for given weights, adapters, preference pairs and images: their first loss is not
    that of equal outputs.
    """
    model, steps = case.spec.model, case.history.steps
    if not case.is_fresh_text or not isinstance(model, ModelSpec) or not steps or steps[0] != 1:
        return
    expected, loss = math.log(model.vocab_size), case.history.column("loss")[0]
    low, high = first_loss_band(model)
    if low <= loss <= high:
        return
    evidence = {"loss": loss, "expected": expected, "vocab_size": model.vocab_size, "low": low, "high": high}
    if loss > high:
        wide, other = high_first_loss(case, model)
        causes = (wide, other) if model.initializer_range > _USUAL_DEVIATION else (other, wide)
        yield Finding(Reason("diagnosis.first-loss-high", evidence), "warning", "high", causes)
        return
    yield Finding(Reason("diagnosis.first-loss-low", evidence), "warning", "high", low_first_loss(case))


@check()
def rising(case: Case) -> Iterator[Finding]:
    """Yield a warning if the loss has risen from its best level, and has not come back for 50 measured steps.

    Best level: the least median of 50 neighbors. Six standard deviations of a step and 5 % are needed: the level of
    healthy runs varies by a few percent (arXiv:2407.21783, section 3.3.4). Not if data or parameters change.
    """
    curve = case.curve
    if curve is None or case.changes_while_training or len(curve.values) < 4 * _RETURN_STEPS:
        return
    levels = [
        median(curve.values[at : at + _RETURN_STEPS])
        for at in range(0, len(curve.values) - _RETURN_STEPS + 1, _RETURN_STEPS // 2)
    ]
    best = min(range(len(levels)), key=levels.__getitem__)
    rise = curve.now - levels[best]
    if best >= len(levels) - 3 or rise <= max(_NOISES * curve.noise, 0.05 * levels[best]):
        return
    if curve.now > curve.start + _margin(curve, curve.start):
        return  # it diverges
    step = curve.steps[best * (_RETURN_STEPS // 2) + _RETURN_STEPS // 2]
    evidence = {"best": levels[best], "best_step": step, "now": curve.now, "step": curve.steps[-1]}
    yield Finding(Reason("diagnosis.loss-rising", evidence), "warning", "medium", _too_high(case))


@check(explains={"loss-flat": ("underfitting",)})
def flat(case: Case) -> Iterator[Finding]:
    """Yield a warning if the loss of a new model has not fallen 100 steps after the warm-up.

    Flat: a fall below 2 % of the start, which learning the frequencies of tokens alone exceeds (the guard's rule,
    ``flat-loss``), and the slope of the last half is 0 within its 95 % interval or lowers the loss by less than 2 % in
    as many steps again. Loaded weights may have nothing left to learn.
    """
    curve = case.curve
    if curve is None or not case.spec.is_from_scratch or curve.steps[-1] < _after_warm_up(case) + _FLAT_STEPS:
        return
    # First weights may be worse than equal outputs; what is unlearned of that is no learning.
    start = min(curve.start, case.uninformed_loss or curve.start)
    fall, margin = start - curve.now, _margin(curve, start)
    if fall > _LEAST_SHARE * start or -fall > margin:
        return
    half = len(curve.values) // 2
    slope = theil_sen(curve.steps[half:], curve.values[half:])
    ahead = -slope.value * (curve.steps[-1] - curve.steps[half])
    if slope.high < 0 and ahead > _LEAST_SHARE * curve.now:
        return
    evidence = {"start": start, "now": curve.now, "steps": curve.steps[-1], "noise": curve.noise}
    norms = [norm for norm in case.history.column("grad_norm")[half:] if norm == norm]
    low = case.rate_too_low()
    data = case.cause("diagnosis.cause-nothing-to-learn", "data")
    dead = case.cause("diagnosis.cause-no-gradient", norm=median(norms) if norms else 0.0)
    lost = max(curve.smooth) > curve.start + margin
    high = case.rate_too_high()
    ranked = (high, data, low) if lost else (dead, low, data) if norms and median(norms) < 1e-6 else (low, data, dead)
    yield Finding(Reason("diagnosis.loss-flat", evidence), "warning", "medium", ranked)


@check(explains={"loss-oscillating": ("loss-swings",)})
def oscillating(case: Case) -> Iterator[Finding]:
    """Yield a warning if neighbors of the last half alternate around the trend, by at least 5 % of the loss.

    The autocorrelation of noise is 0 with a standard deviation of 1 / sqrt(n), 0.1 for 100 steps; below -0.3 a step
    undoes the one before, as gradient descent does beyond its largest stable rate. Of sampled steps the neighbors are
    not known.
    """
    if (curve := case.curve) is None or (around := _around_trend(curve)) is None:
        return
    correlation = autocorrelation(around)
    if correlation > _OSCILLATION:
        return
    evidence = {"correlation": correlation, "band": deviation(around), "now": curve.now, "steps": len(around)}
    causes = (case.rate_too_high(case.lower_rate), case.cause("diagnosis.cause-alternating-data", "data"))
    yield Finding(Reason("diagnosis.loss-oscillating", evidence), "warning", "medium", causes)


@check(of_engine=True)
def swinging(case: Case) -> Iterator[Finding]:
    """Yield a warning if the last half of the loss swings around its trend: up and down over several steps, in periods.

    The autocorrelation is below -0.4 at half a period and above 0.25 at a whole one, with at least three periods; the
    band is at least 5 % of the loss. A heavy ball with momentum b oscillates so once its rate exceeds (1 - sqrt(b))^2
    over the curvature (Goh, Why Momentum Really Works, 2017). Of sampled steps nothing is known.
    """
    if (curve := case.curve) is None or (around := _around_trend(curve)) is None:
        return
    wave = swing(around, _SWINGS)
    if wave is None or wave.low > _SWING or wave.back < _SWING_BACK:
        return
    evidence = {"period": wave.period, "correlation": wave.low, "band": deviation(around)}
    evidence |= {"now": curve.now, "steps": len(around)}
    optimizer = case.spec.training.optimizer
    unused = optimizer.traits.unused
    key, beta = "momentum", optimizer.momentum
    to: Any = 0.9
    if key in unused:
        key, beta, to = "betas", optimizer.betas[0], [0.9, optimizer.betas[1]]
    causes = [case.rate_too_high(case.lower_rate)]
    if key not in unused:
        momentum = case.cause("diagnosis.cause-much-momentum", f"training.optimizer.{key}", to, beta=beta)
        causes.insert(0 if beta > 0.9 else 1, momentum)
    yield Finding(Reason("diagnosis.loss-swings", evidence), "warning", "medium", tuple(causes))


@check()
def spiking(case: Case) -> Iterator[Finding]:
    """Yield a note about spikes of the loss, or a warning if one has not returned in 50 steps or there are many.

    A spike exceeds the median of the 128 steps before by six robust standard deviations of the log. The spread counts
    as at least 1 % of the loss. One in ten healthy runs has some; more than 1 % of the steps, or an end of the curve
    within a spike, is instability (seed 004; PaLM, arXiv:2204.02311, section 5.1, whose spikes took 200 to 500 batches
    to leave out). What the guard has recorded counts too.
    """
    curve = case.curve
    if curve is None:
        return
    peaks = spikes(curve.values)
    recorded = [event for event in case.events_named("spike", "rolled-back") if event.get("cause", "spike") == "spike"]
    if not peaks and not recorded:
        return
    stays = bool(peaks) and not peaks[-1].returned and peaks[-1].after - peaks[-1].first >= _RETURN_STEPS
    outside = sum(spike.after - spike.first for spike in peaks)
    many = len(peaks) > 3 and outside > _MANY_SPIKES * len(curve.values)
    rolled = [event for event in recorded if event.get("event") == "rolled-back"]
    evidence: dict[str, Any] = {"count": max(len(peaks), len(recorded)), "rollbacks": len(rolled)}
    if peaks:
        worst = max(peaks, key=lambda spike: spike.peak / spike.level)
        evidence |= {"step": curve.steps[worst.first], "peak": worst.peak, "level": worst.level}
    else:
        losses = [loss for loss in recorded[-1].get("losses", ()) if isinstance(loss, int | float)]
        worst_step = (recorded[-1].get("steps") or [recorded[-1].get("from_step", recorded[-1].get("step", 0))])[0]
        evidence |= {"step": worst_step, "peak": max(losses, default=0.0)}
        evidence |= {"level": recorded[-1].get("median_loss") or 0.0}
    bad_batch = case.cause("diagnosis.cause-bad-batch", "data", step=evidence["step"])
    high = case.rate_too_high(case.lower_rate)
    beta = case.spec.training.optimizer.betas[1]
    betas = [case.spec.training.optimizer.betas[0], 0.95]
    slow = case.cause("diagnosis.cause-slow-second-moment", "training.optimizer.betas", betas, beta=beta)
    unstable = (high, slow, bad_batch) if beta > 0.95 else (high, bad_batch)
    causes = unstable if many or stays else (bad_batch, high)
    serious = stays or many or bool(recorded)
    yield Finding(Reason("diagnosis.loss-spikes", evidence), warning_if(serious), "high", causes)


def _step_of(event: Mapping[str, Any]) -> int | None:
    """Return the step of a rollback, or of the failure that ended an attempt; None if it has none."""
    step = event.get("from_step")
    params = event.get("params")
    while step is None and isinstance(params, Mapping):
        step = params.get("step")
        params = params["failure"].get("params") if isinstance(params.get("failure"), Mapping) else None
    return step if isinstance(step, int) else None


def _margin(curve: Curve, level: float) -> float:
    return max(2 * curve.noise, _LEAST_SHARE * abs(level))


def _after_warm_up(case: Case) -> int:
    return case.spec.training.schedule.warmup_steps


def _around_trend(curve: Curve) -> list[float] | None:
    """Return the last half of the losses without its trend; None below 5 % of the loss, and unless steps are neighbors.

    Also None for fewer than 64 steps.
    """
    last = curve.steps[-4 * _MIXED_STEPS :]
    if len(curve.values) < 2 * _MIXED_STEPS or last[-1] - last[0] != len(last) - 1:
        return None
    half = curve.values[len(curve.values) // 2 :][-4 * _MIXED_STEPS :]
    around = residuals(range(len(half)), half)
    return None if deviation(around) < _OSCILLATION_SHARE * abs(median(half)) else around


def _too_high(case: Case) -> tuple[Cause, ...]:
    causes = [case.rate_too_high(case.lower_rate)]
    if not case.spec.training.gradient_clipping:
        causes.append(case.cause("diagnosis.cause-no-clipping", "training.gradient_clipping", 1.0))
    return (*causes, case.short_warm_up(), case.cause("diagnosis.cause-changed-data", "data"))
