import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from scaletrain_cli.engine.health.guard import SpikeGuard, StepStatus

Step = tuple[float, float | None]


def statuses(guard: SpikeGuard, steps: list[Step], first: int = 1) -> list[StepStatus]:
    return [guard.observe(first + index, loss, norm) for index, (loss, norm) in enumerate(steps)]


def steady(count: int = 64) -> list[Step]:
    return [(2.0 + 0.1 * (step % 3), 0.5 + 0.01 * (step % 5)) for step in range(count)]


def guard(patience: int = 3) -> SpikeGuard:
    made = SpikeGuard(3.0, patience)
    assert set(statuses(made, steady())) == {"fine"}
    return made


def test_a_loss_above_the_factor_is_a_spike_after_patience_steps() -> None:
    assert statuses(guard(), [(6.4, 0.5)] * 5) == ["suspicious", "suspicious", "spike", "suspicious", "suspicious"]
    young = SpikeGuard(3.0, 3)
    statuses(young, steady(16))
    assert statuses(young, [(6.2, 0.5)] * 5) == ["fine"] * 5


def test_with_a_patience_of_one_a_spike_is_reported_at_once_and_only_once() -> None:
    assert statuses(guard(1), [(50.0, 0.5)] * 3 + [(2.0, 0.5), (50.0, 0.5)]) == [
        "spike",
        "suspicious",
        "suspicious",
        "fine",
        "spike",
    ]


def test_fewer_outliers_than_the_patience_are_no_spike_and_do_not_change_the_medians() -> None:
    found, before = guard(), guard()
    assert statuses(found, [(90.0, 9.0), (90.0, 9.0), (2.0, 0.5)] * 20) == ["suspicious", "suspicious", "fine"] * 20
    statuses(before, [(2.0, 0.5)] * 20)
    assert (found.median_loss, found.median_norm) == (before.median_loss, before.median_norm)


def test_a_gradient_norm_is_an_outlier_only_by_both_ratio_and_spread() -> None:
    assert statuses(guard(1), [(2.0, 5.3)]) == ["spike"]
    assert statuses(guard(1), [(2.0, 5.0)]) == ["fine"], "far beyond the spread, and less than ten times the median"
    wild = SpikeGuard(3.0, 1)
    statuses(wild, [(2.0, norm) for norm in (0.05, 1.0, 8.0) * 16])
    assert statuses(wild, [(2.0, 10.5)]) == ["fine"], "ten times the median, and within the spread"


def test_losses_are_compared_from_the_ninth_step_and_norms_from_the_thirty_third() -> None:
    fresh = SpikeGuard(3.0, 1)
    assert statuses(fresh, [(8.0, 1.0), (40.0, 99.0)] * 4) == ["fine"] * 8
    assert statuses(fresh, [(80.0, 1.0)]) == ["spike"]
    assert statuses(fresh, [(8.0, 1.0)] * 23 + [(8.0, 500.0)]) == ["fine"] * 24
    assert statuses(fresh, [(8.0, 500.0)]) == ["spike"]


def test_of_a_skipped_step_only_the_loss_is_compared() -> None:
    assert statuses(guard(1), [(2.0, None), (50.0, None)]) == ["fine", "spike"]


def test_a_lasting_level_becomes_normal_and_is_not_reported_again() -> None:
    found = statuses(guard(), [(20.0, 0.5)] * 100)
    assert found[:3] == ["suspicious", "suspicious", "spike"]
    assert set(found[3:32]) == {"suspicious"}
    assert set(found[32:]) == {"fine"}


def test_a_spike_above_a_new_level_is_reported() -> None:
    found = guard()
    statuses(found, [(20.0, 0.5)] * 60)
    assert statuses(found, [(61.0, 0.5)] * 3) == ["suspicious", "suspicious", "spike"]


def ordinary(seed: int, steps: int) -> Iterator[Step]:
    """A falling loss with noise, and norms that fall with heavy tails, as a language model's do."""
    chance = random.Random(seed)
    for step in range(1, steps + 1):
        loss = 2.0 + 8.0 / math.sqrt(step) + chance.gauss(0, 0.15)
        yield loss, (0.3 + 5.0 / step) * chance.lognormvariate(0, 0.5)


@pytest.mark.parametrize("seed", range(3))
def test_ordinary_noise_is_no_spike_even_with_a_patience_of_one(seed: int) -> None:
    watch = SpikeGuard(3.0, 1)
    assert {watch.observe(step, *values) for step, values in enumerate(ordinary(seed, 5000), 1)} == {"fine"}


