"""The files of a source of images, in a fixed order, and the units of work that they are read in."""

import glob
import hashlib
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.data.images.samples import (
    CLASS_NAMES,
    MOST_IMAGE_BYTES,
    Bad,
    DigitsUnit,
    Found,
    ImageSettings,
    Member,
    TargetError,
    Unit,
    labels_named,
)
from scaletrain_cli.data.images.shards import ShardUnit
from scaletrain_cli.data.images.tables import names_of_classes, table_units
from scaletrain_cli.data.sources.places import list_files, naming_key
from scaletrain_cli.data.sources.records import SourceFile, local_file
from scaletrain_cli.data.sources.stores import is_remote
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec.corpus_files import (
    FOLDER,
    IMAGE_FORMATS,
    SHARDS,
    SKLEARN_DIGITS,
    SPLITS,
    TABLES,
    TEST,
    TRAIN,
    VALIDATION,
    expanded_braces,
    format_of_file,
    is_hidden,
    split_of_folder,
    splits_by_folder,
    splits_of_file,
)

# A process that is killed loses no more than a unit.
_FILES_OF_A_UNIT = 2048
_REQUESTS = 16  # to a store at the same time
_COMPRESSED_TARS = (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")


@dataclass(frozen=True)
class Listing:
    """A source as it is now. ``state``: a hash that changes with every change of a file.

    ``location``: the source, with an absolute path. ``root``: the folder of loose images, else empty. ``shards``: the
    tar or parquet files. ``names``: images by their paths below ``root``. ``left_out``: files that are not read, by
    suffix; and those of splits that are not read.
    """

    format: str
    location: str
    state: str
    root: str = ""
    names: tuple[str, ...] = ()
    shards: tuple[tuple[SourceFile, str], ...] = ()
    has_splits: bool = False
    labels_beside: bool = False  # in files beside the images
    left_out: Mapping[str, int] | None = None
    bytes: int = 0  # of the files

    def units(self) -> tuple[Unit, ...]:
        """Return the units of work. They depend on the files alone. Raises UsageError and OSError."""
        if self.format == SKLEARN_DIGITS:
            return (DigitsUnit(),)
        if self.format == FOLDER:
            starts = range(0, len(self.names), _FILES_OF_A_UNIT)
            parts = (self.names[start : start + _FILES_OF_A_UNIT] for start in starts)
            return tuple(FolderUnit(self.root, part, self.has_splits, self.labels_beside) for part in parts)
        if self.format == SHARDS:
            return tuple(ShardUnit(number, file, split) for number, (file, split) in enumerate(self.shards))
        return tuple(
            unit for number, (file, split) in enumerate(self.shards) for unit in table_units(number, file, split)
        )

    def class_names(self, settings: ImageSettings) -> tuple[str, ...]:
        """Return the names of the classes in the order of their numbers; empty if the source has none.

        Raises UsageError and OSError.
        """
        return settings.class_names or self._own_names(settings)

    def class_labels(self, settings: ImageSettings) -> tuple[str, ...]:
        """Return what the labels of the source call its classes, in the order of their numbers; empty without names.

        They may differ from the names of a file, see ``labels_named``.
        """
        own = self._own_names(settings)
        return labels_named(own, settings.class_names) if settings.class_names else own

    def _own_names(self, settings: ImageSettings) -> tuple[str, ...]:
        if settings.targets not in ("class", "classes"):
            return ()
        if self.format == SKLEARN_DIGITS:
            return CLASS_NAMES
        if self.format == TABLES:
            return names_of_classes(self.shards[0][0], settings)
        if self.format == FOLDER and not self.labels_beside:
            classes = {class_of_path(name, self.has_splits) for name in self.names}
            return tuple(sorted(name for name in classes if name is not None))
        return ()


def list_source(
    path: str, settings: ImageSettings, folder: Path = Path(), key: str = "data.source", seconds: float | None = None
) -> Listing:
    """Return the files of a source; relative paths are below ``folder``. ``key``: of its path in the spec.

    ``seconds``: after which a request to a remote store is not repeated. Raises UsageError if there are none, and for a
    remote source UnavailableError.
    """
    if path == SKLEARN_DIGITS:
        return Listing(SKLEARN_DIGITS, path, "embedded")
    if is_remote(path):
        return _remote(path, settings, key, seconds)
    try:
        return _local(path, settings, folder, key)
    except OSError as error:
        raise _unusable(key, path, Reason("images.file-unreadable", {"error": str(error)})) from error


# ---- this machine ----------------------------------------------------------------------------------------------------


def _local(path: str, settings: ImageSettings, folder: Path, key: str) -> Listing:
    place = os.path.abspath(folder / expand_home(path))
    root, paths = _entries(place, path, key)
    by_format, others = _by_format(paths)
    chosen = _format(by_format, others, settings, key, path)
    names = by_format[chosen]
    left_out = Counter(Path(name).suffix or name for name in others)
    if chosen != FOLDER:
        kept, tests = _with_splits(names, key, path, settings)
        files = tuple((local_file(Path(root, name), chosen), split) for name, split in kept)
        state = _hashed(f"{os.path.relpath(file.path, root)} {file.state}" for file, _ in files)
        size = sum(file.size for file, _ in files)
        return Listing(chosen, place, state, shards=files, left_out=_counts(left_out, tests, settings), bytes=size)
    beside = reads_beside(settings)
    left_out -= Counter({f".{suffix}": left_out[f".{suffix}"] for suffix in beside})
    described = [name for name in others if name.rpartition(".")[2] in beside]
    suffixes = label_suffixes(settings)
    labels_beside = any(name.rpartition(".")[2] in suffixes for name in described)
    if settings.targets == "numbers" and not labels_beside:
        raise _unusable(key, path, Reason("images.no-numbers-beside", {"suffixes": suffixes}))
    labels_beside = labels_beside or settings.label != "auto"
    firsts = {_first_folder(name) for name in names}
    # Some first folders are a training and a validation split, and others name none.
    if {TRAIN, VALIDATION, ""} <= {SPLITS.get(name.lower(), "") for name in firsts}:
        other = next(name for name in names if not split_of_folder(name))
        raise _unusable(key, path, Reason("images.folders-mix-splits", {"other": other}))
    total, has_splits = len(names), splits_by_folder(firsts)
    if has_splits:
        read = _splits_read({split_of_folder(name) for name in names}, settings)
        names = [name for name in names if split_of_folder(name) in read]
    total_size = _Size()  # one number, because there may be many millions of files
    state = _hashed(_state_of(root, name, total_size) for name in (*names, *described))
    left = _counts(left_out, total - len(names), settings)
    folders = {_first_folder(name) for name in names}
    if has_splits and len(folders) == 1:  # all of them are of the split that is wanted, or one is drawn from them
        root, has_splits = os.path.join(root, *folders), False
        names = [name.partition("/")[2] for name in names]
    return Listing(FOLDER, place, state, root, tuple(names), (), has_splits, labels_beside, left, total_size.bytes)


def _first_folder(name: str) -> str:
    return name.partition("/")[0] if "/" in name else ""


def _entries(place: str, path: str, key: str) -> tuple[str, list[str]]:
    """Return a folder, and the relative paths of the files that a path names, in a fixed order."""
    if os.path.isdir(place):
        return place, list(_walked(place, "", set()))
    if os.path.lexists(place):  # a name may contain braces and wildcards
        return os.path.dirname(place), [os.path.basename(place)]
    paths: list[str] = []
    for pattern in expanded_braces(place):
        files = [name for name in sorted(glob.glob(pattern, recursive=True)) if not os.path.isdir(name)]
        if not files:
            raise _unusable(key, path, Reason("images.nothing-there", {"path": pattern}))
        paths += files
    paths = list(dict.fromkeys(paths))
    root = _fixed_folder(place) or "/"
    return root, [os.path.relpath(name, root) for name in paths]


def _walked(root: str, below: str, seen: set[tuple[int, int]]) -> Iterator[str]:
    """Yield the relative paths of all files, in the order of their names; links are followed, hidden names are not."""
    about = os.stat(os.path.join(root, below))
    if (about.st_dev, about.st_ino) in seen:  # a link to a folder around it
        return
    around = {*seen, (about.st_dev, about.st_ino)}
    with os.scandir(os.path.join(root, below)) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        if is_hidden(entry.name):
            continue
        name = f"{below}/{entry.name}" if below else entry.name
        if entry.is_dir():
            yield from _walked(root, name, around)
        else:
            yield name


@dataclass
class _Size:
    bytes: int = 0


def _state_of(root: str, name: str, size: _Size) -> str:
    """Return the name of a file with what changes when it is written, and add its bytes to ``size``.

    A link that leads nowhere has no state.
    """
    try:
        about = os.stat(os.path.join(root, name))
    except FileNotFoundError:
        return f"{name} missing"
    size.bytes += about.st_size
    return f"{name} {about.st_size} {about.st_mtime_ns} {about.st_ctime_ns} {about.st_ino}"


# ---- remote ----------------------------------------------------------------------------------------------------------


def _remote(path: str, settings: ImageSettings, key: str, seconds: float | None) -> Listing:
    names = expanded_braces(path)
    with naming_key(key), ThreadPoolExecutor(min(_REQUESTS, len(names))) as pool:
        listed = list(pool.map(lambda name: list_files(name, seconds), names))
    by_path = {file.path: file for files in listed for file in files}
    base = path.rstrip("/") if path not in by_path and not set("*?[{") & set(path) else _fixed_folder(path)
    below = {name.removeprefix(f"{base}/"): name for name in by_path}
    by_format, others = _by_format([name for name in below if not is_hidden(name)])
    chosen = _format(by_format, others, settings, key, path)
    if chosen == FOLDER:
        raise _unusable(key, path, Reason("images.remote-folder", {"count": len(by_format[FOLDER])}))
    kept, tests = _with_splits(by_format[chosen], key, path, settings)
    remote = ((by_path[below[name]], split) for name, split in kept)
    files = tuple((SourceFile(file.path, file.size, chosen, etag=file.etag), split) for file, split in remote)
    state = _hashed(f"{file.path} {file.size} {file.etag}" for file, _ in files)
    left_out = Counter(Path(name).suffix or name for name in others)
    size = sum(file.size for file, _ in files)
    return Listing(chosen, path, state, shards=files, left_out=_counts(left_out, tests, settings), bytes=size)


def _fixed_folder(path: str) -> str:
    """Return the folders of a path before its first wildcard or brace."""
    wild = min((at for sign in "*?[{" if (at := path.find(sign)) >= 0), default=len(path))
    return path[:wild].rpartition("/")[0]


# ---- both ------------------------------------------------------------------------------------------------------------


def _by_format(names: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    by_format: dict[str, list[str]] = {name: [] for name in IMAGE_FORMATS}
    others: list[str] = []
    for name in names:
        kind = format_of_file(name)
        (by_format[kind] if kind else others).append(name)
    return by_format, others


def _format(
    by_format: Mapping[str, Sequence[str]], others: Sequence[str], settings: ImageSettings, key: str, path: str
) -> str:
    """Return the format of a source. Raises UsageError if it has no file of it, or of several without a choice."""
    there = [name for name in IMAGE_FORMATS if by_format[name]]
    if settings.format != "auto":
        if settings.format not in there:
            params = {"format": settings.format, "found": there}
            raise _unusable(key, path, Reason("images.other-format" if there else "images.no-images", params))
        return settings.format
    if len(there) > 1:
        counts = [f"{len(by_format[name])} of {name}" for name in there]
        raise _unusable(key, path, Reason("images.mixed-formats", {"found": counts}))
    if there:
        return there[0]
    packed = next((name for name in others if name.lower().endswith(_COMPRESSED_TARS)), None)
    if packed is not None:
        raise _unusable(key, path, Reason("images.compressed-tar", {"file": packed}))
    raise _unusable(key, path, Reason("images.no-images", {"format": "auto", "found": []}))


def _splits_read(splits: Collection[str], settings: ImageSettings) -> Collection[str]:
    if settings.only_evaluation:
        held_out = next((split for split in (VALIDATION, TEST) if split in splits), None)
        return splits if held_out is None else {held_out}
    return set(splits) - {TEST}


def _with_splits(
    names: Sequence[str], key: str, path: str, settings: ImageSettings
) -> tuple[list[tuple[str, str]], int]:
    """Return the shards that are read, each with its split, and the number of those of a split that is not read.

    Without a validation split in the names of the shards, one is drawn from all samples, and no shard has a split.
    Raises UsageError if it is not clear which shards are for training.
    """
    splits_by_name = {name: splits_of_file(name) for name in names}
    if (double := next((name for name in names if len(splits_by_name[name]) > 1), None)) is not None:
        raise _unusable(
            key, path, Reason("images.shard-of-two-splits", {"file": double, "splits": splits_by_name[double]})
        )
    splits = {split for of_file in splits_by_name.values() for split in of_file}
    other = next((name for name in names if not splits_by_name[name]), None)
    if splits and other is not None:
        named = next(name for name in names if splits_by_name[name])
        params = {"named": named, "split": splits_by_name[named][0], "other": other}
        raise _unusable(key, path, Reason("images.shards-mix-splits", params))
    if len(splits) > 1 and TRAIN not in splits and not settings.only_evaluation:
        raise _unusable(key, path, Reason("images.no-training-split", {"splits": sorted(splits)}))
    if len(splits) < 2:  # all of them are what the user asks for
        return [(name, "") for name in names], 0
    read = _splits_read(splits, settings)
    kept = [(name, splits_by_name[name][0]) for name in names if splits_by_name[name][0] in read]
    if settings.only_evaluation or VALIDATION not in splits:
        kept = [(name, "") for name, _ in kept]
    return kept, len(names) - len(kept)


def _counts(left_out: Mapping[str, int], of_splits: int, settings: ImageSettings) -> dict[str, int]:
    """Return the number of files that are not read, by suffix, and of those of other splits."""
    name = "other splits" if settings.only_evaluation else "test split"
    return dict(sorted(left_out.items())) | ({name: of_splits} if of_splits else {})


def _hashed(lines: Iterator[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()


def _unusable(key: str, path: str, problem: Reason) -> UsageError:
    return UsageError(Reason("images.source-unusable", {"where": f"{key} = {path}", "problem": problem}))


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
    of_captions = Member.of(settings.caption, CAPTION).suffixes if settings.captions else ()
    return tuple(dict.fromkeys([*label_suffixes(settings), *of_captions]))


def label_suffixes(settings: ImageSettings) -> tuple[str, ...]:
    """Return the suffixes of the files beside images that may have their labels; empty if the folder is the class."""
    if settings.targets == "none" or (settings.label == "auto" and settings.targets == "class"):
        return ()
    return Member.of(settings.label, LABEL).suffixes


def _beside(path: str, member: Member) -> object:
    for suffix in member.suffixes:
        beside = Path(path).with_suffix(f".{suffix}")
        if beside.is_file():
            return member.value({suffix: beside.read_bytes()})
    return member.value({})
