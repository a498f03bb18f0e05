"""Fine-tuning trains the same model in every layout: some rows of the second table of ``make parity``."""

import pytest

from tests.engine.objectives.layouts import KINDS, LOSS, NORM, FineTuningRow, differences, third_of_the_rows

CUT = [
    FineTuningRow("sft packed dropout", "zero1 sp2"),
    FineTuningRow("dpo by length dynamic", "zero1 pp2 sp2"),
    FineTuningRow("sft packed experts", "zero1 sp2"),  # with a capacity, of which each sequence rank has a share
]


@pytest.mark.parametrize("row", CUT, ids=lambda row: row.name)
def test_fine_tuning_in_a_layout_equals_that_of_one_rank(row: FineTuningRow) -> None:
    loss, norm = differences(row, steps=4)
    assert loss <= LOSS
    assert norm <= NORM


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_fine_tuning_in_layouts_equals_that_of_one_rank(kind: str) -> None:
    found = {row.name: differences(row) for row in third_of_the_rows(kind)}
    wrong = {name: pair for name, pair in found.items() if not (pair[0] <= LOSS and pair[1] <= NORM)}
    assert not wrong
