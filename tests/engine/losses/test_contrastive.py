"""Contrastive losses against their textbook definition, in one process and over ranks, whole and in chunks."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from scaletrain_cli.engine.losses import LOSSES, LossSettings
from scaletrain_cli.engine.losses.contrastive import gather, row_losses
from scaletrain_cli.engine.parallel.mesh import Axis, group_of
from scaletrain_cli.spec.losses import LossSpec
from tests.engine.ranks import on_ranks

PAIRS, INPUTS, SIZE, TEMPERATURE = 12, 7, 5, 0.2
NAMES = ["info_nce", "sigmoid", "nt_xent"]
CHUNKS = [1, 5, 4096]  # 5 divides neither the rows of a rank nor those of all


class Pairs(NamedTuple):
    image: Tensor
    text: Tensor
    logit_scale: Tensor
    logit_bias: Tensor | None


class Towers(nn.Module):
    """Two linear towers, a logit scale and a bias, with the same weights each time."""

    def __init__(self, dtype: torch.dtype, scale: float = 14.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.image, self.text = (
            nn.Parameter(torch.randn(SIZE, INPUTS, generator=generator, dtype=torch.float64).to(dtype))
            for _ in range(2)
        )
        self.logit_scale = nn.Parameter(torch.tensor(math.log(scale), dtype=dtype))
        self.logit_bias = nn.Parameter(torch.tensor(-3.0, dtype=dtype))

    def forward(self, first: Tensor, second: Tensor) -> Pairs:
        x, y = F.normalize(first @ self.image.T), F.normalize(second @ self.text.T)
        return Pairs(x, y, self.logit_scale + 0, self.logit_bias + 0)


def inputs(dtype: torch.dtype, pairs: int = PAIRS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    first = torch.randn(pairs, INPUTS, generator=generator, dtype=torch.float64)
    second = first + torch.randn(pairs, INPUTS, generator=generator, dtype=torch.float64)
    return first.to(dtype), second.to(dtype)


def settings(name: str, chunk_size: int) -> LossSettings:
    return LossSettings(LossSpec(name=name, chunk_size=chunk_size, temperature=TEMPERATURE))  # type: ignore[arg-type]


def loss_of(name: str, pairs: Pairs, axis: Axis, chunk_size: int) -> Tensor:
    outputs: Any = torch.cat([4 * pairs.image, pairs.text]) if name == "nt_xent" else pairs
    return LOSSES[name](outputs, None, settings(name, chunk_size), axis)


def textbook(name: str, pairs: Pairs) -> Tensor:
    """Return the loss of all pairs from the whole matrix of similarities."""
    count, (x, y, logit_scale, bias) = len(pairs.image), pairs
    if name == "info_nce":
        logits = logit_scale.exp() * x @ y.T
        own = torch.arange(count)
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
    if name == "sigmoid":
        signs = 2 * torch.eye(count, dtype=x.dtype) - 1
        return -F.logsigmoid(signs * (logit_scale.exp() * x @ y.T + bias)).sum() / count
    views = F.normalize(torch.cat([4 * x, y]))
    similarities = views @ views.T / TEMPERATURE
    total = torch.zeros((), dtype=x.dtype)
    for row in range(2 * count):
        others = torch.tensor([key for key in range(2 * count) if key != row])
        total = total + similarities[row, others].logsumexp(0) - similarities[row, (row + count) % (2 * count)]
    return total / (2 * count)


def gradients(loss: Tensor, pairs: Pairs, towers: Towers) -> dict[str, Tensor]:
    of = {"of_image": pairs.image, "of_text": pairs.text, **dict(towers.named_parameters())}
    found = torch.autograd.grad(loss, list(of.values()), allow_unused=True)
    return {
        name: torch.zeros_like(value) if gradient is None else gradient
        for (name, value), gradient in zip(of.items(), found, strict=True)
    }


def expected_of(name: str, dtype: torch.dtype = torch.float64, scale: float = 14.0) -> tuple[float, dict[str, Tensor]]:
    towers = Towers(dtype, scale)
    pairs = towers(*inputs(dtype))
    loss = textbook(name, pairs)
    return loss.item(), gradients(loss, pairs, towers)


def assert_same(
    found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]], limit: float = 1e-6
) -> None:
    assert abs(found[0] - expected[0]) <= limit * max(1.0, abs(expected[0]))
    for name, gradient in expected[1].items():
        difference = (found[1][name].double() - gradient.double()).abs().max().item()
        assert difference <= limit * max(1.0, gradient.abs().max().item()), name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_losses_and_gradients_are_those_of_the_textbook_whole_and_in_chunks(
    name: str, dtype: torch.dtype, limit: float
) -> None:
    expected = expected_of(name)
    for chunk_size in CHUNKS:
        towers = Towers(dtype)
        pairs = towers(*inputs(dtype))
        loss = loss_of(name, pairs, Axis(), chunk_size)
        assert_same((loss.item(), gradients(loss, pairs, towers)), expected, limit)


def averaged_over(axis: Axis, name: str, chunk_size: int, dtype: torch.dtype) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of this rank's share of the pairs, averaged over the ranks as DDP does."""
    towers = Towers(dtype)
    mine = (rows.chunk(axis.size)[axis.rank] for rows in inputs(dtype))
    pairs = towers(*mine)
    loss = loss_of(name, pairs, axis, chunk_size)
    found = gradients(loss, pairs, towers)
    for key in ("of_image", "of_text"):  # rows of other ranks have no gradient here
        found[key] = F.pad(found[key], (0, 0, *(len(found[key]) * n for n in (axis.rank, axis.size - 1 - axis.rank))))
    loss = loss.detach()
    for value in (loss, *found.values()):
        dist.all_reduce(value, group=axis.group)
        value /= axis.size
    return loss.item(), found


