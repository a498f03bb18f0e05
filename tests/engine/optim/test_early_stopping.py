import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scaletrain_cli.engine.validation import Validation, check_metrics
from scaletrain_cli.errors import UsageError
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.spec.training import EarlyStoppingSpec, should_stop
from tests.spec.samples import SPEC, load

IMAGES = ("model={family: resnet, hidden_sizes: [64], depths: [1]}", "data={source: sklearn-digits}")


@pytest.mark.parametrize(
    ("losses", "stops"),
    [
        *(([], False), ([3.0, 2.0, 1.0], False), ([3.0, 2.0, 2.1, 2.05], True), ([3.0, 2.0, 2.1, 1.9], False)),
        *(([3.0, 2.0, 2.0, 2.0], True), ([2.0, 2.5, 1.9, 2.4], False), ([2.0, math.nan, math.inf], True)),
    ],
)
def test_training_stops_after_two_evaluations_without_an_improvement(losses: list[float], stops: bool) -> None:
    assert should_stop(losses, EarlyStoppingSpec(patience=2)) is stops


def test_an_improvement_must_be_large_enough() -> None:
    slowly = [2.0, 1.95, 1.92]
    assert should_stop(slowly, EarlyStoppingSpec(patience=2, min_delta=0.1))
    assert not should_stop(slowly, EarlyStoppingSpec(patience=2, min_delta=0.04))


def test_small_improvements_add_up() -> None:
    """The next loss is compared with the best one, not with the one before it."""
    assert not should_stop([2.0, 1.95, 1.85], EarlyStoppingSpec(patience=2, min_delta=0.1))


def test_a_patience_of_zero_turns_early_stopping_off() -> None:
    assert not should_stop([1.0] * 50, EarlyStoppingSpec(patience=0))


def test_a_metric_that_the_first_validation_lacks_ends_the_run() -> None:
    spec = load(SPEC, *IMAGES, "training.loss=bce", "checkpoint.keep_best=validation_top1")
    with pytest.raises(UsageError, match=r"checkpoint\.keep_best: validation_top1 .* has validation_loss\."):
        check_metrics(spec, {"validation_loss": 0.7})
    stopping = ("training.early_stopping={patience: 2, metric: validation_top1}", "training.loss=bce")
    with pytest.raises(UsageError, match=r"training\.early_stopping\.metric: validation_top1"):
        check_metrics(
            load(SPEC, *IMAGES, *stopping), {"validation_loss": 0.7, "validation_mean_average_precision": 0.5}
        )
    check_metrics(spec, {"validation_loss": 0.7, "validation_top1": 0.5})
    check_metrics(spec, {"validation_loss": math.nan})  # the guard acts on a run that diverges


def test_a_loss_that_is_not_finite_does_not_keep_later_ones_from_being_the_best(tmp_path: Path) -> None:
    context: Any = SimpleNamespace(spec=load(SPEC, "checkpoint.keep_best=validation_loss"), run=RunDir(tmp_path))
    nothing: Any = None
    validation = Validation(context, nothing, nothing, None, {}, {}, nothing)
    losses = [math.nan, 3.0, 2.0, math.nan, 2.5]
    best = [validation.is_best([{"validation_loss": each} for each in losses[:count]]) for count in range(1, 6)]
    assert best == [False, True, True, False, False]
