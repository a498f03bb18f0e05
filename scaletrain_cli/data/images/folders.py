"""Images as files in folders: the first folder of a path is the class, and files beside an image may describe it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.data.images.samples import MOST_IMAGE_BYTES, Bad, Found, ImageSettings
from scaletrain_cli.data.images.targets import Member, TargetError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec.image_files import split_of_folder

# Beside a.jpg: a.cls, a.txt and a.json, as the members of a tar shard.
LABEL, CAPTION = ("cls",), ("txt",)


@dataclass(frozen=True)
class FolderUnit:
    """Files below ``root`` by their relative paths. ``has_splits``: the first folder is a split, the next a class.

    ``labels_beside``: labels are in files beside the images; else the folder of an image is its class.
    """

    root: str
    names: tuple[str, ...]
    has_splits: bool
    labels_beside: bool = False

    def samples(self, settings: ImageSettings) -> Iterator[Found | Bad]:
        """Yield the image of each file."""
        for name in self.names:
            path = os.path.join(self.root, name)
            try:
                name.encode()
            except UnicodeEncodeError:
                yield Bad(ascii(path), Reason("images.name-not-utf-8"))
                continue
            try:
                yield self._sample(name, path, settings)
            except TargetError as error:
                yield Bad(path, error.reason)
            except OSError as error:
                yield Bad(path, Reason("images.file-unreadable", {"error": error.strerror or str(error)}))

    def _sample(self, name: str, path: str, settings: ImageSettings) -> Found | Bad:
        with open(path, "rb") as file:
            image = file.read(MOST_IMAGE_BYTES + 1)
        if len(image) > MOST_IMAGE_BYTES:
            return Bad(path, Reason("images.file-too-large", {"most": MOST_IMAGE_BYTES}))
        label: object = class_of_path(name, self.has_splits)
        if self.labels_beside:
            label = _beside(path, Member.of(settings.label, LABEL))
        caption = _beside(path, Member.of(settings.caption, CAPTION)) if settings.captions else None
        split = split_of_folder(name) if self.has_splits else ""
        return Found(split, 0, 0, name, "", image, label, caption, path)


def class_of_path(name: str, has_splits: bool) -> str | None:
    """Return the folder that is the class of an image; None if it lies in no folder."""
    folders = name.split("/")[:-1]
    return next(iter(folders[1:] if has_splits else folders), None)


def reads_beside(settings: ImageSettings) -> tuple[str, ...]:
    """Return the suffixes of files beside the images that are read."""
    found: list[str] = []
    found += label_suffixes(settings)
    if settings.captions:
        found += Member.of(settings.caption, CAPTION).suffixes
    return tuple(dict.fromkeys(found))


def label_suffixes(settings: ImageSettings) -> tuple[str, ...]:
    """Return the suffixes of the files beside images that may have their labels; empty if the folder is the class."""
    if settings.targets == "none" or (settings.label == "auto" and settings.targets == "class"):
        return ()
    return Member.of(settings.label, LABEL).suffixes


def _beside(path: str, member: Member) -> object:
    contents: dict[str, bytes] = {}
    for suffix in member.suffixes:
        beside = Path(path).with_suffix(f".{suffix}")
        if beside.is_file():
            contents[suffix] = beside.read_bytes()
            break
    return member.value(contents)
