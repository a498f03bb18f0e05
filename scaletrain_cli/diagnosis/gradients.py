"""Checks of the gradient norm (before clipping, unscaled) and of the loss scale of fp16."""

from collections.abc import Iterator
from typing import Any

from scaletrain_cli.diagnosis.case import Case
from scaletrain_cli.diagnosis.curves import median, spikes
from scaletrain_cli.diagnosis.findings import Finding, Severity
from scaletrain_cli.reasons import Reason

_RECENT = 200
_FEWEST = 64
_CLIPPED_SHARE = 0.9
_CLIPPED_NORMS = 3.0
_HIGH_NORM = 5.0  # "constantly high (5+), your LR is too high" (seed 004)
_TREND = 10.0
_VANISHED = 1e-3
_SPIKE = 10.0
_SPIKES = 3
_SCALED_BY_CLIPPING = ("sgd", "momentum")
_SKIPPED_SHARE = 0.01
_WINDOWS = 2
_LOW_SCALE = 2.0**7


def always_clipped(case: Case) -> Iterator[Finding]:
    """Yield a finding if clipping changes nearly every step: over 90 % of the last 200, at a median norm of three times
    the limit.

    A norm that is always above the limit makes every gradient the same length. Adam divides by the length anyway, so
    this is a note; with SGD it is a learning rate that is lower by the same factor, hence a warning.
    """
    training = case.spec.training
    limit = training.gradient_clipping
    steps, norms = case.history.known("grad_norm")
    recent = [norm for step, norm in zip(steps, norms, strict=True) if step > training.schedule.warmup_steps]
    recent = recent[-_RECENT:]
    if not limit or training.gradient_clipping_by != "norm" or len(recent) < _FEWEST:
        return
    share, usual = sum(norm > limit for norm in recent) / len(recent), median(recent)
    if share <= _CLIPPED_SHARE or usual <= _CLIPPED_NORMS * limit:
        return
    evidence = {"share": share, "norm": usual, "limit": limit, "steps": len(recent)}
    low = case.cause(
        "diagnosis.cause-low-clipping",
        "training.gradient_clipping",
        max(1.0, float(f"{2 * usual:.1g}")),
        limit=limit,
        norm=usual,
    )
    high = case.rate_too_high()
    severity: Severity = "warning" if training.optimizer.name in _SCALED_BY_CLIPPING else "note"
    causes = (high, low) if usual > _HIGH_NORM else (low,)
    yield Finding(Reason("diagnosis.always-clipped", evidence), severity, "high", causes)


