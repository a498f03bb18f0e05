"""The changes of an image are those of their definitions: Pillow's and torch's functions, and the papers' formulas."""

import hashlib
import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageEnhance, ImageOps

from scaletrain_cli.engine.data.images.transforms import (
    NO_BOX,
    OPERATIONS,
    Box,
    Geometry,
    ImageTransform,
    SampleKey,
    center_crop,
    color_jitter,
    crop_box,
    erased_box,
    flip,
    operation_argument,
    rand_augment,
    resized_crop,
    shift_hue,
)
from scaletrain_cli.spec.images import (
    AugmentSpec,
    ColorJitterSpec,
    ImagesSpec,
    RandAugmentSpec,
    RandomErasingSpec,
    RandomResizedCropSpec,
)
from tests.data.images.test_decode import noise

BICUBIC, BILINEAR = Image.Resampling.BICUBIC, Image.Resampling.BILINEAR
KEY = SampleKey(seed=1, epoch=2, sample=3)
DRAWS = 4000


def smooth(height: int, width: int, channels: int = 3) -> Image.Image:
    """Return an image without noise, so that interpolations agree but for rounding."""
    small = noise(max(2, height // 12), max(2, width // 12), channels)
    image = Image.fromarray(small if channels > 1 else small[..., 0])
    return image.resize((width, height), BICUBIC)


def pixels(image: Image.Image) -> Any:
    return np.asarray(image).astype(np.int16)


def torch_resized(image: Image.Image, height: int, width: int, mode: str) -> Any:
    """Return what torch's antialiased resize makes of an image, rounded to bytes."""
    whole = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float()
    resized = F.interpolate(whole, (height, width), mode=mode, antialias=True, align_corners=False)
    return resized[0].round().clamp(0, 255).permute(1, 2, 0).numpy().astype(np.int16)


def kolmogorov_smirnov(found: list[float], low: float, high: float) -> float:
    """Return the greatest distance between the distribution of the values and the uniform one."""
    values = (np.sort(found) - low) / (high - low)
    places = np.arange(len(values))
    return float(max((values - places / len(values)).max(), ((places + 1) / len(values) - values).max()))


LIMIT = 1.95 / math.sqrt(DRAWS)  # of the distance above; larger by chance in 1 of 1,000 samples


@pytest.mark.parametrize(("mode", "resampling"), [("bicubic", BICUBIC), ("bilinear", BILINEAR)])
def test_a_crop_is_resized_like_torchs_antialiased_resize(mode: str, resampling: Any) -> None:
    image, box = smooth(120, 150), Box(top=11, left=20, height=60, width=90)
    found = resized_crop(image, box, 32, resampling)
    part = Image.fromarray(np.asarray(image)[11:71, 20:110])
    assert np.abs(pixels(found) - torch_resized(part, 32, 32, mode)).max() <= 1
    whole = np.asarray(resized_crop(image, Box(0, 0, 120, 150), 120, resampling))
    assert whole.shape == (120, 120, 3)


def test_pixels_beside_a_crop_have_no_effect_on_it() -> None:
    image, box = noise(40, 40), Box(10, 10, 20, 20)
    other = image.copy()
    other[:10], other[30:], other[:, :10], other[:, 30:] = 0, 0, 255, 255
    first, second = (pixels(resized_crop(Image.fromarray(each), box, 7, BICUBIC)) for each in (image, other))
    assert np.array_equal(first, second)


@pytest.mark.parametrize(
    ("height", "width", "size", "ratio", "resized"),
    [(300, 400, 224, 0.875, (256, 341)), (500, 375, 224, 0.95, (313, 235)), (96, 96, 96, 1.0, (96, 96))],
)
def test_evaluation_resizes_the_shorter_side_and_crops_the_center(
    height: int, width: int, size: int, ratio: float, resized: tuple[int, int]
) -> None:
    image = smooth(height, width)
    expected = torch_resized(image, *resized, "bicubic")
    top, left = round((resized[0] - size) / 2), round((resized[1] - size) / 2)
    expected = expected[top : top + size, left : left + size]
    found = pixels(center_crop(image, size, ratio, BICUBIC))
    assert found.shape == (size, size, 3)
    assert np.abs(found - expected).max() <= 1


def test_a_flip_exchanges_left_and_right() -> None:
    array = noise(5, 7)
    assert np.array_equal(pixels(flip(Image.fromarray(array))), array[:, ::-1])


def test_crops_have_a_uniform_area_and_a_log_uniform_ratio() -> None:
    height, width = 2000, 1800
    spec = RandomResizedCropSpec(scale=(0.08, 0.4), ratio=(0.75, 4 / 3))  # every draw fits
    boxes = [crop_box(height, width, KEY._replace(sample=i).draws("crop"), spec) for i in range(DRAWS)]
    areas = [box.height * box.width / (height * width) for box in boxes]
    ratios = [math.log(box.width / box.height) for box in boxes]
    assert kolmogorov_smirnov(areas, 0.08, 0.4) < LIMIT
    assert kolmogorov_smirnov(ratios, math.log(0.75), math.log(4 / 3)) < LIMIT
    assert abs(np.corrcoef(areas, ratios)[0, 1]) < 0.05
    tops = [box.top / (height - box.height) for box in boxes]
    lefts = [box.left / (width - box.width) for box in boxes]
    assert kolmogorov_smirnov(tops, 0, 1) < LIMIT
    assert kolmogorov_smirnov(lefts, 0, 1) < LIMIT
    assert abs(np.corrcoef(tops, lefts)[0, 1]) < 0.05


def test_the_whole_area_may_be_cropped() -> None:
    spec = RandomResizedCropSpec(scale=(1, 1), ratio=(1, 1))
    assert crop_box(30, 30, KEY.draws("crop"), spec) == Box(0, 0, 30, 30)


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [(10, 1000, Box(0, 493, 10, 13)), (1000, 10, Box(493, 0, 13, 10)), (1, 1000, Box(0, 499, 1, 1))],
)
def test_a_crop_that_never_fits_is_the_largest_one_at_the_center(height: int, width: int, expected: Box) -> None:
    assert crop_box(height, width, KEY.draws("crop"), RandomResizedCropSpec(scale=(0.9, 1))) == expected


def test_erased_parts_have_a_uniform_area_and_a_log_uniform_ratio() -> None:
    spec = RandomErasingSpec(probability=0.5, scale=(0.02, 0.25), ratio=(0.3, 1 / 0.3))
    boxes = [erased_box(1000, 1000, KEY._replace(sample=i).draws("erase"), spec) for i in range(2 * DRAWS)]
    erased = [box for box in boxes if box != NO_BOX]
    assert abs(len(erased) / len(boxes) - 0.5) < 4 * math.sqrt(0.25 / len(boxes))
    assert kolmogorov_smirnov([box.height * box.width / 1e6 for box in erased], 0.02, 0.25) < LIMIT
    assert (
        kolmogorov_smirnov([math.log(box.height / box.width) for box in erased], math.log(0.3), -math.log(0.3)) < LIMIT
    )
    assert all(box.top + box.height <= 1000 and box.left + box.width <= 1000 for box in boxes)
    assert erased_box(4, 4, KEY.draws("erase"), RandomErasingSpec(probability=1, scale=(1, 1))) == NO_BOX


def test_color_jitter_multiplies_by_factors_in_their_ranges() -> None:
    gray = Image.new("RGB", (4, 4), (100, 100, 100))
    spec = ColorJitterSpec(brightness=0.4)
    values = [pixels(color_jitter(gray, KEY._replace(sample=i).draws("color"), spec))[0, 0, 0] for i in range(DRAWS)]
    assert (min(values), max(values)) == (60, 139)  # Pillow rounds down
    assert kolmogorov_smirnov([each + 0.5 for each in values], 60, 140) < LIMIT + 1 / 80


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_each_part_of_color_jitter_is_pillows_enhancement(name: str) -> None:
    image = smooth(24, 24)
    found = color_jitter(image, KEY.draws("color"), ColorJitterSpec(**{name: 0.5}))
    kind = {"brightness": ImageEnhance.Brightness, "contrast": ImageEnhance.Contrast, "saturation": ImageEnhance.Color}
    factors = np.linspace(0.5, 1.5, 4001)
    errors = [np.abs(pixels(kind[name](image).enhance(float(each))) - pixels(found)).max() for each in factors[::20]]
    assert min(errors) <= 1
    assert not np.array_equal(pixels(found), pixels(image))


def test_the_order_of_color_jitter_differs_between_samples() -> None:
    image, spec = smooth(24, 24), ColorJitterSpec(brightness=0.9, contrast=0.9, saturation=0.9, hue=0.3)
    found = {color_jitter(image, KEY._replace(sample=i).draws("color"), spec).tobytes() for i in range(20)}
    assert len(found) == 20


@pytest.mark.parametrize(
    ("share", "expected"), [(1 / 3, (0, 200, 0)), (-1 / 3, (0, 0, 200)), (0.5, (0, 200, 200)), (0.0, (200, 0, 0))]
)
def test_a_turned_hue_is_that_of_the_color_circle(share: float, expected: tuple[int, ...]) -> None:
    found = pixels(shift_hue(Image.new("RGB", (1, 1), (200, 0, 0)), share))[0, 0]
    assert np.abs(found - np.array(expected)).max() <= 6  # a step of the circle is 1 / 256
    assert shift_hue(Image.new("L", (1, 1), 7), share).getpixel((0, 0)) == 7


def affine(image: Image.Image, matrix: tuple[float, ...], fill: Any) -> Any:
    return pixels(image.transform(image.size, Image.Transform.AFFINE, matrix, resample=BICUBIC, fillcolor=fill))


def added(image: Image.Image, value: int) -> Any:
    array = pixels(image)
    return np.where(array < 128, np.minimum(array + value, 255), array)


# name, level, increasing, negative, Pillow's own function at the argument that the level stands for
KNOWN: list[tuple[str, float, bool, bool, Any]] = [
    ("auto_contrast", 9, True, False, lambda i, f: pixels(ImageOps.autocontrast(i))),
    ("equalize", 9, True, False, lambda i, f: pixels(ImageOps.equalize(i))),
    ("invert", 9, True, False, lambda i, f: 255 - pixels(i)),
    ("rotate", 10, True, False, lambda i, f: pixels(i.rotate(30, BICUBIC, fillcolor=f))),
    ("rotate", 5, True, True, lambda i, f: pixels(i.rotate(-15, BICUBIC, fillcolor=f))),
    ("posterize", 5, True, False, lambda i, f: pixels(i) & 0b11000000),
    ("posterize", 9, True, False, lambda i, f: pixels(i) & 0b10000000),
    ("posterize", 7.5, False, False, lambda i, f: pixels(i) & 0b11100000),
    ("solarize", 2.5, True, False, lambda i, f: pixels(ImageOps.solarize(i, 192))),
    ("solarize", 10, True, False, lambda i, f: pixels(ImageOps.solarize(i, 0))),
    ("solarize", 2.5, False, False, lambda i, f: pixels(ImageOps.solarize(i, 64))),
    ("solarize_add", 10, True, False, lambda i, f: added(i, 110)),
    ("solarize_add", 5, False, False, lambda i, f: added(i, 55)),
    ("color", 10, True, False, lambda i, f: pixels(ImageEnhance.Color(i).enhance(1.9))),
    ("color", 10, True, True, lambda i, f: pixels(ImageEnhance.Color(i).enhance(1 - 0.9))),
    ("contrast", 5, True, True, lambda i, f: pixels(ImageEnhance.Contrast(i).enhance(0.55))),
    ("contrast", 5, False, True, lambda i, f: pixels(i)),
    ("brightness", 10, False, False, lambda i, f: pixels(ImageEnhance.Brightness(i).enhance(1.9))),
    ("sharpness", 4, True, False, lambda i, f: pixels(ImageEnhance.Sharpness(i).enhance(1.36))),
    ("shear_x", 10, True, False, lambda i, f: affine(i, (1, 0.3, 0, 0, 1, 0), f)),
    ("shear_y", 5, True, True, lambda i, f: affine(i, (1, 0, 0, -0.15, 1, 0), f)),
    ("translate_x", 10, True, False, lambda i, f: affine(i, (1, 0, 0.45 * 40, 0, 1, 0), f)),
    ("translate_y", 5, True, True, lambda i, f: affine(i, (1, 0, 0, 0, 1, -0.225 * 30), f)),
]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("name", "level", "increasing", "negative", "expected"), KNOWN)
def test_operations_of_randaugment_are_pillows_functions(
    name: str, level: float, increasing: bool, negative: bool, expected: Any, channels: int
) -> None:
    image = smooth(30, 40, channels)
    fill = (124, 116, 104) if channels == 3 else (7,)
    argument = operation_argument(name, level, increasing=increasing, negative=negative)
    found = OPERATIONS[name](image, argument, Geometry(BICUBIC, fill))
    assert found.mode == image.mode
    assert found.size == image.size
    assert np.abs(pixels(found) - expected(image, fill if channels == 3 else 7)).max() <= 1


