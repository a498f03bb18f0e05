"""Checks of validation and sources: overfitting, underfitting, other data, and sources that are not learned."""

import math
from collections.abc import Iterator

from scaletrain_cli.diagnosis.case import Case, check
from scaletrain_cli.diagnosis.curves import fall_of, median, noise
from scaletrain_cli.diagnosis.findings import Finding
from scaletrain_cli.diagnosis.history import SOURCE_LOSS
from scaletrain_cli.reasons import Reason, Texts
from scaletrain_cli.spec import ModelSpec

TEXTS: Texts = {
    "overfitting": "the model overfits: the validation loss rose to {now:.3f} at step {step:whole} from {best:.3f} at "
    "step {best_step:whole}, while the training loss fell to {training:.3f}",
    "source-stands-still": "{source:source} is not learned: its loss is {now:.3f}, {early:.3f} before, while that of "
    "another source fell by {others:percent}",
    "validation-far-above": "the validation loss of {validation:.3f} at step {step:whole} is {gap:.3f} above the "
    "training loss of {training:.3f}",
    "underfitting": "the model underfits: training ({training:.3f}) and validation ({validation:.3f}) stand close to "
    "each other at step {step:whole}, not far below the {reference:.3f} of a model without context",
    "cause-other-validation-data": "the validation data are of another kind than the training data",
    "cause-much-regularization": "the weight decay of {decay:g} holds the weights near zero",
    "cause-small-model": "the model is too small for the data",
    "cause-keep-best": "the best checkpoint may be deleted as newer ones are saved",
    "cause-learned-source": "{source:source} has been learned; more of it teaches little",
    "cause-little-data": "the data are few for this model, and are repeated",
    "cause-little-regularization": "little regularization",
    "cause-random-source": "{source:source} cannot be predicted: damaged text, another encoding, or random data",
    "cause-rare-source": "{source:source} is too rare in the batches",
    "cause-trained-too-long": "training went on after step {step:whole}, when the validation was best",
}

_FEWEST_VALIDATIONS = 4
_GAP_SHARE, _GAP_NATS = 0.5, 0.5
_GAP_VALIDATIONS = 3
_FIT_GAP = 0.05
_HIGH_OF_ENTROPY, _HIGH_OF_UNINFORMED = 0.8, 0.5
_NO_FALL = 0.05
_MUCH_DECAY = 0.5
_FIT_STEPS = 100
_RISEN_VALIDATIONS = 2
_RISE = 0.02
_SAMPLE_DEVIATION = 0.5
_FEWEST_STEPS = 128
_STANDS = 0.02
_LEARNS = 0.05
_SHARE_OF_OTHERS = 0.25


@check(explains={"overfitting": ("validation-far-above", "data-repeated", "loss-stairs")})
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
    epochs = case.epochs_at(validations[-1].step)
    if epochs is not None and epochs <= 1 and any(validation_above_training(case)):
        return  # nothing can have been memorized: the validation data are others
    evidence = {
        "best": losses[best],
        "best_step": validations[best].step,
        "now": losses[-1],
        "step": validations[-1].step,
        "training": curve.now,
    }
    stop = case.cause(
        "diagnosis.cause-trained-too-long", "training.early_stopping.patience", 3, step=validations[best].step
    )
    little = case.cause("diagnosis.cause-little-data", "data")
    decay = case.cause("diagnosis.cause-little-regularization", "training.optimizer.weight_decay")
    keep = case.cause("diagnosis.cause-keep-best", "checkpoint.keep_best", "validation_loss")
    causes = (little, stop, decay) if case.spec.checkpoint.keep_best else (little, stop, keep, decay)
    yield Finding(Reason("diagnosis.overfitting", evidence), "warning", "high", causes)


@check(explains={"validation-far-above": ("loss-stairs",)})
def validation_above_training(case: Case) -> Iterator[Finding]:
    """Yield a warning if the last three validations are above the training loss by half of it and half a nat.

    In the first epoch, where nothing can have been memorized, the validation data are others; later the model overfits,
    and ``overfitting`` names it once the validation rises. Losses that a validation does not share are left out: those
    of mixed or augmented images, and of regularization.
    """
    validations, curve = case.history.validations, case.curve
    if len(validations) < _GAP_VALIDATIONS or curve is None or case.changes_while_training:
        return
    if not isinstance(case.spec.model, ModelSpec):
        return
    gaps = []
    for validation in validations[-_GAP_VALIDATIONS:]:
        if (training := _training_at(case, validation.step)) is None:
            return
        gaps.append((validation.loss - training, training))
    if any(gap < max(_GAP_SHARE * abs(training), _GAP_NATS) for gap, training in gaps):
        return
    gap, training = gaps[-1]
    epochs = case.epochs_at(validations[-1].step)
    evidence = {"validation": validations[-1].loss, "training": training, "gap": gap, "step": validations[-1].step}
    other = case.cause("diagnosis.cause-other-validation-data", "data")
    little = case.cause("diagnosis.cause-little-data", "data")
    causes = (little, other) if epochs is not None and epochs > 1 else (other, little)
    yield Finding(Reason("diagnosis.validation-far-above", evidence), "warning", "medium", causes)


@check()
def underfitting(case: Case) -> Iterator[Finding]:
    """Yield a warning if training and validation both stand high, close to each other, after half of the steps.

    Not before 100 steps after the warm-up: a model that has just learned the frequencies of tokens stands there, too.

    High: above 80 % of the entropy of the token frequencies of the text, or where that is not known half the loss of
    equal outputs. Close: by 5 % or two standard errors, for which a sample has a standard deviation of half a nat.
    Standing: the last half of the steps fell by less than 5 % in all. Without such a reference nothing is concluded.
    """
    validations, curve, uninformed = case.history.validations, case.curve, case.uninformed_loss
    if len(validations) < _GAP_VALIDATIONS or curve is None or uninformed is None or case.changes_while_training:
        return
    entropy = None if case.dataset is None else case.dataset.token_entropy
    share, reference = (_HIGH_OF_UNINFORMED, uninformed) if entropy is None else (_HIGH_OF_ENTROPY, entropy)
    loss, samples = validations[-1].loss, validations[-1].sequences
    error = 2 * _SAMPLE_DEVIATION / math.sqrt(samples) if samples else 0.0
    least = max(case.spec.total_steps / 2, case.spec.training.schedule.warmup_steps + _FIT_STEPS)
    if min(curve.now, loss) < share * reference or curve.steps[-1] < least:
        return
    if curve.start - curve.now < _LEARNS * curve.start:  # it does not fall at all, see loss-flat
        return
    if fall_of(curve.values[len(curve.values) // 2 :]) > _NO_FALL * curve.now:
        return
    if abs(loss - curve.now) > max(_FIT_GAP * curve.now, error):
        return
    decay = case.spec.training.optimizer.weight_decay
    evidence = {"training": curve.now, "validation": loss, "reference": reference, "step": curve.steps[-1]}
    strong = case.cause(
        "diagnosis.cause-much-regularization", "training.optimizer.weight_decay", min(0.1, decay / 10), decay=decay
    )
    small = case.cause("diagnosis.cause-small-model", "model")
    rate = case.rate_too_low()
    causes = (strong, small, rate) if decay > _MUCH_DECAY else (small, rate, strong)
    yield Finding(Reason("diagnosis.underfitting", evidence), "warning", "low", causes)


@check()
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
        unlearnable = case.cause("diagnosis.cause-random-source", "data.sources", source=source)
        learned = case.cause("diagnosis.cause-learned-source", "data.sources", source=source)
        rare = case.cause("diagnosis.cause-rare-source", "data.sources", source=source)
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
