"""BatchNorm alone equals torch's; over several ranks it equals one process with the images of all."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from scaletrain_cli.engine.model.vision.batch_norm import (
    BatchNorm2d,
    average_statistics,
    update_statistics,
)
from scaletrain_cli.engine.parallel.mesh import Axis
from tests.engine.model.vision.convnets import DIMS, fresh, images
from tests.engine.ranks import on_ranks

CHANNELS = 5


def whole_batch(offset: float = 3.0) -> tuple[Tensor, Tensor]:
    """Return images and the gradients of what is computed from them."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, CHANNELS, 4, 3, generator=generator) * 2 + offset
    return x, torch.randn(x.shape, generator=generator)


def torchs() -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(CHANNELS)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2, CHANNELS))
        norm.bias.copy_(torch.linspace(-1, 1, CHANNELS))
    return norm


def ours() -> BatchNorm2d:
    norm = BatchNorm2d(CHANNELS)
    norm.load_state_dict(torchs().state_dict())
    return norm


def trained(norm: nn.Module, x: Tensor, gradient: Tensor, steps: int = 3) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    for _ in range(steps):
        norm.zero_grad()
        x.grad = None
        y = norm(x)
        update_statistics(norm)
        (y * gradient).sum().backward()
    assert x.grad is not None
    of_weights = {f"gradient of {name}": p.grad for name, p in norm.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **of_weights, **dict(norm.named_buffers())}


def test_alone_it_equals_torchs() -> None:
    x, gradient = whole_batch()
    torch.testing.assert_close(trained(ours(), x, gradient), trained(torchs(), x, gradient), atol=1e-6, rtol=1e-6)
    assert torch.equal(ours().eval()(x), torchs().eval()(x))


def test_a_frozen_one_is_that_of_torch_in_evaluation() -> None:
    x, gradient = whole_batch()
    norm, expected = ours(), torchs().eval()
    for each in (norm, expected):
        each.requires_grad_(False)
        each.running_mean.copy_(torch.linspace(2, 4, CHANNELS))
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    found = trained(norm, x, gradient)
    torch.testing.assert_close(found, trained(expected, x, gradient), atol=0, rtol=0)
    assert all(torch.equal(found[name], buffer) for name, buffer in before.items())
    norm.bias.requires_grad_(True)
    assert not torch.equal(trained(norm, x, gradient)["running_mean"], before["running_mean"])


SPLITS = {1: [6], 2: [4, 2], 3: [3, 2, 1]}  # numbers of images by rank


def share(split: list[int], whole: Tensor) -> Tensor:
    return whole.split(split)[dist.get_rank()]


def synchronized(split: list[int], offset: float) -> dict[str, Tensor]:
    """Train on this rank's images. Weight gradients are summed over the ranks, as the loss is a sum over images."""
    norm, (x, gradient) = ours(), whole_batch(offset)
    norm.axis = Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    found = trained(norm, share(split, x), share(split, gradient))
    for name, parameter in norm.named_parameters():
        dist.all_reduce(parameter.grad)
        found[f"gradient of {name}"] = parameter.grad
    return found


@pytest.mark.parametrize("ranks", SPLITS)
def test_over_ranks_it_equals_one_process_with_all_images(ranks: int) -> None:
    x, gradient = whole_batch()
    expected = trained(torchs(), x, gradient)
    found = on_ranks(ranks, synchronized, SPLITS[ranks], 3.0)
    for name in ("y", "x"):
        joined = torch.cat([each[name] for each in found])
        torch.testing.assert_close(joined, expected[name], atol=1e-6, rtol=1e-6)
    others = expected.keys() - {"y", "x"}
    assert others
    for each in found:
        for name in others:
            torch.testing.assert_close(each[name], expected[name], atol=1e-6, rtol=1e-6)
            assert torch.equal(each[name], found[0][name]), f"{name} differs between ranks"


def test_over_ranks_a_mean_far_from_zero_costs_no_digits() -> None:
    x, gradient = whole_batch(1000.0)
    expected = trained(torchs().double(), x.double(), gradient.double())
    found = on_ranks(2, synchronized, SPLITS[2], 1000.0)
    # The images themselves are rounded to 1000 x 2^-24 = 6e-5.
    assert (torch.cat([each["y"] for each in found]) - expected["y"]).abs().max() < 5e-4
    torch.testing.assert_close(found[0]["running_var"].double(), expected["running_var"], atol=0, rtol=1e-5)


def on_part_of_the_ranks() -> tuple[dict[str, Tensor], Tensor]:
    """Train with no images on rank 1; and in bf16."""
    norm, (x, gradient) = ours(), whole_batch()
    norm.axis = Axis(2, dist.get_rank(), dist.group.WORLD)
    found = trained(norm, share([6, 0], x), share([6, 0], gradient))
    narrow = ours().to(torch.bfloat16)
    narrow.axis = norm.axis
    y = narrow(share([4, 2], x).bfloat16())
    update_statistics(narrow)
    assert y.dtype == torch.bfloat16
    return found, narrow.running_var


def test_ranks_without_images_and_models_in_bf16_are_normalized_alike() -> None:
    x, gradient = whole_batch()
    expected = trained(torchs(), x, gradient)
    (first, narrow), (second, _) = on_ranks(2, on_part_of_the_ranks)
    torch.testing.assert_close(first["y"], expected["y"], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(first["x"], expected["x"], atol=1e-6, rtol=1e-6)
    assert torch.equal(second["running_mean"], first["running_mean"])
    assert second["y"].shape[0] == 0
    exact = torchs()
    exact(x.bfloat16().float())
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow, exact.running_var, atol=1e-6, rtol=1e-6)


def averaged() -> tuple[list[Tensor], list[Tensor], bool]:
    """Return own statistics, their mean over the ranks, and True if a second mean changes nothing."""
    model = fresh(DIMS["basic"])
    model(images(seed=dist.get_rank()))
    own = [buffer.clone() for buffer in model.buffers()]
    axis = Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    average_statistics(model, axis)
    mean = [buffer.clone() for buffer in model.buffers()]
    average_statistics(model, axis)
    return own, mean, all(torch.equal(a, b) for a, b in zip(mean, model.buffers(), strict=True))


def test_averaged_statistics_are_the_mean_over_the_ranks_and_stay() -> None:
    found = on_ranks(3, averaged)
    for _, mean, stays in found:
        assert stays
        assert all(torch.equal(a, b) for a, b in zip(mean, found[0][1], strict=True))
    assert found[0][1]
    for number, mean in enumerate(found[0][1]):
        own = torch.stack([each[0][number] for each in found])
        assert mean.dtype == own.dtype
        torch.testing.assert_close(mean.double(), own.double().mean(0), atol=1e-7, rtol=1e-6)


def test_a_single_value_per_channel_has_no_variance() -> None:
    with pytest.raises(ValueError, match="two values per channel"):
        ours()(torch.ones(1, CHANNELS, 1, 1))
