"""Decode the bytes of an image file with Pillow."""

from functools import cache
from io import BytesIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from scaletrain_cli.data.chunk_hashes import CorruptDataError
from scaletrain_cli.errors import DoNotRequeueError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.text import listed

MODES = {1: "L", 3: "RGB"}  # Pillow's mode of the images of a model, by its channels
# Without formats that start a program (EPS) or hold no pixels (PDF).
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF")

# Formats of which Pillow looks for an orientation in these keys of ``info`` alone.
_ORIENTED_BY_INFO = ("JPEG", "PNG")
_ORIENTATION_KEYS = frozenset(("exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp"))


class BadImageError(CorruptDataError):
    """An image of a source cannot be decoded (exit 93). ``evidence`` is for an event."""

    def __init__(self, place: str, problem: str) -> None:
        """``place``: the file with its member or row."""
        DoNotRequeueError.__init__(self, Reason("data.image-unreadable", {"place": place, "problem": problem}))
        self.evidence = {"file": place, "problem": problem}


class MissingImageError(BadImageError):
    """A row names an image that does not exist."""

    def __init__(self, place: str) -> None:
        """``place``: the path that the row gives, after ``data.images.folder``."""
        DoNotRequeueError.__init__(self, Reason("data.image-missing", {"place": place}))
        self.evidence = {"file": place, "problem": "there is no such file"}


def decode(content: bytes, place: str, channels: int) -> Image.Image:
    """Return the image with its orientation applied: mode L for 1 channel, RGB for 3, 8 bits each.

    The first image of an animation counts. Transparency is dropped without a background: the colors stay. Images of
    16 bits keep their upper 8. JPEG files are decoded at their whole size, because the smaller sizes of libjpeg
    (``Image.draft``) give other pixels after the resize. Raises BadImageError, which names ``place``.
    """
    try:
        mode = MODES[channels]
        image = _opened(content)
        image.load()
        _apply_orientation(image)
        if image.mode == mode:
            return image
        if image.mode.startswith("I"):
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if image.mode == "LAB":
            image = image.convert("RGB")  # the only mode into which Pillow converts it
        image.info.pop("transparency", None)
        return image.convert(mode)
    except MemoryError:
        raise
    except Exception as error:  # decoders of damaged files raise whatever they meet
        raise _bad_image(error, place) from error


def size_of(content: bytes, place: str) -> tuple[int, int]:
    """Return width and height as stored. Reads the header only. Raises BadImageError, which names ``place``."""
    try:
        with _opened(content) as image:
            return int(image.width), int(image.height)
    except MemoryError:
        raise
    except Exception as error:
        raise _bad_image(error, place) from error


def _bad_image(error: Exception, place: str) -> BadImageError:
    if isinstance(error, UnidentifiedImageError):
        return BadImageError(place, f"not an image in one of the formats {listed(_formats(), len(_FORMATS))}")
    return BadImageError(place, str(error) or type(error).__name__)


def _opened(content: bytes) -> Image.Image:
    """Return the image, whose pixels are not decoded. Raises ValueError for one that no mode of MODES can hold."""
    if not content:
        raise ValueError("the file is empty")
    image: Image.Image = Image.open(BytesIO(content), formats=_formats())
    if image.mode == "F" or (image.mode == "I" and image.format != "PPM"):  # a PGM of 16 bits has the mode I
        raise ValueError("its pixels have 32 bits; save it with 8 or 16 bits")
    return image


def _apply_orientation(image: Image.Image) -> None:
    """Turn or mirror the image as its EXIF orientation says, so that it is as upright as people see it.

    transformers' ``load_image`` and the datasets library do so too; torchvision's ``ImageFolder`` does not.
    """
    if image.format in _ORIENTED_BY_INFO and _ORIENTATION_KEYS.isdisjoint(image.info):
        return  # exif_transpose takes a tenth of the time of a small image to find nothing
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception:  # damaged EXIF data say nothing about the pixels
        return


@cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)