def test_every_operation_is_compared_with_pillow() -> None:
    assert {name for name, *_ in KNOWN} == set(OPERATIONS)
    assert len(OPERATIONS) == 15


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("negative", [False, True])
def test_a_higher_level_changes_an_image_more_if_increasing(name: str, negative: bool) -> None:
    image, none = smooth(30, 40), Geometry(BILINEAR, (0, 0, 0))
    changes = []
    for level in (0.0, 2.5, 5.0, 7.5, 10.0):
        argument = operation_argument(name, level, increasing=True, negative=negative)
        changes.append(float(np.abs(pixels(OPERATIONS[name](image, argument, none)) - pixels(image)).mean()))
    assert changes == sorted(changes) or name in ("auto_contrast", "equalize", "invert")
    assert changes[-1] > 0
    if name not in ("auto_contrast", "equalize", "invert", "posterize"):  # posterize keeps at most 4 bits
        assert changes[0] == 0


def test_randaugment_draws_each_operation_alike_and_applies_its_share() -> None:
    image = smooth(8, 8)
    used: list[str] = []
    spec = RandAugmentSpec(num_ops=2, probability=0.5)
    plain = dict(OPERATIONS)
    try:
        for name in OPERATIONS:
            OPERATIONS[name] = lambda image, argument, geometry, name=name: used.append(name) or image  # type: ignore
        for i in range(DRAWS):
            rand_augment(image, KEY._replace(sample=i).draws("augment"), spec, Geometry(BICUBIC, (0, 0, 0)))
    finally:
        OPERATIONS.update(plain)
    assert abs(len(used) / (2 * DRAWS) - 0.5) < 4 * math.sqrt(0.25 / (2 * DRAWS))
    counts = np.array([used.count(name) for name in OPERATIONS])
    expected = len(used) / 15
    assert ((counts - expected) ** 2 / expected).sum() < 36.1  # chi-squared of 14 degrees, 1 in 1,000


