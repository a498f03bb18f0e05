"""The order of sources against a plain implementation of Webster's method with exact fractions."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaletrain_cli.data.mixture import PARTS, Mixture, Stage, whole_weights

_WEIGHTS = st.lists(st.integers(1, 1000), min_size=1, max_size=6)


def webster(weights: list[int], samples: int) -> list[int]:
    """The source with the earliest slot that is due, one sample at a time."""
    taken = [0] * len(weights)
    order = []
    for _ in range(samples):
        due = [
            (Fraction(2 * count + 1, 2 * weight), source)
            for source, (count, weight) in enumerate(zip(taken, weights, strict=True))
        ]
        source = min(due)[1]
        taken[source] += 1
        order.append(source)
    return order


@pytest.mark.parametrize("weights", [[70, 25, 5], [5, 5], [999_999, 1], [1]])
def test_sources_come_in_the_order_of_websters_method(weights: list[int]) -> None:
    mixture = Mixture([Stage(0, tuple(weights))])
    assert [mixture.place(sample).source for sample in range(9000)] == webster(weights, 9000)


@given(_WEIGHTS, st.integers(0, 10**11))
def test_shares_of_every_prefix_are_those_of_the_weights_up_to_two_samples(weights: list[int], samples: int) -> None:
    counts = Mixture([Stage(0, tuple(weights))]).counts(samples)
    assert counts.sum() == samples
    assert np.abs(counts - samples * np.array(weights) / sum(weights)).max() <= 2


def test_a_small_source_of_a_long_run_has_its_epochs() -> None:
    samples, sequences, epochs = 10**9, 123, 2.5
    share = epochs * sequences / samples
    assert Mixture([Stage(0, (1 - share, share))]).counts(samples)[1] == pytest.approx(epochs * sequences, abs=1)


@given(_WEIGHTS, _WEIGHTS, st.integers(1, 10**7), st.integers(0, 10**7))
def test_each_source_is_read_in_order_without_a_gap_across_stages(
    first: list[int], second: list[int], start: int, before: int
) -> None:
    width = min(len(first), len(second))
    mixture = Mixture([Stage(0, tuple(first[:width])), Stage(start, tuple(second[:width]))])
    begin = max(0, start - 50) if before % 2 else before
    taken = mixture.counts(begin)
    for sample in range(begin, begin + 100):
        source, position = mixture.place(sample)
        assert position == taken[source]
        taken[source] += 1
    assert (taken == mixture.counts(begin + 100)).all()


def test_a_source_with_weight_0_gives_no_sample_until_a_stage_gives_it_one() -> None:
    mixture = Mixture([Stage(0, (1.0, 0.0)), Stage(1000, (0.5, 0.5))])
    assert [mixture.place(sample).source for sample in range(1000)] == [0] * 1000
    assert mixture.counts(1100).tolist() == [1050, 50]


def test_a_revision_changes_no_sample_before_it() -> None:
    stages = [Stage(0, (0.5, 0.3, 0.2)), Stage(4_000, (0.1, 0.1, 0.8))]
    one, two = Mixture(stages), Mixture([*stages, Stage(6_000, (1.0, 0.0, 0.0))])
    assert [one.place(sample) for sample in range(6_000)] == [two.place(sample) for sample in range(6_000)]
    assert {two.place(sample).source for sample in range(6_000, 6_100)} == {0}


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50).filter(any))
def test_whole_weights_add_up_and_keep_every_source(weights: list[float]) -> None:
    whole = whole_weights(weights)
    assert sum(whole) == PARTS
    assert all((part > 0) == (weight > 0) for part, weight in zip(whole, weights, strict=True))


@pytest.mark.parametrize("weights", [(), (0.0,), (1.0, -0.5), (float("inf"), 1.0), (float("nan"),)])
def test_weights_without_a_meaning_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"weights|empty"):
        Mixture([Stage(0, weights)])


@pytest.mark.parametrize(
    "stages", [[], [Stage(1, (1.0,))], [Stage(0, (1.0,)), Stage(0, (1.0,))], [Stage(0, (1.0,)), Stage(5, (1.0, 1.0))]]
)
def test_stages_without_an_order_are_refused(stages: list[Stage]) -> None:
    with pytest.raises(ValueError, match="stage"):
        Mixture(stages)


def test_a_sample_far_into_a_run_is_found_without_the_samples_before_it() -> None:
    mixture = Mixture([Stage(0, (0.6, 0.4))])
    assert mixture.place(10**12).position == 6 * 10**11
    assert mixture.counts(10**12).tolist() == [6 * 10**11, 4 * 10**11]
