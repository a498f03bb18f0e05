import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from scaletrain_cli.engine.metrics.noise_scale import EVERY, LARGEST_SHARE, NoiseScale, NoiseSteps

_CPU = torch.device("cpu")
SMALL, LARGE, SIZE = 2, 16, 4000


@pytest.mark.parametrize("scale", [3.0, 300.0])  # far below and far above the batch
def test_the_estimate_is_the_noise_that_was_added(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    gradient = torch.full((SIZE,), 1 / math.sqrt(SIZE), dtype=torch.float64)  # of norm 1
    noise = NoiseScale(SMALL, LARGE, _CPU)
    found = torch.tensor(math.nan)
    for _ in range(200):
        samples = torch.randn(LARGE, SIZE, generator=generator, dtype=torch.float64) * math.sqrt(scale / SIZE)
        gradients = gradient + samples  # of each sequence; the trace of their covariance is the scale
        of_small = gradients.view(-1, SMALL, SIZE).mean(1).square().sum(1).mean()
        found = noise.add(of_small, gradients.mean(0).norm())
    assert found.item() == pytest.approx(scale, rel=0.2)


def test_the_estimate_is_unknown_at_first_and_passes_over_an_overflow() -> None:
    noise, other = NoiseScale(1, 4, _CPU), NoiseScale(1, 4, _CPU)
    found = [noise.add(torch.tensor(5.0), 2.0).item() for _ in range(25)]
    assert all(math.isnan(each) for each in found[:19])
    assert found[19:] == pytest.approx([(5 - 4) / (1 - 1 / 4) / ((4 * 4 - 5) / 3)] * 6)
    for _ in range(25):
        other.add(torch.tensor(math.inf), math.inf)
        known = other.add(torch.tensor(5.0), torch.tensor(2.0))
    assert known.item() == found[-1]
    noise.begin_again()
    assert math.isnan(noise.add(torch.tensor(5.0), 2.0).item())
    assert [noise.add(torch.tensor(6.0), 2.0).item() for _ in range(24)][-1] == pytest.approx(
        (6 - 4) / (3 / 4) / (10 / 3)
    )


def test_the_estimate_is_unknown_while_noise_hides_the_gradient() -> None:
    noise = NoiseScale(1, 4, _CPU)
    for _ in range(30):
        found = noise.add(torch.tensor(8.0), 1.0)  # less than noise alone leaves: 8 / 4
    assert math.isnan(found.item())


def test_the_gradient_is_measured_before_anything_changes_it() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)

    def reduced(weight: nn.Parameter) -> None:
        weight.grad = None

    model.weight.register_post_accumulate_grad_hook(reduced)
    noise, inputs = NoiseScale(1, 4, _CPU), torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    with noise.measuring(model.parameters(), 8.0):
        (8 * model(inputs).sum()).backward()
    expected = (inputs.sum(0).square().sum() * 2).item()
    assert noise.take_square().item() == pytest.approx(expected, rel=1e-6)
    assert noise.take_square().item() == 0
    model(inputs).sum().backward()
    assert noise.take_square().item() == 0


class OneRank:
    def total(self, values: list[float]) -> list[float]:
        return list(values)


@pytest.mark.parametrize(("cost", "interval"), [(1e-6, EVERY), (0.03, 60), (10.0, 200)])
def test_the_scale_is_measured_less_often_where_it_is_expensive_once_estimated(cost: float, interval: int) -> None:
    noise = NoiseScale(1, 4, _CPU)
    steps = NoiseSteps(noise, OneRank())  # type: ignore[arg-type]
    measured = []
    for step in range(1, 801):
        if steps.begin(step):
            measured.append(step)
            noise.taken, noise.seconds = noise.taken + 1, cost
        steps.step_took(1.0)
        steps.after_step()
    assert measured[:20] == list(range(EVERY, 201, EVERY))
    assert {later - earlier for earlier, later in pairwise(measured[20:])} == {interval}
    assert interval in (EVERY, 200) or cost / interval <= LARGEST_SHARE
