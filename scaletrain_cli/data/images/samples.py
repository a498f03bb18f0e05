"""Samples of a source of images, and the settings that decide which parts a sample has."""

import importlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec.corpus_files import SKLEARN_DIGITS
from scaletrain_cli.spec.images import ImageFieldsSpec, ImagesSpec
from scaletrain_cli.spec.sources import SourceFieldsSpec

# class: one class number; classes: any number of them, as 0 and 1 for each class; numbers: real numbers.
Targets = Literal["none", "class", "classes", "numbers"]
# A longer file is no image that anybody trains on, and would fill the memory of a worker.
MOST_IMAGE_BYTES = 256 << 20


class ImageSample(NamedTuple):
    """One image as it is stored. ``label``: a class number, or a number for each class or target.

    ``place``: ``file:member`` or ``file, row 3`` for messages.
    """

    key: str
    image: bytes
    label: int | tuple[float, ...] | None
    caption: str | None
    place: str


class ImageSource(Protocol):
    """Samples of one split of a source, in a fixed order."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def read(self, index: int) -> ImageSample:
        """Return one sample. Raises CorruptDataError if it is not what was indexed."""
        ...


@dataclass(frozen=True)
class ImageSettings:
    """Settings of the reading of a source: all that its index depends on beside the files.

    ``image``, ``label``, ``caption``: as ImageFieldsSpec. ``class_names``: of a file; empty: those of the source.
    ``only_evaluation``: of several splits that for validation alone, else that for testing.
    """

    format: str = "auto"
    image: str = "auto"
    label: str = "auto"
    caption: str = "auto"
    targets: Targets = "class"
    captions: bool = False
    class_names: tuple[str, ...] = ()
    validation_share: float = 0.05
    skips_bad: bool = False
    only_evaluation: bool = False

    def key(self) -> str:
        """Return the settings as text, for the key of an index."""
        return json.dumps(asdict(self), sort_keys=True)


def image_settings(
    images: ImagesSpec,
    targets: Targets,
    *,
    captions: bool,
    validation_share: float,
    skips_bad: bool,
    format: str = "auto",
    fields: ImageFieldsSpec | SourceFieldsSpec | None = None,
    folder: Path = Path(),
) -> ImageSettings:
    """Return the settings of a source of the spec. ``folder``: the base of relative paths.

    ``fields``: those of the source, None for those of ``images``.

    Raises UsageError if the file with the names of the classes cannot be read.
    """
    named = fields or images.fields
    return ImageSettings(
        format,
        named.image,
        named.label,
        named.caption,
        targets,
        captions,
        () if images.classes is None or targets not in ("class", "classes") else class_names(images.classes, folder),
        validation_share,
        skips_bad,
    )


def labels_named(labels: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return what a source calls each class that a file names, in the order of the file; ``names`` if it is not clear.

    ``labels``: the classes of the source, in the order of their numbers; empty if they have no names. A label has the
    name that equals it up to case, ``_`` and ``-``. Of as many labels as names, all of them others, each has the name
    in the same place, such as goldfish for the folder n01443537.
    """
    own, given = (
        {" ".join(each.casefold().replace("_", " ").replace("-", " ").split()): each for each in these}
        for these in (labels, names)
    )
    if not set(labels) & set(names) and len(own) == len(labels) == len(names) == len(given):
        if own.keys() == given.keys():
            return tuple(own[each] for each in given)
        if own.keys().isdisjoint(given):
            return tuple(labels)
    return tuple(names)


def class_names(path: str, folder: Path = Path(), key: str = "data.images.classes") -> tuple[str, ...]:
    """Return the names of a file with one class per line. Raises UsageError for an unreadable one or double names.

    ``key``: of the path in the spec, for the message.
    """
    place = folder / expand_home(path)
    try:
        names = tuple(line.strip() for line in place.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        problem = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UsageError(
            Reason("images.classes-unreadable", {"key": key, "path": str(place), "error": problem})
        ) from error
    while names and not names[-1]:
        names = names[:-1]
    if not names or "" in names:
        line = names.index("") + 1 if names else 1
        raise UsageError(Reason("images.class-without-name", {"key": key, "path": str(place), "line": line}))
    if len(set(names)) != len(names):
        line, name = next(_repeated(names))
        raise UsageError(
            Reason("images.class-named-twice", {"key": key, "path": str(place), "name": name, "line": line})
        )
    return names


def _repeated(names: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    seen = set[str]()
    for line, name in enumerate(names, start=1):
        if name in seen:
            yield line, name
        seen.add(name)


class Found(NamedTuple):
    """A sample that a reader of a format has found; ``label`` and ``caption`` as they are stored, None: missing.

    ``split``: that its file or folder names, else empty. ``file``, ``offset``: where the image is; for a table the
    number of its group of rows, and of the row in it. ``suffix``: what follows ``key`` in the name of the image.
    """

    split: str
    file: int
    offset: int
    key: str
    suffix: str
    image: bytes
    label: Any
    caption: Any
    place: str


class Bad(NamedTuple):
    """A sample, or the rest of a file, that cannot be used."""

    place: str
    reason: Reason


class Unit(Protocol):
    """Some samples of a source that one process reads, in order."""

    def samples(self, settings: ImageSettings) -> Iterator[Found | Bad]:
        """Yield them. Raises UsageError for a file that cannot be used or changes meanwhile, and OSError."""
        ...


# The embedded source of images: handwritten digits of the library scikit-learn, 8 x 8 pixels in 17 shades of gray.


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
