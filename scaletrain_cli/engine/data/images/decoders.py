"""The decoders of ``data.images.decoder``."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image

from scaletrain_cli.data.images.decode import BadImageError, decode
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason

Decode = Callable[[bytes, str, int], Image.Image]


def decoder_of(name: str) -> Decode:
    """Return the function (content of a file, its place, channels) -> image of a decoder; see data.images.decode.

    ``auto`` is pillow, whose pixels do not depend on the installation. Raises UsageError if the library of the decoder
    cannot be imported.
    """
    if name != "torchvision":
        return decode
    try:
        importlib.import_module("torchvision.io")
    except (ImportError, RuntimeError, OSError) as error:  # also a wheel for another build of torch
        params = {"error": str(error).partition("\n")[0]}
        raise UsageError(Reason("data.torchvision-absent", params)) from error
    return _decode_by_torchvision


def _decode_by_torchvision(content: bytes, place: str, channels: int) -> Image.Image:
    """Return the image as ``decode`` does; the pixels of a JPEG file may differ from Pillow's by rounding.

    The gray of a colored JPEG file is its luma channel.
    """
    io: Any = importlib.import_module("torchvision.io")
    mode = io.ImageReadMode.GRAY if channels == 1 else io.ImageReadMode.RGB
    try:
        encoded = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        pixels = io.decode_image(encoded, mode=mode, apply_exif_orientation=True).numpy()
    except (RuntimeError, ValueError) as error:
        raise BadImageError(place, str(error).partition("\n")[0]) from error
    if pixels.ndim == 4:  # the images of an animation
        pixels = pixels[0]
    if pixels.dtype == np.uint16:
        pixels = (pixels >> 8).astype(np.uint8)
    return Image.fromarray(pixels[0] if channels == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
