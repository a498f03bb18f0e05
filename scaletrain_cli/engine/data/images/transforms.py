"""Changes of one image: pure functions of the image and of a random generator that belongs to one operation on it.

The generator of an operation is a counter generator (Philox) whose key is a hash of the seed, the epoch, the sample and
the operation, so that no result depends on which process computes it, or on what it computed before.
"""

import hashlib
import math
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageEnhance, ImageOps

from scaletrain_cli.spec.images import (
    AugmentSpec,
    ColorJitterSpec,
    ImagesSpec,
    RandAugmentSpec,
    RandomErasingSpec,
    RandomResizedCropSpec,
)

RESAMPLING = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
_TRIES = 10  # of a random rectangle that may not fit
_MASK64 = (1 << 64) - 1


class SampleKey(NamedTuple):
    """A sample in one pass over its source. ``sample``: number within the source; ``view``: of several of one image."""

    seed: int
    epoch: int
    sample: int
    view: int = 0

    def draws(self, operation: str) -> np.random.Generator:
        """Return the random generator of an operation on this sample, to be used before the next call in this thread.

        The next call gives the same object the numbers of another operation: a new object costs ten times as much.
        """
        numbers = struct.pack("<4Q", self.seed & _MASK64, self.epoch, self.sample, self.view)
        key = hashlib.blake2b(numbers + operation.encode(), digest_size=16).digest()
        return _GENERATOR.with_key(np.frombuffer(key, "<u8"))


class _Generator(threading.local):
    """A Philox generator of each thread."""

    def __init__(self) -> None:
        self._source = np.random.Philox(0)
        self._generator = np.random.Generator(self._source)

    def with_key(self, key: npt.NDArray[np.uint64]) -> np.random.Generator:
        """Return the generator in the state of a new one with this key."""
        self._source.state = {
            "bit_generator": "Philox",
            "state": {"counter": _NO_COUNT, "key": key},
            "buffer": _NO_COUNT,
            "buffer_pos": len(_NO_COUNT),  # nothing is left of it
            "has_uint32": 0,
            "uinteger": 0,
        }
        return self._generator


_NO_COUNT = np.zeros(4, np.uint64)
_GENERATOR = _Generator()


class Box(NamedTuple):
    """A rectangle of pixels; ``height`` 0: none."""

    top: int
    left: int
    height: int
    width: int


NO_BOX = Box(0, 0, 0, 0)


def _between(draw: np.random.Generator, low: float, high: float) -> float:
    """Return a uniform number. Several times as fast as ``Generator.uniform`` for one number."""
    return low + (high - low) * draw.random()


def _below(draw: np.random.Generator, count: int) -> int:
    """Return a uniform whole number from 0 to ``count - 1``."""
    return int(draw.random() * count)


