"""Decode images, also those of rows, and read the batches of a rank: any batch by its number alone."""

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from scaletrain_cli.data.chunk_hashes import CorruptDataError
from scaletrain_cli.data.images.decode import MODES, BadImageError, MissingImageError, decode, size_of
from scaletrain_cli.data.images.samples import MOST_IMAGE_BYTES, ImageSource
from scaletrain_cli.engine.data.dataset import Joined
from scaletrain_cli.engine.data.images.batches import ImageMicroBatch, ImageStepBatch
from scaletrain_cli.engine.data.images.captions import CaptionTokenizer
from scaletrain_cli.engine.data.images.mixing import mix_of_pair
from scaletrain_cli.engine.data.images.transforms import ImageTransform, SampleKey
from scaletrain_cli.engine.data.row_source import RowImage
from scaletrain_cli.engine.data.rows import RowImages, StoredImage
from scaletrain_cli.engine.data.sample_order import SampleOrder, places_in_batch, sample_at, source_seed
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.vision_model import LlavaSpec, image_channels

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
        raise UsageError(Reason("data.torchvision-absent", {"error": str(error).partition("\n")[0]})) from error
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


class _Place(NamedTuple):
    """A sample of a run: its source, the number of the pass over this source, and its number within it; from 0 on."""

    source: int
    epoch: int
    number: int


