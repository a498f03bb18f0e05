"""One unit of an index of images: its samples, checked and written as records, whose format is SAMPLE."""

from __future__ import annotations

import hashlib
import json
import struct
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from scaletrain_cli.data.drafts import folder_written_whole
from scaletrain_cli.data.images.samples import (
    Bad,
    DigitsUnit,
    Found,
    ImageSettings,
    TargetError,
    Unit,
    caption_of,
    target_of,
)
from scaletrain_cli.data.pipeline.shards import SPLITS, split_of
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import create_file, make_folder, open_new

# ``file``: its number in files.json. ``offset``: of the first byte of the image; in a table the number of the group of
# rows times 2^32, and the number of the row in it. ``digest``: of the bytes of the image. ``label``: a class number, or
# -1. ``text``: where the text of the sample begins: the path, whose first ``key`` bytes are the key, then the caption.
SAMPLE = np.dtype(
    [
        ("file", "<u4"),
        ("length", "<u4"),
        ("offset", "<u8"),
        ("digest", "<u8"),
        ("label", "<i4"),
        ("text", "<u8"),
        ("key", "<u2"),
        ("suffix", "u1"),
        ("caption", "<u4"),
    ]
)
PACKED = struct.Struct("<IIQQiQHBI")  # as SAMPLE
EMBEDDED_IMAGES, UNIT_INFO = "images.bin", "unit.json"
TARGET_TYPES = {"numbers": "<f4", "classes": "<i4"}  # of targets.bin
MOST_PLACES = 20  # of bad samples, in dataset.json
_LONGEST_KEY, _LONGEST_SUFFIX = 2**16 - 1, 2**8 - 1


@dataclass
class _Written:
    """The samples of a unit and a split, in memory."""

    samples: bytearray = field(default_factory=bytearray)
    text: bytearray = field(default_factory=bytearray)
    targets: array[Any] = field(default_factory=lambda: array("d"))
    ends: array[Any] = field(default_factory=lambda: array("q"))
    image_bytes: int = 0
    pixels: int = 0
    short_sides: Counter[int] = field(default_factory=Counter)  # images by the bucket of their shorter side


def index_unit(folder: Path, settings: ImageSettings, labels: Sequence[str], given: tuple[int, Unit]) -> None:
    """Write the samples of a unit as a folder, whole or not at all. Raises UsageError for a bad one, and OSError.

    ``labels``: what the source calls its classes, in the order of their numbers.
    """
    number, unit = given
    place = folder / f"{number:06d}"
    if place.is_dir():
        return
    written = {split: _Written() for split in SPLITS}
    classes = {label: number for number, label in enumerate(labels)}
    bad: dict[str, list[dict[str, Any]]] = {}
    counts = Counter[str]()
    sizes = set[int]()
    images = bytearray()
    for sample in unit.samples(settings):
        problem = sample if isinstance(sample, Bad) else _add(sample, settings, classes, written, sizes)
        if problem is None:
            if isinstance(unit, DigitsUnit) and isinstance(sample, Found):
                images += sample.image
            continue
        if not settings.skips_bad:
            raise UsageError(Reason("images.bad-sample", {"where": problem.place, "problem": problem.reason}))
        code = problem.reason.code
        counts[code] += 1
        if len(bad.setdefault(code, [])) < MOST_PLACES:
            bad[code].append({"place": problem.place, "problem": problem.reason.to_document()})
    info = {
        "bad": [{"code": code, "samples": counts[code], "places": bad[code]} for code in sorted(bad)],
        "target_size": sizes.pop() if len(sizes) == 1 else 0,
        **{
            f"{split}_{what}": getattr(of_split, what)
            for split, of_split in written.items()
            for what in ("image_bytes", "pixels", "short_sides")
        },
    }
    make_folder(folder, parents=True)
    with folder_written_whole(place) as draft:
        for split, of_split in written.items():
            _write(draft / f"{split}.samples.bin", of_split.samples)
            _write(draft / f"{split}.text.bin", of_split.text)
            _write(draft / f"{split}.targets.bin", of_split.targets.tobytes())
            _write(draft / f"{split}.ends.bin", of_split.ends.tobytes())
        if images:
            _write(draft / EMBEDDED_IMAGES, images)
        create_file(draft / UNIT_INFO, json.dumps(info))


def _write(path: Path, content: bytes | bytearray) -> None:
    with open_new(path) as file:
        file.write(content)


def _add(
    sample: Found, settings: ImageSettings, classes: Mapping[str, int], written: Mapping[str, _Written], sizes: set[int]
) -> Bad | None:
    """Add a sample to its split; return why it cannot be used, or None. ``sizes``: of targets of numbers."""
    try:
        target = target_of(sample.label, settings, classes)
        caption = caption_of(sample.caption) if settings.captions else b""
        size = _size(sample, settings)
    except TargetError as error:
        return Bad(sample.place, error.reason)
    if isinstance(size, Reason):
        return Bad(sample.place, size)
    if settings.targets == "numbers":
        if sizes and len(target) not in sizes:
            return Bad(sample.place, Reason("images.other-size", {"given": len(target), "expected": min(sizes)}))
        sizes.add(len(target))
    key, suffix = sample.key.encode(), sample.suffix.encode()
    if not 0 < len(key) <= _LONGEST_KEY or len(suffix) > _LONGEST_SUFFIX:
        return Bad(sample.place, Reason("images.name-too-long", {"bytes": len(key) + len(suffix)}))
    into = written[sample.split or split_of(key, settings.validation_share)]
    into.samples += PACKED.pack(
        sample.file,
        len(sample.image),
        sample.offset,
        digest_of(sample.image),
        int(target[0]) if settings.targets == "class" else -1,
        len(into.text),
        len(key),
        len(suffix),
        len(caption),
    )
    into.text += key + suffix + caption
    if settings.targets in TARGET_TYPES:
        into.targets.extend(target)
        into.ends.append(len(into.targets))
    into.image_bytes += len(sample.image)
    into.pixels += size[0] * size[1]
    into.short_sides[bucket_of(min(size))] += 1
    return None


def bucket_of(side: int) -> int:
    """Return the least side of the bucket of a length in pixels: exact below 64, then 32 buckets for each octave."""
    shift = max(0, side.bit_length() - 6)
    return side >> shift << shift


def short_sides(documents: Iterable[Mapping[str, Any]], splits: Sequence[str]) -> dict[str, int]:
    """Return the images in some splits of units or indexes by the bucket of their shorter side, in ascending order."""
    sides = Counter[int]()
    for document in documents:
        for split in splits:
            sides.update({int(side): count for side, count in document[f"{split}_short_sides"].items()})
    return {str(side): sides[side] for side in sorted(sides)}


def _size(sample: Found, settings: ImageSettings) -> tuple[int, int] | Reason:
    """Return width and height of an image, or why it cannot be decoded. It is decoded where bad ones are left out."""
    from scaletrain_cli.data.images.decode import BadImageError, decode, size_of  # which needs Pillow

    try:
        if settings.skips_bad:
            decode(sample.image, sample.place, 3)
        return size_of(sample.image, sample.place)
    except BadImageError as error:
        return Reason("images.not-decodable", {"error": str(error.evidence["problem"])})


def digest_of(image: bytes) -> int:
    """Return the 64 bits by which a change of an image is found."""
    return int.from_bytes(hashlib.blake2b(image, digest_size=8).digest(), "little")
