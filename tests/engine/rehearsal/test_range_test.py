import math
import random
from collections.abc import Callable

import pytest

from scaletrain_cli.engine.rehearsal.learning_rate import choose, has_diverged, rates, smoothed, suggest

FIRST, LAST = 1e-6, 1.0


def quadratic(curvatures: list[float], noise: float, seed: int) -> Callable[[], Callable[[float], tuple[float, float]]]:
    """Return a maker of gradient descent on sum(c x^2) / 2 from ones; a step returns loss before it and norm."""

    def make() -> Callable[[float], tuple[float, float]]:
        chance, place = random.Random(seed), [1.0] * len(curvatures)

        def step(rate: float) -> tuple[float, float]:
            loss = 0.5 * sum(c * x * x for c, x in zip(curvatures, place, strict=True))
            slopes = [c * x + chance.gauss(0.0, noise) for c, x in zip(curvatures, place, strict=True)]
            for number, slope in enumerate(slopes):
                place[number] -= rate * slope
            return loss, math.hypot(*slopes)

        return step

    return make


def curve(make: Callable[[], Callable[[float], tuple[float, float]]], steps: int) -> tuple[list[float], ...]:
    """Run a range test, as learning_rate.py does; return rates, losses after each and norms."""
    step, tried = make(), rates(FIRST, LAST, steps)
    before, norms = [], []
    for rate in [*tried, LAST]:
        loss, norm = step(rate)
        before.append(loss)
        norms.append(norm)
        if has_diverged(before):
            break
    count = len(before) - 1
    return tried[:count], before[1:], norms[:count]


@pytest.mark.parametrize("steps", [40, 180])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("largest", [20.0, 2000.0])
def test_the_suggestion_for_a_noisy_quadratic_is_stable_and_near_the_best_fixed_rate(
    largest: float, seed: int, steps: int
) -> None:
    """Gradient descent diverges above 2 / largest curvature; the best rate of a plain sweep is somewhat below."""
    curvatures = [largest * 0.8**place for place in range(20)]
    make = quadratic(curvatures, noise=0.02 * math.sqrt(largest), seed=seed)
    found = suggest(*curve(make, steps))
    ends = {}
    for rate in (1 / largest * 2.0**power for power in range(-8, 3)):
        step = make()
        for _ in range(60):
            loss, _ = step(rate)
            if not loss < 1e6:
                break
        ends[rate] = loss
    best = min(ends, key=ends.__getitem__)
    assert best / 10 < found.rate < 2 / largest, f"best {best:.2g}, suggested {found.rate:.2g}"
    if found.diverges is not None:
        assert 1 / largest < found.diverges
        assert found.rate <= found.diverges / 5 * 1.001


def test_a_loss_that_never_falls_gives_no_suggestion_and_one_that_only_varies_none_where_it_is_higher() -> None:
    tried = rates(FIRST, LAST, 100)
    assert suggest(tried, [8.3 + 0.01 * place for place in range(100)], [1.0] * 100).rate is None
    found = []
    for seed in range(5):
        chance = random.Random(seed)
        flat = [8.3 + chance.gauss(0, 0.01) + (0.1 if rate > 1e-2 else 0.0) for rate in tried]
        found.append(suggest(tried, flat, [1.0] * 100).rate)
    known = [rate for rate in found if rate is not None]
    assert known
    assert max(known) < 1e-2


def test_a_loss_that_is_not_finite_ends_the_range() -> None:
    tried = rates(FIRST, LAST, 60)
    losses = [5.0 - 4.0 / (1 + (1e-3 / rate)) if rate < 0.02 else math.nan for rate in tried]
    found = suggest(tried, losses, [1.0] * 60)
    assert found.diverges == next(rate for rate in tried if rate >= 0.02)
    assert found.rate <= found.diverges / 5
    assert has_diverged([1.0, math.inf])


def test_divergence_near_ln_v_is_seen_although_the_loss_stays_below_1_3_times_its_best() -> None:
    """Of a language model of 4,096 tokens: from 8.3 down to 7.2 and up to 8.9, less than 1.3 x 7.2 = 9.4."""
    tried = rates(FIRST, LAST, 120)
    losses = [
        8.3 - 1.1 / (1 + math.exp(-4 * (math.log10(rate) + 3.3))) + 1.7 / (1 + math.exp(-9 * (math.log10(rate) + 1.2)))
        for rate in tried
    ]
    assert max(losses) < 1.3 * min(losses)
    found = suggest(tried, losses, [1.0] * 120)
    assert 0.02 < found.diverges < 0.2
    assert has_diverged([*losses[:100], 8.9, 8.95, 9.0])


def test_the_average_has_no_lag_and_keeps_straight_lines() -> None:
    tried = rates(1e-5, 1.0, 41)
    line = [3.0 - 0.05 * place for place in range(41)]
    assert smoothed(tried, line) == pytest.approx(line)
    peak = [math.exp(-(((place - 20) / 6) ** 2)) for place in range(41)]
    assert max(range(41), key=smoothed(tried, peak).__getitem__) == 20


@pytest.mark.parametrize(
    ("forks", "expected"),
    [
        ([(1e-3, 6.0), (3e-3, 5.0), (9e-3, math.inf)], (3e-3, 3e-3, 3e-3)),
        ([(1e-3, 5.05), (3e-3, 5.0), (9e-3, 5.2)], (3e-3, 1e-3, 9e-3)),
        ([(1e-3, 8.4), (3e-3, 8.5), (9e-3, math.inf)], (None, 0.0, 0.0)),
    ],
)
def test_fixed_rates_decide(forks: list[tuple[float, float]], expected: tuple[float | None, float, float]) -> None:
    assert choose(forks, start=8.3) == expected


def test_rates_are_at_equal_ratios() -> None:
    assert rates(1e-6, 1.0, 7) == pytest.approx([1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0])
    assert rates(1e-6, 1.0, 1) == [1.0]
