"""Properties of tensor-parallel layers; the parity table shows that they compute the same."""

import pytest
import torch
from torch import nn

from scaletrain_cli.engine.parallel.mesh import Axis
from scaletrain_cli.engine.parallel.tensor import ColumnParallelLinear, RowParallelLinear


@pytest.mark.parametrize("layer", [ColumnParallelLinear, RowParallelLinear])
def test_a_sharded_layer_uses_the_linear_function_that_zero3_replaces(
    layer: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = layer(nn.Linear(4, 4, bias=False), Axis(size=2, rank=0))
    monkeypatch.setattr("torch.nn.functional.linear", lambda x, weight, bias=None: torch.full((1,), 7.0))
    assert cut(torch.ones(1, 4)).item() == 7.0
