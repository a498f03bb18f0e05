"""The embedded source of images: handwritten digits of the library scikit-learn, 8 x 8 pixels in 17 shades of gray."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass

from scaletrain_cli.data.images.samples import Bad, Found, ImageSettings
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec.image_files import SKLEARN_DIGITS

CLASS_NAMES = tuple(map(str, range(10)))
_SHADES = 16
_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True)
class DigitsUnit:
    """All digits; the index has the images themselves, so that reading them does not need scikit-learn."""

    def samples(self, settings: ImageSettings) -> Iterator[Found | Bad]:
        """Yield the digits as PGM files. Raises UsageError if scikit-learn is not installed."""
        try:
            found = importlib.import_module("sklearn.datasets").load_digits()
        except ImportError as error:
            raise UsageError(Reason("images.no-scikit-learn", {"source": SKLEARN_DIGITS})) from error
        offset = 0
        for number, (pixels, digit) in enumerate(zip(found.images, found.target.tolist(), strict=True)):
            rows = [[round(value * 255 / _SHADES) for value in row] for row in pixels.tolist()]
            image = b"P5 %d %d 255\n" % (len(rows[0]), len(rows)) + bytes(value for row in rows for value in row)
            place = f"{SKLEARN_DIGITS}, image {number + 1}"
            caption = f"a handwritten {_WORDS[digit]}"
            yield Found("", 0, offset, f"digit-{number:04d}", "", image, digit, caption, place)
            offset += len(image)
