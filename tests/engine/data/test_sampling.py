"""The content of a batch is a pure function of seed and number, in every layout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaletrain_cli.engine.data.permutation import permute, sample_at, samples_at
from scaletrain_cli.engine.data.sample_order import places_in_batch
from tests.engine.data.images.pictures import layout


@given(size=st.integers(1, 2000), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permute(index, size=size, key=key) for index in range(size)) == list(range(size))


@given(seed=st.integers(0, 2**63 - 1), samples=st.integers(1, 300))
def test_every_epoch_visits_every_sample_once(seed: int, samples: int) -> None:
    for epoch in range(3):
        seen = [sample_at(epoch * samples + i, seed=seed, samples=samples) for i in range(samples)]
        assert sorted(seen) == list(range(samples))


def test_epochs_and_seeds_have_different_orders() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [sample_at(epoch * 500 + i, seed=seed, samples=500) for i in range(500)]

    assert len({tuple(order(seed, epoch)) for seed in (1, 2, 3) for epoch in (0, 1)}) == 6


def test_every_layout_divides_all_samples_of_a_batch() -> None:
    for data, micro in ((1, 24), (1, 1), (2, 4), (4, 6), (8, 3), (24, 1)):
        batches = [batch for rank in range(data) for batch in places_in_batch(layout(24, data, micro), rank)]
        assert all(len(batch) == micro for batch in batches)
        assert sorted(place for batch in batches for place in batch) == list(range(24))


@pytest.mark.parametrize(("samples", "seed"), [(1, 0), (2, 3), (7, 1), (1000, 2**63), (70_001, 5)])
def test_many_samples_are_those_of_each_position(samples: int, seed: int) -> None:
    for first, count in ((0, 50), (samples - 1, 3 * min(samples, 40)), (10**12, 33)):
        expected = [sample_at(first + place, seed=seed, samples=samples) for place in range(count)]
        assert samples_at(first, count, seed=seed, samples=samples).tolist() == expected
