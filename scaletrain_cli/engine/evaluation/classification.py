"""Accuracy of classifiers: top-1, top-5 and by class; mean average precision of several labels per image."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scaletrain_cli.engine.evaluation.measures import Figures, Measures, rounded, rows_of_all, slices_of, sum_over
from scaletrain_cli.engine.parallel.mesh import Axis

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
        counted = sum_over(torch.tensor([len(scores)]), axis)
        samples = int(counted)
        if samples == 0:
            return None
        found, positives = [], []
        for part in slices_of(self._classes, max(1, _SCORES_AT_A_TIME // samples)):
            whole = rows_of_all(labels[:, part].contiguous(), axis)
            found.append(average_precision(rows_of_all(scores[:, part].contiguous(), axis), whole))
            positives.append(whole.sum(0))
        values, counts = torch.cat(found), torch.cat(positives).tolist()
        by_class: list[dict[str, Any]] = [
            {
                "class": _shown(self._names, number),
                "samples": count,
                "average_precision": rounded(float(value)) if count else None,
            }
            for number, (value, count) in enumerate(zip(values, counts, strict=True))
        ]
        with_positives = values[~values.isnan()]
        metrics = {}
        if len(with_positives):
            metrics["mean_average_precision"] = rounded(float(with_positives.mean()))
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
        found, accuracy = self._precision.result(axis), self._accuracy.result(axis)
        others = int(sum_over(torch.tensor([self._others]), axis))
        if found is None or accuracy is None or others:
            return found
        pairs = zip(accuracy.details["classes"], found.details["classes"], strict=True)
        classes = [of_class | precision for of_class, precision in pairs]
        return Figures(accuracy.metrics | found.metrics, accuracy.details | {"classes": classes})


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
        metrics = {"mae": _value(absolute.sum() / total), "rmse": _value((squared.sum() / total).sqrt())}
        details: dict[str, object] = {"samples": int(counts[0])}
        if len(counts) > 1:
            each = zip(absolute / counts, (squared / counts).sqrt(), strict=True)
            details["outputs"] = [{"mae": _value(mae), "rmse": _value(rmse)} for mae, rmse in each]
        return Figures(metrics, details)


def _value(figure: Tensor) -> float:
    return rounded(float(figure))