def test_the_level_of_randaugment_is_normal_and_cut_to_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    import scaletrain_cli.engine.data.images.transforms as module

    levels: list[float] = []

    def recorded(name: str, level: float, *, increasing: bool, negative: bool) -> float:
        levels.append(level)
        return 0.0

    monkeypatch.setattr(module, "operation_argument", recorded)
    monkeypatch.setattr(module, "OPERATIONS", dict.fromkeys(OPERATIONS, lambda image, argument, geometry: image))
    spec, image = RandAugmentSpec(num_ops=1, magnitude=9, magnitude_std=0.5, probability=1), smooth(8, 8)
    for i in range(DRAWS):
        rand_augment(image, KEY._replace(sample=i).draws("augment"), spec, Geometry(BICUBIC, (0,)))
    inside = np.array([each for each in levels if each < 10])
    assert max(levels) == 10
    assert abs(1 - len(inside) / DRAWS - 0.02275) < 0.01  # above 9 + 2 deviations of 0.5
    assert abs(float(np.median(levels)) - 9) < 0.05
    assert abs(float(np.mean(inside < 8.5)) - 0.1587 / 0.97725) < 0.03


def test_draws_depend_on_every_number_and_on_the_operation() -> None:
    keys = [KEY, *(KEY._replace(**{name: 7}) for name in KEY._fields)]
    firsts = [key.draws(operation).random() for key in keys for operation in ("crop", "flip")]
    assert len(set(firsts)) == 10
    assert KEY.draws("crop").random() == KEY.draws("crop").random()


