from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from scaletrain_cli.data.images.decode import decode, size_of

ORIENTATION = 0x0112
# EXIF (CIPA DC-008, 4.6.4): where row 0 and column 0 of the stored pixels are in the upright image.
UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],  # row 0 at the top, column 0 at the right
    3: lambda a: a[::-1, ::-1],  # bottom, right
    4: lambda a: a[::-1],  # bottom, left
    5: lambda a: a.swapaxes(0, 1),  # row 0 at the left, column 0 at the top
    6: lambda a: a.swapaxes(0, 1)[:, ::-1],  # right, top
    7: lambda a: a.swapaxes(0, 1)[::-1, ::-1],  # right, bottom
    8: lambda a: a.swapaxes(0, 1)[::-1],  # left, bottom
}


def noise(height: int, width: int, channels: int = 3) -> Any:
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), np.uint8)


def file_of(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_the_orientation_of_exif_is_applied(orientation: int) -> None:
    pixels = noise(3, 5)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    content = file_of(Image.fromarray(pixels), "PNG", exif=exif)
    assert np.array_equal(np.asarray(decode(content, "a.png", 3)), UPRIGHT[orientation](pixels))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_damaged_exif_data_do_not_make_an_image_bad() -> None:
    image = Image.fromarray(noise(16, 16))
    content = file_of(image, "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0")
    assert np.array_equal(np.asarray(decode(content, "a.jpg", 3)), np.asarray(Image.open(BytesIO(content))))


@pytest.mark.parametrize(("format", "options"), [("JPEG", {"quality": 90}), ("WEBP", {}), ("BMP", {}), ("GIF", {})])
@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_pixels_are_pillows_in_every_format(format: str, options: dict[str, Any], channels: int, mode: str) -> None:
    content = file_of(Image.fromarray(noise(40, 60)), format, **options)
    found = decode(content, "a", channels)
    assert found.mode == mode
    assert np.array_equal(np.asarray(found), np.asarray(Image.open(BytesIO(content)).convert(mode)))


def test_a_jpeg_in_cmyk_becomes_rgb() -> None:
    content = file_of(Image.new("CMYK", (8, 4)), "JPEG")
    assert decode(content, "a.jpg", 3).mode == "RGB"
    assert np.asarray(decode(content, "a.jpg", 3)).min() > 250  # no ink


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_a_tiff_in_lab_is_converted_by_way_of_rgb(channels: int, mode: str) -> None:
    image = Image.fromarray(noise(4, 4)).convert("LAB")
    found = np.asarray(decode(file_of(image, "TIFF"), "a.tif", channels))
    assert np.array_equal(found, np.asarray(image.convert("RGB").convert(mode)))


def test_transparency_is_dropped_and_the_colors_stay() -> None:
    pixels = noise(4, 4, 4)
    assert np.array_equal(np.asarray(decode(file_of(Image.fromarray(pixels)), "a.png", 3)), pixels[..., :3])
    palette = Image.fromarray(noise(4, 4)).quantize(4)
    content = file_of(palette, transparency=bytes([0, 255, 255, 255]))
    assert np.array_equal(np.asarray(decode(content, "a.png", 3)), np.asarray(palette.convert("RGB")))


def test_16_bits_keep_their_upper_8() -> None:
    pixels = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    found = np.asarray(decode(file_of(Image.fromarray(pixels)), "a.png", 1))
    assert np.array_equal(found, np.arange(256).reshape(16, 16))


def test_a_pgm_of_16_bits_keeps_its_upper_8_too() -> None:
    """Pillow has its pixels as numbers of 32 bits, from 0 to 65,535 whatever its largest value is."""
    content = b"P5 2 2 1023\n" + np.array([[0, 256], [512, 1023]], ">u2").tobytes()
    assert size_of(content, "a.pgm") == (2, 2)
    assert np.asarray(decode(content, "a.pgm", 1)).tolist() == [[0, 64], [128, 255]]
