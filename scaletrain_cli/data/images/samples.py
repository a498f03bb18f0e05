"""Samples of a source of images, their labels and captions, and the settings that decide which parts a sample has."""

import importlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec.corpus_files import SKLEARN_DIGITS

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


def labels_named(labels: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return what a source calls each class that a file names, in the order of the file; ``names`` if it is not clear.

    ``labels``: the classes of the source, in the order of their numbers; empty if they have no names. A label has the
    name that equals it up to case, ``_`` and ``-``. Of as many labels as names, all of them others, each has the name
    in the same place, such as goldfish for the folder n01443537.
    """
    own, given = (
        {" ".join(label.casefold().replace("_", " ").replace("-", " ").split()): label for label in these}
        for these in (labels, names)
    )
    if not set(labels) & set(names) and len(own) == len(labels) == len(names) == len(given):
        if own.keys() == given.keys():
            return tuple(own[label] for label in given)
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
            digits = importlib.import_module("sklearn.datasets").load_digits()
        except ImportError as error:
            raise UsageError(Reason("images.no-scikit-learn", {"source": SKLEARN_DIGITS})) from error
        offset = 0
        for number, (pixels, digit) in enumerate(zip(digits.images, digits.target.tolist(), strict=True)):
            rows = [[round(value * 255 / _SHADES) for value in row] for row in pixels.tolist()]
            image = b"P5 %d %d 255\n" % (len(rows[0]), len(rows)) + bytes(value for row in rows for value in row)
            place = f"{SKLEARN_DIGITS}, image {number + 1}"
            yield Found("", 0, offset, f"digit-{number:04d}", "", image, digit, f"a handwritten {_WORDS[digit]}", place)
            offset += len(image)


_LARGEST_CLASS = 2**31 - 2
_NOT_LABELED = -1  # as the datasets library marks examples of a test split
MOST_CAPTION_BYTES = 1 << 20
_LONGEST_SHOWN = 40
_NUMBER = re.compile(r"-?\d{1,18}")
_IN_JSON = "json:"


class TargetError(Exception):
    """A label or a caption cannot be used."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


def target_of(value: Any, settings: ImageSettings, classes: Mapping[str, int]) -> list[float]:
    """Return the class number, the class numbers in order, or the numbers of a label; empty without targets.

    ``value``: as stored: a number, a list, or the bytes of a member. ``classes``: numbers by name; empty if the source
    has no names. Raises TargetError.
    """
    if settings.targets == "none":
        return []
    if isinstance(value, bytes):
        value = _parsed(value, settings)
    if value is None:
        raise TargetError(Reason("images.no-label"))
    if settings.targets == "class":
        return [_class_of(value, classes)]
    if settings.targets == "classes":
        if not isinstance(value, list):
            value = [value]
        return sorted({_class_of(label, classes) for label in value})
    elements = value if isinstance(value, list) else [value]
    numbers = [element for element in elements if isinstance(element, int | float) and not isinstance(element, bool)]
    if len(numbers) != len(elements) or not elements or not all(map(math.isfinite, numbers)):
        raise TargetError(Reason("images.label-not-numbers", {"given": _shown(value)}))
    return list(map(float, numbers))


def _parsed(content: bytes, settings: ImageSettings) -> Any:
    """Return the value of a member: a number, a list, or the name of a class."""
    if not (text := _decoded(content).strip()):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if settings.targets == "class" and not isinstance(value, int) else value


def _class_of(value: Any, classes: Mapping[str, int]) -> int:
    if isinstance(value, str):
        if value in classes:
            return classes[value]
        if not _NUMBER.fullmatch(value.strip()):
            if classes:
                raise TargetError(Reason("images.class-unknown", {"given": _shown(value), "classes": len(classes)}))
            raise TargetError(Reason("images.class-without-names", {"given": _shown(value)}))
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TargetError(Reason("images.label-not-a-class", {"given": _shown(value)}))
    if value == _NOT_LABELED:
        raise TargetError(Reason("images.no-label"))
    if not 0 <= value <= (len(classes) - 1 if classes else _LARGEST_CLASS):
        raise TargetError(Reason("images.class-beyond", {"given": value, "classes": len(classes)}))
    return value


def caption_of(value: Any) -> bytes:
    """Return a caption in UTF-8, without white space around it. Raises TargetError."""
    if value is None:
        raise TargetError(Reason("images.no-caption"))
    if isinstance(value, list) and value:  # several captions of one image: the first one
        value = value[0]
    if isinstance(value, bytes):
        value = _decoded(value)
    if not isinstance(value, str):
        raise TargetError(Reason("images.caption-not-text", {"given": _shown(value)}))
    if not (caption := value.strip().encode("utf-8", "replace")):
        raise TargetError(Reason("images.no-caption"))
    if len(caption) > MOST_CAPTION_BYTES:
        raise TargetError(Reason("images.caption-too-long", {"bytes": len(caption), "most": MOST_CAPTION_BYTES}))
    return caption


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TargetError(Reason("images.not-utf-8", {"error": str(error)})) from error


def json_value(content: bytes | None, key: str) -> Any:
    """Return the value of a key of a JSON object; None if it has no such key, or is missing. Raises TargetError."""
    if content is None:
        return None
    try:
        document = json.loads(content)
    except ValueError as error:
        raise TargetError(Reason("images.not-json", {"error": str(error)})) from error
    if not isinstance(document, dict):
        raise TargetError(Reason("images.not-json", {"error": "it must be an object"}))
    return document.get(key)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


@dataclass(frozen=True)
class Member:
    """The part of a sample that a field of the spec names: the first of some suffixes, or a key of a JSON member."""

    suffixes: tuple[str, ...]
    json_key: str | None = None

    @classmethod
    def of(cls, field: str, usual: tuple[str, ...]) -> "Member":
        """Return the member of a field such as auto, cls, jpg;png or json:caption; auto: ``usual``."""
        if field == "auto":
            return cls(usual)
        if field.startswith(_IN_JSON):
            return cls(("json",), field.removeprefix(_IN_JSON))
        return cls(tuple(part.strip().lower().removeprefix(".") for part in field.split(";")))

    def suffix_in(self, members: Mapping[str, Any]) -> str | None:
        """Return the suffix of the member among those of a sample; None if it has none."""
        return next((suffix for suffix in self.suffixes if suffix in members), None)

    def value(self, members: Mapping[str, bytes]) -> Any:
        """Return the content of the member, or the value of its JSON key; None if it is missing. Raises TargetError."""
        if (suffix := self.suffix_in(members)) is None:
            return None
        return members[suffix] if self.json_key is None else json_value(members[suffix], self.json_key)