@dataclass(frozen=True)
class ImageBatchReader(Joined):
    """Reads the batches of images of one data-parallel rank.

    The samples of a batch, their random changes and their mixes are functions of the seed and of numbers: that of the
    batch, or those of the pass over a source and of the sample in it. So no layout, process or resume changes them.

    ``sources``: the samples of each source. ``order``: the order of several sources; None: that of the first one.
    ``labeled``: batches have targets. ``captions``: None: batches have no captions.
    ``views``: independent changes of each image in training.
    """

    sources: tuple[ImageSource, ...]
    layout: Layout
    mesh: Mesh
    seed: int
    transform: ImageTransform
    labeled: bool = True
    captions: CaptionTokenizer | None = None
    views: int = 1
    order: SampleOrder | None = None
    decoder: str = "auto"

    def __post_init__(self) -> None:
        """Raises UsageError for a decoder that cannot be imported, for micro-batches that cannot be mixed, and for a
        model of images that are neither gray nor RGB.
        """
        decoder_of(self.decoder)
        if self.transform.channels not in MODES:
            raise UsageError(Reason("data.channels-not-allowed", {"given": self.transform.channels}))
        size = self.layout.micro_batch_size
        if self.transform.augment.mixes and size % 2:
            raise UsageError(Reason("data.mixing-odd-micro-batch", {"given": size}))

    def batch(self, number: int) -> ImageStepBatch:
        """Return this rank's part of the global batch with this number (1-based)."""
        layout, size = self.layout, self.layout.micro_batch_size
        first = (number - 1) * layout.global_batch_size
        within = places_in_batch(layout, self.mesh.data.rank)
        numbers = [[first + place for place in micro] for micro in within]
        places = [[self._place(number) for number in micro] for micro in numbers]
        try:
            batch = self._read(places, numbers, training=True)
        except CorruptDataError as error:
            error.evidence["batch"] = number
            error.explain(Reason("data.of-batch", {"batch": number, "cause": error.reason or recorded(error.message)}))
            raise
        if not (self.transform.augment.mixes and self.labeled):
            return batch
        side, augment = self.transform.size, self.transform.augment
        mixes = [mix_of_pair(self.seed, number - 1, place // 2, side, augment) for micro in within for place in micro]
        values = torch.tensor([[mix.weight, *mix.box] for mix in mixes], dtype=torch.float32)
        return batch._replace(mix=values.view(len(within), size, 5))

    def without_groups(self) -> "ImageBatchReader":
        """Return a reader of the same batches without process groups, which another process can get as a pickle."""
        return replace(self, mesh=self.mesh.without_groups())

    def rounds(self, count: int) -> int:
        """Return the rounds in which ``count`` samples are evaluated, with one micro-batch for each rank in each."""
        return -(-count // (self.layout.micro_batch_size * self.layout.data_parallel))

    def round(self, number: int, count: int) -> ImageStepBatch:
        """Return this rank's micro-batch of a round (1-based) of an evaluation of the first ``count`` samples.

        They are in the order of the sources and not augmented. In a last round that is not full, other samples stand
        in for those that are missing: ``real`` is False for them.
        """
        size = self.layout.micro_batch_size
        first = ((number - 1) * self.layout.data_parallel + self.mesh.data.rank) * size
        numbers = list(range(first, first + size))
        stored = [min(index, count - 1) for index in numbers]
        places = [_Place(source, 0, own) for source, own in map(self.located, stored)]
        batch = self._read([places], [numbers], training=False)
        if count % (size * self.layout.data_parallel):
            batch = batch._replace(real=batch.samples < count)
        return batch

    def in_order(self, count: int) -> Iterator[ImageMicroBatch]:
        """Yield this rank's micro-batches of an evaluation of the first ``count`` samples; see ``round``."""
        for number in range(1, self.rounds(count) + 1):
            yield from self.round(number, count).micro_batches()

    def _place(self, sample: int) -> _Place:
        source, position = (0, sample) if self.order is None else self.order.mixture.place(sample)
        size = len(self.sources[source])
        number = sample_at(position, seed=source_seed(self.seed, source), samples=size)
        return _Place(source, position // size, number)

    def _read(self, places: list[list[_Place]], numbers: list[list[int]], *, training: bool) -> ImageStepBatch:
        micros, size = len(places), self.layout.micro_batch_size
        side, channels = self.transform.size, self.transform.channels
        views = self.views if training else 1
        images = np.empty((micros, views, size, side, side, channels), np.uint8)
        erases = training and self.transform.augment.random_erasing is not None
        boxes = np.zeros((micros, views, size, 4), np.int64)
        labels: list[int | tuple[float, ...]] = []
        captions: list[str] = []
        decode: Decode = decoder_of(self.decoder)
        for micro, row in np.ndindex(micros, size):
            source, epoch, number = places[micro][row]
            sample = self.sources[source].read(number)
            image = decode(sample.image, sample.place, channels)
            for view in range(views):
                if training:
                    key = SampleKey(source_seed(self.seed, source), epoch, number, view)
                    images[micro, view, row] = self.transform.training(image, key)
                    boxes[micro, view, row] = self.transform.erased(key)
                else:
                    images[micro, view, row] = self.transform.evaluation(image)
            if self.labeled:
                labels.append(_present(sample.label, "label", sample.place))
            if self.captions is not None:
                captions.append(_present(sample.caption, "caption", sample.place))
        shape, targets = (micros, size), None
        if self.labeled:
            kind = torch.int64 if isinstance(labels[0], int) else torch.float32  # classes, or numbers
            targets = torch.unflatten(torch.tensor(labels, dtype=kind), 0, shape)
        sources = torch.tensor([[place.source for place in micro] for micro in places])
        return ImageStepBatch(
            images=torch.from_numpy(images).flatten(1, 2),
            samples=torch.tensor(numbers),
            targets=targets,
            tokens=None if self.captions is None else torch.from_numpy(self.captions.encode(captions)).view(*shape, -1),
            erased=torch.from_numpy(boxes).flatten(1, 2) if erases else None,
            sources=sources if len(self.sources) > 1 else None,
            numbers=torch.tensor([[self.starts[place.source] + place.number for place in micro] for micro in places]),
        )


def _present(value: Any, name: str, place: str) -> Any:
    if value is None:
        raise CorruptDataError(place, f"it has no {name}")
    return value


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
        pixels = np.empty((len(chosen), transform.size, transform.size, transform.channels), np.uint8)
        for place, number in enumerate(chosen):
            stored = images.read(number)
            pixels[place] = transform.evaluation(decoded(stored.content, stored.place, transform.channels))
        return torch.from_numpy(pixels)
