"""Measures over a validation split, of the rows of all ranks.

Accuracy of classifiers: top-1, top-5 and by class; mean average precision of several labels per image. Retrieval
between images and texts: recall at 1, 5 and 10 in both directions, with any number of texts per image.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from scaletrain_cli.engine.parallel.mesh import Axis

_BYTES_PER_GATHER = 1 << 24  # of one rank


class Figures(NamedTuple):
    """Results of an evaluation, the same on every rank.

    ``metrics``: for metrics.jsonl, by name. ``details``: JSON for the file of the evaluation, such as a list of
    classes.
    """

    metrics: dict[str, float]
    details: dict[str, Any]


class Measures(ABC):
    """Accumulates what the micro-batches of one rank contribute. Only ``result`` is collective."""

    @abstractmethod
    def result(self, axis: Axis) -> Figures | None:
        """Return the figures over all samples of all ranks of the axis; None without any. Collective.

        They depend neither on the number of ranks nor on the division of samples among them.
        """


class MeanLoss:
    """The mean of the losses of micro-batches, each by its number of samples."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None  # losses times samples, samples

    def add(self, loss: Tensor, samples: Tensor | int) -> None:
        """Add the mean loss of a micro-batch; without samples it is not counted, whatever it is."""
        count = torch.as_tensor(samples, dtype=torch.float64, device=loss.device)
        weighted = torch.where(count > 0, loss.detach().double() * count, torch.zeros_like(count))
        sums = torch.stack([weighted, count])
        self._sums = sums if self._sums is None else self._sums + sums

    def take(self, axis: Axis) -> float | None:
        """Return the mean over all ranks, and begin again; None if no rank has counted a sample. Collective."""
        total, samples = sum_over(torch.zeros(2, dtype=torch.float64) if self._sums is None else self._sums, axis)
        self._sums = None
        return rounded(total / samples) if samples > 0 else None


def sum_over(values: Tensor, axis: Axis) -> Tensor:
    """Return the sum over the ranks of an axis, on the CPU. Collective."""
    if axis.group is None:
        return values.cpu()
    values = values.to(axis.device)
    dist.all_reduce(values, group=axis.group)
    return values.cpu()


