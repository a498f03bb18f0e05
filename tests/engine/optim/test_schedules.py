"""The learning rate is a pure function of the step, and each schedule equals torch's over a whole run."""

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedules

from scaletrain_cli.spec import TrainingSpec
from scaletrain_cli.spec.training import learning_rate

PEAK, LEAST, WARMUP, TOTAL = 1e-3, 1e-4, 10, 100


def training(name: str, **schedule: object) -> TrainingSpec:
    return TrainingSpec.model_validate(
        {
            "global_batch_size": 8,
            "steps": TOTAL,
            "optimizer": {"lr": PEAK},
            "schedule": {"name": name, "warmup_steps": WARMUP, "min_lr": LEAST, **schedule},
        }
    )


def ours(name: str, **schedule: object) -> list[float]:
    return [learning_rate(step, TOTAL, training(name, **schedule)) for step in range(1, TOTAL + 1)]


Scheduler = Callable[[torch.optim.Optimizer], torch_schedules.LRScheduler]


def theirs(*schedulers: Scheduler, milestone: int = WARMUP) -> list[float]:
    """The rates of one torch scheduler, or of a second one from the step after ``milestone`` on."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=PEAK)
    made = [scheduler(optimizer) for scheduler in schedulers]
    whole = made[0] if len(made) == 1 else torch_schedules.SequentialLR(optimizer, made, [milestone])
    rates = []
    for _ in range(TOTAL):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SequentialLR calls its parts in a way that torch itself deprecates
            whole.step()
    return rates


def warmup(optimizer: torch.optim.Optimizer) -> torch_schedules.LRScheduler:
    return torch_schedules.LinearLR(optimizer, 1 / WARMUP, 1.0, WARMUP - 1)


def test_the_cosine_schedule_equals_that_of_torch() -> None:
    """The peak is the warm-up's last step, hence the cosine begins there."""
    after = theirs(warmup, lambda o: torch_schedules.CosineAnnealingLR(o, TOTAL - WARMUP, LEAST), milestone=WARMUP - 1)
    assert ours("cosine") == pytest.approx(after)
    assert ours("cosine")[-1] == pytest.approx(LEAST)


def test_the_linear_schedule_equals_that_of_torch() -> None:
    decay = theirs(
        warmup, lambda o: torch_schedules.LinearLR(o, 1.0, LEAST / PEAK, TOTAL - WARMUP), milestone=WARMUP - 1
    )
    assert ours("linear") == pytest.approx(decay)


def test_the_step_schedule_equals_that_of_torch() -> None:
    """The peak lasts for ``step_size`` steps after the warm-up."""
    drops = theirs(warmup, lambda o: torch_schedules.StepLR(o, 20, 0.5))
    assert ours("step", step_size=20, gamma=0.5, min_lr=0.0) == pytest.approx(drops)


def test_step_does_not_fall_below_the_minimum() -> None:
    assert ours("step", step_size=5, gamma=0.1)[-1] == LEAST


@pytest.mark.parametrize(("warmup_steps", "rise"), [(25, 0.25), (0, 0.3)])
def test_the_onecycle_schedule_equals_that_of_torch(warmup_steps: int, rise: float) -> None:
    """Its warm-up is the rise of the cycle; the default length is torch's."""
    floor = PEAK / 25 / LEAST
    cycle = theirs(
        lambda o: torch_schedules.OneCycleLR(
            o, PEAK, TOTAL, pct_start=rise, cycle_momentum=False, div_factor=25.0, final_div_factor=floor
        )
    )
    assert ours("onecycle", warmup_steps=warmup_steps) == pytest.approx(cycle)


def test_the_constant_schedule_equals_that_of_torch() -> None:
    assert ours("constant") == pytest.approx(theirs(warmup))


@pytest.mark.parametrize(("cooldown_steps", "length"), [(20, 20), (0, 10)])
def test_wsd_is_constant_and_then_cools_down(cooldown_steps: int, length: int) -> None:
    stable = TOTAL - WARMUP - length

    def factor(step: int) -> float:
        return LEAST / PEAK + (1 - LEAST / PEAK) * (1 - math.sqrt(max(0, step - stable) / length))

    reference = theirs(warmup, lambda o: torch_schedules.LambdaLR(o, factor), milestone=WARMUP - 1)
    assert ours("wsd", cooldown_steps=cooldown_steps) == pytest.approx(reference)


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
def test_without_warmup_the_first_step_is_near_the_peak(name: str) -> None:
    assert ours(name, warmup_steps=0)[0] == pytest.approx(PEAK, rel=1.1e-2)


@pytest.mark.parametrize("name", ["cosine", "linear", "step", "onecycle", "constant", "wsd"])
def test_a_run_of_one_step_trains(name: str) -> None:
    rate = learning_rate(1, 1, training(name, warmup_steps=0, step_size=1))
    assert LEAST <= rate <= PEAK