def test_numbers_are_those_of_a_new_generator_whatever_was_drawn_before() -> None:
    digest = hashlib.blake2b(struct.pack("<4Q", *KEY) + b"flip", digest_size=16).digest()
    fresh = np.random.Generator(np.random.Philox(key=np.frombuffer(digest, "<u8")))
    expected = (fresh.random(3).tolist(), fresh.integers(10, dtype=np.uint32), fresh.normal())
    before = KEY.draws("crop")
    before.random(5)
    before.integers(10, dtype=np.uint32)  # leaves half of a number
    draw = KEY.draws("flip")
    assert (draw.random(3).tolist(), draw.integers(10, dtype=np.uint32), draw.normal()) == expected


def test_evaluation_has_no_random_change_and_training_all_that_are_set() -> None:
    images = ImagesSpec(augment=AugmentSpec(rand_augment=RandAugmentSpec(), color_jitter=ColorJitterSpec(hue=0.1)))
    transform = ImageTransform.of(images, 32, (0.5, 0.4, 0.3))
    assert transform.fill == (128, 102, 76)
    image = smooth(50, 60)
    assert np.array_equal(transform.evaluation(image), pixels(center_crop(image, 32, 0.875, BICUBIC)))
    views = {transform.training(image, KEY._replace(view=i)).tobytes() for i in range(8)}
    assert len(views) == 8
    plain = ImageTransform.of(ImagesSpec(augment=AugmentSpec(random_resized_crop=None, horizontal_flip=0)), 32, (0.5,))
    assert np.array_equal(plain.training(image, KEY), plain.evaluation(image))
    assert plain.erased(KEY) == NO_BOX
    gray = smooth(50, 60, 1)
    assert ImageTransform.of(images, 32, (0.5,)).training(gray, KEY).shape == (32, 32, 1)


def test_the_center_of_a_very_long_image_is_that_of_the_whole_and_takes_little_memory() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 400, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    found = np.asarray(center_crop(image, 32, 0.875, Image.Resampling.BICUBIC)).astype(int)
    whole = image.resize((3600, 36), Image.Resampling.BICUBIC).crop((1784, 2, 1816, 34))
    assert np.abs(found - np.asarray(whole)).max() <= 2
    assert center_crop(Image.new("RGB", (60_000, 1)), 224, 0.875, Image.Resampling.BICUBIC).size == (224, 224)
