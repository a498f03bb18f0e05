"""The content of a batch is a pure function of seed and number, in every layout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaletrain_cli.engine.data.permutation import batch_indices, permute, sample_at, samples_at


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


def global_batch(number: int, data_parallel: int, micro_batch_size: int) -> set[int]:
    indices = []
    for rank in range(data_parallel):
        batches = batch_indices(
            seed=7,
            batch=number,
            global_batch_size=24,
            samples=1000,
            rank=rank,
            data_parallel=data_parallel,
            micro_batch_size=micro_batch_size,
        )
        assert all(len(batch) == micro_batch_size for batch in batches)
        indices += [index for batch in batches for index in batch]
    assert len(indices) == 24
    return set(indices)


def test_the_global_batch_does_not_depend_on_the_layout() -> None:
    for number in (0, 1, 40, 41, 42, 10_000):
        batches = [global_batch(number, d, m) for d, m in ((1, 24), (1, 1), (2, 4), (4, 6), (8, 3), (24, 1))]
        assert all(batch == batches[0] for batch in batches)


@pytest.mark.parametrize(("samples", "seed"), [(1, 0), (2, 3), (7, 1), (1000, 2**63), (70_001, 5)])
def test_many_samples_are_those_of_each_position(samples: int, seed: int) -> None:
    for first, count in ((0, 50), (samples - 1, 3 * min(samples, 40)), (10**12, 33)):
        expected = [sample_at(first + place, seed=seed, samples=samples) for place in range(count)]
        assert samples_at(first, count, seed=seed, samples=samples).tolist() == expected