def norm_trend(case: Case) -> Iterator[Finding]:
    """Yield a warning if the gradient norm has grown tenfold since the end of the warm-up, or shrunk to a thousandth.

    The run's own level decides: the usual 0.5 to 2 (seed 004) depends on the width, the loss and the batch. A norm that
    grows over a long run precedes divergence (arXiv:2309.14322); one near zero trains nothing. A falling norm is
    healthy when the loss nears zero, so a thousandth counts only if the loss has not halved.
    """
    curve = case.curve
    steps, norms = case.history.known("grad_norm")
    after = [norm for step, norm in zip(steps, norms, strict=True) if step > case.spec.training.schedule.warmup_steps]
    if curve is None or len(after) < 2 * _FEWEST or case.changes_while_training:
        return
    early, now = median(after[: len(after) // 4]), median(after[-_FEWEST:])
    evidence = {"early": early, "now": now, "step": steps[-1]}
    rate = case.rate_too_high()
    if early > 0 and now > _TREND * early:
        decay = case.cause("diagnosis.cause-growing-weights", "training.optimizer.weight_decay")
        yield Finding(Reason("diagnosis.gradient-norm-grows", evidence), "warning", "medium", (rate, decay))
    elif now < _VANISHED * early and curve.now > curve.start / 2:
        dead = case.cause("diagnosis.cause-saturated", "model")
        yield Finding(Reason("diagnosis.gradient-vanishes", evidence), "warning", "medium", (rate, dead))


def norm_spikes(case: Case) -> Iterator[Finding]:
    """Yield a finding if the gradient norm is repeatedly ten times its level, as the guard counts outliers.

    More than three such spikes, and more than 1 % of the steps, are instability ("spikes to 10+ intermittently", seed
    004), although clipping hides them from the weights: a warning. Fewer are ordinary (arXiv:2501.06842).
    """
    steps, norms = case.history.known("grad_norm")
    found = [spike for spike in spikes(norms) if spike.peak > _SPIKE * spike.level]
    if len(found) <= _SPIKES or len(found) <= 0.01 * len(norms):
        return
    worst = max(found, key=lambda spike: spike.peak / spike.level)
    evidence: dict[str, Any] = {"count": len(found), "steps": len(norms), "step": steps[worst.first]}
    evidence |= {"peak": worst.peak, "level": worst.level}
    causes = [case.rate_too_high(case.lower_rate)]
    if not case.spec.training.gradient_clipping:
        causes.append(case.cause("diagnosis.cause-no-clipping", "training.gradient_clipping", 1.0))
    causes.append(case.cause("diagnosis.cause-bad-batch", "data", step=evidence["step"]))
    yield Finding(Reason("diagnosis.gradient-norm-spikes", evidence), "warning", "medium", tuple(causes))


def dead_gradients(case: Case) -> Iterator[Finding]:
    """Yield an error if the guard has recorded gradients of zero, or of a millionth of their level."""
    for event in list(case.events_named("dead-gradients"))[-1:]:
        norms = [norm for norm in event.get("norms", ()) if isinstance(norm, int | float)]
        evidence = {"step": event.get("step", 0), "norm": max(norms, default=0.0), "steps": len(norms)}
        causes = (
            case.cause("diagnosis.cause-saturated", "model"),
            case.cause("diagnosis.cause-ignored-targets", "data"),
        )
        yield Finding(Reason("diagnosis.gradients-dead", evidence), "error", "high", causes)


def loss_scale(case: Case) -> Iterator[Finding]:
    """Yield a finding if the loss scale of fp16 collapses: an error at its minimum.

    Dynamic scaling skips about one step per window of growth, and at first one per halving. So a warning for over 1 %
    of skipped steps in two windows in a row, or for a scale below 2^7 that is still falling (arXiv:1710.03740). A
    collapse that the guard recorded is enough after any number of steps: the run may have ended there.
    """
    settings = case.spec.training.loss_scale
    _steps, scales = case.history.known("loss_scale")
    collapsed = list(case.events_named("loss-scale-collapsed"))
    if case.spec.training.precision != "fp16" or (len(scales) < _FEWEST and not collapsed):
        return
    skipped = [value == 1.0 for value in case.history.column("skipped")]
    applied = next((at for at, skip in enumerate(skipped) if not skip), 0)
    skipped, scales = skipped[applied:], scales[applied:]
    now = scales[-1]
    window = settings.window if case.history.is_whole else len(skipped) // 4
    windows = [skipped[-(number + 1) * window : len(skipped) - number * window] for number in range(_WINDOWS)]
    often = all(len(one) >= window > 0 and sum(one) > max(1, _SKIPPED_SHARE * len(one)) for one in windows)
    falls = now < _LOW_SCALE and now < scales[len(scales) // 2]
    if not (often or falls or collapsed or now <= settings.minimum):
        return
    evidence: dict[str, Any] = {"scale": now, "first": scales[0], "skipped": sum(skipped), "steps": len(skipped)}
    causes = (
        case.cause("diagnosis.cause-fp16-range", "training.precision", "bf16"),
        case.rate_too_high(case.lower_rate),
    )
    severity: Severity = "error" if now <= settings.minimum else "warning"
    yield Finding(Reason("diagnosis.loss-scale-collapses", evidence), severity, "high", causes)
