import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scaletrain_cli.engine.optim.clipping import AdaptiveClip, clip_elements
from tests.engine.optim.small_engine import batch, run_spec, small_model, start, train, weights
from tests.engine.ranks import on_ranks

LIMIT = 0.05
PLAIN_STEPS = {"optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 0.0}}
STEPS = 5


def elements_clipped(precision: str, stage: int) -> Tensor:
    small = start(run_spec({"precision": precision, **PLAIN_STEPS}), stage, accumulation=2)
    clip_elements(small.optimizer, LIMIT)
    for step in range(STEPS):
        train(small, step)
    return weights(small)


# Gradients of 16-bit weights are rounded to them; the clipped steps are 0.005 long.
@pytest.mark.parametrize(
    ("precision", "stage", "closeness"),
    [
        *[("fp32", stage, 1e-6) for stage in (0, 1, 3)],
        ("bf16", 1, 4e-3),
        ("fp16", 3, 1e-3),
        pytest.param("fp32", 2, 1e-6, marks=pytest.mark.long),
        *[pytest.param("bf16", stage, 4e-3, marks=pytest.mark.long) for stage in (2, 3)],
        pytest.param("fp16", 1, 1e-3, marks=pytest.mark.long),
    ],
)
def test_elements_are_clipped_after_averaging_and_unscaling(precision: str, stage: int, closeness: float) -> None:
    model = small_model()
    for step in range(STEPS):
        inputs, targets = batch(step)
        model.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), LIMIT)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    expected = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert (on_ranks(2, elements_clipped, precision, stage)[0] - expected).abs().max() < closeness


def observed(norms: list[float], largest: float = 0.0) -> AdaptiveClip:
    clip = AdaptiveClip(largest)
    for norm in norms:
        clip.observe(norm)
    return clip


NOISE = [1.0 + 0.1 * (-1) ** step for step in range(60)]


def test_too_few_norms_set_no_threshold() -> None:
    assert observed(NOISE[:24]).threshold() == 0.0
    assert observed(NOISE[:24], largest=3.0).threshold() == 3.0


def test_the_threshold_is_two_and_a_half_deviations_above_the_mean() -> None:
    """The mean of alternating norms of 1.1 and 0.9 is 1, and their deviation 0.1."""
    assert observed(NOISE).threshold() == pytest.approx(1.25, abs=0.01)


def test_a_spike_raises_the_threshold_no_more_than_what_was_allowed() -> None:
    assert observed([*NOISE, 1000.0]).threshold() == observed([*NOISE, observed(NOISE).threshold()]).threshold()


def test_the_threshold_follows_a_slow_change() -> None:
    falling = [norm * 0.98**step for step, norm in enumerate(NOISE * 3)]
    assert observed(falling).threshold() < observed(NOISE).threshold() / 3


def test_no_threshold_exceeds_gradient_clipping() -> None:
    assert observed(NOISE, largest=1.1).threshold() == 1.1
    assert observed([100.0 + norm for norm in NOISE], largest=1.0).threshold() == 1.0


def test_the_threshold_recovers_from_large_norms_at_the_beginning() -> None:
    """All norms exceed the limit; the statistics use the norms before clipping."""
    begun = observed([10.0 + norm for norm in NOISE[:25]], largest=1.0)
    for step in range(400):
        begun.observe(0.5 + 0.05 * (-1) ** step)
    assert 0.5 < begun.threshold() < 0.75


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_is_left_out(norm: float) -> None:
    assert observed([*NOISE, norm]).state_dict() == observed(NOISE).state_dict()


@pytest.mark.parametrize("at", [10, 40])
def test_it_goes_on_from_a_checkpoint(at: int) -> None:
    resumed = AdaptiveClip(2.0)
    resumed.load_state_dict(observed(NOISE[:at], 2.0).state_dict())
    for norm in NOISE[at:]:
        resumed.observe(norm)
    assert resumed.state_dict() == observed(NOISE, 2.0).state_dict()


def thresholds_obeyed(precision: str, stage: int) -> list[float]:
    """Return how far the weights move in steps with learning rate 1, under thresholds that change between steps."""
    settings: dict[str, Any] = {"precision": precision, "optimizer": {"name": "sgd", "lr": 1.0, "weight_decay": 0.0}}
    small, moved = start(run_spec(settings), stage, clip=1.0), []
    for step, threshold in enumerate((0.5, 0.25, 0.125)):
        small.engine.optimizer.clip_grad = threshold
        before = weights(small)
        train(small, step)
        moved.append((weights(small) - before).norm().item())
    return moved


@pytest.mark.parametrize(
    ("precision", "stage"), [("fp32", 1), ("fp32", 3), ("bf16", 1), pytest.param("bf16", 2, marks=pytest.mark.long)]
)
def test_deepspeed_clips_to_a_threshold_that_changes(precision: str, stage: int) -> None:
    assert on_ranks(2, thresholds_obeyed, precision, stage)[0] == pytest.approx([0.5, 0.25, 0.125], rel=0.05)
