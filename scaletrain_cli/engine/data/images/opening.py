"""Open the index of a run's images, and build the readers of its batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from scaletrain_cli.data.block_cache import block_cache
from scaletrain_cli.data.images.compatibility import require_outputs
from scaletrain_cli.data.images.reading import IndexedImages, open_images
from scaletrain_cli.data.images.samples import ImageSample
from scaletrain_cli.engine.data.images.captions import caption_tokenizer
from scaletrain_cli.engine.data.images.reading import ImageBatchReader
from scaletrain_cli.engine.data.images.transforms import ImageTransform
from scaletrain_cli.engine.data.permutation import permute
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec import ClipSpec, ModelSpec, RunSpec
from scaletrain_cli.spec.vision_model import LlavaSpec, image_channels

_ORDER = 0x0696D616765  # key of the order of samples, the same for every run, so that all validate on the same


@dataclass(frozen=True)
class ImagesInfo:
    """The contents of dataset.json. ``fingerprint``: a hash of all samples; ``seal``: also of the other fields."""

    schema: str
    fingerprint: str
    seal: str
    is_verified: bool = True


@dataclass(frozen=True)
class ImageSamples:
    """``count`` samples of a split, from number ``first`` on of a fixed pseudo-random order of the whole split.

    Files are often in the order of their classes; here the first and the last samples are a random part of the split.
    """

    images: IndexedImages
    first: int
    count: int

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> ImageSample:
        """Return a sample, counted from 0. Raises CorruptDataError if it is not what was indexed."""
        if not 0 <= index < self.count:
            raise IndexError(f"sample {index} of {self.count}")
        return self.images.read(permute(self.first + index, size=len(self.images), key=_ORDER))

    def part(self, first: int, count: int) -> ImageSamples:
        """Return ``count`` samples from ``first`` on, in the same order."""
        return replace(self, first=self.first + first, count=count)


def open_images_of(spec: RunSpec, folder: Path) -> tuple[ImagesInfo, ImageSamples, ImageSamples]:
    """Return info, training split and validation split of an index.

    Raises UsageError if the model has too few outputs, and CorruptDataError for a damaged index.
    """
    splits = open_images(folder, block_cache(spec.data.cache))
    document = splits["train"].document
    require_outputs(spec, document, folder)
    info = ImagesInfo(document["schema"], document["fingerprint"], document["seal"])
    train, validation = (ImageSamples(splits[name], 0, len(splits[name])) for name in ("train", "validation"))
    return info, train, validation


def image_reader(spec: RunSpec, samples: ImageSamples, layout: Layout, mesh: Mesh) -> ImageBatchReader:
    """Return the reader of this rank's batches. Raises UsageError."""
    model, images = spec.model, spec.data.images
    assert not isinstance(model, ModelSpec | LlavaSpec)
    size = model.vision_config.image_size if isinstance(model, ClipSpec) else model.image_size
    channels = image_channels(model)
    mean, _ = images.normalization(model.family, channels)
    captions = None
    if isinstance(model, ClipSpec):
        path = spec.data.tokenizer.path
        assert path is not None, "checked by the spec"
        text = model.text_config
        sizes = text.max_position_embeddings, text.vocab_size
        captions = caption_tokenizer(expand_home(path), *sizes, text.eos_token_id)
    views = 2 if spec.training.objective == "contrastive" and captions is None else 1
    return ImageBatchReader(
        (samples,),
        layout,
        mesh,
        spec.training.seed,
        ImageTransform.of(images, size, mean),
        labeled=spec.training.objective != "contrastive",
        captions=captions,
        views=views,
        decoder=images.decoder,
    )
