"""What layers cut over tensor ranks owe to others. That they compute the same is for the parity table."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scaletrain_cli.engine.parallel.mesh import Axis
from scaletrain_cli.engine.parallel.tensor import ColumnParallelLinear, RowParallelLinear


@pytest.mark.parametrize("layer", [ColumnParallelLinear, RowParallelLinear])
def test_a_cut_layer_multiplies_with_what_zero3_has_put_in_the_place_of_linear(
    layer: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = layer(nn.Linear(4, 4, bias=False), Axis(size=2, rank=0))
    monkeypatch.setattr("torch.nn.functional.linear", lambda x, weight, bias=None: torch.full((1,), 7.0))
    assert cut(torch.ones(1, 4)).item() == 7.0
