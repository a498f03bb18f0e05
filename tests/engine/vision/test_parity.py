"""Networks for images train in every layout as the models of transformers do in a plain loop."""

from __future__ import annotations

import pytest

from scaletrain_cli.spec.losses import LOSSES_OF
from tests.engine.parity.comparison import Difference
from tests.engine.ranks import on_ranks
from tests.engine.vision.runs import Row, difference, train_plainly, train_rank
from tests.engine.vision.table import measured, vision_rows

LIMIT = Difference(loss=1e-5, norm=1e-5, weight=1e-5)
ROWS = [
    Row("resnet", zero=2, ranks=2, accumulation=2, checkpointing="full"),
    Row("resnet", zero=0),
    Row("resnet", zero=3, ranks=2),
    Row("convnext", zero=1, ranks=2, accumulation=2),
    Row("convnext", zero=3, ranks=2, checkpointing="full"),
    Row("vit", zero=2, ranks=2, accumulation=2, checkpointing="full"),
    Row("vit", zero=0),
    Row("vit", zero=1, ranks=2),
    Row("vit", zero=3, ranks=2, checkpointing="full"),
    Row("clip", zero=0, accumulation=2),
    Row("clip", zero=3, ranks=2, accumulation=2, checkpointing="full"),
    Row("clip", zero=1, ranks=2),
    Row("llava", zero=3, ranks=2, accumulation=2, checkpointing="full"),
    Row("llava", zero=0),
    Row("llava", zero=1, ranks=2),
    Row("llava", zero=2, ranks=2, accumulation=2, checkpointing="full"),
]
SHORT = (ROWS[0], Row("llava", zero=0))  # and two of convolutions in test_convnet_parity.py


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[] if row in SHORT else pytest.mark.long) for row in ROWS],
    ids=str,
)
def test_a_layout_trains_what_a_plain_loop_trains(row: Row) -> None:
    expected = train_plainly(row)
    found = on_ranks(row.ranks, train_rank, row)
    for each in found:
        assert difference(each, expected).within(LIMIT)


def test_the_table_of_parity_has_every_family_loss_stage_and_number_of_ranks() -> None:
    rows = vision_rows()
    names = {row.spec().training.loss.of(row.spec().training.objective) for row in rows}
    assert names == {name for losses in LOSSES_OF.values() for name in losses}
    for family in ("resnet", "convnext", "vit", "clip"):
        layouts = {(row.ranks, row.zero) for row in rows if row.family == family}
        assert layouts >= {(1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (4, 1), (4, 3)}


@pytest.mark.long
@pytest.mark.parametrize("row", [row for row in vision_rows() if row.joins_samples and row.zero == 2], ids=str)
def test_a_row_of_the_table_is_within_its_limits(row: Row) -> None:
    ((line, right),) = measured([row])
    assert right, line
