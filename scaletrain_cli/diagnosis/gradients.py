"""Checks of the gradient norm (before clipping, unscaled), of fp16's loss scale, and of layers beside like ones."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from scaletrain_cli.diagnosis.case import Case, check
from scaletrain_cli.diagnosis.curves import median, spikes
from scaletrain_cli.diagnosis.findings import Finding, Severity, warning_if
from scaletrain_cli.reasons import Reason, Texts

TEXTS: Texts = {
    "always-clipped": "{share:percent} of the last {steps:of step} are clipped: the gradient norm is {norm:.3g}, the "
    "limit {limit:.3g}",
    "gradient-norm-grows": "the gradient norm grows: {now:.3g} at step {step:whole}, {early:.3g} after the warm-up",
    "gradient-vanishes": "the gradient vanishes: its norm is {now:.3g} at step {step:whole}, {early:.3g} before",
    "gradient-norm-spikes": "{count:of spike} of the gradient norm in {steps:of step}, to ten times its level or "
    "more; the largest at step {step:whole}: {peak:.3g} from {level:.3g}",
    "gradients-dead": "the gradient was zero for {steps:of step} until step {step:whole} (norm {norm:.3g} at most)",
    "loss-scale-collapses": "the loss scale of fp16 collapses: {scale:g} now, {first:g} at first; {skipped:whole} of "
    "{steps:of step} skipped",
    "layer-dead": "{layer} gets no gradient: {norm:.3g}, others {usual:.3g} ({count:of layer} in all)",
    "layer-silent": "{share:percent} of the units of {layer} are zero for all inputs ({count:of layer} in all)",
    "layer-exploding": "the {what} of {layer} are {value:.3g}, {times:.0f} times those of others ({usual:.3g})",
    "update-ratio": "each step changes {layer} by {ratio:percent} of its weights, like layers by {usual:percent}",
    "cause-zero-weights": "its weights are zero at first, or have been masked",
    "cause-large-layer": "its first weights are larger than those of others, or nothing normalizes its input",
    "cause-small-weights": "its weights are far smaller than those of others",
    "cause-fp16-range": "activations or gradients leave the range of fp16; bf16 needs no loss scale",
    "cause-growing-weights": "weights or logits grow; weight decay holds them",
    "cause-ignored-targets": "no token of the batches counts in the loss",
    "cause-low-clipping": "the limit of {limit:g} is far below the usual norm of {norm:.3g}",
    "cause-no-clipping": "gradients are not clipped",
    "cause-saturated": "units are saturated or dead, and pass no gradient on",
}

_CHECKS = 3
_DEAD_SHARE = 0.5
_EXPLODED = 100.0
_UPDATE_TIMES = 10.0
_LEAST_UPDATE = 0.01
_NUMBER = re.compile(r"\d+")


@check(explains={"gradients-dead": ("loss-flat", "gradient-vanishes", "layer-dead")})
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


@check(of_engine=True)
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


@check()
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


def _latest(case: Case, column: str, after: int = 0) -> dict[str, list[float]]:
    """Return the last three measured values of a column by layer, of those that have three."""
    by_layer = {}
    for name, series in case.telemetry.layers.items():
        rows = zip(series.steps, series.mean.get(column, ()), strict=False)
        values = [value for step, value in rows if value == value and step > after]
        if len(values) >= _CHECKS:
            by_layer[name] = values[-_CHECKS:]
    return by_layer


def _of_like_layers(by_layer: Mapping[str, list[float]], name: str) -> float | None:
    """Return the median of the other layers whose names differ by a number; None if there are none."""
    groups: dict[str, list[str]] = defaultdict(list)
    for layer in by_layer:
        groups[_NUMBER.sub("#", layer)].append(layer)
    others = [median(by_layer[layer]) for layer in groups[_NUMBER.sub("#", name)] if layer != name]
    return median(others) if others else None


def _of_all(by_layer: Mapping[str, list[float]]) -> float:
    return median([median(values) for values in by_layer.values()])


_RECENT = 200
_FEWEST = 64
_CLIPPED_SHARE = 0.9
_CLIPPED_NORMS = 3.0
_HIGH_NORM = 5.0  # "constantly high (5+), your LR is too high" (seed 004)
_TREND = 10.0
_VANISHED = 1e-3
_SPIKE = 10.0
_SPIKES = 3
_SKIPPED_SHARE = 0.01
_WINDOWS = 2
_LOW_SCALE = 2.0**7


@check()
def norm_spikes(case: Case) -> Iterator[Finding]:
    """Yield a finding if the gradient norm is repeatedly ten times its level, as the guard counts outliers.

    More than three such spikes, and more than 1 % of the steps, are instability ("spikes to 10+ intermittently", seed
    004), although clipping hides them from the weights: a warning. Fewer are ordinary (arXiv:2501.06842).
    """
    steps, norms = case.history.known("grad_norm")
    outliers = [spike for spike in spikes(norms) if spike.peak > _SPIKE * spike.level]
    if len(outliers) <= _SPIKES or len(outliers) <= 0.01 * len(norms):
        return
    worst = max(outliers, key=lambda spike: spike.peak / spike.level)
    evidence: dict[str, Any] = {"count": len(outliers), "steps": len(norms), "step": steps[worst.first]}
    evidence |= {"peak": worst.peak, "level": worst.level}
    causes = [case.rate_too_high(case.lower_rate)]
    if not case.spec.training.gradient_clipping:
        causes.append(case.cause("diagnosis.cause-no-clipping", "training.gradient_clipping", 1.0))
    causes.append(case.cause("diagnosis.cause-bad-batch", "data", step=evidence["step"]))
    yield Finding(Reason("diagnosis.gradient-norm-spikes", evidence), "warning", "medium", tuple(causes))


@check(of_engine=True)
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
    causes = (high, low) if usual > _HIGH_NORM else (low,)
    serious = training.optimizer.traits.kind == "sgd"
    yield Finding(Reason("diagnosis.always-clipped", evidence), warning_if(serious), "high", causes)


@check()
def dead_layers(case: Case) -> Iterator[Finding]:
    """Yield a warning about layers through which nothing is learned, in the last three measurements of each.

    Their gradient is zero, or a thousandth of that of like layers (the same name but for its number); or over half of
    their units are zero for all tokens that were looked at. Layers that do not train have no gradient and are left out.
    """
    gradients = _latest(case, "gradient_norm")
    dead: dict[str, tuple[float, float]] = {}
    for name, values in gradients.items():
        usual = min(_of_like_layers(gradients, name) or math.inf, _of_all(gradients))  # a like layer may explode
        if usual > 0 and max(values) <= _VANISHED * usual:
            dead[name] = max(values), usual
    silent = {name: min(values) for name, values in _latest(case, "dead_share").items() if min(values) > _DEAD_SHARE}
    if not dead and not silent:
        return
    causes = (
        case.cause("diagnosis.cause-saturated", "model"),
        case.cause("diagnosis.cause-zero-weights", "model.initializer_range"),
        case.rate_too_high(),
    )
    if dead:
        name = min(dead, key=lambda layer: (dead[layer][0], layer))
        evidence = {"layer": name, "norm": dead[name][0], "usual": dead[name][1], "count": len(dead)}
        yield Finding(Reason("diagnosis.layer-dead", evidence), "warning", "high", causes)
        return
    name = max(silent, key=silent.__getitem__)
    silence = {"layer": name, "share": silent[name], "count": len(silent)}
    yield Finding(Reason("diagnosis.layer-silent", silence), "warning", "medium", causes)


@check()
def exploding_layers(case: Case) -> Iterator[Finding]:
    """Yield a warning about layers whose gradient or activations are a hundred times those of like layers.

    In the last three measurements; "like" as above. With one layer of a kind, all layers are compared, at a thousand
    times. The usual spread of a trained network is about ten (mean of squares, arXiv:2203.03466).
    """
    for column, what in (("activation_rms", "activations"), ("gradient_norm", "gradient")):
        by_layer = _latest(case, column)
        worst: tuple[float, str, float, float] | None = None
        for name, values in by_layer.items():
            like = _of_like_layers(by_layer, name)
            usual, limit = (like, _EXPLODED) if like else (_of_all(by_layer), 10 * _EXPLODED)
            if usual > 0 and min(values) > limit * usual and (worst is None or min(values) / usual > worst[0]):
                worst = min(values) / usual, name, min(values), usual
        if worst is None:
            continue
        times, name, value, usual = worst
        evidence = {"layer": name, "what": what, "value": value, "usual": usual, "times": times}
        causes = (
            case.cause("diagnosis.cause-large-layer", "model.initializer_range"),
            case.rate_too_high(),
            case.cause("diagnosis.cause-growing-weights", "training.optimizer.weight_decay"),
        )
        yield Finding(Reason("diagnosis.layer-exploding", evidence), "warning", "high", causes)
        return


@check()
def update_ratio(case: Case) -> Iterator[Finding]:
    """Yield a finding if a step changes a layer by over 1 % of its weights, ten times what it changes like layers by.

    The ratio of update and weight itself is no criterion: with Adam it follows from the rate and the size of the
    weights, about 0.3 lr / std. After the warm-up, in the last three measurements.
    """
    by_layer = _latest(case, "update_ratio", after=case.spec.training.schedule.warmup_steps)
    for name, values in by_layer.items():
        usual = _of_like_layers(by_layer, name)
        if usual and min(values) > max(_UPDATE_TIMES * usual, _LEAST_UPDATE):
            evidence = {"layer": name, "ratio": min(values), "usual": usual}
            causes = (
                case.cause("diagnosis.cause-small-weights", "model.initializer_range"),
                case.rate_too_high(),
            )  # fmt: skip
            yield Finding(Reason("diagnosis.update-ratio", evidence), "warning", "low", causes)
            return
