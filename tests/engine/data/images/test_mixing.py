"""Mixed images and targets are those of a plain loop over pairs, and normalization is that of the textbook."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from scaletrain_cli.engine.data.images.batches import ImageMicroBatch
from scaletrain_cli.engine.data.images.mixing import UNMIXED, Mix, finish, mix_of_pair
from scaletrain_cli.engine.data.images.transforms import NO_BOX, Box
from scaletrain_cli.spec.images import AugmentSpec

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE, CLASSES = 12, 5
PAIRS = 4000


def batch(rows: int = 8, views: int = 1, **parts: Any) -> ImageMicroBatch:
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (views * rows, SIZE, SIZE, 3), dtype=torch.uint8, generator=draw)
    targets = torch.randint(0, CLASSES, (rows,), generator=draw)
    return ImageMicroBatch(images.permute(0, 3, 1, 2), torch.arange(rows), **{"targets": targets, **parts})


def normalized(images: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(each, dtype=torch.float64).view(3, 1, 1) for each in (MEAN, STD))
    return ((images.double() / 255) - mean) / std


def mixes(kind: str, rows: int = 8) -> list[Mix]:
    spec = AugmentSpec(mixup=0.8 if kind != "cutmix" else 0, cutmix=1.0 if kind != "mixup" else 0, mix_probability=0.8)
    return [mix_of_pair(seed=3, batch=11, pair=place // 2, size=SIZE, spec=spec) for place in range(rows)]


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("kind", ["mixup", "cutmix", "both"])
def test_mixed_images_and_soft_targets_are_those_of_a_plain_loop(kind: str, views: int) -> None:
    found_mixes = mixes(kind)
    assert any(mix != UNMIXED for mix in found_mixes)
    table = torch.tensor([[mix.weight, *mix.box] for mix in found_mixes])
    given = batch(views=views, mix=table)
    found = finish(given, mean=MEAN, std=STD, classes=CLASSES)
    whole = normalized(given.images)
    for row, (weight, box) in enumerate(found_mixes):
        other = row + 1 if row % 2 == 0 else row - 1
        for view in range(views):
            own, theirs = whole[view * 8 + row], whole[view * 8 + other]
            if box == NO_BOX:
                expected = weight * own + (1 - weight) * theirs
            else:
                expected = own.clone()
                for y in range(box.top, box.top + box.height):
                    for x in range(box.left, box.left + box.width):
                        expected[:, y, x] = theirs[:, y, x]
                share = float((expected != own).any(0).double().mean())
                assert 1 - weight == pytest.approx(share, abs=2 / SIZE**2)  # equal pixels by chance
            assert torch.allclose(found.images[view * 8 + row].double(), expected, atol=1e-6)
        target = torch.zeros(CLASSES)
        target[given.targets[row]] += weight
        target[given.targets[other]] += 1 - weight
        assert torch.allclose(found.targets[row], target, atol=1e-7)
    assert found.mix is None


def test_numbers_as_targets_are_mixed_by_the_same_weights() -> None:
    targets = torch.rand(4, 3)
    table = torch.tensor([[0.25, 0, 0, 0, 0]] * 2 + [[1.0, 0, 0, 0, 0]] * 2)
    found = finish(batch(4, targets=targets, mix=table), mean=MEAN, std=STD)
    expected = torch.stack([0.25 * targets[0] + 0.75 * targets[1], 0.25 * targets[1] + 0.75 * targets[0], *targets[2:]])
    assert torch.allclose(found.targets, expected)


def test_both_images_of_a_pair_have_the_same_mix_whatever_micro_batch_they_are_in() -> None:
    spec = AugmentSpec(mixup=0.4)
    first = mix_of_pair(1, 2, 3, SIZE, spec)
    assert first == mix_of_pair(1, 2, 3, SIZE, spec)
    others = [mix_of_pair(*key, SIZE, spec) for key in ((0, 2, 3), (1, 0, 3), (1, 2, 0))]
    assert first not in others


def test_weights_have_the_mean_and_variance_of_beta_and_kinds_their_shares() -> None:
    spec = AugmentSpec(mixup=0.4, cutmix=1.0, mix_probability=0.7, switch_probability=0.25)
    found = [mix_of_pair(0, 0, pair, 224, spec) for pair in range(PAIRS)]
    mixed = [mix for mix in found if mix != UNMIXED]
    cut = [mix for mix in mixed if mix.box != NO_BOX]
    assert abs(len(mixed) / PAIRS - 0.7) < 4 * math.sqrt(0.21 / PAIRS)
    assert abs(len(cut) / len(mixed) - 0.25) < 4 * math.sqrt(0.1875 / len(mixed))
    weights = np.array([mix.weight for mix in mixed if mix.box == NO_BOX])
    assert abs(weights.mean() - 0.5) < 4 * weights.std() / math.sqrt(len(weights))
    assert weights.var() == pytest.approx(1 / (4 * (2 * 0.4 + 1)), rel=0.08)  # of Beta(a, a): 1 / (4 (2 a + 1))


def test_the_part_of_cutmix_is_around_a_uniform_center_and_cut_at_the_border() -> None:
    spec = AugmentSpec(cutmix=1.0)
    boxes = [mix_of_pair(0, 0, pair, 100, spec).box for pair in range(PAIRS)]
    assert all(0 <= b.top <= b.top + b.height <= 100 and 0 <= b.left <= b.left + b.width <= 100 for b in boxes)
    # A square of side s around a uniform center: its mean area within the image is (s - s^2 / 4)^2, s^2 uniform.
    sides = np.sqrt(np.linspace(0, 1, 100_001))
    expected = float(((sides - sides**2 / 4) ** 2).mean())
    areas = np.array([b.height * b.width / 1e4 for b in boxes])
    assert abs(areas.mean() - expected) < 4 * areas.std() / math.sqrt(PAIRS) + 0.005  # whole pixels


def test_no_mix_is_drawn_where_none_is_set() -> None:
    assert mix_of_pair(0, 0, 0, SIZE, AugmentSpec()) == UNMIXED
    assert mix_of_pair(0, 0, 0, SIZE, AugmentSpec(mixup=1, mix_probability=0)) == UNMIXED


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_have_the_type_and_order_of_the_model(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    given = batch()
    found = finish(given, mean=MEAN, std=STD, dtype=dtype, memory_format=memory_format)
    assert found.images.dtype == dtype
    assert found.images.is_contiguous(memory_format=memory_format)
    expected = normalized(given.images)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    assert torch.allclose(found.images.double(), expected, atol=tolerance, rtol=tolerance)
    assert found.targets is given.targets
    assert found.inputs == (found.images,)


def test_erased_pixels_have_the_mean_of_the_data_and_no_others_change() -> None:
    boxes = [Box(0, 0, 3, 4), NO_BOX, Box(8, 5, 4, 7), NO_BOX]
    given = batch(4, erased=torch.tensor(boxes))
    found = finish(given, mean=MEAN, std=STD).images
    expected = normalized(given.images)
    for row, (top, left, height, width) in enumerate(boxes):
        for y in range(top, top + height):
            for x in range(left, left + width):
                expected[row, :, y, x] = 0
    assert torch.allclose(found.double(), expected, atol=1e-6)


def test_an_erased_part_is_mixed_as_the_mean() -> None:
    erased = torch.tensor([Box(0, 0, 12, 11), NO_BOX])
    found = finish(batch(2, erased=erased, mix=torch.tensor([[0.25, 0, 0, 0, 0]] * 2)), mean=MEAN, std=STD, classes=5)
    expected = 0.75 * normalized(batch(2).images)[1]
    assert torch.allclose(found.images[0, :, :, :11].double(), expected[:, :, :11], atol=1e-6)
