"""Checks of validation and sources: overfitting, and sources that are not learned."""

from __future__ import annotations

import math
from collections.abc import Iterator

from scaletrain_cli.diagnosis.case import Case
from scaletrain_cli.diagnosis.curves import median, noise
from scaletrain_cli.diagnosis.findings import Cause, Finding
from scaletrain_cli.diagnosis.history import SOURCE_LOSS
from scaletrain_cli.reasons import Reason

_FEWEST_VALIDATIONS = 4
_RISEN_VALIDATIONS = 2
_RISE = 0.02
_SAMPLE_DEVIATION = 0.5
_FEWEST_STEPS = 128
_STANDS = 0.02
_LEARNS = 0.05
_SHARE_OF_OTHERS = 0.25


def overfitting(case: Case) -> Iterator[Finding]:
    """Yield a warning if the validation loss has risen from its best value while the training loss fell.

    Risen: the last two validations, and the median of those since the best, are above it by 2 % and by two standard
    errors, for which a sample has a standard deviation of half a nat. The same samples are validated each time. The
    training loss must have fallen since the best validation (seed 004: "training loss continues to decrease but
    validation loss stagnates or increases").
    """
    validations, curve = case.history.validations, case.curve
    if len(validations) < _FEWEST_VALIDATIONS or curve is None or case.changes_while_training:
        return
    losses = [validation.loss for validation in validations]
    best = min(range(len(losses)), key=losses.__getitem__)
    since = losses[best + 1 :]
    samples = validations[-1].sequences
    error = 2 * _SAMPLE_DEVIATION / math.sqrt(samples) if samples else 0.0
    least = losses[best] + max(_RISE * abs(losses[best]), error)
    if len(since) < _RISEN_VALIDATIONS or median(since) <= least or min(since[-_RISEN_VALIDATIONS:]) <= least:
        return
    then = _training_at(case, validations[best].step)
    if then is None or curve.now >= then - curve.noise:
        return
    evidence = {
        "best": losses[best],
        "best_step": validations[best].step,
        "now": losses[-1],
        "step": validations[-1].step,
        "training": curve.now,
    }
    stop = Cause(
        Reason("diagnosis.cause-trained-too-long", {"step": validations[best].step}),
        case.change("training.early_stopping.patience", 3),
    )
    little = Cause(Reason("diagnosis.cause-little-data"), case.change("data"))
    decay = Cause(Reason("diagnosis.cause-little-regularization"), case.change("training.optimizer.weight_decay"))
    keep = Cause(Reason("diagnosis.cause-keep-best"), case.change("checkpoint.keep_best", "validation_loss"))
    causes = (little, stop, decay) if case.spec.checkpoint.keep_best else (little, stop, keep, decay)
    yield Finding(Reason("diagnosis.overfitting", evidence), "warning", "high", causes)


def source_stands_still(case: Case) -> Iterator[Finding]:
    """Yield a warning for each source whose loss has hardly fallen while that of another has.

    Since the first quarter of the steps, at least 128 in all: another source fell by 5 % or more, and this one by less
    than 2 % or three errors of its median, or by less than 5 % and a quarter of the other. A low loss has been learned.
    """
    history = case.history
    if len(history.sources) < 2 or case.spec.data.stages:
        return
    falls: dict[str, tuple[float, float, float]] = {}
    for source in history.sources:
        _, values = history.known(f"{SOURCE_LOSS}{source}")
        if len(values) < _FEWEST_STEPS:
            continue
        part, first = len(values) // 8, len(values) // 4
        falls[source] = median(values[first : first + part]), median(values[-part:]), noise(values) / math.sqrt(part)
    for source, (early, now, error) in falls.items():
        best = max([(falls[other][0] - falls[other][1]) / falls[other][0] for other in falls if other != source] or [0])
        fall = (early - now) / early
        stands = early - now <= max(_STANDS * early, 3 * error) or fall < min(_LEARNS, best * _SHARE_OF_OTHERS)
        if best < _LEARNS or not stands:
            continue
        uninformed = case.uninformed_loss
        evidence = {"source": source, "early": early, "now": now, "others": best}
        unlearnable = Cause(Reason("diagnosis.cause-random-source", {"source": source}), case.change("data.sources"))
        learned = Cause(Reason("diagnosis.cause-learned-source", {"source": source}), case.change("data.sources"))
        rare = Cause(Reason("diagnosis.cause-rare-source", {"source": source}), case.change("data.sources"))
        low = uninformed is not None and now < uninformed / 4
        causes = (learned, rare) if low else (unlearnable, rare)
        yield Finding(Reason("diagnosis.source-stands-still", evidence), "warning", "medium", causes)


def _training_at(case: Case, step: int) -> float | None:
    """Return the median training loss around a step; None if nothing was measured there."""
    curve = case.curve
    if curve is None:
        return None
    near = sorted(range(len(curve.steps)), key=lambda place: abs(curve.steps[place] - step))[:15]
    return median([curve.values[place] for place in near]) if near else None