def rows_of_all(rows: Tensor, axis: Axis) -> Tensor:
    """Return the rows of all ranks in the order of the ranks, on the CPU: [sum of local rows, ...]. Collective.

    Ranks may have different numbers of rows, also none. They are sent in parts, so that a device holds few of them.
    """
    rows = rows.detach()
    if axis.group is None:
        return rows.cpu()
    device = axis.device
    own = torch.tensor([len(rows)], device=device)
    counts = [torch.zeros_like(own) for _ in range(axis.size)]
    dist.all_gather(counts, own, group=axis.group)
    sizes = [int(count) for count in counts]
    by_rank: list[list[Tensor]] = [[] for _ in sizes]
    part = max(1, _BYTES_PER_GATHER // (math.prod(rows.shape[1:]) * rows.element_size()))
    for first in range(0, max(sizes), part):
        count = min(part, max(sizes) - first)
        sent = torch.zeros(count, *rows.shape[1:], dtype=rows.dtype, device=device)
        there = rows[first : first + count]
        sent[: len(there)] = there.to(device)
        received = [torch.empty_like(sent) for _ in sizes]
        dist.all_gather(received, sent, group=axis.group)
        for rank, (size, values) in enumerate(zip(sizes, received, strict=True)):
            by_rank[rank].append(values[: max(0, size - first)].cpu())
    return torch.cat([values for of_rank in by_rank for values in of_rank])


def in_sample_order(samples: Tensor) -> Tensor:
    """Return the indices of rows in the order of their sample numbers, the first row alone of equal numbers."""
    order = torch.argsort(samples, stable=True)
    ordered = samples[order]
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return order[first]


def slices_of(count: int, size: int) -> Iterator[slice]:
    """Yield slices of ``size`` indices, the last one shorter, that cover 0 to ``count`` - 1."""
    for first in range(0, count, size):
        yield slice(first, min(first + size, count))


def rounded(value: Tensor) -> float:
    """Return the value with nine digits: the order in which ranks are added up has no effect on them."""
    return float(f"{float(value):.9g}")


_TOP = (1, 5)
_SCORES_AT_A_TIME = 1 << 21


def rank_of_target(logits: Tensor, targets: Tensor) -> Tensor:
    """Return how many classes come before the target, [samples] int64, from logits [samples, classes].

    Of equal logits the class with the lower index comes first, as in argmax. NaN comes before all others, so that a
    model that has diverged is never right.
    """
    own = logits.gather(1, targets.unsqueeze(1))
    classes = torch.arange(logits.shape[1], device=logits.device)
    return (~(logits <= own) | ((logits == own) & (classes < targets.unsqueeze(1)))).sum(1)


def _shown(names: Sequence[str] | None, number: int) -> str | int:
    """Return the name of a class; its number where there are no names, or fewer than the model has outputs."""
    return number if names is None or number >= len(names) else names[number]


class Accuracy(Measures):
    """Shares of samples whose class is among the 1 or 5 with the largest logits.

    ``top5`` is left out with five classes or fewer, where it is 1. ``names``: of the classes, in the order of the
    labels. ``prefix``: of the metrics.
    """

    def __init__(self, classes: int, names: Sequence[str] | None = None, *, prefix: str = "") -> None:
        self._names, self._prefix = names, prefix
        self._counts = torch.zeros(1 + len(_TOP), classes, dtype=torch.int64)  # samples, then hits for each k
        self._top = [k for k in _TOP if k == 1 or k < classes]

    def add(self, logits: Tensor, targets: Tensor, counted: Tensor | None = None) -> None:
        """Count samples: logits [samples, classes], targets [samples] int64.

        Negative targets, and samples where ``counted`` is False, are not counted.
        """
        known = targets >= 0 if counted is None else counted & (targets >= 0)
        logits, targets = logits.detach()[known], targets[known]
        ranks = rank_of_target(logits, targets)
        rows = torch.stack([torch.ones_like(ranks), *(ranks < k for k in _TOP)])
        self._counts = self._counts.to(rows.device)
        self._counts.index_add_(1, targets, rows)

    def result(self, axis: Axis) -> Figures | None:
        counts = sum_over(self._counts, axis)
        total = int(counts[0].sum())
        if total == 0:
            return None
        hits = dict(zip(_TOP, counts[1:], strict=True))
        metrics = {f"{self._prefix}top{k}": int(hits[k].sum()) / total for k in self._top}
        by_class = [
            {
                "class": _shown(self._names, number),
                "samples": samples,
                **{f"top{k}": int(hits[k][number]) / samples if samples else None for k in self._top},
            }
            for number, samples in enumerate(counts[0].tolist())
        ]
        with_samples = counts[0] > 0
        recalls = hits[1][with_samples].double() / counts[0][with_samples]
        details = {
            f"{self._prefix}samples": total,
            f"{self._prefix}mean_class_accuracy": float(recalls.mean()),
            f"{self._prefix}classes": by_class,
        }
        return Figures(metrics, details)


def average_precision(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the average precision of each class, [classes] in fp64, NaN for a class without a positive label.

    scores [samples, classes]; labels [samples, classes] bool. It is the sum over the distinct scores of the gain in
    recall times the precision there, without interpolation. Samples with equal scores are taken together, so that
    their order has no effect. NaN counts as the largest score.
    """
    ordered, order = scores.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).sort(0, descending=True)
    right = labels.gather(0, order).cumsum(0).double()
    count = torch.arange(1, len(scores) + 1, device=scores.device, dtype=torch.float64).unsqueeze(1)
    ends = torch.ones_like(ordered, dtype=torch.bool)
    ends[:-1] = ordered[:-1] != ordered[1:]  # the last of equal scores
    # the true positives up to the end of the scores before: those at the last end
    at_ends = torch.where(ends, right, torch.zeros_like(right))
    before = torch.zeros_like(right)
    before[1:] = at_ends.cummax(0).values[:-1]
    gains = torch.where(ends, (right - before) * right / count, torch.zeros_like(right))
    return gains.sum(0) / right[-1].where(right[-1] > 0, torch.nan)


class MeanAveragePrecision(Measures):
    """Mean over the classes with a positive label of the average precision of each; several labels per sample."""

    def __init__(self, classes: int, names: Sequence[str] | None = None) -> None:
        self._names, self._classes = names, classes
        self._scores: list[Tensor] = []
        self._labels: list[Tensor] = []

    def add(self, logits: Tensor, labels: Tensor, counted: Tensor | None = None) -> None:
        """Keep samples on the CPU: logits [samples, classes], labels alike, positive above 0.5."""
        if counted is not None:
            logits, labels = logits[counted], labels[counted]
        self._scores.append(logits.detach().float().cpu())
        self._labels.append((labels > 0.5).cpu())

    def result(self, axis: Axis) -> Figures | None:
        scores = torch.cat(self._scores) if self._scores else torch.empty(0, self._classes)
        labels = torch.cat(self._labels) if self._labels else torch.empty(0, self._classes, dtype=torch.bool)
        samples = int(sum_over(torch.tensor([len(scores)]), axis))
        if samples == 0:
            return None
        precisions, positives = [], []
        for part in slices_of(self._classes, max(1, _SCORES_AT_A_TIME // samples)):
            whole = rows_of_all(labels[:, part].contiguous(), axis)
            precisions.append(average_precision(rows_of_all(scores[:, part].contiguous(), axis), whole))
            positives.append(whole.sum(0))
        values, counts = torch.cat(precisions), torch.cat(positives).tolist()
        by_class: list[dict[str, Any]] = [
            {
                "class": _shown(self._names, number),
                "samples": count,
                "average_precision": rounded(value) if count else None,
            }
            for number, (value, count) in enumerate(zip(values, counts, strict=True))
        ]
        with_positives = values[~values.isnan()]
        metrics = {}
        if len(with_positives):
            metrics["mean_average_precision"] = rounded(with_positives.mean())
        return Figures(metrics, {"samples": samples, "classes": by_class})


class LabelMeasures(Measures):
    """Mean average precision, and accuracy as well if every sample of all ranks has exactly one label."""

    def __init__(self, classes: int, names: Sequence[str] | None = None) -> None:
        self._precision, self._accuracy = MeanAveragePrecision(classes, names), Accuracy(classes, names)
        self._others = 0  # samples without a label, or with several

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add samples: logits [samples, classes], labels alike, positive above 0.5."""
        self._precision.add(logits, labels)
        positive = labels > 0.5
        one = positive.sum(1) == 1
        self._others += int((~one).sum())
        self._accuracy.add(logits[one], positive[one].int().argmax(1))

    def result(self, axis: Axis) -> Figures | None:
        figures, accuracy = self._precision.result(axis), self._accuracy.result(axis)
        others = int(sum_over(torch.tensor([self._others]), axis))
        if figures is None or accuracy is None or others:
            return figures
        pairs = zip(accuracy.details["classes"], figures.details["classes"], strict=True)
        classes = [of_class | precision for of_class, precision in pairs]
        return Figures(accuracy.metrics | figures.metrics, accuracy.details | {"classes": classes})


class Errors(Measures):
    """``mae`` and ``rmse`` over all samples and outputs; by output in the details if there are several."""

    def __init__(self, outputs: int) -> None:
        self._sums = torch.zeros(3, outputs, dtype=torch.float64)  # samples, absolute errors, squared errors

    def add(self, outputs: Tensor, targets: Tensor, counted: Tensor | None = None) -> None:
        """Add samples: outputs and targets [samples, outputs]."""
        errors = outputs.detach().double() - targets.double().view(len(outputs), -1)
        if counted is not None:
            errors = errors[counted]
        self._sums = self._sums.to(errors.device)
        self._sums += torch.stack([torch.ones_like(errors).sum(0), errors.abs().sum(0), errors.square().sum(0)])

    def result(self, axis: Axis) -> Figures | None:
        counts, absolute, squared = sum_over(self._sums, axis)
        if counts[0] == 0:
            return None
        total = counts.sum()
        metrics = {"mae": rounded(absolute.sum() / total), "rmse": rounded((squared.sum() / total).sqrt())}
        details: dict[str, object] = {"samples": int(counts[0])}
        if len(counts) > 1:
            errors = zip(absolute / counts, (squared / counts).sqrt(), strict=True)
            details["outputs"] = [{"mae": rounded(mae), "rmse": rounded(rmse)} for mae, rmse in errors]
        return Figures(metrics, details)


RECALLS = (1, 5, 10)
_COMPARED_AT_A_TIME = 1 << 23
_MOST_SAMPLES = 1 << 40  # of a source


def content_keys(items: Tensor) -> Tensor:
    """Return a 64-bit hash of each item, [items] int64: equal for equal pixels, or for equal token ids."""
    digests = [hashlib.blake2b(item.numpy().tobytes(), digest_size=8).digest() for item in items.cpu().contiguous()]
    return torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in digests], dtype=torch.int64)


