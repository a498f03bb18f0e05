"""The files that a source of images names: their format, their split by name, and braces in paths. Reads no file.

Standard library only, because verbs that only read a spec import it.
"""

import re
from collections.abc import Collection, Iterator
from pathlib import PurePosixPath

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec.splits import SPLITS, TRAIN, VALIDATION, named_splits, the_one

# Digits of 8 x 8 pixels in 17 shades of gray, which the library scikit-learn contains.
SKLEARN_DIGITS = "sklearn-digits"
FOLDER, SHARDS, TABLES = "image_folder", "webdataset", "parquet"
IMAGE_FORMATS = (FOLDER, SHARDS, TABLES)
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "avif", "jp2")
SHARD_SUFFIX, TABLE_SUFFIX = "tar", "parquet"
_BRACES = re.compile(r"\{([^{}]*)\}")
_NUMBERS = re.compile(r"(\d{1,18})\.\.(\d{1,18})")
_MOST_NAMES = 1_000_000


def format_of_file(name: str) -> str:
    """Return the format of a source that a file of this name belongs to; empty for other files."""
    suffix = PurePosixPath(name).suffix.lower().removeprefix(".")
    if suffix == SHARD_SUFFIX:
        return SHARDS
    if suffix == TABLE_SUFFIX:
        return TABLES
    return FOLDER if suffix in IMAGE_SUFFIXES else ""


def is_hidden(name: str) -> bool:
    """Return True if a part of a relative path begins with a dot, or belongs to an archive of macOS."""
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def expanded_braces(path: str) -> list[str]:
    """Return the paths of ``a-{000..099}.tar`` and ``{a,b}.tar``, in order. Raises UsageError for too many."""
    found: list[str] = []
    for name in _expanded(path):
        if len(found) == _MOST_NAMES:
            raise UsageError(Reason("images.too-many-names", {"path": path, "most": _MOST_NAMES}))
        found.append(name)
    return found


def _expanded(path: str) -> Iterator[str]:
    for match in _BRACES.finditer(path):
        if (values := _values(match[1])) is not None:
            for value in values:
                yield from _expanded(f"{path[: match.start()]}{value}{path[match.end() :]}")
            return
    yield path


def _values(text: str) -> Iterator[str] | None:
    """Return the values of the text between braces; None if it is a part of a name."""
    if (numbers := _NUMBERS.fullmatch(text)) is not None:
        first, last = int(numbers[1]), int(numbers[2])
        padded = any(each[0] == "0" and len(each) > 1 for each in numbers.groups())
        width = max(map(len, numbers.groups())) if padded else 0
        order = range(first, last + 1) if first <= last else range(first, last - 1, -1)
        return (f"{number:0{width}d}" for number in order)
    return iter(text.split(",")) if "," in text else None


def split_of_folder(name: str) -> str:
    """Return the split that the first folder of a relative path names: train, validation or test; else empty."""
    first, separator, _ = name.partition("/")
    return the_one(named_splits(first)) if separator else ""


def splits_of_file(name: str) -> tuple[str, ...]:
    """Return the splits that a path below a source names: those of its last part that names one.

    A word counts where no letter is beside it: train in ``cc3m-train-0001.tar``, ``train2017/a.tar`` and
    ``a_train.parquet``, not in ``trainable.tar``. A name with words of two splits has both.
    """
    found = (named_splits(part) for part in reversed(name.split("/")))
    return next((splits for splits in found if splits), ())


def splits_by_folder(first_folders: Collection[str]) -> bool:
    """Return True if the first folders of images are splits, one of them for training, and none is a class.

    Folders such as ``bullet_train`` are classes unless another one names a validation split.
    """
    named = {name: the_one(named_splits(name)) for name in first_folders}
    whole = all(name.lower() in SPLITS for name in first_folders)
    return TRAIN in named.values() and all(named.values()) and (whole or VALIDATION in named.values())
