"""A spike is a run of steps far above what is usual; it never becomes part of what is usual by passing."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator

import pytest

from scaletrain_cli.engine.guarding.spikes import Judgement, SpikeGuard

Step = tuple[float, float | None]


def judged(guard: SpikeGuard, steps: list[Step], first: int = 1) -> list[Judgement]:
    return [guard.observe(first + index, loss, norm) for index, (loss, norm) in enumerate(steps)]


def steady(count: int = 64) -> list[Step]:
    return [(2.0 + 0.1 * (step % 3), 0.5 + 0.01 * (step % 5)) for step in range(count)]


def guard(patience: int = 3) -> SpikeGuard:
    made = SpikeGuard(3.0, patience)
    assert set(judged(made, steady())) == {"fine"}
    return made


def test_a_loss_above_the_factor_is_a_spike_once_it_has_lasted_for_the_patience() -> None:
    assert judged(guard(), [(6.4, 0.5)] * 5) == ["suspicious", "suspicious", "spike", "suspicious", "suspicious"]
    assert judged(guard(), [(6.2, 0.5)] * 5) == ["fine"] * 5


def test_with_a_patience_of_one_it_is_a_spike_at_once_and_told_once() -> None:
    assert judged(guard(1), [(50.0, 0.5)] * 3 + [(2.0, 0.5), (50.0, 0.5)]) == [
        "spike",
        "suspicious",
        "suspicious",
        "fine",
        "spike",
    ]


def test_what_passes_before_the_patience_ends_is_no_spike_and_leaves_the_medians_as_they_were() -> None:
    found, before = guard(), guard()
    assert judged(found, [(90.0, 9.0), (90.0, 9.0), (2.0, 0.5)] * 20) == ["suspicious", "suspicious", "fine"] * 20
    judged(before, [(2.0, 0.5)] * 20)
    assert (found.median_loss, found.median_norm) == (before.median_loss, before.median_norm)


def test_a_gradient_norm_stands_out_only_by_both_ratio_and_spread() -> None:
    assert judged(guard(1), [(2.0, 5.3)]) == ["spike"]
    assert judged(guard(1), [(2.0, 5.0)]) == ["fine"], "far beyond the spread, and less than ten times the median"
    wild = SpikeGuard(3.0, 1)
    judged(wild, [(2.0, norm) for norm in (0.05, 1.0, 8.0) * 16])
    assert judged(wild, [(2.0, 10.5)]) == ["fine"], "ten times the median, and within the spread"


def test_losses_are_judged_from_the_ninth_step_and_norms_from_the_thirty_third() -> None:
    fresh = SpikeGuard(3.0, 1)
    assert judged(fresh, [(8.0, 1.0), (40.0, 99.0)] * 4) == ["fine"] * 8
    assert judged(fresh, [(80.0, 1.0)]) == ["spike"]
    assert judged(fresh, [(8.0, 1.0)] * 23 + [(8.0, 500.0)]) == ["fine"] * 24
    assert judged(fresh, [(8.0, 500.0)]) == ["spike"]


def test_a_skipped_step_is_judged_by_its_loss_alone() -> None:
    assert judged(guard(1), [(2.0, None), (50.0, None)]) == ["fine", "spike"]


def test_a_level_that_lasts_is_taken_in_and_not_told_again() -> None:
    found = judged(guard(), [(20.0, 0.5)] * 100)
    assert found[:3] == ["suspicious", "suspicious", "spike"]
    assert set(found[3:32]) == {"suspicious"}
    assert set(found[32:]) == {"fine"}


def test_a_spike_upon_a_new_level_is_told() -> None:
    found = guard()
    judged(found, [(20.0, 0.5)] * 60)
    assert judged(found, [(61.0, 0.5)] * 3) == ["suspicious", "suspicious", "spike"]


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


@pytest.mark.parametrize("cut", [3, 40, 66, 67, 90])
def test_state_goes_through_json_and_on_to_the_same_judgements(cut: int) -> None:
    steps = [*steady(), *[(50.0, 9.0)] * 8, *steady(30), *[(2.0, 90.0)] * 6]
    whole, first, second = SpikeGuard(3.0, 5), SpikeGuard(3.0, 5), SpikeGuard(3.0, 5)
    expected = judged(whole, steps)
    begun = judged(first, steps[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + judged(second, steps[cut:], first=cut + 1) == expected
    assert second.state_dict() == whole.state_dict()