def cases_on_rank() -> dict[tuple[str, int, str], tuple[float, dict[str, Tensor]]]:
    """Return the results of all cases; of four ranks also in two groups of every second rank."""
    size, rank = dist.get_world_size(), dist.get_rank()
    axis = Axis(size, rank, dist.group.WORLD)
    found = {}
    for name in NAMES:
        for chunk_size in CHUNKS:
            found[name, chunk_size, "float32"] = averaged_over(axis, name, chunk_size, torch.float32)
        found[name, 4096, "float64"] = averaged_over(axis, name, 4096, torch.float64)
    if size == 4:
        half = Axis(2, rank // 2, group_of([rank % 2, rank % 2 + 2]))
        for name in NAMES:
            found[name, 5, "half"] = averaged_over(half, name, 5, torch.float32)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_and_gradients_do_not_depend_on_the_number_of_ranks(ranks: int) -> None:
    expected = {name: expected_of(name) for name in NAMES}
    for reported in on_ranks(ranks, cases_on_rank):
        assert len(reported) == (12 if ranks == 2 else 15)
        for (name, _, kind), found in reported.items():
            assert_same(found, expected[name], 1e-12 if kind == "float64" else 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_single_pair_has_its_textbook_loss(name: str) -> None:
    towers = Towers(torch.float64)
    pairs = towers(*inputs(torch.float64, 1))
    found, expected = loss_of(name, pairs, Axis(), 1), textbook(name, pairs)
    assert found.item() == pytest.approx(expected.item(), abs=1e-15)
    if name != "sigmoid":
        assert found.item() == 0.0
    others = towers(*inputs(torch.float64, 1))
    expected = textbook(name, others)
    assert_same((0.0, gradients(found, pairs, towers)), (0.0, gradients(expected, others, towers)), 1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_features_that_are_all_alike_have_their_textbook_loss(name: str) -> None:
    alike = F.normalize(torch.ones(PAIRS, SIZE, dtype=torch.float64)).requires_grad_()
    pairs = Pairs(alike, alike * 1, torch.tensor(2.0).double(), torch.tensor(-1.0).double())
    found = loss_of(name, pairs, Axis(), 5)
    assert found.item() == pytest.approx(textbook(name, pairs).item(), rel=1e-12)
    if name != "sigmoid":
        assert found.item() == pytest.approx(math.log(PAIRS if name == "info_nce" else 2 * PAIRS - 1), rel=1e-12)


@pytest.mark.parametrize("name", ["info_nce", "sigmoid"])
def test_a_large_logit_scale_keeps_the_digits_of_a_small_loss(name: str) -> None:
    expected = expected_of(name, scale=1e4)
    towers = Towers(torch.float64, 1e4)
    pairs = towers(*inputs(torch.float64))
    loss = loss_of(name, pairs, Axis(), 5)
    assert_same((loss.item(), gradients(loss, pairs, towers)), expected, 1e-11)
    # Similarities of 100 and 92: in fp32 one number for the log-sum-exp would have an error of 8e-6.
    alike = torch.cat([0.92**0.5 * torch.ones(PAIRS, 1), 0.08**0.5 * torch.eye(PAIRS)], 1).requires_grad_()
    similar = Pairs(alike, alike * 1, torch.tensor(math.log(100.0)), torch.tensor(-96.0))
    doubled = Pairs(*(value.double() for value in similar if value is not None))
    found, wanted = loss_of(name, similar, Axis(), 5).item(), textbook(name, doubled).item()
    assert 1e-3 < wanted < 1
    assert abs(found - wanted) < (1.5e-7 if name == "info_nce" else 2e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_features_of_16_bits_are_computed_with_in_fp32(name: str, dtype: torch.dtype) -> None:
    pairs = Towers(torch.float32, 100.0)(*inputs(torch.float32))
    narrow = Pairs(*(value.detach().to(dtype).requires_grad_() for value in pairs if value is not None))
    wide = Pairs(*(value.float() for value in narrow if value is not None))
    loss = loss_of(name, narrow, Axis(), 5)
    assert loss.dtype == torch.float32
    assert loss.item() == loss_of(name, wide, Axis(), 5).item()
    for gradient in torch.autograd.grad(loss, narrow[:2]):
        assert gradient.dtype == dtype
        assert torch.isfinite(gradient).all()


class LargestTensor(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that any operation returns."""

    bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result


def memory(function: Callable[[], Tensor]) -> tuple[int, int]:
    """Return the bytes that the forward pass keeps, and those of the largest tensor of both passes."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with LargestTensor() as largest:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = function()
        torch.autograd.backward(loss)
    return sum(kept.values()), largest.bytes


def test_memory_for_32768_negatives_is_that_of_their_features_and_one_tile() -> None:
    rows, negatives, size, chunk = 64, 32768, 8, 1024
    x = F.normalize(torch.randn(rows, size)).requires_grad_()
    y = F.normalize(torch.randn(negatives, size)).requires_grad_()
    scale = torch.tensor(10.0)
    kept, largest = memory(lambda: row_losses(x, y, scale, 512, chunk).mean())
    features = 4 * size * (rows + negatives)
    assert kept <= features + 3 * 4 * rows
    assert largest <= max(4 * rows * chunk, 4 * size * negatives)  # 8.4 MB with all similarities at once
    whole, matrix = memory(lambda: F.cross_entropy(scale * x @ y.T, 512 + torch.arange(rows)))
    assert matrix == 4 * rows * negatives
    assert kept < whole / 8


@pytest.mark.parametrize("name", NAMES)
def test_chunks_bound_the_memory_of_each_loss(name: str) -> None:
    pairs, chunk = 512, 64
    x, y = (F.normalize(torch.randn(pairs, 8)).requires_grad_() for _ in range(2))
    kept, largest = memory(lambda: loss_of(name, Pairs(x, y, torch.tensor(2.0), torch.tensor(-1.0)), Axis(), chunk))
    features = 4 * 8 * pairs
    assert largest <= 4 * features  # a tile has 4 * 64 * 64, the whole matrix 4 * 512 * 512 bytes
    assert kept <= 12 * features


def test_a_gathered_feature_has_the_gradients_of_all_ranks() -> None:
    for rank, (rows, gradient, scattered, narrow) in enumerate(on_ranks(3, gathered_on_rank)):
        assert torch.equal(rows, torch.tensor([[1.0, 1], [1, 1], [2, 2], [2, 2], [3, 3], [3, 3]]))
        assert torch.equal(gradient, torch.full((2, 2), 6.0 * (rank + 1)))  # (1 + 2 + 3) of each rank's own factor
        assert torch.equal(scattered, gradient)
        assert torch.equal(narrow, rows)


def gathered_on_rank() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gathered rows, the gradient of this rank's rows in two ways, and rows that were sent in 16 bits."""
    axis = Axis(3, dist.get_rank(), dist.group.WORLD)
    x = torch.full((2, 2), float(axis.rank + 1), requires_grad=True)
    rows = gather(x, axis)
    factors = torch.tensor([1.0, 1, 2, 2, 3, 3]).unsqueeze(1)
    loss = ((axis.rank + 1) * factors * rows).sum()
    (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
    with patch.object(dist, "get_backend", return_value="nccl"):  # which sums and scatters in one call
        (scattered,) = torch.autograd.grad(loss, x)
    return rows.detach(), gradient, scattered, gather(x.detach(), axis, torch.bfloat16)


@pytest.mark.parametrize("name", ["info_nce", "sigmoid"])
def test_features_of_different_shapes_are_an_error(name: str) -> None:
    for x, y in ((torch.zeros(3, 4), torch.zeros(2, 4)), (torch.zeros(4), torch.zeros(4))):
        with pytest.raises(ValueError, match=rf"{name}: image features"):
            loss_of(name, Pairs(x, y, torch.tensor(1.0), torch.tensor(0.0)), Axis(), 5)


def test_an_odd_number_of_views_is_an_error() -> None:
    with pytest.raises(ValueError, match="two views of a batch"):
        LOSSES["nt_xent"](torch.zeros(3, 4), None, LossSettings(), Axis())


def test_the_sigmoid_loss_needs_a_bias() -> None:
    pairs = Pairs(torch.zeros(2, 4), torch.zeros(2, 4), torch.tensor(0.0), None)
    with pytest.raises(ValueError, match="no logit_bias"):
        loss_of("sigmoid", pairs, Axis(), 5)
