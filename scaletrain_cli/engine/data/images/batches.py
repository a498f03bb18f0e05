"""Batches of images as the reader makes them and as the model takes them."""

from typing import NamedTuple

import torch
from torch import Tensor

from scaletrain_cli.engine.data.loader import map_tensors


class ImageMicroBatch(NamedTuple):
    """The images of one forward pass. B is micro_batch_size.

    images: [views * B, C, H, W]: the first view of all samples, then the second one; uint8 as read, then normalized
    values (``mixing.finish``).
    samples: [B] int64, unique numbers of the samples in the run.
    targets: [B] int64 classes, or [B, D] float32 targets, shares of classes among them; None: there are none.
    tokens: [B, positions] int64 captions; None: there are none.
    erased: [views * B, 4] int64: top, left, height and width of the erased part in pixels, height 0: none.
    mix: [B, 5] float32: weight of the own image in the mix with the other one of its pair, then top, left, height and
    width of the part that is the other image alone (CutMix); height 0: all pixels are mixed (mixup).
    sources: [B] int64, number of the source of each sample; None: there is only one.
    numbers: [B] int64, numbers of the samples in the split.
    real: [B] bool, False for a sample that stands in for a missing one at the end of an evaluation; None: all count.
    """

    images: Tensor
    samples: Tensor
    targets: Tensor | None = None
    tokens: Tensor | None = None
    erased: Tensor | None = None
    mix: Tensor | None = None
    sources: Tensor | None = None
    numbers: Tensor | None = None
    real: Tensor | None = None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The arguments of the model: images, or images and captions."""
        return (self.images,) if self.tokens is None else (self.images, self.tokens)

    def to(self, device: torch.device) -> "ImageMicroBatch":
        return map_tensors(self, lambda tensor: tensor.to(device))


class ImageStepBatch(ImageMicroBatch):
    """All micro-batches of one step in the same few tensors, whose first dimension counts them.

    images: [micro-batches, views * B, H, W, C] uint8: pixels lie as decoders write them, and micro-batches are views in
    the order of channels-last images.
    """

    __slots__ = ()

    def micro_batches(self) -> list[ImageMicroBatch]:
        """Return the micro-batches, in the order of accumulation."""
        parts = zip(*[field.unbind() for field in self if field is not None], strict=True)
        names = [name for name, field in zip(self._fields, self, strict=True) if field is not None]
        batches = [ImageMicroBatch(**dict(zip(names, part, strict=True))) for part in parts]
        return [batch._replace(images=batch.images.permute(0, 3, 1, 2)) for batch in batches]
