"""Samples of images as a run reads them, for ``data show``: their keys, sizes and labels, and a sheet of pictures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from scaletrain_cli.data.images.decode import decode, size_of
from scaletrain_cli.data.images.samples import ImageSample
from scaletrain_cli.engine.data.images.batches import ImageMicroBatch
from scaletrain_cli.engine.data.images.mixing import finish
from scaletrain_cli.engine.data.images.opening import ImageSamples, JoinedImages, image_reader
from scaletrain_cli.engine.data.images.reading import ImageBatchReader
from scaletrain_cli.engine.data.images.transforms import SampleKey
from scaletrain_cli.engine.data.sample_order import SampleOrder, source_seed
from scaletrain_cli.engine.data.splits import RunData
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.vision_model import image_channels

_PASSES = 4  # of the training views on a sheet
_LEAST_SIDE, _MARGIN, _LINE = 112, 6, 16  # in pixels
_MOST_COLUMNS, _LONGEST_TEXT = 8, 90

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Picture:
    """A row of a sheet: some pictures, [height, width, channels] each, with a text above them."""

    text: str
    images: tuple[Pixels, ...]


class ShownImages:
    """Shows the samples of a run. ``order``: that of several sources in training."""

    def __init__(self, spec: RunSpec, layout: Layout, data: RunData, order: SampleOrder | None = None) -> None:
        self._spec, self._layout, self._data, self._order = spec, layout, data, order
        self._names = list(data.train)

    def of_split(self, split: str, first: int, count: int) -> Iterator[tuple[dict[str, Any], Picture]]:
        """Yield samples of a split from number ``first`` on, counted from 1 over all sources, each with its pictures.

        The first picture is the image as in evaluation; in the training split others follow as the model gets them in
        the first passes over the source. Raises UsageError if there is no such sample.
        """
        splits = self._data.train if split == "train" else self._data.validation
        samples = JoinedImages(tuple(of_source for of_source in splits.values() if isinstance(of_source, ImageSamples)))
        if first > len(samples):
            raise UsageError(Reason("data.row-out-of-range", {"rows": len(samples), "row": first}))
        reader = image_reader(self._spec, samples, self._layout, Mesh())
        for number in range(first - 1, min(first - 1 + count, len(samples))):
            source, own = samples.located(number)
            sample = samples.sources[source].read(own)
            about = {"number": number + 1, **self._described(reader, source, sample)}
            image = decode(sample.image, sample.place, reader.transform.channels)
            pictures = [reader.transform.evaluation(image)]
            if split == "train":
                keys = (SampleKey(source_seed(self._spec.training.seed, source), turn, own) for turn in range(_PASSES))
                pictures += [self._erased(reader, reader.transform.training(image, key), key) for key in keys]
            yield about, Picture(_text(about), tuple(pictures))

    def of_step(
        self, number: int, places: Sequence[tuple[int, int, int]], mesh_of: Mapping[int, Mesh]
    ) -> Iterator[tuple[dict[str, Any], Picture]]:
        """Yield samples of the batch with this number as the model gets them: augmented, erased and mixed.

        ``places``: micro-batch, replica and row of each, from 0 on. ``mesh_of``: the mesh of each replica.
        """
        samples: Any = self._data.samples
        batches: dict[int, list[ImageMicroBatch]] = {}
        for micro, replica, row in places:
            reader = image_reader(self._spec, samples, self._layout, mesh_of[replica], self._order)
            if replica not in batches:
                batches = {replica: reader.batch(number).micro_batches()}
            batch = batches[replica][micro]
            assert batch.numbers is not None
            source, _ = samples.located(int(batch.numbers[row]))
            sample = samples.read(int(batch.numbers[row]))
            place = {"sample": int(batch.samples[row]), "micro_batch": micro + 1, "replica": replica}
            about = {**place, "number": int(batch.numbers[row]) + 1, **self._described(reader, source, sample)}
            if batch.mix is not None and (share := float(batch.mix[row, 0])) < 1:
                partner = self._labeled(reader, samples.read(int(batch.numbers[row ^ 1])))
                kind = "cutmix" if float(batch.mix[row, 3]) > 0 else "mixup"
                about["mix"] = {"kind": kind, "share": share, "with": partner["class"]}
            yield about, Picture(_text(about), self._seen(batch, row))

    def _seen(self, batch: ImageMicroBatch, row: int) -> tuple[Pixels, ...]:
        """Return the views of a sample in a micro-batch as pixels, without the normalization of the model."""
        assert not hasattr(self._spec.model, "text_config") or batch.tokens is not None
        channels = image_channels(self._spec.model)  # type: ignore[arg-type]
        mean, std = self._spec.data.images.normalization(self._spec.model.family, channels)
        classes = getattr(self._spec.model, "num_labels", None)
        images = finish(batch, mean=mean, std=std, classes=classes).images.permute(0, 2, 3, 1).numpy()
        size = len(batch.samples)
        views = images[row::size] * np.array(std, np.float32) + np.array(mean, np.float32)
        return tuple(np.clip(np.rint(view * 255), 0, 255).astype(np.uint8) for view in views)

    def _erased(self, reader: ImageBatchReader, image: Pixels, key: SampleKey) -> Pixels:
        if reader.transform.augment.random_erasing is None:
            return image
        top, left, height, width = (int(number) for number in reader.transform.erased(key))
        mean, _ = self._spec.data.images.normalization(self._spec.model.family, reader.transform.channels)
        pixels = np.array(image)
        pixels[top : top + height, left : left + width] = np.rint(np.array(mean) * 255).astype(np.uint8)
        return pixels

    def _described(self, reader: ImageBatchReader, source: int, sample: ImageSample) -> dict[str, Any]:
        width, height = size_of(sample.image, sample.place)
        return {
            "source": self._names[source],
            "key": sample.key,
            "place": sample.place,
            "size": [width, height],
            "bytes": len(sample.image),
            **self._labeled(reader, sample),
        }

    def _labeled(self, reader: ImageBatchReader, sample: ImageSample) -> dict[str, Any]:
        """Return label, class names, caption, and the tokens of the caption."""
        samples: Any = self._data.samples
        label, names = sample.label, samples.class_names
        classes: str | list[str] | None = None
        if isinstance(label, int):
            classes = names[label] if names else str(label)
        elif isinstance(label, tuple) and self._spec.training.objective == "classification":
            numbers = [number for number, value in enumerate(label) if value]
            classes = [names[number] if names else str(number) for number in numbers]
        tokens = cut = None
        if reader.captions is not None and sample.caption is not None:
            tokens = reader.captions.length(sample.caption)
            cut = tokens > reader.captions.positions
        return {
            "label": list(label) if isinstance(label, tuple) else label,
            "class": classes,
            "caption": sample.caption,
            "tokens": tokens,
            "cut": cut,
        }


def label_text(about: Mapping[str, Any]) -> str:
    if about["caption"] is not None:
        return str(about["caption"])
    shown = about["label"] if about["class"] is None else about["class"]
    words = "" if shown is None else ", ".join(map(str, shown)) if isinstance(shown, list) else str(shown)
    if mix := about.get("mix"):
        other = mix["with"] if isinstance(mix["with"], str) else ", ".join(mix["with"] or ())
        words += f" {mix['share']:.2f} + {other} {1 - mix['share']:.2f} ({mix['kind']})"
    return words


def _text(about: Mapping[str, Any]) -> str:
    name = about["key"]
    return f"{about['number']}  {label_text(about)}  [{about['source']}: {name}]"


def write_sheet(pictures: Sequence[Picture], path: Path) -> None:
    """Write the pictures as a PNG file: those of a sample side by side below its text. Raises OSError."""
    side = max(view.shape[0] for picture in pictures for view in picture.images)
    scale = max(1, -(-_LEAST_SIDE // side))
    cell = side * scale + _MARGIN
    widest = max(len(picture.images) for picture in pictures)
    across = max(1, _MOST_COLUMNS // widest)  # samples in a line of the sheet
    if widest == 1:
        cell = max(cell, 160)
    lines = -(-len(pictures) // across)
    height = side * scale + _MARGIN + _LINE
    sheet = Image.new("RGB", (across * (widest * cell + _MARGIN) + _MARGIN, lines * height + _MARGIN), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    for number, picture in enumerate(pictures):
        left = _MARGIN + number % across * (widest * cell + _MARGIN)
        top = _MARGIN + number // across * height
        _write(draw, (left, top), picture.text, widest * cell - _MARGIN, font)
        for column, pixels in enumerate(picture.images):
            image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).convert("RGB")
            image = image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
            sheet.paste(image, (left + column * cell, top + _LINE))
    sheet.save(path, "PNG")


def _write(draw: Any, place: tuple[int, int], text: str, width: int, font: Any) -> None:
    """Write one line, cut to a width in pixels; characters that the font lacks are question marks."""
    text = " ".join(text.split())[:_LONGEST_TEXT]
    try:
        font.getlength(text)
    except UnicodeEncodeError:  # the font of a Pillow without FreeType
        text = text.encode("latin-1", "replace").decode("latin-1")
    while text and font.getlength(text) > width:
        text = text[:-1]
    draw.text(place, text, fill="black", font=font)
