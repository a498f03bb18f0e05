from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from scaletrain_cli.engine.model.gpt import Conv1D
from scaletrain_cli.engine.model.linear import linear_product


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_a_linear_product_equals_that_of_torch(bias: bool, transposed: bool) -> None:
    x, weight, constant = torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5) if bias else None
    given = weight.t().contiguous() if transposed else weight
    found = linear_product(x, given, constant, transposed=transposed)
    assert torch.allclose(found, F.linear(x, weight, constant), atol=1e-6)


def test_a_transposed_layer_saves_its_parameter_and_no_view_of_it() -> None:
    """Autograd saves a reference to a parameter, which ZeRO-3 may empty and gather again, but all values of a view."""
    layer, saved = Conv1D(4, 6), []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        layer(torch.randn(2, 3, 4, requires_grad=True))
    held = [tensor for tensor in saved if tensor.untyped_storage().data_ptr() == layer.weight.data_ptr()]
    assert held
    assert all(tensor is layer.weight for tensor in held)


def test_a_replacement_of_f_linear_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def another(x: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
        return torch.full_like(x, 7.0)

    monkeypatch.setattr(F, "linear", another)
    assert linear_product(torch.zeros(2, 4), torch.zeros(4, 4), None, transposed=False).eq(7.0).all()
