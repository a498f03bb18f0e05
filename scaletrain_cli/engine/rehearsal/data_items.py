"""Items of a rehearsal about what the loss sees: labels and masks, duplicates, the first loss, causality."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrain_cli.diagnosis.findings import Cause
from scaletrain_cli.diagnosis.loss import first_loss_band, high_first_loss, low_first_loss
from scaletrain_cli.diagnosis.rehearsal import Item
from scaletrain_cli.engine.data.batches import BatchReader, MicroBatch
from scaletrain_cli.engine.data.dataset import TextSequences
from scaletrain_cli.engine.data.rows import NOT_COUNTED, RowSamples
from scaletrain_cli.engine.parallel.mesh import SequencePart
from scaletrain_cli.engine.rehearsal.trials import Trials, finite
from scaletrain_cli.engine.step import ModelStepper
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import ModelSpec

_OFFSETS = (0, 1, 2)
_LEAST_SHARE = 0.98  # of the labels that are the next token; packed rows and truncation have a few others
_MOST_IGNORED = 0.9
_READ = 512  # samples whose labels or contents are compared
_MOST_ALIKE = 0.99  # share of one label among images
_MOST_DUPLICATES = 0.2
_WIDE_BAND = 3.0  # of the first loss, for other models than language models, whose first outputs are not equal
_MOST_CHANGE = 1e-3  # of hidden states that must not change, relative to their root mean square
_MOST_CHANGE_OF_EXPERTS = 2e-2  # where other tokens change the sizes of matrix products


def labels(trials: Trials) -> Item:
    """Compare labels with tokens, and count those that are ignored; of images count the labels.

    Unshifted labels (each the token itself) let a model copy its input; labels that are shifted twice hide one token.
    More than 90 % of ignored labels waste the computation, and none in rows with questions train on the questions.
    """
    batches = trials.batches(1)
    if not isinstance(batches[0], MicroBatch):
        return _labels_of_images(trials)
    counted = total = last = 0  # last: labels whose next token is not there
    matches = [0] * len(_OFFSETS)
    for batch in batches:
        known = batch.labels != NOT_COUNTED
        total, counted, last = total + known.numel(), counted + int(known.sum()), last + int(known[:, -1].sum())
        for offset in _OFFSETS:
            here = known[:, : known.shape[1] - offset]
            same = (batch.labels[:, : here.shape[1]] == batch.tokens[:, offset:]) & here
            matches[offset] += int(same.sum())
    counted, total, last, *matches = (int(count) for count in trials.consensus.total([counted, total, last, *matches]))
    ignored = 1 - counted / total if total else 1.0
    shares = {offset: matches[offset] / max(1, counted - offset * last) for offset in _OFFSETS}
    figures: dict[str, Any] = {
        "ignored_share": round(ignored, 4),
        "label_shares_by_offset": {str(offset): round(min(1.0, share), 4) for offset, share in shares.items()},
        "labels": total,
    }
    if counted == 0 or ignored > _MOST_IGNORED:
        causes = (
            trials.case.cause("rehearsal.cause-masked-answers", "data.loss_on"),
            trials.case.cause("rehearsal.cause-long-prompts", "model.seq_len"),
            trials.case.cause("rehearsal.cause-cut-answers", "data.truncation"),
        )
        return Item("labels", "failed", Reason("rehearsal.labels-ignored", {"share": ignored}), figures, causes)
    if shares[1] < _LEAST_SHARE:
        offset = max(shares, key=shares.__getitem__)
        params = {"share": min(1.0, shares[1]), "offset": offset, "offset_share": min(1.0, shares[offset])}
        cause = trials.case.cause("rehearsal.cause-other-labels", "data")
        return Item("labels", "failed", Reason("rehearsal.labels-not-next", params), figures, (cause,))
    if (wrong := _wrong_offset(trials, batches, figures)) is not None:
        return wrong
    reason = Reason("rehearsal.labels-next", {"share": min(1.0, shares[1]), "ignored": ignored})
    return Item("labels", "passed", reason, figures)


def _wrong_offset(trials: Trials, batches: Sequence[MicroBatch], figures: dict[str, Any]) -> Item | None:
    """Return the failure if trained weights predict the tokens at another offset better than the next ones."""
    spec = trials.case.spec
    if spec.is_from_scratch or trials.trainer.composed.objective.reads_pairs or not isinstance(spec.model, ModelSpec):
        return None
    losses = {offset: trials.loss([_at_offset(batch, offset) for batch in batches]) for offset in _OFFSETS}
    figures["loss_by_offset"] = {str(offset): finite(loss) for offset, loss in losses.items()}
    best = min(losses, key=losses.__getitem__)
    if best == 1:
        return None
    params = {"offset": best, "loss": losses[best], "expected_loss": losses[1]}
    causes = (
        trials.case.cause("rehearsal.cause-other-tokenizer", "data.tokenizer"),
        trials.case.cause("rehearsal.cause-other-weights", "model.weights"),
    )
    return Item("labels", "failed", Reason("rehearsal.labels-other-offset", params), figures, causes)


def _at_offset(batch: MicroBatch, offset: int) -> MicroBatch:
    """Return the batch with the tokens at an offset as labels, where the next one counts."""
    labels = batch.tokens.roll(-offset, -1).masked_fill(batch.labels == NOT_COUNTED, NOT_COUNTED)
    if offset:
        labels[:, -offset:] = NOT_COUNTED
    return batch._replace(labels=labels, divisor=None, weights=None)


def _labels_of_images(trials: Trials) -> Item:
    samples: Any = trials.trainer.data.samples
    number = min(_READ, len(samples))
    apart = max(1, len(samples) // number)
    if trials.case.spec.training.objective == "contrastive":
        return _captions(trials)
    labels = [samples.label(at) for at in range(0, len(samples), apart)][:number]
    kinds = Counter(labels)
    label, most = kinds.most_common(1)[0]
    figures = {"samples": len(labels), "different_labels": len(kinds), "largest_share": round(most / len(labels), 4)}
    if most > _MOST_ALIKE * len(labels):
        cause = trials.case.cause("rehearsal.cause-constant-labels", "data")
        params = {"share": most / len(labels), "label": str(label), "samples": len(labels)}
        return Item("labels", "failed", Reason("rehearsal.labels-constant", params), figures, (cause,))
    params = {"samples": len(labels), "different": len(kinds), "share": most / len(labels)}
    return Item("labels", "passed", Reason("rehearsal.labels-vary", params), figures)


def _captions(trials: Trials) -> Item:
    batches = trials.batches(1)
    tokens = [row.tobytes() for batch in batches if batch.tokens is not None for row in batch.tokens.cpu().numpy()]
    if not tokens:
        return Item("labels", "skipped", Reason("rehearsal.no-labels"))
    most = Counter(tokens).most_common(1)[0][1] / len(tokens)
    figures = {"captions": len(tokens), "different_captions": len(set(tokens)), "largest_share": round(most, 4)}
    alike = trials.largest(most)
    if alike > 0.5:
        cause = trials.case.cause("rehearsal.cause-constant-captions", "data")
        return Item("labels", "failed", Reason("rehearsal.captions-alike", {"share": alike}), figures, (cause,))
    params = {"samples": len(tokens), "different": len(set(tokens)), "share": most}
    return Item("labels", "passed", Reason("rehearsal.labels-vary", params), figures)


def duplicates(trials: Trials) -> Item:
    """Count the samples among the first ones that are equal to an earlier one; rank 0 reads them.

    Whole rows or images are compared, since rows may share their first words, such as a system prompt.
    """

    def count() -> tuple[int, int]:
        hashes = list(_contents(trials))
        return len(hashes), len(hashes) - len(set(hashes))

    samples, repeated = trials.consensus.from_rank_zero(count)
    share = repeated / samples if samples else 0.0
    figures = {"samples": samples, "duplicates": repeated}
    params = {"samples": samples, "count": repeated, "share": share}
    if share > _MOST_DUPLICATES:
        causes = (
            trials.case.cause("rehearsal.cause-repeated-data", "data"),
            trials.case.cause("rehearsal.cause-no-deduplication", "data.pipeline"),
        )
        return Item("duplicates", "failed", Reason("rehearsal.duplicates", params), figures, causes)
    return Item("duplicates", "passed", Reason("rehearsal.few-duplicates", params), figures)


def _contents(trials: Trials) -> Iterator[bytes]:
    """Yield a hash of each of some samples of the training split, at equal distances."""
    reader = trials.trainer.training
    samples: Any = trials.trainer.data.samples
    count = min(_READ, len(samples))
    for number in (at * len(samples) // count for at in range(count)):
        if isinstance(reader, BatchReader):
            content = _tokens(reader.sequences, number).tobytes()
        else:
            content = samples.read(number).image
        yield hashlib.blake2b(content, digest_size=8).digest()


def _tokens(sequences: TextSequences | RowSamples, number: int) -> npt.NDArray[Any]:
    """Return the tokens of a sequence or row, without padding."""
    if isinstance(sequences, RowSamples):
        rows = sequences.read([number], sequences.seq_len)
        return np.asarray(rows.tokens[rows.real])
    return np.asarray(sequences.rows([number]))


def first_loss(trials: Trials) -> Item:
    """Compare the first loss of a new model with that of outputs that are equal for all samples.

    Logits of a deviation s give ln V + s^2 / 2; see ``scaletrain_cli.diagnosis.loss.first_loss`` for the band. Models
    of images may begin anywhere within a factor of 3.
    """
    spec, case = trials.case.spec, trials.case
    expected = case.uninformed_loss
    if not spec.is_from_scratch:
        return Item("first-loss", "skipped", Reason("rehearsal.loaded-weights"))
    if expected is None or expected <= 0:
        return Item("first-loss", "skipped", Reason("rehearsal.first-loss-unknown"))
    loss = trials.step(trials.batches(1), 0.0).loss
    trials.restore()
    if isinstance(spec.model, ModelSpec):
        low, high = first_loss_band(spec.model)
        above: tuple[Cause, ...] = high_first_loss(case, spec.model)
        below: tuple[Cause, ...] = low_first_loss(case)
    else:
        low, high = expected / _WIDE_BAND, expected * _WIDE_BAND
        above = below = (case.cause("rehearsal.cause-other-labels", "data"),)
    figures = {"loss": finite(loss), "expected": finite(expected), "low": finite(low), "high": finite(high)}
    params = {"loss": finite(loss), "expected": expected, "low": low, "high": high}
    if not math.isfinite(loss):
        spread = above[:1] if isinstance(spec.model, ModelSpec) else ()
        return Item("first-loss", "failed", Reason("rehearsal.first-loss-not-finite", params), figures, spread)
    if loss > high:
        return Item("first-loss", "failed", Reason("rehearsal.first-loss-high", params), figures, above)
    if loss < low:
        return Item("first-loss", "failed", Reason("rehearsal.first-loss-low", params), figures, below)
    return Item("first-loss", "passed", Reason("rehearsal.first-loss-usual", params), figures)


def causality(trials: Trials) -> Item:
    """Change a token, and compare the hidden states of tokens that must not see it, on every rank.

    These are the earlier tokens and, in packed rows that keep documents apart, all tokens of other documents.
    """
    trainer = trials.trainer
    if not isinstance(trials.case.spec.model, ModelSpec):
        return Item("causality", "skipped", Reason("rehearsal.no-causal-model"))
    if not isinstance(trainer.stepper, ModelStepper):
        return Item("causality", "skipped", Reason("rehearsal.outputs-in-pipeline"))
    batch = trials.batches(1)[0]
    length = batch.tokens.shape[1]
    # of a rank with a part of each row that; the change is on the last of these ranks
    positions = batch.positions if batch.positions.dim() == 2 else batch.positions.expand(len(batch.tokens), -1)
    changed = batch.tokens.clone()
    mesh = trainer.composed.objective.mesh
    part, alone = mesh.part, mesh.part.ranks == 1
    documents = batch.documents if alone else None
    place = length // 2
    if documents is not None:  # the middle of the shortest first document of a row
        place = max(0, min(int((row == row[0]).sum()) for row in documents) // 2)
    if mesh.parts.rank == mesh.parts.size - 1:
        changed[:, place] = (changed[:, place] + 1) % trials.case.spec.model.vocab_size
    (before,), (after,) = (trainer.stepper.outputs_of(version) for version in (batch, batch._replace(tokens=changed)))
    moved = (after.float() - before.float()).abs().amax(-1)
    scale = before.float().pow(2).mean().sqrt().clamp_min(1e-12)
    last = SequencePart(part.context, part.context - 1, part.sequence, part.sequence - 1)
    whole = length * part.ranks
    earlier = (part.places(whole) < last.places(whole)[place]).to(positions.device).expand_as(positions)
    most = _MOST_CHANGE_OF_EXPERTS if trials.case.spec.model.num_experts else _MOST_CHANGE
    seen = trials.largest(float((moved / scale)[earlier].max()) if bool(earlier.any()) else 0.0)
    beyond = 0.0
    several = documents is not None and bool((documents[:, place : place + 1] != documents).any())
    if documents is not None and several:
        others = (documents != documents[:, place : place + 1]) & (documents >= 0)
        beyond = float((moved / scale)[others].max())
    beyond = trials.largest(beyond)
    figures = {"change_of_earlier_tokens": finite(seen), "change_of_other_documents": finite(beyond), "limit": most}
    attention = trials.case.cause("rehearsal.cause-attention")
    if seen > most:
        return Item("causality", "failed", Reason("rehearsal.sees-later", {"change": seen}), figures, (attention,))
    if beyond > most:
        return Item(
            "causality", "failed", Reason("rehearsal.sees-documents", {"change": beyond}), figures, (attention,)
        )
    code = Reason("rehearsal.causal-in-documents" if several else "rehearsal.causal")
    return Item("causality", "passed", code, figures)
