"""Steps take the batches outside of skip ranges in order, each once."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from scaletrain_cli.data.skip_ranges import batch_number, keeps_batches, merged_skip_ranges

window = st.tuples(st.integers(1, 60), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair)))
windows = st.lists(window, max_size=8)


def batches_of(found: list[tuple[int, int]] | tuple[tuple[int, int], ...]) -> set[int]:
    return {number for first, last in found for number in range(first, last + 1)}


def test_without_skip_ranges_a_step_trains_on_the_batch_of_its_number() -> None:
    assert [batch_number(step, ()) for step in (1, 2, 900)] == [1, 2, 900]


def test_a_skip_range_includes_both_ends() -> None:
    assert [batch_number(step, ((3, 5),)) for step in (1, 2, 3, 4)] == [1, 2, 6, 7]


@given(windows)
def test_steps_take_the_batches_outside_of_skip_ranges_in_order(found: list[tuple[int, int]]) -> None:
    skipped = batches_of(found)
    allowed = [number for number in range(1, 400) if number not in skipped]
    assert [batch_number(step, merged_skip_ranges(found)) for step in range(1, 200)] == allowed[:199]


@given(windows)
def test_merged_skip_ranges_hold_the_same_batches_in_order_and_are_not_adjacent(found: list[tuple[int, int]]) -> None:
    few = merged_skip_ranges(found)
    assert batches_of(few) == batches_of(found)
    assert all(before[1] + 1 < after[0] for before, after in itertools.pairwise(few))
    assert merged_skip_ranges(few) == few


@given(windows, window, st.integers(1, 200))
def test_a_later_skip_range_does_not_change_earlier_steps(
    found: list[tuple[int, int]], ahead: tuple[int, int], step: int
) -> None:
    before = batch_number(step, merged_skip_ranges(found))
    if before < ahead[0]:
        assert batch_number(step, merged_skip_ranges([*found, ahead])) == before


def test_ranges_keep_the_batches_of_a_checkpoint_if_its_steps_have_the_same_ones() -> None:
    assert keeps_batches(0, [], [(1, 3)])
    assert keeps_batches(5, [], [(6, 6)])
    assert not keeps_batches(5, [], [(5, 5)])
    assert keeps_batches(5, [(2, 3)], [(2, 2), (3, 3), (8, 8)])  # trained are 1, 4, 5, 6, 7
    assert not keeps_batches(5, [(2, 3)], [(2, 3), (7, 7)])
    assert not keeps_batches(5, [(2, 3)], [(3, 4)])
    assert not keeps_batches(5, [(2, 3)], [])
    assert keeps_batches(5, [(2, 3), (90, 99)], [(2, 3)])
    assert keeps_batches(5, iter([(2, 3)]), iter([(2, 3)]))  # as those of a checkpoint's state are given
