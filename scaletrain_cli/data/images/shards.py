"""Images in tar shards as the library webdataset reads them: adjacent members with one key are one sample.

The key is the path up to the first dot of its last part, and the rest is the suffix in lower case. Members named like
__this__ are left out. An index keeps where each image begins, so that any sample is read without those before it.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO

from scaletrain_cli.data.images.samples import MOST_IMAGE_BYTES, Bad, Found, ImageSettings, Member, TargetError
from scaletrain_cli.data.sources.opening import stored
from scaletrain_cli.data.sources.records import SourceFile, require_unchanged
from scaletrain_cli.reasons import Reason

IMAGE, LABEL, CAPTION = ("jpg", "jpeg", "png", "webp", "ppm", "bmp", "gif", "tif", "tiff"), ("cls",), ("txt",)
_NAME = re.compile(r"((?:.*/|)[^./][^./]*)\.([^/]*)", re.DOTALL)
_BLOCK = 512
_MOST_BESIDE_BYTES = 16 << 20  # of a label, a caption or a JSON member
_MOST_SHOWN = 10


@dataclass(frozen=True)
class ShardUnit:
    """One tar file, the one with ``number`` among those of the source. ``split``: that its name says, or empty."""

    number: int
    file: SourceFile
    split: str

    def samples(self, settings: ImageSettings) -> Iterator[Found | Bad]:
        """Yield the samples in the order of the file; the rest of a damaged file is one bad sample."""
        require_unchanged(self.file)
        wanted = _Wanted.of(settings)
        with stored(self.file) as stream:
            for group in _groups(stream, self.file.path):
                if isinstance(group, Bad):
                    require_unchanged(self.file)
                    yield group
                else:
                    yield self._sample(group, wanted, stream)
        require_unchanged(self.file)

    def _sample(self, group: _Group, wanted: _Wanted, stream: IO[bytes]) -> Found | Bad:
        place = f"{self.file.path}:{group.key}"
        if group.twice:
            return Bad(f"{place}.{group.twice}", Reason("images.member-twice", {"suffix": group.twice}))
        if (suffix := wanted.image.suffix_in(group.members)) is None:
            params = {"suffixes": list(wanted.image.suffixes), "members": list(group.members)[:_MOST_SHOWN]}
            return Bad(place, Reason("images.no-image", params))
        name, offset, size = group.members[suffix]
        place = f"{self.file.path}:{name}"
        if size > MOST_IMAGE_BYTES:
            return Bad(place, Reason("images.file-too-large", {"most": MOST_IMAGE_BYTES}))
        beside = {suffix: member for suffix, member in group.members.items() if suffix in wanted.beside}
        for name_beside, _, size_beside in beside.values():
            if size_beside > _MOST_BESIDE_BYTES:
                where = f"{self.file.path}:{name_beside}"
                return Bad(where, Reason("images.file-too-large", {"most": _MOST_BESIDE_BYTES}))
        contents = {suffix: _read(stream, start, count) for suffix, (_, start, count) in beside.items()}
        image = _read(stream, offset, size)
        if len(image) < size or any(len(contents[suffix]) < member[2] for suffix, member in beside.items()):
            return Bad(place, Reason("images.shard-cut", {"byte": offset + len(image)}))
        try:
            label = wanted.label.value(contents)
            caption = wanted.caption.value(contents)
        except TargetError as error:
            return Bad(place, error.reason)
        rest = name.removeprefix(group.key)
        return Found(self.split, self.number, offset, group.key, rest, image, label, caption, place)


@dataclass(frozen=True)
class _Wanted:
    image: Member
    label: Member
    caption: Member

    @classmethod
    def of(cls, settings: ImageSettings) -> _Wanted:
        nothing = Member(())
        return cls(
            Member.of(settings.image, IMAGE),
            nothing if settings.targets == "none" else Member.of(settings.label, LABEL),
            Member.of(settings.caption, CAPTION) if settings.captions else nothing,
        )

    @property
    def beside(self) -> set[str]:
        return {*self.label.suffixes, *self.caption.suffixes}


@dataclass
class _Group:
    """Adjacent members of one key: (name, first byte, bytes) by suffix. ``twice``: a suffix that two of them have."""

    key: str
    members: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    twice: str = ""


def _groups(stream: IO[bytes], path: str) -> Iterator[_Group | Bad]:
    """Yield the groups of a tar file; the last item is a Bad if the file does not end as a tar file does."""
    group: _Group | None = None
    try:
        with tarfile.open(fileobj=stream, mode="r:") as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined] # which would hold all of a large shard
                parts = split_name(member.name) if member.isreg() else None
                if parts is None:
                    continue
                if member.issparse():
                    yield Bad(f"{path}:{member.name}", Reason("images.member-sparse"))
                    continue
                key, suffix = parts
                if group is None or group.key != key:
                    if group is not None:
                        yield group
                    group = _Group(key)
                if suffix in group.members:
                    group.twice = suffix
                group.members[suffix] = member.name, member.offset_data, member.size
            end = archive.offset
    except (tarfile.TarError, UnicodeDecodeError) as error:
        params = {"error": str(error) or type(error).__name__, "byte": stream.tell()}
        if group is None:
            yield Bad(path, Reason("images.not-a-tar", params))
            return
        yield group  # whose content is compared with its size when it is read
        yield Bad(path, Reason("images.shard-damaged", params))
        return
    if group is not None:
        yield group
    if _read(stream, end, _BLOCK) != bytes(_BLOCK):
        yield Bad(path, Reason("images.shard-without-end", {"byte": end}))


def split_name(name: str) -> tuple[str, str] | None:
    """Return (key, suffix in lower case) of the path of a member; None for one that is not read."""
    if "/" not in name and name.startswith("__") and name.endswith("__"):
        return None
    match = _NAME.fullmatch(name)
    return (match[1], match[2].lower()) if match else None


def _read(stream: IO[bytes], start: int, size: int) -> bytes:
    stream.seek(start, io.SEEK_SET)
    return stream.read(size)