def ranks_of_best(scores: Tensor, positives: Tensor) -> Tensor:
    """Return how many items come before the best positive one of each query, [queries] int64.

    scores [queries, items]; positives alike, bool. Of equal scores the item with the lower index comes first. NaN comes
    before all others. A query without a positive item has the number of items.
    """
    items = torch.arange(scores.shape[1], device=scores.device)
    best = scores.masked_fill(~positives, -torch.inf).max(1, keepdim=True).values
    first = (positives & (scores == best)).int().argmax(1, keepdim=True)
    ranks = (~(scores <= best) | ((scores == best) & (items < first))).sum(1)
    return torch.where(positives.any(1), ranks, scores.shape[1])


def recalls(queries: Tensor, items: Tensor, pairs: Tensor, axis: Axis) -> dict[int, float]:
    """Return the share of queries with a positive item among the first k, for each k in RECALLS. Collective.

    queries [queries, d] and items [items, d], the same on every rank; pairs [pairs, 2] int64: a query and an item that
    belong together. Queries without a pair are not counted. Ranks take chunks of queries in turn: the chunks, and so
    the rounding of the scores, do not depend on the number of ranks.
    """
    device = axis.device
    items = items.to(device)
    hits = torch.zeros(len(RECALLS) + 1, dtype=torch.int64, device=device)
    pairs = pairs[pairs[:, 0].argsort(stable=True)]
    chunk = max(1, _COMPARED_AT_A_TIME // max(1, len(items)))
    for number, part in enumerate(slices_of(len(queries), chunk)):
        if number % axis.size != axis.rank:
            continue
        first, last = torch.searchsorted(pairs[:, 0].contiguous(), torch.tensor([part.start, part.stop])).tolist()
        own = pairs[first:last].to(device)
        positives = torch.zeros(part.stop - part.start, len(items), dtype=torch.bool, device=device)
        positives[own[:, 0] - part.start, own[:, 1]] = True
        known = positives.any(1)
        ranks = ranks_of_best(queries[part].to(device) @ items.T, positives)[known]
        hits += torch.stack([known.sum(), *((ranks < k).sum() for k in RECALLS)])
    counted, *counts = sum_over(hits, axis).tolist()
    return {k: count / counted for k, count in zip(RECALLS, counts, strict=True)} if counted else {}


class Retrieval(Measures):
    """``recall_at_<k>/image_to_text`` and ``/text_to_image`` among the first ``limit`` pairs of each source.

    Pairs with equal images are one image with several texts, and those with equal texts one text of several images: a
    query finds any of those that belong to it.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._source = limit, 0
        self._images: list[Tensor] = []
        self._texts: list[Tensor] = []
        self._keys: list[Tensor] = []  # [pairs, 3]: number of the sample, keys of image and text

    def add(
        self, features: tuple[Tensor, Tensor], content: tuple[Tensor, Tensor], samples: Tensor, counted: Tensor | None
    ) -> None:
        """Keep pairs on the CPU. ``features``: of images and texts, [pairs, d] each, normalized.

        ``content``: pixels [pairs, ...] and token ids [pairs, length], which tell equal images and texts. ``samples``:
        numbers of the pairs in the split, [pairs].
        """
        kept = samples < self._limit
        if counted is not None:
            kept &= counted
        if not kept.any():
            return
        for values, store in zip(features, (self._images, self._texts), strict=True):
            store.append(values.detach()[kept].float().cpu())
        keys = (content_keys(values[kept]) for values in content)
        numbers = samples[kept].cpu() + self._source * _MOST_SAMPLES
        self._keys.append(torch.stack([numbers, *keys], dim=1))

    def next_source(self) -> None:
        """Count the samples from the next call on as those of another source, with numbers of their own."""
        self._source += 1

    def result(self, axis: Axis) -> Figures | None:
        width = sum_over(torch.tensor([self._images[0].shape[1] if self._images else 0, int(bool(self._images))]), axis)
        if width[1] == 0:
            return None
        dim = int(width[0] // width[1])
        keys = rows_of_all(torch.cat([*self._keys, torch.empty(0, 3, dtype=torch.int64)]), axis)
        images, texts = (
            rows_of_all(torch.cat([*features, torch.empty(0, dim)]), axis) for features in (self._images, self._texts)
        )
        order = in_sample_order(keys[:, 0])
        (image, image_rows), (text, text_rows) = (_distinct(keys[order, column]) for column in (1, 2))
        queries = F.normalize(images[order][image_rows], dim=1), F.normalize(texts[order][text_rows], dim=1)
        pairs = torch.stack([image, text], dim=1)
        to_text = recalls(queries[0], queries[1], pairs, axis)
        to_image = recalls(queries[1], queries[0], pairs.flip(1), axis)
        metrics = {f"recall_at_{k}/image_to_text": value for k, value in to_text.items()}
        metrics |= {f"recall_at_{k}/text_to_image": value for k, value in to_image.items()}
        details = {"pairs": len(order), "images": len(image_rows), "texts": len(text_rows)}
        return Figures(metrics, {"retrieval": details})


def _distinct(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of the distinct key of each row, in order of first rows, and the first row of each key."""
    _, inverse = torch.unique(keys, return_inverse=True)
    first = torch.full((int(inverse.max()) + 1,), len(keys), dtype=torch.int64)
    first.scatter_reduce_(0, inverse, torch.arange(len(keys)), "amin")
    order = first.argsort()
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    return place[inverse], first[order]