def test_a_late_spike_below_the_factor_is_found_by_the_spread() -> None:
    chance = random.Random(3)
    late = [(2.2 + chance.gauss(0, 0.03), 0.5) for _ in range(200)]
    for spike in (2.9, 3.5, 5.0):
        found = SpikeGuard(3.0, 3)
        assert set(statuses(found, late)) == {"fine"}
        assert statuses(found, [(spike, 0.5)] * 3) == ["suspicious", "suspicious", "spike"]
        below_the_ratio = statuses(found, [(2.6, 0.5)] * 3)
        assert below_the_ratio == ["fine"] * 3, "far beyond the spread, and less than 1.25 times the median"
    noisy = SpikeGuard(3.0, 3)
    statuses(noisy, [(2.2 + chance.gauss(0, 0.4), 0.5) for _ in range(200)])
    assert statuses(noisy, [(4.5, 0.5)] * 3) == ["fine"] * 3, "twice the median, and within the spread"


def test_a_large_factor_makes_the_spread_lenient_too() -> None:
    late = [(2.2 + 0.01 * (step % 3), 0.5) for step in range(64)]
    lenient = SpikeGuard(12.0, 1)
    statuses(lenient, late)
    assert statuses(lenient, [(4.0, 0.5)]) == ["fine"], "four times a quarter above the median is allowed"
    assert statuses(lenient, [(4.6, 0.5)]) == ["spike"]


def test_small_losses_of_preference_pairs_are_compared_with_the_loss_at_the_start() -> None:
    losses = [0.02, 0.01, 0.05] * 20
    for least, expected in ((0.0, "spike"), (0.69, "fine")):
        watch = SpikeGuard(3.0, 1, least)
        statuses(watch, [(loss, 1.0) for loss in losses])
        assert watch.observe(61, 0.6, 1.0) == expected
    assert watch.observe(62, 2.5, 1.0) == "spike"


def test_a_small_factor_limits_the_loss_below_the_spread() -> None:
    strict = SpikeGuard(1.1, 1)
    statuses(strict, [(2.2 + 0.01 * (step % 3), 0.5) for step in range(64)])
    assert statuses(strict, [(2.45, 0.5)]) == ["spike"]


SHAPES = ("plain", "heavy tails", "hard batches", "a step up", "warm restarts", "a plateau in the warm-up")


def made_up_losses(shape: str, seed: int, steps: int) -> list[float]:
    """Return a falling loss, from smooth to very noisy, with changes that occur in healthy runs."""
    chance = random.Random(f"{shape} {seed}")
    noise, floor = chance.choice([0.003, 0.03, 0.1]), chance.choice([0.1, 0.6, 2.0, 3.5])
    first = chance.choice([8.0, 10.4])
    jump, losses = chance.randrange(200, steps), []
    for step in range(1, steps + 1):
        usual, drawn = floor + (first - floor) * (1 + step / 30) ** -0.6, chance.gauss(0, 1)
        if shape == "heavy tails":  # Student's, of three degrees of freedom
            drawn /= math.sqrt(sum(chance.gauss(0, 1) ** 2 for _ in range(3)) / 3)
        elif shape == "hard batches" and chance.random() < 0.05:
            drawn += 0.2 / noise
        elif shape == "a step up" and step > jump:
            usual *= 1.15
        elif shape == "warm restarts" and step > 400:
            usual *= 1 + 0.1 * math.exp(-(step % 400) / 60)
        elif shape == "a plateau in the warm-up" and step < 150:
            usual = first - 0.5 * step / 150
        losses.append(usual * max(0.1, 1 + noise * drawn))
    return losses


@pytest.mark.parametrize("shape", SHAPES)
def test_no_healthy_loss_is_a_spike_and_a_late_spike_upon_it_is_one(shape: str) -> None:
    for seed in range(12):
        losses = made_up_losses(shape, seed, 1000)
        found = SpikeGuard(3.0, 3)
        assert "spike" not in statuses(found, [(loss, None) for loss in losses]), seed
        spike = [(found.median_loss * rise, None) for rise in (2.2, 2.4, 2.3)]
        assert statuses(found, spike)[-1] == "spike", seed


def test_no_loss_of_real_small_runs_is_a_spike() -> None:
    recorded = json.loads((Path(__file__).parent / "real_losses.json").read_text())
    for name, run in recorded.items():
        found = SpikeGuard(3.0, 3)
        steps = list(zip(run["losses"], run["grad_norms"], strict=True))
        assert len(steps) > 1000
        assert "spike" not in statuses(found, steps), name


@pytest.mark.parametrize("cut", [3, 40, 66, 67, 90])
def test_state_restored_from_json_leads_to_the_same_statuses(cut: int) -> None:
    steps = [*steady(), *[(50.0, 9.0)] * 8, *steady(30), *[(2.0, 90.0)] * 6]
    whole, first, second = SpikeGuard(3.0, 5), SpikeGuard(3.0, 5), SpikeGuard(3.0, 5)
    expected = statuses(whole, steps)
    begun = statuses(first, steps[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + statuses(second, steps[cut:], first=cut + 1) == expected
    assert second.state_dict() == whole.state_dict()