def crop_box(height: int, width: int, draw: np.random.Generator, spec: RandomResizedCropSpec) -> Box:
    """Return a random part of an image: its share of the area is uniform, and so is the logarithm of width / height.

    After 10 draws that do not fit: the largest rectangle at the center with a ratio in the range.
    Source: arXiv:1409.4842, section 6.
    """
    lowest, highest = map(math.log, spec.ratio)
    for _ in range(_TRIES):
        area, ratio = height * width * _between(draw, *spec.scale), math.exp(_between(draw, lowest, highest))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return Box(_below(draw, height - h + 1), _below(draw, width - w + 1), h, w)
    low, high = spec.ratio
    w, h = min(width, max(1, round(height * high))), min(height, max(1, round(width / low)))
    return Box((height - h) // 2, (width - w) // 2, h, w)


def resized_crop(image: Image.Image, box: Box, size: int, resampling: Image.Resampling) -> Image.Image:
    """Return a part of the image, resized to ``size`` x ``size`` without a look at pixels beside the part."""
    return image.crop((box.left, box.top, box.left + box.width, box.top + box.height)).resize((size, size), resampling)


_LONGEST_SIDES = 32  # of the shorter side: up to this, an image is resized before it is cropped


def center_crop(image: Image.Image, size: int, crop_ratio: float, resampling: Image.Resampling) -> Image.Image:
    """Return the center of the image, whose shorter side is first resized to ``size / crop_ratio`` pixels.

    Both sides are rounded down, as in torchvision's Resize, and an odd margin is one pixel larger at one side.
    """
    shorter = math.floor(round(size / crop_ratio, 6))
    scaled = [shorter * side // min(image.size) for side in image.size]
    left, top = (round((side - size) / 2) for side in scaled)
    if max(scaled) > _LONGEST_SIDES * shorter:  # would take gigabytes as a whole
        across, down = image.width / scaled[0], image.height / scaled[1]
        box = (left * across, top * down, (left + size) * across, (top + size) * down)
        return image.resize((size, size), resampling, box=box)
    if tuple(scaled) != image.size:
        image = image.resize((scaled[0], scaled[1]), resampling)
    return image.crop((left, top, left + size, top + size))


def padded(image: Image.Image, size: int, mean: Sequence[float], resampling: Image.Resampling) -> Image.Image:
    """Return the whole image in the middle of a square with the color ``mean``, resized to ``size`` pixels.

    As LLaVA-1.5's ``expand2square``: an odd margin is one pixel larger at the right or the bottom, and the color is
    rounded down. Of very long images the square would take gigabytes: they are resized first.
    """
    longer, shorter = max(image.size), max(1, min(image.size))
    if longer > _LONGEST_SIDES * shorter and longer > size:
        scale = size / longer
        image = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))), resampling)
        longer = max(image.size)
    color = tuple(int(255 * channel) for channel in mean)
    square = Image.new(image.mode, (longer, longer), color if len(color) > 1 else color[0])
    square.paste(image, ((longer - image.width) // 2, (longer - image.height) // 2))
    return square.resize((size, size), resampling)


def flip(image: Image.Image) -> Image.Image:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def color_jitter(image: Image.Image, draw: np.random.Generator, spec: ColorJitterSpec) -> Image.Image:
    """Return the image with changed brightness, contrast, saturation and hue, in random order.

    The factors of the first three are uniform in [max(0, 1 - x), 1 + x]. Gray images have no hue.
    """
    order = draw.permutation(4)
    strengths = (spec.brightness, spec.contrast, spec.saturation)
    factors = [draw.uniform(max(0.0, 1.0 - strength), 1.0 + strength) for strength in strengths]
    shift = draw.uniform(-spec.hue, spec.hue)
    for number in order:
        if number == 3:
            image = shift_hue(image, shift) if spec.hue else image
        elif strengths[number]:
            image = _ENHANCE[number](image).enhance(factors[number])
    return image


_ENHANCE: tuple[Callable[[Image.Image], Any], ...] = (
    ImageEnhance.Brightness,
    ImageEnhance.Contrast,
    ImageEnhance.Color,
)


def shift_hue(image: Image.Image, share: float) -> Image.Image:
    """Return the image with its hue turned by a share of the circle, whose steps are 1 / 256."""
    if image.mode == "L":
        return image
    steps = round(share * 256)
    hue, saturation, value = image.convert("HSV").split()
    turned = hue.point([(level + steps) % 256 for level in range(256)])
    return Image.merge("HSV", (turned, saturation, value)).convert(image.mode)


# RandAugment. Level: from 0 to 10.
_LEVELS = 10.0
_GREATEST_ANGLE, _GREATEST_SHEAR, _GREATEST_TRANSLATION = 30.0, 0.3, 0.45
_GREATEST_ADDED, _BRIGHT = 110, 128
_BITS = 4  # that posterize removes or keeps at level 10
_GREATEST_ENHANCEMENT = 0.9


class Geometry(NamedTuple):
    """The resampling of operations that move pixels, and the color of pixels from beyond the image."""

    resampling: Image.Resampling
    fill: tuple[int, ...]

    @property
    def color(self) -> Any:
        """``fill`` as Pillow takes it: a number for gray images."""
        return self.fill if len(self.fill) > 1 else self.fill[0]


_Operation = Callable[[Image.Image, float, Geometry], Image.Image]


def _transformed(image: Image.Image, matrix: Sequence[float], geometry: Geometry) -> Image.Image:
    return image.transform(
        image.size, Image.Transform.AFFINE, tuple(matrix), resample=geometry.resampling, fillcolor=geometry.color
    )


OPERATIONS: dict[str, _Operation] = {
    "auto_contrast": lambda image, _, __: ImageOps.autocontrast(image),
    "equalize": lambda image, _, __: ImageOps.equalize(image),
    "invert": lambda image, _, __: ImageOps.invert(image),
    "rotate": lambda image, degrees, geometry: image.rotate(
        degrees, resample=cast(Any, geometry.resampling), fillcolor=geometry.color
    ),
    "posterize": lambda image, bits, _: ImageOps.posterize(image, int(bits)),
    "solarize": lambda image, threshold, _: ImageOps.solarize(image, int(threshold)),
    "solarize_add": lambda image, added, _: image.point(
        [min(255, value + int(added)) if value < _BRIGHT else value for value in range(256)] * len(image.getbands())
    ),
    "color": lambda image, factor, _: ImageEnhance.Color(image).enhance(factor),
    "contrast": lambda image, factor, _: ImageEnhance.Contrast(image).enhance(factor),
    "brightness": lambda image, factor, _: ImageEnhance.Brightness(image).enhance(factor),
    "sharpness": lambda image, factor, _: ImageEnhance.Sharpness(image).enhance(factor),
    "shear_x": lambda image, share, geometry: _transformed(image, (1, share, 0, 0, 1, 0), geometry),
    "shear_y": lambda image, share, geometry: _transformed(image, (1, 0, 0, share, 1, 0), geometry),
    "translate_x": lambda image, share, geometry: _transformed(image, (1, 0, share * image.width, 0, 1, 0), geometry),
    "translate_y": lambda image, share, geometry: _transformed(image, (1, 0, 0, 0, 1, share * image.height), geometry),
}
_NAMES = tuple(OPERATIONS)
_ENHANCEMENTS = ("color", "contrast", "brightness", "sharpness")
_SIGNED = {
    "rotate": _GREATEST_ANGLE,
    "shear_x": _GREATEST_SHEAR,
    "shear_y": _GREATEST_SHEAR,
    "translate_x": _GREATEST_TRANSLATION,
    "translate_y": _GREATEST_TRANSLATION,
}


def operation_argument(name: str, level: float, *, increasing: bool, negative: bool) -> float:
    """Return the argument of an operation of RandAugment at a level from 0 to 10; 0 if it takes none.

    Angles are in degrees; shears and translations are shares of the other or the same side; posterize keeps bits, at
    least one, as without any an image is black; solarize inverts values from its threshold on. ``increasing``: a higher
    level always changes the image more; otherwise posterize, solarize and the enhancements change it least at level 10,
    10 and 5, as in the first programs of AutoAugment. ``negative``: the sign, where the operation has one. Levels and
    ranges as in timm (``inc1``).
    """
    share = level / _LEVELS
    sign = -1.0 if negative else 1.0
    if name in _SIGNED:
        return sign * share * _SIGNED[name]
    if name in _ENHANCEMENTS:
        if increasing:
            return max(1.0 - _GREATEST_ENHANCEMENT, 1.0 + sign * share * _GREATEST_ENHANCEMENT)
        return share * 1.8 + 0.1
    if name == "posterize":
        return max(1, _BITS - int(share * _BITS) if increasing else int(share * _BITS))
    if name == "solarize":
        return 256 - int(share * 256) if increasing else int(share * 256)
    return int(share * _GREATEST_ADDED) if name == "solarize_add" else 0.0


def rand_augment(
    image: Image.Image, draw: np.random.Generator, spec: RandAugmentSpec, geometry: Geometry
) -> Image.Image:
    """Return the image after ``spec.num_ops`` of the 15 operations, drawn with replacement, each with a probability.

    The level of each is normal around the magnitude and cut to 0 to 10. Source: arXiv:1909.13719, section 3.1; the
    15 operations, the probability and the deviation are those of timm, which published recipes were trained with.
    """
    for _ in range(spec.num_ops):
        name = _NAMES[int(draw.integers(len(_NAMES)))]
        applied, negative = draw.random() < spec.probability, draw.random() < 0.5
        level = min(_LEVELS, max(0.0, draw.normal(spec.magnitude, spec.magnitude_std)))
        if applied:
            argument = operation_argument(name, level, increasing=spec.increasing, negative=negative)
            image = OPERATIONS[name](image, argument, geometry)
    return image


def erased_box(height: int, width: int, draw: np.random.Generator, spec: RandomErasingSpec) -> Box:
    """Return the rectangle of random erasing (arXiv:1708.04896, algorithm 1), or NO_BOX.

    Its share of the area is uniform, and so is the logarithm of height / width. It is smaller than the image in both
    directions; after 10 draws that do not fit there is none.
    """
    if draw.random() >= spec.probability:
        return NO_BOX
    lowest, highest = map(math.log, spec.ratio)
    for _ in range(_TRIES):
        area, ratio = height * width * _between(draw, *spec.scale), math.exp(_between(draw, lowest, highest))
        h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < h < height and 0 < w < width:
            return Box(_below(draw, height - h + 1), _below(draw, width - w + 1), h, w)
    return NO_BOX


@dataclass(frozen=True)
class ImageTransform:
    """The pixels of an image in training and in evaluation. ``fill``: the mean color, from 0 to 255.

    ``pad``: the mean color, from 0 to 1, that evaluation puts around the whole image; None: it crops the center.
    """

    size: int
    augment: AugmentSpec
    interpolation: Literal["bicubic", "bilinear"]
    crop_ratio: float
    fill: tuple[int, ...]
    pad: tuple[float, ...] | None = None

    @property
    def channels(self) -> int:
        """The number of channels: 1 or 3."""
        return len(self.fill)

    @classmethod
    def of(
        cls, images: ImagesSpec, size: int, mean: Sequence[float], crop_ratio: float | None = None
    ) -> "ImageTransform":
        """Return the transform of a spec. ``mean``: of each channel, from 0 to 1. ``crop_ratio``: None: the spec's."""
        fill = tuple(round(255 * channel) for channel in mean)
        ratio = images.crop_ratio if crop_ratio is None else crop_ratio
        pad = tuple(mean) if images.aspect == "pad" else None
        return cls(size, images.augment, images.interpolation, ratio, fill, pad)

    def training(self, image: Image.Image, key: SampleKey) -> npt.NDArray[np.uint8]:
        """Return one view of the image as [size, size, channels]."""
        spec, resampling = self.augment, RESAMPLING[self.interpolation]
        if spec.random_resized_crop is None:
            image = center_crop(image, self.size, self.crop_ratio, resampling)
        else:
            box = crop_box(image.height, image.width, key.draws("crop"), spec.random_resized_crop)
            image = resized_crop(image, box, self.size, resampling)
        if spec.horizontal_flip and key.draws("flip").random() < spec.horizontal_flip:
            image = flip(image)
        if spec.color_jitter is not None:
            image = color_jitter(image, key.draws("color"), spec.color_jitter)
        if spec.rand_augment is not None:
            image = rand_augment(image, key.draws("augment"), spec.rand_augment, Geometry(resampling, self.fill))
        return _pixels(image)

    def evaluation(self, image: Image.Image) -> npt.NDArray[np.uint8]:
        """Return the center of the image, or all of it, as [size, size, channels]."""
        resampling = RESAMPLING[self.interpolation]
        if self.pad is not None:
            return _pixels(padded(image, self.size, self.pad, resampling))
        return _pixels(center_crop(image, self.size, self.crop_ratio, resampling))

    def erased(self, key: SampleKey) -> Box:
        """Return the rectangle of one view that is erased in training, or NO_BOX."""
        spec = self.augment.random_erasing
        return NO_BOX if spec is None else erased_box(self.size, self.size, key.draws("erase"), spec)


def _pixels(image: Image.Image) -> npt.NDArray[np.uint8]:
    pixels = np.asarray(image)
    return pixels[..., None] if pixels.ndim == 2 else pixels
