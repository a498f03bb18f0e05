"""Mix pairs of images of a batch (mixup, CutMix), and finish batches on the device of the model."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from scaletrain_cli.engine.data.images.batches import ImageMicroBatch
from scaletrain_cli.engine.data.images.transforms import NO_BOX, Box, SampleKey
from scaletrain_cli.spec.images import AugmentSpec


class Mix(NamedTuple):
    """The mix of the two images of a pair with each other, the same for both.

    A pair is images 2 i and 2 i + 1 of the global batch: in the same micro-batch in every layout, if these are even.

    ``weight``: of the own image and its target, 1 if the pair is not mixed. ``box``: the part that CutMix takes from
    the other image; NO_BOX: mixup.
    """

    weight: float
    box: Box


UNMIXED = Mix(1.0, NO_BOX)


def mix_of_pair(seed: int, batch: int, pair: int, size: int, spec: AugmentSpec) -> Mix:
    """Return the mix of a pair of images of ``size`` x ``size``, by the number of the batch and of the pair in it.

    Mixup: arXiv:1710.09412, section 2. CutMix: arXiv:1905.04899, equations 1 and 2; the weight is that of the pixels
    that are left, also where the box ends at the border of the image.
    """
    draw = SampleKey(seed, batch, pair).draws("mix")
    mixed, switched = draw.random() < spec.mix_probability, draw.random() < spec.switch_probability
    if not spec.mixes or not mixed:
        return UNMIXED
    if not spec.cutmix or (spec.mixup and not switched):
        return Mix(float(draw.beta(spec.mixup, spec.mixup)), NO_BOX)
    side = int(size * math.sqrt(1.0 - draw.beta(spec.cutmix, spec.cutmix)))
    y, x = (int(center) - side // 2 for center in draw.integers(size, size=2))
    top, left, bottom, right = max(0, y), max(0, x), min(size, y + side), min(size, x + side)
    if bottom <= top or right <= left:
        return UNMIXED
    box = Box(top, left, bottom - top, right - left)
    return Mix(1.0 - box.height * box.width / size**2, box)


def finish(
    batch: ImageMicroBatch,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
    classes: int | None = None,
) -> ImageMicroBatch:
    """Return the batch with normalized, erased and mixed images of ``dtype``, and mixed targets.

    ``mean``, ``std``: of each channel, where pixels go from 0 to 1; erased pixels have the mean. ``classes``: of the
    model; the targets of mixed images are [B, classes] float32 with the sum 1. A loss smooths them as others: smoothing
    is linear, so that it may come after mixing. The computation is in float32.
    """
    images = normalized(batch.images, mean=mean, std=std, memory_format=memory_format)
    if batch.erased is not None:
        images.masked_fill_(_inside(batch.erased, images).unsqueeze(1), 0.0)
    targets = batch.targets
    if batch.mix is not None:
        weight, boxes = batch.mix[:, 0], batch.mix[:, 1:]
        # own * share + other * (1 - share): the share of CutMix is 0 in its box and 1 elsewhere, and so exact.
        cut = (boxes[:, 2] > 0).view(-1, 1, 1, 1)
        inside = _inside(boxes, images[: len(boxes)]).unsqueeze(1)
        share = torch.where(cut, (~inside).float(), weight.view(-1, 1, 1, 1))
        views = len(images) // len(weight)
        index = torch.cat([_partners(len(weight), images.device) + view * len(weight) for view in range(views)])
        share = share.repeat(views, 1, 1, 1)
        images, targets = images * share + images[index] * (1.0 - share), _mixed_targets(targets, weight, classes)
    images = images.to(dtype, memory_format=memory_format)
    return batch._replace(images=images, targets=targets, erased=None, mix=None)


def normalized(
    images: Tensor,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Tensor:
    """Return uint8 images [N, C, H, W] less ``mean`` over ``std`` of each channel, float32."""
    pixels = images.to(torch.float32, memory_format=memory_format)
    scale = torch.tensor([1 / (255 * deviation) for deviation in std], dtype=torch.float32)
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], dtype=torch.float32)
    return pixels.mul_(_by_channel(scale, pixels)).add_(_by_channel(shift, pixels))


def _by_channel(values: Tensor, images: Tensor) -> Tensor:
    return values.to(images.device, non_blocking=True).view(1, -1, 1, 1)


def _inside(boxes: Tensor, images: Tensor) -> Tensor:
    """Return a mask [N, H, W] that is True within each box [N, 4]."""
    top, left, height, width = (column.view(-1, 1, 1) for column in boxes.unbind(1))
    rows = torch.arange(images.shape[-2], device=images.device).view(1, -1, 1)
    columns = torch.arange(images.shape[-1], device=images.device).view(1, 1, -1)
    return (rows >= top) & (rows < top + height) & (columns >= left) & (columns < left + width)


def _partners(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device) ^ 1


def _mixed_targets(targets: Tensor | None, weight: Tensor, classes: int | None) -> Tensor | None:
    if targets is None:
        return None
    if not targets.is_floating_point():
        assert classes is not None, "mixed targets need the number of classes"
        targets = F.one_hot(targets, classes).float()
    own = weight.unsqueeze(1)
    return targets * own + targets[_partners(len(targets), targets.device)] * (1.0 - own)
