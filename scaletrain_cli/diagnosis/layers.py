"""Checks of layers by their telemetry: gradients, activations and updates beside those of like layers."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from scaletrain_cli.diagnosis.case import Case
from scaletrain_cli.diagnosis.curves import median
from scaletrain_cli.diagnosis.findings import Finding
from scaletrain_cli.reasons import Reason

_CHECKS = 3
_DEAD_SHARE = 0.5
_VANISHED = 1e-3
_EXPLODED = 100.0
_UPDATE_TIMES = 10.0
_LEAST_UPDATE = 0.01
_NUMBER = re.compile(r"\d+")


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


def exploding_layers(case: Case) -> Iterator[Finding]:
    """Yield a warning about layers whose gradient or activations are a hundred times those of like layers.

    In the last three measurements; "like" as above. With one layer of a kind, all layers are compared, at a thousand
    times. The usual spread of a trained network is about ten (mean of squares, arXiv:2203.03466).
    """
    for column, what in (("activation_rms", "activations"), ("gradient_norm", "gradient")):
        found = _latest(case, column)
        worst: tuple[float, str, float, float] | None = None
        for name, values in found.items():
            like = _of_like_layers(found, name)
            usual, limit = (like, _EXPLODED) if like else (_of_all(found), 10 * _EXPLODED)
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


def update_ratio(case: Case) -> Iterator[Finding]:
    """Yield a finding if a step changes a layer by over 1 % of its weights, ten times what it changes like layers by.

    The ratio of update and weight itself is no criterion: with Adam it follows from the rate and the size of the
    weights, about 0.3 lr / std. After the warm-up, in the last three measurements.
    """
    found = _latest(case, "update_ratio", after=case.spec.training.schedule.warmup_steps)
    for name, values in found.items():
        usual = _of_like_layers(found, name)
        if usual and min(values) > max(_UPDATE_TIMES * usual, _LEAST_UPDATE):
            evidence = {"layer": name, "ratio": min(values), "usual": usual}
            causes = (
                case.cause("diagnosis.cause-small-weights", "model.initializer_range"),
                case.rate_too_high(),
            )  # fmt: skip
            yield Finding(Reason("diagnosis.update-ratio", evidence), "warning", "low", causes)
            return


def _latest(case: Case, column: str, after: int = 0) -> dict[str, list[float]]:
    """Return the last three measured values of a column by layer, of those that have three."""
    found = {}
    for name, series in case.telemetry.layers.items():
        rows = zip(series.steps, series.mean.get(column, ()), strict=False)
        values = [value for step, value in rows if value == value and step > after]
        if len(values) >= _CHECKS:
            found[name] = values[-_CHECKS:]
    return found


def _of_like_layers(found: Mapping[str, list[float]], name: str) -> float | None:
    """Return the median of the other layers whose names differ by a number; None if there are none."""
    groups: dict[str, list[str]] = defaultdict(list)
    for each in found:
        groups[_NUMBER.sub("#", each)].append(each)
    others = [median(found[each]) for each in groups[_NUMBER.sub("#", name)] if each != name]
    return median(others) if others else None


def _of_all(found: Mapping[str, list[float]]) -> float:
    return median([median(values) for values in found.values()])
