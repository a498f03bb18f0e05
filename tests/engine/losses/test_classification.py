"""Losses of class scores and of predicted numbers against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from scaletrain_cli.engine.losses import LOSSES, LossSettings, binary_cross_entropy, cross_entropy
from scaletrain_cli.engine.parallel.mesh import Axis
from scaletrain_cli.spec.losses import LOSSES_OF, LossSpec

ROWS, CLASSES = 6, 5
PRECISIONS = [(torch.float64, 1e-12), (torch.float32, 1e-6)]


def logits(dtype: torch.dtype, size: float = 3.0, classes: int = CLASSES) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (size * torch.randn(ROWS, classes, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()


def labels(classes: int = CLASSES) -> Tensor:
    return torch.arange(ROWS) * 2 % classes


def mixed(dtype: torch.dtype) -> Tensor:
    """Return targets of images that are 0.7 themselves and 0.3 their partner."""
    own = F.one_hot(labels(), CLASSES).to(dtype)
    return 0.7 * own + 0.3 * own.flip(0)


def same(loss: Tensor, expected: Tensor, of: Tensor, closeness: float) -> None:
    (found,) = torch.autograd.grad(loss, of)
    (wanted,) = torch.autograd.grad(expected, of)
    assert abs(loss.item() - expected.item()) <= closeness * max(1.0, abs(expected.item()))
    assert torch.allclose(found, wanted, rtol=closeness, atol=closeness)


@pytest.mark.parametrize(("dtype", "closeness"), PRECISIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_classes_and_mixed_targets_have_torchs_loss(dtype: torch.dtype, closeness: float, smoothing: float) -> None:
    x = logits(dtype)
    for targets in (labels(), mixed(dtype), torch.full((ROWS,), 3)):
        expected = F.cross_entropy(x, targets, label_smoothing=smoothing)
        same(cross_entropy(x, targets, smoothing), expected, x, closeness)


@pytest.mark.parametrize(("dtype", "closeness"), PRECISIONS)
@pytest.mark.parametrize("weight", [None, 2.5, (0.5, 1.0, 2.0, 3.0, 0.1)])
def test_binary_cross_entropy_of_labels_and_mixed_targets_is_that_of_torch(
    dtype: torch.dtype, closeness: float, weight: float | tuple[float, ...] | None
) -> None:
    x = logits(dtype)
    several = (torch.rand(ROWS, CLASSES, generator=torch.Generator().manual_seed(2)) > 0.5).to(dtype)
    one = F.one_hot(labels(), CLASSES).to(dtype)
    factor = None if weight is None else torch.tensor(weight, dtype=dtype)
    for targets, dense in ((several, several), (labels(), one), (torch.zeros_like(several),) * 2):
        expected = F.binary_cross_entropy_with_logits(x, dense, pos_weight=factor)
        same(binary_cross_entropy(x, targets, pos_weight=weight), expected, x, closeness)
    expected = F.binary_cross_entropy_with_logits(x, 0.9 * mixed(dtype) + 0.1 / CLASSES, pos_weight=factor)
    same(binary_cross_entropy(x, mixed(dtype), 0.1, weight), expected, x, closeness)


def test_targets_above_the_threshold_count_as_one_after_smoothing() -> None:
    x, targets = logits(torch.float64), mixed(torch.float64)
    for threshold, smoothing in ((0.2, 0.0), (0.5, 0.0), (0.31, 0.2)):
        dense = (((1 - smoothing) * targets + smoothing / CLASSES) > threshold).double()
        assert 0 < dense.sum() < dense.numel()
        expected = F.binary_cross_entropy_with_logits(x, dense)
        assert binary_cross_entropy(x, targets, smoothing, target_threshold=threshold).item() == expected.item()


def test_labels_of_which_an_image_may_have_several_are_smoothed_as_one_of_two_classes_each() -> None:
    x, smoothing = logits(torch.float64), 0.1
    several = (torch.rand(ROWS, CLASSES, generator=torch.Generator().manual_seed(2)) > 0.5).double()
    two = torch.stack((torch.zeros_like(x), x), 1)  # sigmoid(x) = softmax([0, x])_1
    expected = F.cross_entropy(two, several.long(), label_smoothing=smoothing)
    same(binary_cross_entropy(x, several, smoothing, several_labels=True), expected, x, 1e-12)
    settings = LossSettings(LossSpec(name="bce"), smoothing, several_labels=True)
    assert LOSSES["bce"](x, several, settings, Axis()).item() == pytest.approx(expected.item(), abs=1e-12)


def test_one_output_is_smoothed_as_one_of_two_classes() -> None:
    x, targets = logits(torch.float64, classes=1), torch.tensor([[0.0], [1.0]] * (ROWS // 2), dtype=torch.float64)
    expected = F.binary_cross_entropy_with_logits(x, 0.8 * targets + 0.1)
    assert binary_cross_entropy(x, targets, 0.2).item() == pytest.approx(expected.item(), abs=1e-12)


def test_large_logits_and_a_single_class_have_finite_losses() -> None:
    large = logits(torch.float32, 1e4)
    for loss in (cross_entropy, binary_cross_entropy):
        found = loss(large, mixed(torch.float32), 0.1)
        assert torch.isfinite(found)
        assert torch.isfinite(torch.autograd.grad(found, large)[0]).all()
    alone = logits(torch.float32, classes=1)
    found = cross_entropy(alone, torch.zeros(ROWS, dtype=torch.int64), 0.1)
    assert found.item() == 0.0
    assert not torch.autograd.grad(found, alone)[0].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_16_bits_are_computed_with_in_fp32(dtype: torch.dtype) -> None:
    x = logits(dtype, 1e3)
    for name in ("cross_entropy", "bce"):
        loss = LOSSES[name](x, labels(), LossSettings(LossSpec(name=name), 0.1), Axis())  # type: ignore[arg-type]
        wide = LOSSES[name](x.float(), labels(), LossSettings(LossSpec(name=name), 0.1), Axis())  # type: ignore[arg-type]
        assert loss.dtype == torch.float32
        assert loss.item() == wide.item()
        assert torch.isfinite(torch.autograd.grad(loss, x)[0]).all()


@pytest.mark.parametrize("loss", [cross_entropy, binary_cross_entropy])
@pytest.mark.parametrize("targets", [torch.zeros(ROWS), torch.zeros(ROWS, 1), torch.zeros(1, dtype=torch.int64)])
def test_targets_of_another_shape_or_kind_are_errors(loss: object, targets: Tensor) -> None:
    with pytest.raises(ValueError, match=r"logits \[6, 5\] and targets"):
        loss(logits(torch.float32), targets)  # type: ignore[operator]


def test_weights_for_another_number_of_classes_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 numbers for 5 classes"):
        binary_cross_entropy(logits(torch.float32), labels(), pos_weight=(1.0, 2.0))


def test_a_class_that_does_not_exist_is_an_error() -> None:
    for loss in (cross_entropy, binary_cross_entropy):
        with pytest.raises(RuntimeError, match="out of bounds"):
            loss(logits(torch.float32), labels() - 100)


def test_every_name_in_the_spec_has_a_loss() -> None:
    assert set(LOSSES) == {name for names in LOSSES_OF.values() for name in names}


NAMES = ["mse", "mae", "huber"]
DELTA = 0.7


def loss(name: str, predictions: Tensor, targets: Tensor) -> Tensor:
    settings = LossSettings(LossSpec(name=name, delta=DELTA))  # type: ignore[arg-type]
    return LOSSES[name](predictions, targets, settings, Axis())


def numbers(seed: int, dtype: torch.dtype = torch.float64, size: float = 1.0) -> Tensor:
    return (size * torch.randn(7, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "closeness"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_losses_of_numbers_are_those_of_torch(name: str, dtype: torch.dtype, closeness: float) -> None:
    of_torch = {"mse": F.mse_loss, "mae": F.l1_loss, "huber": lambda x, y: F.huber_loss(x, y, delta=DELTA)}[name]
    x, y = numbers(1, dtype).requires_grad_(), numbers(2, dtype)
    found, expected = loss(name, x, y), of_torch(x, y)  # type: ignore[operator]
    errors = (x - y).flatten().tolist()
    assert {abs(error) <= DELTA for error in errors} == {True, False}
    assert found.item() == pytest.approx(expected.item(), abs=closeness)
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
