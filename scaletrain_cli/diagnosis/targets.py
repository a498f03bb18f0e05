"""Checks of what is predicted, by the shape of the loss: targets that are visible, that do not follow, or that repeat.

These are signatures. The direct tests, with labels compared with inputs token by token, are those of a rehearsal.
"""

from collections.abc import Iterator
from typing import Any

from scaletrain_cli.diagnosis.case import Case, check
from scaletrain_cli.diagnosis.curves import fall_of, median, noise
from scaletrain_cli.diagnosis.findings import Cause, Finding, warning_if
from scaletrain_cli.reasons import Reason, Texts
from scaletrain_cli.spec import ModelSpec

TEXTS: Texts = {
    "targets-visible": "the loss is {now:.3f} and was below {limit:.2f} from step {step:whole} on, where equal "
    "outputs have {uninformed:.3f}: so little cannot be learned so soon",
    "order-not-learned": "the loss stands at {now:.3f} at step {last:whole}, near the {entropy:.3f} of token "
    "frequencies, which it reached at step {step:whole}: which token follows which is not learned",
    "data-duplicated": "{share:percent} of the passages of the training text ({tokens:whole} tokens) occur again in a "
    "sample of it",
    "data-repeated": "the {tokens:whole} tokens of the training text have been read {epochs:.1f} times",
    "loss-stairs": "the loss falls in stairs where an epoch begins ({count:of time}), by {fall:.3g} at step "
    "{step:whole}",
    "loss-falls-at-resume": "the loss is lower by {fall:.3g} after a resume at step {step:whole} ({count:of time}), "
    "as for text that was read before",
    "cause-unshifted-labels": "labels are the inputs themselves, not shifted by one; `scaletrain rehearse` compares "
    "them token by token",
    "cause-shifted-labels": "labels are shifted once too often, or do not belong to the inputs; `scaletrain rehearse` "
    "compares them token by token",
    "cause-shuffled-tokens": "the order of the tokens carries nothing: shuffled or encoded text",
    "cause-repetitive-data": "the text is the same few passages again and again",
    "cause-one-class": "all images have the same label: a column of labels that is not read",
    "cause-duplicates": "the text holds copies; `data.steps` can remove them",
    "cause-many-epochs": "fewer steps would do",
    "cause-sampler-restarts": "the sampler began anew with the attempt, and repeats what was read",
}

_VISIBLE_NATS = 1.0  # "under ~1 nat in hundreds of steps": text is not that predictable
_VISIBLE_SHARE = 0.2
_VISIBLE_EPOCHS = 2.0  # after more the text may have been memorized
_ONE_CLASS_SHARE = 0.02
_EARLY_STEPS = 100
_NEAR_ENTROPY = 0.9
_STANDS = 0.03
_STAND_STEPS = 100
_VALIDATION_FALLS = 0.05
_REPEATED = 0.3
_FRESH_EPOCHS = 4.0
_MANY_EPOCHS = 8.0
_BORDER_STEPS = 8


@check()
def targets_visible(case: Case) -> Iterator[Finding]:
    """Yield a warning if a new model predicts its targets better than any model can within so few steps.

    Text: below one nat and a fifth of ln V within two epochs, as for labels that are not shifted, so that each token
    has to be predicted from itself. Both losses, if there is a validation: a low training loss alone is memorized.
    Classes: below 2 % of ln of their number within 100 steps, as for labels that are all the same.
    """
    curve, uninformed = case.curve, case.uninformed_loss
    if curve is None or uninformed is None or case.changes_while_training:
        return
    is_text = isinstance(case.spec.model, ModelSpec)
    share = _VISIBLE_SHARE if is_text else _ONE_CLASS_SHARE
    limit = min(_VISIBLE_NATS, share * uninformed) if is_text else share * uninformed
    first = next(
        (step for step, value, later in zip(curve.steps, curve.smooth, curve.smooth[1:], strict=False)
         if max(value, later) < limit), None,
    )  # fmt: skip
    if first is None or curve.now >= limit:
        return
    if is_text and (case.epochs_at(first) or 0.0) > _VISIBLE_EPOCHS:
        return
    if not is_text and (first > _EARLY_STEPS or getattr(case.spec.model, "num_labels", 0) < 2):
        return
    validations = case.history.validations
    if validations and validations[-1].loss >= max(2 * limit, 3 * curve.now):
        return
    evidence = {"now": curve.now, "step": first, "uninformed": uninformed, "limit": limit}
    causes: tuple[Cause, ...] = (case.cause("diagnosis.cause-one-class", "data"),)
    if is_text:
        causes = (
            case.cause("diagnosis.cause-unshifted-labels", "data"),
            case.cause("diagnosis.cause-repetitive-data", "data"),
        )
    yield Finding(Reason("diagnosis.targets-visible", evidence), "warning", "medium", causes)


