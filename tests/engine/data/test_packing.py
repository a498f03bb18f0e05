"""Packing: nothing is lost, nothing is too long, and the rows are those of TRL."""

from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaletrain_cli.engine.data.row_writing import best_fit, pack

LENGTHS = st.lists(st.integers(1, 40), max_size=60)


@given(LENGTHS, st.integers(1, 40), st.booleans())
def test_every_token_is_in_exactly_one_row_and_no_row_too_long(lengths: list[int], capacity: int, split: bool) -> None:
    if not split:
        lengths = [min(length, capacity) for length in lengths]
    rows = pack(lengths, capacity, split=split)
    assert all(0 < sum(stop - start for _, start, stop in row) <= capacity for row in rows)
    tokens = Counter((document, i) for row in rows for document, start, stop in row for i in range(start, stop))
    assert tokens == Counter((document, i) for document, length in enumerate(lengths) for i in range(length))
    assert [min(row) for row in rows] == sorted(min(row) for row in rows)


@given(LENGTHS.map(lambda lengths: [min(length, 16) for length in lengths]))
def test_no_two_rows_would_fit_into_one(lengths: list[int]) -> None:
    fills = sorted(sum(lengths[i] for i in row) for row in best_fit(lengths, 16))
    assert len(fills) < 2 or fills[0] + fills[1] > 16


@pytest.mark.long  # the import of TRL takes long
@pytest.mark.parametrize("split", [False, True], ids=["bfd", "bfd_split"])
@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 40))
def test_rows_are_those_of_trl_up_to_their_order(split: bool, lengths: list[int], capacity: int) -> None:
    table, trl = pytest.importorskip("pyarrow"), pytest.importorskip("trl.data_utils")
    documents = [[number] * length for number, length in enumerate(lengths)]
    if not split:
        lengths = [min(length, capacity) for length in lengths]
    packed = trl._pack_bfd(table.table({"input_ids": documents}), capacity, "split" if split else "truncate")
    theirs = Counter(tuple(sizes) for sizes in packed.column("seq_lengths").to_pylist())
    ours = Counter(tuple(stop - start for _, start, stop in row) for row in pack(lengths, capacity, split=split))
    assert ours == theirs
    assert Counter(chain.from_iterable(packed.column("input_ids").to_pylist())) == Counter(
        number for number, length in enumerate(lengths) for _ in range(length)
    )
