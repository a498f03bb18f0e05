"""The learning rate is a pure function of the step."""

from itertools import pairwise

import pytest

from scaletrain_cli.engine.schedule import learning_rate
from scaletrain_cli.spec import TrainingSpec


def training(name: str, warmup_steps: int = 10) -> TrainingSpec:
    return TrainingSpec.model_validate(
        {
            "global_batch_size": 8,
            "steps": 100,
            "optimizer": {"lr": 1e-3},
            "schedule": {"name": name, "warmup_steps": warmup_steps, "min_lr": 1e-4},
        }
    )


@pytest.mark.parametrize("name", ["cosine", "linear", "constant"])
def test_warmup_is_linear_and_ends_at_the_peak(name: str) -> None:
    rates = [learning_rate(step, 100, training(name)) for step in range(1, 11)]
    assert rates == pytest.approx([1e-4 * step for step in range(1, 11)])


def test_cosine_is_half_way_in_the_middle_and_ends_at_the_minimum() -> None:
    assert learning_rate(55, 100, training("cosine")) == pytest.approx(0.5 * (1e-3 + 1e-4))
    assert learning_rate(100, 100, training("cosine")) == pytest.approx(1e-4)


def test_linear_falls_by_the_same_amount_each_step() -> None:
    rates = [learning_rate(step, 100, training("linear")) for step in range(10, 101)]
    assert [first - second for first, second in pairwise(rates)] == pytest.approx([9e-4 / 90] * 90)
    assert rates[-1] == pytest.approx(1e-4)


def test_constant_stays_at_the_peak() -> None:
    assert {learning_rate(step, 100, training("constant")) for step in range(10, 101)} == {1e-3}


def test_without_warmup_the_first_step_is_near_the_peak() -> None:
    assert learning_rate(1, 100, training("cosine", warmup_steps=0)) == pytest.approx(1e-3, rel=1e-3)
