"""Open the indexes of a run's images, and build the readers of its batches."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from scaletrain_cli.data.block_cache import block_cache
from scaletrain_cli.data.images.compatibility import require_outputs, require_same_classes, zero_shot_classes
from scaletrain_cli.data.images.reading import IndexedImages, open_images
from scaletrain_cli.data.images.samples import ImageSample
from scaletrain_cli.engine.data.dataset import Joined
from scaletrain_cli.engine.data.images.captions import CaptionTokenizer, caption_tokenizer
from scaletrain_cli.engine.data.images.reading import ImageBatchReader
from scaletrain_cli.engine.data.images.transforms import ImageTransform
from scaletrain_cli.engine.data.sample_order import SampleOrder, permute
from scaletrain_cli.engine.evaluation.zero_shot import ZeroShot
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

    @property
    def sources(self) -> "tuple[ImageSamples, ...]":
        return (self,)

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of the classes in the order of their numbers; None if they have none."""
        return self.images.class_names

    @property
    def several_labels(self) -> bool:
        """True if an image may have none or several of the classes."""
        return self.images.num_classes is not None and not self.images.has_one_class

    def label(self, index: int) -> int | tuple[float, ...] | None:
        """Return the label of a sample, counted from 0."""
        return self.images.label(self.place(index))

    def place(self, index: int) -> int:
        """Return the number of a sample in the order of the source, both counted from 0."""
        if not 0 <= index < self.count:
            raise IndexError(f"sample {index} of {self.count}")
        return permute(self.first + index, size=len(self.images), key=_ORDER)

    def read(self, index: int) -> ImageSample:
        """Return a sample, counted from 0. Raises CorruptDataError if it is not what was indexed."""
        return self.images.read(self.place(index))

    def part(self, first: int, count: int) -> "ImageSamples":
        return replace(self, first=self.first + first, count=count)


@dataclass(frozen=True)
class JoinedImages(Joined):
    """The samples of several sources of images, in the order of Joined.

    Their classes have the same numbers, see ``require_same_classes``.
    """

    sources: tuple[ImageSamples, ...]

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of the classes, of the first source that has some."""
        return next((names for source in self.sources if (names := source.class_names)), None)

    @property
    def several_labels(self) -> bool:
        return any(source.several_labels for source in self.sources)

    def label(self, index: int) -> int | tuple[float, ...] | None:
        """Return the label of a sample, counted from 0 over all sources."""
        source, own = self.located(index)
        return self.sources[source].label(own)

    def read(self, index: int) -> ImageSample:
        """Return a sample, counted from 0 over all sources."""
        source, own = self.located(index)
        return self.sources[source].read(own)


def open_sources(
    spec: RunSpec, folders: Mapping[str, Path]
) -> dict[str, tuple[ImagesInfo, ImageSamples, ImageSamples]]:
    """Return info, training split and validation split of each source, given its index by the name of the source.

    Raises UsageError also if the classes of two sources differ.
    """
    opened = {name: open_images_of(spec, folder) for name, folder in folders.items()}
    require_same_classes({name: train.class_names for name, (_, train, _) in opened.items()})
    return opened


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


def image_reader(
    spec: RunSpec, samples: ImageSamples | JoinedImages, layout: Layout, mesh: Mesh, order: SampleOrder | None = None
) -> ImageBatchReader:
    """Return the reader of this rank's batches. ``order``: that of several sources in training. Raises UsageError."""
    model, images = spec.model, spec.data.images
    assert not isinstance(model, ModelSpec | LlavaSpec)
    size = model.vision_config.image_size if isinstance(model, ClipSpec) else model.image_size
    mean, _ = images.normalization(model.family, image_channels(model))
    captions = run_caption_tokenizer(spec) if isinstance(model, ClipSpec) else None
    return ImageBatchReader(
        samples.sources,
        layout,
        mesh,
        spec.training.seed,
        ImageTransform.of(images, size, mean),
        labeled=spec.training.objective != "contrastive",
        captions=captions,
        views=2 if spec.training.objective == "contrastive" and captions is None else 1,
        order=order,
        decoder=images.decoder,
    )


def run_caption_tokenizer(spec: RunSpec) -> CaptionTokenizer:
    """Return the tokenizer of the captions of a run of CLIP. Raises UsageError, see ``caption_tokenizer``."""
    tokenizer = spec.data.tokenizer
    assert isinstance(spec.model, ClipSpec)
    assert tokenizer.path is not None, "checked by the spec"
    text = spec.model.text_config
    sizes = text.max_position_embeddings, text.vocab_size, text.eos_token_id
    return caption_tokenizer(expand_home(tokenizer.path), *sizes, tokenizer.tokenizer_class)


def zero_shot_of(spec: RunSpec, folder: Path, layout: Layout, mesh: Mesh, device: torch.device) -> ZeroShot:
    """Return the measure of ``evaluation.zero_shot`` over the images of an index: those for validation, else all.

    Raises UsageError, and CorruptDataError for a damaged index.
    """
    assert spec.evaluation.zero_shot is not None
    splits = open_images(folder, block_cache(spec.data.cache))
    split = splits["validation"] if len(splits["validation"]) else splits["train"]
    names = zero_shot_classes(spec, split.document, folder)
    reader = replace(
        image_reader(spec, ImageSamples(split, 0, len(split)), layout, mesh), labeled=True, captions=None, views=1
    )
    return ZeroShot(reader, names, spec.evaluation.zero_shot.templates, run_caption_tokenizer(spec), mesh.data, device)
