"""Top-k accuracy, mean average precision and errors: against scikit-learn, on any number of ranks."""

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from scaletrain_cli.engine.evaluation.measures import (
    Accuracy,
    Errors,
    Figures,
    MeanAveragePrecision,
    Measures,
    average_precision,
    rank_of_target,
)
from scaletrain_cli.engine.parallel.mesh import Axis
from tests.engine.ranks import on_ranks

SAMPLES, CLASSES, WITHOUT_SAMPLES = 103, 9, 4
ALONE = Axis()


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def classified() -> tuple[Tensor, Tensor]:
    """Logits with many ties, and classes of which one has no sample."""
    logits = torch.randint(0, 6, (SAMPLES, CLASSES), generator=_generator()).float()
    targets = torch.randint(0, CLASSES - 1, (SAMPLES,), generator=_generator(1))
    return logits, targets + (targets >= WITHOUT_SAMPLES)


@cache
def labeled() -> tuple[Tensor, Tensor]:
    """Scores with ties, and several labels per sample; one class has no positive label."""
    scores = torch.randint(-20, 20, (SAMPLES, CLASSES), generator=_generator(2)).float() / 4
    labels = (torch.rand(SAMPLES, CLASSES, generator=_generator(3)) < 0.3).float()
    labels[:, WITHOUT_SAMPLES] = 0
    return scores, labels


@cache
def measured() -> tuple[Tensor, Tensor]:
    return torch.randn(SAMPLES, 2, generator=_generator(4)) * 1e3, torch.randn(SAMPLES, 2, generator=_generator(5))


KINDS: dict[str, Any] = {
    "accuracy": (classified, lambda: Accuracy(CLASSES)),
    "mean average precision": (labeled, lambda: MeanAveragePrecision(CLASSES)),
    "errors": (measured, lambda: Errors(2)),
}


def fill(measures: Any, outputs: Tensor, targets: Tensor, rank: int, ranks: int, size: int = 8) -> Measures:
    """Add the samples of a rank in rounds of micro-batches; the last sample stands in for those after the end."""
    for first in range(rank * size, -(-SAMPLES // (size * ranks)) * size * ranks, size * ranks):
        places = torch.arange(first, first + size)
        rows = places.clamp(max=SAMPLES - 1)
        measures.add(outputs[rows], targets[rows], places < SAMPLES)
    return measures  # type: ignore[no-any-return]


def figures_of_rank(kind: str) -> Figures:
    group = torch.distributed.group.WORLD
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    data, make = KINDS[kind]
    return fill(make(), *data(), rank, ranks).result(Axis(ranks, rank, group))


def figures_alone(kind: str) -> Figures:
    data, make = KINDS[kind]
    measures = make()
    measures.add(*data())
    return measures.result(ALONE)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_any_number_of_ranks_gives_the_same_figures(ranks: int) -> None:
    for kind in KINDS:
        assert on_ranks(ranks, figures_of_rank, kind) == [figures_alone(kind)] * ranks, kind


def test_top_k_is_that_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    logits, targets = torch.randn(SAMPLES, CLASSES, generator=_generator(6)), classified()[1]
    found = Accuracy(CLASSES)
    found.add(logits, targets)
    result = found.result(ALONE)
    for k in (1, 5):
        expected = metrics.top_k_accuracy_score(targets.numpy(), logits.numpy(), k=k, labels=range(CLASSES))
        assert result.metrics[f"top{k}"] == pytest.approx(expected, abs=1e-15)


def test_of_equal_logits_the_class_with_the_lower_index_comes_first() -> None:
    """scikit-learn prefers the higher index, so it gets the classes in reverse order."""
    metrics = pytest.importorskip("sklearn.metrics")
    logits, targets = classified()
    for k in (1, 5):
        ours = (rank_of_target(logits, targets) < k).double().mean().item()
        reverse = CLASSES - 1 - targets
        expected = metrics.top_k_accuracy_score(reverse, logits.flip(1).numpy(), k=k, labels=range(CLASSES))
        assert ours == pytest.approx(expected, abs=1e-15)
    assert rank_of_target(torch.zeros(3, 4), torch.tensor([0, 1, 3])).tolist() == [0, 1, 3]
    assert torch.equal(rank_of_target(logits, targets) == 0, torch.from_numpy(logits.numpy().argmax(1)) == targets)


def test_logits_that_are_not_numbers_are_never_right() -> None:
    logits = torch.tensor([[math.nan] * 6, [3.0, 1, 0, 0, 0, math.nan], [math.inf, 0, 0, 0, 0, 0]])
    assert rank_of_target(logits, torch.tensor([0, 0, 0])).tolist() == [6, 1, 0]


def test_accuracy_by_class_is_the_diagonal_of_the_confusion_matrix() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    logits, targets = classified()
    matrix = metrics.confusion_matrix(targets, logits.numpy().argmax(1), labels=range(CLASSES))
    by_class = figures_alone("accuracy").details["classes"]
    assert [each["samples"] for each in by_class] == matrix.sum(1).tolist()
    for number, each in enumerate(by_class):
        expected = matrix[number, number] / matrix[number].sum() if matrix[number].sum() else None
        assert each["top1"] == expected
    assert by_class[WITHOUT_SAMPLES] == {"class": WITHOUT_SAMPLES, "samples": 0, "top1": None, "top5": None}
    recalls = [each["top1"] for each in by_class if each["samples"]]
    assert figures_alone("accuracy").details["mean_class_accuracy"] == pytest.approx(np.mean(recalls), abs=1e-12)


def test_samples_without_a_class_are_not_counted_and_five_classes_have_no_top_5() -> None:
    found = Accuracy(5, ["a", "b", "c"], prefix="zero_shot_")
    assert found.result(ALONE) is None
    found.add(torch.eye(5)[:3], torch.tensor([0, -100, 1]))
    result = found.result(ALONE)
    assert (result.metrics, result.details["zero_shot_samples"]) == ({"zero_shot_top1": 0.5}, 2)
    assert [each["class"] for each in result.details["zero_shot_classes"]] == ["a", "b", "c", 3, 4]


def test_average_precision_is_that_of_scikit_learn_also_with_ties() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    scores, labels = labeled()
    found = average_precision(scores, labels.bool())
    with_positives = [number for number in range(CLASSES) if number != WITHOUT_SAMPLES]
    for number in with_positives:
        expected = metrics.average_precision_score(labels[:, number], scores[:, number])
        assert found[number].item() == pytest.approx(expected, abs=1e-12)
    assert found[WITHOUT_SAMPLES].isnan()
    mean = found[with_positives].mean().item()
    result = figures_alone("mean average precision")
    assert result.metrics == {"mean_average_precision": pytest.approx(mean, abs=1e-8)}
    assert result.details["classes"][WITHOUT_SAMPLES]["average_precision"] is None
    assert [each["samples"] for each in result.details["classes"]] == labels.sum(0).int().tolist()


def test_errors_are_those_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    outputs, targets = (values.double().numpy() for values in measured())
    result = figures_alone("errors")
    assert result.metrics["mae"] == pytest.approx(metrics.mean_absolute_error(targets, outputs), rel=1e-8)
    assert result.metrics["rmse"] == pytest.approx(metrics.mean_squared_error(targets, outputs) ** 0.5, rel=1e-8)
    each = metrics.mean_absolute_error(targets, outputs, multioutput="raw_values")
    assert [output["mae"] for output in result.details["outputs"]] == pytest.approx(list(each), rel=1e-8)
    assert Errors(1).result(ALONE) is None