@check(explains={"order-not-learned": ("underfitting",)})
def order_not_learned(case: Case) -> Iterator[Finding]:
    """Yield a warning if a new language model stands near the entropy of the token frequencies of its data.

    Predicting each token by its frequency alone is learned first, in tens of steps. The loss of a model that sees the
    tokens before leaves that level soon; one whose labels are shifted once too often, or do not belong to its inputs,
    stands 1 to 2 nats higher than it should. "Near": above 90 % of the entropy after twice as many steps as it took to
    come within 10 % of it, at least 100, and the last half of the steps since fell by less than 3 %. Not while
    validations since fell by more than 5 % to less than the entropy: that is more than frequencies.
    """
    curve, dataset = case.curve, case.dataset
    if curve is None or dataset is None or not case.is_fresh_text or case.changes_while_training:
        return
    entropy = dataset.token_entropy
    if (
        entropy is None
        or curve.now < _NEAR_ENTROPY * entropy
        or curve.now > 1.1 * entropy
        or curve.start < 1.1 * entropy
    ):
        return
    came = next(step for step, value in zip(curve.steps, curve.smooth, strict=True) if value < 1.1 * entropy)
    since = max(2 * came, came + _STAND_STEPS, case.spec.training.schedule.warmup_steps + _STAND_STEPS)
    if curve.steps[-1] < since:
        return
    later = [value for step, value in zip(curve.steps, curve.values, strict=True) if step > came]
    half = later[len(later) // 2 :]
    if fall_of(half) > _STANDS * curve.now:
        return
    held_out = [one.loss for one in case.history.validations if one.step > came]
    if len(held_out) > 1 and held_out[-1] < min(entropy, (1 - _VALIDATION_FALLS) * held_out[0]):
        return
    evidence = {"now": curve.now, "entropy": entropy, "step": came, "last": curve.steps[-1]}
    # A step of Adam changes a weight by about the rate: one that exceeds the spread of the first weights replaces them.
    model = case.spec.model
    lost = max(curve.smooth) > curve.start * 1.05
    lost |= isinstance(model, ModelSpec) and case.peak_rate > model.initializer_range
    rate = case.rate_too_high()
    shifted = case.cause("diagnosis.cause-shifted-labels", "data")
    shuffled = case.cause("diagnosis.cause-shuffled-tokens", "data")
    small = case.cause("diagnosis.cause-small-model", "model")
    causes: tuple[Cause, ...]
    low = case.rate_too_low()
    causes = (rate, shifted) if lost else (shifted, rate, shuffled, small)
    if case.spec.training.optimizer.traits.kind == "sgd":  # far slower than Adam on text
        causes = (low, shifted, shuffled, small)
    yield Finding(Reason("diagnosis.order-not-learned", evidence), "warning", "low", causes)


@check(explains={"data-duplicated": ("targets-visible", "loss-stairs")})
def repeated_passages(case: Case) -> Iterator[Finding]:
    """Yield a warning if over 30 % of the passages of the training text occur again in a sample of it.

    200 passages of 32 tokens in up to a million tokens. Web text without deduplication has a few percent; repeated text
    is worth less with each repetition (arXiv:2205.10487, arXiv:2305.16264) and its validation split is no test.
    """
    dataset = case.dataset
    share = None if dataset is None else dataset.repeated_share
    if dataset is None or share is None or share <= _REPEATED:
        return
    evidence = {"share": share, "tokens": dataset.train_tokens}
    causes = (case.cause("diagnosis.cause-duplicates", "data"),)
    yield Finding(Reason("diagnosis.data-duplicated", evidence), "warning", "high", causes)


@check(explains={"loss-falls-at-resume": ("loss-spikes", "loss-rising")})
def stairs(case: Case) -> Iterator[Finding]:
    """Yield a warning if the training loss falls in stairs where an epoch begins, or where an attempt resumed.

    A stair: the median after the border is below that before it by 3 % and five standard errors, and by twice what the
    steps beside it fell, at most borders. At the start of an epoch it is text that the model knows; after a resume,
    text that it has just read: a sampler that began anew. The loss is then lower than that of new text.
    """
    curve = case.curve
    if curve is None or case.changes_while_training:
        return
    resumed = [event["step"] for event in case.events_named("resumed") if isinstance(event.get("step"), int)]
    for code, borders in (("stairs", _borders(case)), ("repeats-after-resume", resumed)):
        falls = _falls(case, borders)
        steps = [step for step, (fall, usual) in zip(borders, falls, strict=True) if fall > max(usual, 0.0)]
        if len(falls) < (2 if code == "stairs" else 1) or len(steps) <= len(falls) / 2:
            continue
        largest = max(range(len(falls)), key=lambda number: falls[number][0])
        evidence: dict[str, Any] = {"count": len(steps), "fall": falls[largest][0], "step": borders[largest]}
        if code == "stairs":
            known = case.cause("diagnosis.cause-little-data", "data")
            yield Finding(Reason("diagnosis.loss-stairs", evidence), "warning", "medium", (known,))
        else:
            again = case.cause("diagnosis.cause-sampler-restarts", "data")
            yield Finding(Reason("diagnosis.loss-falls-at-resume", evidence), "warning", "medium", (again,))


@check(explains={"data-repeated": ("loss-stairs",)})
def many_epochs(case: Case) -> Iterator[Finding]:
    """Yield a finding if a new language model reads its text for more than four epochs: a warning from eight.

    Up to four epochs repeated text is almost as good as new, and from sixteen on hardly worth anything
    (arXiv:2305.16264). Not while a validation shows that it still helps. The fall of the loss at the start of epochs,
    where there is one, is evidence.
    """
    curve, dataset = case.curve, case.dataset
    if curve is None or dataset is None or not case.is_fresh_text or case.changes_while_training:
        return
    epochs = case.epochs_at(curve.steps[-1])
    if epochs is None or epochs <= _FRESH_EPOCHS:
        return
    validations = [validation.loss for validation in case.history.validations]
    if len(validations) > 2 and validations[-1] <= min(validations) * 1.02:
        return
    falls = [fall for fall, _ in _falls(case, _borders(case))]
    evidence = {"epochs": epochs, "tokens": dataset.train_tokens, "fall": max(0.0, median(falls)) if falls else 0.0}
    few = case.cause("diagnosis.cause-little-data", "data")
    long = case.cause("diagnosis.cause-many-epochs", "training.steps")
    yield Finding(Reason("diagnosis.data-repeated", evidence), warning_if(epochs > _MANY_EPOCHS), "high", (few, long))


def _borders(case: Case) -> list[int]:
    """Return the steps after which an epoch begins, but the first."""
    curve, epoch_steps = case.curve, case.epoch_steps
    if curve is None or epoch_steps is None or epoch_steps < 4 * _BORDER_STEPS:
        return []
    return [round(epoch_steps * number) for number in range(1, int(curve.steps[-1] / epoch_steps) + 1)][-16:]


def _falls(case: Case, borders: list[int]) -> list[tuple[float, float]]:
    """Return by border how much lower the loss is right after it, and how much is usual or noise; 0 if unknown."""
    curve = case.curve
    assert curve is not None
    falls = []
    for border in borders:
        parts = [
            [value for step, value in zip(curve.steps, curve.values, strict=True) if first < step <= first + width]
            for first, width in ((border - 3 * _BORDER_STEPS, _BORDER_STEPS), (border - _BORDER_STEPS, _BORDER_STEPS),
                                 (border, _BORDER_STEPS))
        ]  # fmt: skip
        if min(len(part) for part in parts) < _BORDER_STEPS // 2:
            falls.append((0.0, 0.0))
            continue
        earlier, before, after = (median(part) for part in parts)
        error = 1.25 * noise([value for part in parts[:2] for value in part]) * (2 / _BORDER_STEPS) ** 0.5
        usual = max(2 * max(0.0, earlier - before) / 2, 5 * error, 0.03 * before)
        falls.append((before - after, usual))
    return falls
