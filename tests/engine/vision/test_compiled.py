"""Compiled networks for images train what the models of transformers do in a plain loop without compilation."""

from __future__ import annotations

import shutil

import pytest

from tests.engine.parity.comparison import Difference
from tests.engine.ranks import on_ranks
from tests.engine.vision.runs import Row, difference, train_plainly, train_rank

LIMIT = Difference(loss=1e-5, norm=1e-5, weight=1e-5)
_ON = "training.compile=true"  # and not auto, which runs eagerly what cannot be compiled


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize(
    "row",
    [
        Row("resnet", 1, ranks=2, overrides=(_ON, "model.hidden_sizes=[16]", "model.depths=[1]"), steps=2),
        Row("convnext", 0, overrides=(_ON, "model.hidden_sizes=[8]", "model.depths=[1]"), steps=2),
        Row("vit", 0, overrides=(_ON, "model.num_hidden_layers=1"), steps=2),
        Row("clip", 0, accumulation=2, overrides=(_ON,), steps=2),
    ],
    ids=lambda row: row.family,
)
def test_a_compiled_network_trains_what_a_plain_loop_trains(row: Row) -> None:
    expected = train_plainly(row)
    for found in on_ranks(row.ranks, train_rank, row):
        assert difference(found, expected).within(LIMIT)
