"""Losses of predicted numbers against torch's own and against their definition as a loop."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from scaletrain_cli.engine.losses import LOSSES, LossSettings
from scaletrain_cli.engine.parallel.mesh import Axis
from scaletrain_cli.spec.losses import LossSpec

NAMES = ["mse", "mae", "huber"]
DELTA = 0.7


def loss(name: str, predictions: Tensor, targets: Tensor) -> Tensor:
    settings = LossSettings(LossSpec(name=name, delta=DELTA))  # type: ignore[arg-type]
    return LOSSES[name](predictions, targets, settings, Axis())


def numbers(seed: int, dtype: torch.dtype = torch.float64, size: float = 1.0) -> Tensor:
    return (size * torch.randn(7, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


def by_definition(name: str, error: float) -> float:
    if name == "mse":
        return error**2
    if name == "mae":
        return abs(error)
    return error**2 / 2 if abs(error) <= DELTA else DELTA * (abs(error) - DELTA / 2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "closeness"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_losses_are_means_of_their_definition_and_torch_agrees(name: str, dtype: torch.dtype, closeness: float) -> None:
    of_torch = {"mse": F.mse_loss, "mae": F.l1_loss, "huber": lambda x, y: F.huber_loss(x, y, delta=DELTA)}[name]
    x, y = numbers(1, dtype).requires_grad_(), numbers(2, dtype)
    found, expected = loss(name, x, y), of_torch(x, y)  # type: ignore[operator]
    errors = (x - y).flatten().tolist()
    assert {abs(error) <= DELTA for error in errors} == {True, False}
    assert found.item() == pytest.approx(sum(by_definition(name, error) for error in errors) / 21, abs=closeness)
    assert torch.equal(*(torch.autograd.grad(value, x)[0] for value in (found, expected)))


@pytest.mark.parametrize("name", NAMES)
def test_one_value_per_row_may_be_a_vector_of_targets(name: str) -> None:
    x, y = numbers(1)[:, :1], numbers(2)[:, 0]
    assert loss(name, x, y).item() == loss(name, x, y.unsqueeze(1)).item()
    assert loss(name, x, torch.arange(7)).item() == loss(name, x, torch.arange(7.0).double()).item()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_predictions_of_16_bits_are_computed_with_in_fp32(name: str, dtype: torch.dtype) -> None:
    x = numbers(1, dtype, 200.0).requires_grad_()  # squares are above the largest number of fp16
    found = loss(name, x, numbers(2, torch.float32, 200.0))
    assert found.dtype == torch.float32
    assert torch.isfinite(found)
    assert torch.isfinite(torch.autograd.grad(found, x)[0]).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(7,), (7, 1), (1, 3), (6, 3)])
def test_shapes_that_torch_would_broadcast_are_errors(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"{name}: predictions \[7, 3\] and targets"):
        loss(name, numbers(1), torch.zeros(shape))
