"""The item that overfits a few samples, which a correct model and loss can."""

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from scaletrain_cli.diagnosis.rehearsal import Item
from scaletrain_cli.engine.data.batches import MicroBatch
from scaletrain_cli.engine.data.images.batches import ImageMicroBatch
from scaletrain_cli.engine.data.rows import NOT_COUNTED
from scaletrain_cli.engine.model.document_attention import segments_of
from scaletrain_cli.engine.optim.optimizers import SCHEDULE
from scaletrain_cli.engine.rehearsal.trials import Trials, finite
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.losses import LOSSES_OF

_SEQUENCES = 8
_SHARE = 0.15  # of the budget
_WANTED_STEPS = 60  # fewer samples are taken if not as many fit into it
_FEWEST_STEPS, _MOST_STEPS = 12, 200
_LEARNED = 0.05  # of the start that may be left above the floor
_ON_THE_WAY = 0.5
_WARM_STEPS = 5
_NEAR = 10.0


def overfit(trials: Trials) -> Item:
    """Train up to 8 samples up to 200 times, without dropout, weight decay, mixing and schedule; restore the state.

    Passed once the loss is within 5 % of its start above its floor. The floor is the least loss that any model can
    have: equal beginnings with several continuations, equal captions, smoothed labels. If the budget ends earlier, half
    of the way passes.
    """
    case, spec = trials.case, trials.case.spec
    if trials.trainer.composed.objective.reads_pairs:
        return Item("overfit", "skipped", Reason("rehearsal.overfit-of-pairs"))
    layout = case.plan.layout
    rows = _rows(trials)
    batches = [first_rows(batch, rows) for batch in trials.batches(1)]
    floor = _mean(trials.consensus.share(floor_of(spec, batches)))
    rate = trials.peak_rate
    if (known := trials.suggested_rate) is not None and not known / _NEAR <= rate <= known * _NEAR:
        rate = known
    budget = _SHARE * trials.budget_seconds
    losses: list[float] = []
    with _plain_training(trials):
        began = time.perf_counter()
        while len(losses) < _MOST_STEPS:
            losses.append(trials.step(batches, rate * min(1.0, (len(losses) + 1) / _WARM_STEPS)).loss)
            if not math.isfinite(losses[-1]) or left(losses, floor) <= _LEARNED:
                break
            spent = trials.largest(time.perf_counter() - began)
            if len(losses) >= _FEWEST_STEPS and spent > budget:
                break
    trials.restore()
    share = left(losses, floor)
    figures = {
        "losses": [finite(loss) for loss in losses],
        "floor": finite(floor),
        "samples": rows * layout.data_parallel * layout.gradient_accumulation_steps,
        "steps": len(losses),
        "lr": finite(rate),
    }
    params: dict[str, Any] = {
        "start": losses[0],
        "end": losses[-1],
        "floor": floor,
        "steps": len(losses),
        "share": share if math.isfinite(share) else 1.0,
    }
    if share <= _LEARNED:
        return Item("overfit", "passed", Reason("rehearsal.overfit-learned", params), figures)
    # In the second half by at least a tenth of its first value above the floor.
    fallen = losses[len(losses) // 2] - losses[-1]
    falls = math.isfinite(losses[-1]) and fallen >= 0.1 * (losses[0] - floor) > 0
    if len(losses) < _MOST_STEPS and (share <= _ON_THE_WAY or falls):
        return Item("overfit", "passed", Reason("rehearsal.overfit-on-the-way", params), figures)
    causes = (
        case.cause("rehearsal.cause-other-labels", "data"),
        case.cause("diagnosis.cause-rate-too-high", "training.optimizer.lr", lr=rate),
        case.cause("rehearsal.cause-detached", "training.trainable"),
    )
    if not math.isfinite(losses[-1]):
        params |= {"end": None, "start": finite(losses[0])}
        return Item("overfit", "failed", Reason("rehearsal.overfit-not-finite", params), figures, causes[1:2])
    return Item("overfit", "failed", Reason("rehearsal.overfit-not-learned", params), figures, causes)


def _rows(trials: Trials) -> int:
    """Return the samples of a micro-batch: 8 in all, or as few as 60 steps within the budget need."""
    layout = trials.case.plan.layout
    rows = max(1, _SEQUENCES // (layout.data_parallel * layout.gradient_accumulation_steps))
    while rows > 1 and trials.steps_in(_SHARE, 1, _MOST_STEPS, rows / layout.micro_batch_size) < _WANTED_STEPS:
        rows //= 2
    return rows


def left(losses: Sequence[float], floor: float) -> float:
    """Return the part of the first loss above the floor that is left, at best so far in the last three steps."""
    start = losses[0] - floor
    if start <= 0:
        return 0.0
    recent = [loss for loss in losses[-3:] if math.isfinite(loss)]
    return (min(recent) - floor) / start if recent else math.inf


def first_rows(batch: Any, rows: int) -> Any:
    """Return the first rows of a micro-batch, whose loss is then the mean over its own labels; images unmixed.

    Rows with images and views of images are kept whole: several tensors of theirs count other things than rows.
    """
    if isinstance(batch, ImageMicroBatch):
        views = len(batch.images) // len(batch.samples)
        plain = batch._replace(mix=None, erased=None)
        if views > 1:
            return plain
        return plain._replace(**{name: field[:rows] for name, field in plain._asdict().items() if field is not None})
    if not isinstance(batch, MicroBatch) or batch.images is not None:
        return batch
    whole = ("segments", "divisor", "step_tokens", "positions")
    cut = {name: field[:rows] for name, field in batch._asdict().items() if field is not None and name not in whole}
    positions = batch.positions if batch.positions.dim() == 1 else batch.positions[:rows]
    segments = None if batch.documents is None else segments_of(batch.documents[:rows])
    return batch._replace(**cut)._replace(positions=positions, segments=segments, divisor=None)


def floor_of(spec: RunSpec, batches: Sequence[Any]) -> float:
    """Return the least loss that a model can have on these micro-batches of this rank, in nats.

    Smoothed labels count alone: their floor is far above that of equal beginnings.
    """
    training = spec.training
    if isinstance(batches[0], MicroBatch):
        classes = spec.language_model.vocab_size
        ambiguous = _mean([_ambiguity(batch) for batch in batches])
        return max(ambiguous, smoothing_entropy(training.label_smoothing, classes))
    name = training.loss.of(training.objective) if training.objective in LOSSES_OF else ""
    classes = getattr(spec.model, "num_labels", 0)
    if name == "cross_entropy":
        return smoothing_entropy(training.label_smoothing, classes)
    if name == "bce" and training.label_smoothing and classes:
        low = training.label_smoothing / classes
        high = 1 - training.label_smoothing + low
        return ((classes - 1) * _binary_entropy(low) + _binary_entropy(high)) / classes
    if name == "info_nce":
        return _mean([_alike_captions(batch) for batch in batches])
    return 0.0


def smoothing_entropy(smoothing: float, classes: int) -> float:
    """Return the entropy of a smoothed label: 1 - s + s / n for its class, s / n for each other one."""
    if smoothing <= 0 or classes < 2:
        return 0.0
    other = smoothing / classes
    own = 1 - smoothing + other
    return -(own * math.log(own) + (classes - 1) * other * math.log(other))


def _binary_entropy(share: float) -> float:
    return -(share * math.log(share) + (1 - share) * math.log(1 - share)) if 0 < share < 1 else 0.0


def _ambiguity(batch: MicroBatch) -> float:
    """Return the mean entropy, over the labels that count, of the labels that follow the same beginning."""
    tokens, labels = batch.tokens.tolist(), batch.labels.tolist()
    documents = None if batch.documents is None else batch.documents.tolist()
    follow: dict[int, Counter[int]] = {}
    for row, (own, wanted) in enumerate(zip(tokens, labels, strict=True)):
        begun, before = 0, None
        for place, token in enumerate(own):
            document = None if documents is None else documents[row][min(place, len(documents[row]) - 1)]
            begun = hash((0 if document != before else begun, token))
            before = document
            if wanted[place] != NOT_COUNTED:
                follow.setdefault(begun, Counter())[wanted[place]] += 1
    total = sum(seen.total() for seen in follow.values())
    lost = sum(
        count * math.log(seen.total() / count) for seen in follow.values() for count in seen.values() if len(seen) > 1
    )
    return lost / total if total else 0.0


def _alike_captions(batch: Any) -> float:
    """Return the mean of ln n over the samples whose caption n of them have."""
    if batch.tokens is None:
        return 0.0
    counts = Counter(tuple(row) for row in batch.tokens.tolist())
    return sum(count * math.log(count) for count in counts.values()) / counts.total()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@contextmanager
def _plain_training(trials: Trials) -> Iterator[None]:
    """A context without dropout, stochastic depth and weight decay."""
    model, optimizer = trials.trainer.composed.model, trials.trainer.composed.optimizer
    dropping: list[Any] = [module for module in model.modules() if hasattr(module, "p") and hasattr(module, "key")]
    chances = [module.p for module in dropping]
    before = [(group.get("weight_decay"), group.get(SCHEDULE)) for group in optimizer.param_groups]
    for module in dropping:
        module.p = 0.0
    for group in optimizer.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] = 0.0
        if SCHEDULE in group:
            group[SCHEDULE] = [(last, factor, 0.0) for last, factor, _ in group[SCHEDULE]]
    try:
        yield
    finally:
        for module, chance in zip(dropping, chances, strict=True):
            module.p = chance
        for group, (decay, schedule) in zip(optimizer.param_groups, before, strict=True):
            group |= {} if decay is None else {"weight_decay": decay}
            group |= {} if schedule is None else {SCHEDULE: schedule}
