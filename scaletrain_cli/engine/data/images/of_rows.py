"""Images of rows: read and checked when rows are prepared, and decoded to the pixels of a batch."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from scaletrain_cli.data.images.decode import BadImageError, MissingImageError, decode, size_of
from scaletrain_cli.data.images.samples import MOST_IMAGE_BYTES
from scaletrain_cli.engine.data.images.reading import decoder_of
from scaletrain_cli.engine.data.images.transforms import ImageTransform
from scaletrain_cli.engine.data.row_images import RowImages, StoredImage
from scaletrain_cli.engine.data.row_source import RowImage
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.vision_model import LlavaSpec, image_channels


def read_image(image: RowImage, channels: int, *, decodes: bool) -> StoredImage:
    """Return the bytes of an image whose header can be read, or with ``decodes`` all of it. Raises BadImageError."""
    content = image.content
    if image.path is not None:
        try:
            if image.path.stat().st_size > MOST_IMAGE_BYTES:
                raise BadImageError(image.place, f"it has more than {MOST_IMAGE_BYTES} bytes")
            content = image.path.read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise MissingImageError(image.place) from error
        except OSError as error:
            raise BadImageError(image.place, error.strerror or str(error)) from error
    assert content is not None
    if decodes:
        decode(content, image.place, channels)
    else:
        size_of(content, image.place)
    return StoredImage(content, image.place)


@dataclass(frozen=True)
class RowPixels:
    """Decodes images of rows and changes them to the size of the model, as in evaluation, without random changes."""

    transform: ImageTransform
    decoder: str

    @classmethod
    def of(cls, spec: RunSpec) -> "RowPixels":
        """Return the pixels of a spec of a LLaVA. Raises UsageError if the decoder cannot be imported."""
        model, images = spec.model, spec.data.images
        assert isinstance(model, LlavaSpec)
        mean, _ = images.normalization(model.family, image_channels(model))
        decoder_of(images.decoder)
        transform = ImageTransform.of(images, model.vision_config.image_size, mean, images.crop_ratio_of(model.family))
        return cls(transform, images.decoder)

    def read(self, images: RowImages, numbers: Iterable[int]) -> Tensor:
        """Return the images with these numbers, [images, height, width, channels] uint8.

        Raises BadImageError, which names the place in the source, and CorruptDataError.
        """
        transform, decoded = self.transform, decoder_of(self.decoder)
        chosen = list(map(int, numbers))
        found = np.empty((len(chosen), transform.size, transform.size, transform.channels), np.uint8)
        for place, number in enumerate(chosen):
            stored = images.read(number)
            found[place] = transform.evaluation(decoded(stored.content, stored.place, transform.channels))
        return torch.from_numpy(found)
