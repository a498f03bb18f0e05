"""Samples of an index, read in any order: from files of this machine, or from a store through the cache of the node.

A reader holds no list of samples: of a sample it reads 43 bytes of the index, its text, and its image. What was read is
compared with the index, so that an image that has changed since is found when it is read.
"""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scaletrain_cli.data.block_cache import BlockCache, CachedBlocks, block_cache
from scaletrain_cli.data.chunk_hashes import CorruptDataError
from scaletrain_cli.data.images.compatibility import FILES, SCHEMA
from scaletrain_cli.data.images.index_units import PACKED, digest_of
from scaletrain_cli.data.images.samples import ImageSample, ImageSettings
from scaletrain_cli.data.images.tables import image_leaf
from scaletrain_cli.data.pipeline.shards import SPLITS, read_description
from scaletrain_cli.data.sources.places import RemoteFile, SeekableFile
from scaletrain_cli.data.sources.stores import PlaceError, is_remote
from scaletrain_cli.data.token_files import OPEN_FILES, LocalFile
from scaletrain_cli.errors import DoNotRequeueError
from scaletrain_cli.extras import require
from scaletrain_cli.hub.cache import cache_folder, path_in_cache
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.spec.corpus_files import FOLDER, TABLES

_MOST_TABLES = 8
_MOST_ROWS_BYTES = 64 << 20  # of decoded groups of rows, beside the one that is read
_ENDS = 1 << 17  # numbers of a file that are read at a time
_READS = 4  # of remote bytes that are not those of the index
_PAUSE_SECONDS = 0.2


class ChangedImageError(CorruptDataError):
    """An image is not the one that was indexed (exit 93). ``evidence`` is for an event."""

    def __init__(self, place: str, problem: Reason) -> None:
        """``place``: the file with its member or row."""
        DoNotRequeueError.__init__(self, Reason("images.changed", {"where": place, "problem": problem}))
        self.evidence = {"file": place, "problem": str(problem)}


class _Record(NamedTuple):
    """The fields of SAMPLE."""

    file: int
    length: int
    offset: int
    digest: int
    label: int
    text: int
    key: int
    suffix: int
    caption: int


class IndexedImages:
    """The samples of one split of an index. It can be pickled, and read by several threads."""

    def __init__(self, folder: Path, split: str, cache: BlockCache | None = None) -> None:
        self.folder, self.split = folder, split
        self._cache = cache
        self._opened: _Opened | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._files.samples

    def __getstate__(self) -> tuple[Path, str, BlockCache | None]:
        return self.folder, self.split, self._cache

    def __setstate__(self, state: tuple[Path, str, BlockCache | None]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    @property
    def document(self) -> Mapping[str, Any]:
        """The contents of dataset.json."""
        return self._files.document

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of the classes in the order of their numbers; None if the source has none."""
        names = self._files.document["classes"]
        return None if names is None else tuple(names)

    @property
    def num_classes(self) -> int | None:
        """The number of classes; None for an index without classes."""
        count = self._files.document["num_classes"]
        return None if count is None else int(count)

    @property
    def has_one_class(self) -> bool:
        """True if each sample has exactly one class, also where the index allows several."""
        files = self._files
        if files.targets != "classes":
            return files.targets == "class"
        assert files.ends is not None
        for first in range(0, files.samples, _ENDS):
            count = min(_ENDS, files.samples - first)
            ends = np.frombuffer(files.ends.read(first * 8, (first + count) * 8), "<i8")
            if not np.array_equal(ends, np.arange(first + 1, first + count + 1)):
                return False
        return True

    def read(self, index: int) -> ImageSample:
        """Return one sample.

        Raises CorruptDataError if the index or the image is not what was written or indexed; for a remote source also
        PlaceError and UnavailableError.
        """
        files = self._files
        if not 0 <= index < files.samples:
            raise IndexError(f"sample {index} of {files.samples}")
        about = self._record(index)
        size = about.key + about.suffix + about.caption
        text = files.text.read(about.text, about.text + size)
        name = text[: about.key + about.suffix].decode()
        caption = text[about.key + about.suffix :].decode() if files.has_captions else None
        place = files.images.place(about, name)
        image = files.images.read(about, name, place)
        return ImageSample(text[: about.key].decode(), image, self._label(index, about), caption, place)

    def label(self, index: int) -> int | tuple[float, ...] | None:
        """Return the label of a sample without its image. Raises CorruptDataError."""
        return self._label(index, self._record(index))

    @property
    def _files(self) -> "_Opened":
        if self._opened is not None:
            return self._opened
        with self._lock:
            if self._opened is None:
                self._opened = _opened(self.folder, self.split, self._cache)
            return self._opened

    def _record(self, index: int) -> _Record:
        width = PACKED.size
        return _Record._make(PACKED.unpack(self._files.index.read(index * width, (index + 1) * width)))

    def _label(self, index: int, about: _Record) -> int | tuple[float, ...] | None:
        files = self._files
        if files.targets == "class":
            return about.label
        if files.targets == "none":
            return None
        assert files.numbers is not None
        assert files.ends is not None
        bounds = np.frombuffer(files.ends.read(max(0, index - 1) * 8, (index + 1) * 8), "<i8").tolist()
        start, stop = (0, bounds[0]) if index == 0 else bounds
        content = files.numbers.read(start * 4, stop * 4)
        if files.targets == "numbers":
            return tuple(np.frombuffer(content, "<f4").tolist())
        label = [0.0] * int(files.document["num_classes"])
        for number in np.frombuffer(content, "<i4").tolist():
            label[number] = 1.0
        return tuple(label)


@dataclass
class _Opened:
    document: Mapping[str, Any]
    samples: int
    targets: str
    has_captions: bool
    index: LocalFile
    text: LocalFile
    numbers: LocalFile | None
    ends: LocalFile | None
    images: "_Images"


def open_images(folder: Path, cache: BlockCache | None = None) -> dict[str, IndexedImages]:
    """Return the splits of an index by name: train and validation. Reads dataset.json and the sizes of the files.

    ``cache``: through which remote images are read; None for one of the default size. Raises UsageError for a folder
    without an index, and CorruptDataError for a damaged one.
    """
    by_split = {split: IndexedImages(folder, split, cache) for split in SPLITS}
    for images in by_split.values():
        len(images)
    return by_split


def describe_index(folder: Path) -> dict[str, Any]:
    """Return dataset.json of an index. Raises UsageError if there is none, and CorruptDataError if it has changed."""
    return read_description(folder, SCHEMA)


def _opened(folder: Path, split: str, cache: BlockCache | None) -> _Opened:
    document = describe_index(folder)
    samples, settings = int(document[f"{split}_samples"]), ImageSettings(**document["settings"])
    index = LocalFile(folder / f"{split}.samples.bin")
    if index.size != samples * PACKED.size:
        what = f"{index.size} bytes instead of the {samples * PACKED.size} that dataset.json states"
        raise CorruptDataError(index.path, what)
    has_numbers = settings.targets in ("classes", "numbers")
    return _Opened(
        document,
        samples,
        settings.targets,
        settings.captions,
        index,
        LocalFile(folder / f"{split}.text.bin"),
        LocalFile(folder / f"{split}.targets.bin") if has_numbers else None,
        LocalFile(folder / f"{split}.ends.bin") if has_numbers else None,
        _images_of(folder, document, settings, cache),
    )


# ---- images ----------------------------------------------------------------------------------------------------------


class _Images:
    """Reads the images of an index; subclasses know where they are."""

    def place(self, about: _Record, name: str) -> str:
        """Return ``file:member`` or ``file, row 3``."""
        raise NotImplementedError

    def read(self, about: _Record, name: str, place: str) -> bytes:
        """Return an image that is the one that was indexed. Raises ChangedImageError."""
        try:
            content = self._read(about, name)
        except OSError as error:
            problem = Reason("images.file-unreadable", {"error": error.strerror or str(error)})
            raise ChangedImageError(place, problem) from error
        _require_same(content, about, place)
        return content

    def _read(self, about: _Record, name: str) -> bytes:
        raise NotImplementedError


def _require_same(content: bytes, about: _Record, place: str) -> None:
    if len(content) != about.length or digest_of(content) != about.digest:
        raise ChangedImageError(place, Reason("images.other-content"))


class _LooseImages(_Images):
    def __init__(self, root: str) -> None:
        self._root = root

    def place(self, about: _Record, name: str) -> str:
        return f"{self._root}/{name}"

    def _read(self, about: _Record, name: str) -> bytes:
        with open(f"{self._root}/{name}", "rb") as file:
            return file.read(about.length + 1)


class _Shards(_Images):
    """Local files."""

    def __init__(self, paths: list[str], separator: str = ":") -> None:
        self._paths, self._separator = paths, separator

    def place(self, about: _Record, name: str) -> str:
        return f"{self._paths[about.file]}{self._separator}{name}"

    def _read(self, about: _Record, name: str) -> bytes:
        return OPEN_FILES.read(Path(self._paths[about.file]), about.offset, about.length)


class _RemoteShards(_Images):
    def __init__(self, files: list[RemoteFile], cache: BlockCache) -> None:
        self._files = [CachedBlocks(file, cache) for file in files]

    def place(self, about: _Record, name: str) -> str:
        return f"{self._files[about.file].file.path}:{name}"

    def read(self, about: _Record, name: str, place: str) -> bytes:
        file = self._files[about.file]
        stop = min(about.offset + about.length, file.file.size)
        return _read_remote(
            lambda: file.read(about.offset, stop), lambda: file.forget(about.offset, stop), about, place
        )


def _read_remote(read: Callable[[], bytes], forget: Callable[[], None], about: _Record, place: str) -> bytes:
    """Return an image of a store, read again if its bytes are not those of the index. Raises ChangedImageError."""
    for number in range(_READS):
        try:
            content = read()
        except PlaceError as error:
            if error.reason is not None and error.means_other_content:
                raise ChangedImageError(place, error.reason) from None
            raise
        try:
            _require_same(content, about, place)
            return content
        except ChangedImageError:  # a fault of the network or of the local disk
            if number == _READS - 1:
                raise
        forget()
        time.sleep(_PAUSE_SECONDS)
    raise AssertionError


class _RowsOfTables(_Images):
    """Parquet files. A row is read with its group; the groups that were read last are kept, for reading in order."""

    def __init__(self, files: list[RemoteFile], settings: ImageSettings, cache: BlockCache | None) -> None:
        self._paths, self._settings, self._cache = files, settings, cache
        self._tables: OrderedDict[int, Any] = OrderedDict()
        self._groups: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._lock = threading.Lock()
        self._process = os.getpid()

    def place(self, about: _Record, name: str) -> str:
        row = int(name.rpartition(":")[2])
        return f"{self._paths[about.file].path}, row {row + 1}"

    def read(self, about: _Record, name: str, place: str) -> bytes:
        if self._cache is None:
            return super().read(about, name, place)
        return _read_remote(lambda: self._read(about, name), lambda: self._forget(about.file), about, place)

    def _read(self, about: _Record, name: str) -> bytes:
        group, row = about.offset >> 32, about.offset & 0xFFFFFFFF
        with self._lock:
            if self._process != os.getpid():
                self._tables, self._groups, self._process = OrderedDict(), OrderedDict(), os.getpid()
            try:
                rows = self._rows(about.file, group)
                return bytes(rows[row].as_py() or b"") if row < len(rows) else b""
            except require("pyarrow", "parquet").ArrowException as error:
                raise OSError(" ".join(str(error).split())) from error

    def _rows(self, file: int, group: int) -> Any:
        if (file, group) in self._groups:
            self._groups.move_to_end((file, group))
            return self._groups[file, group]
        table, leaf, in_struct = self._table(file)
        if group >= table.metadata.num_row_groups:
            return ()
        column = table.read_row_group(group, columns=[leaf]).column(0)
        column = column.combine_chunks()
        if in_struct:
            column = column.field("bytes") if hasattr(column, "field") else column.chunk(0).field("bytes")
        kept = sum(group.nbytes for group in self._groups.values())
        while self._groups and kept + column.nbytes > _MOST_ROWS_BYTES:
            kept -= self._groups.popitem(last=False)[1].nbytes
        self._groups[file, group] = column
        return column

    def _table(self, file: int) -> tuple[Any, str, bool]:
        if file in self._tables:
            self._tables.move_to_end(file)
            return self._tables[file]  # type: ignore[no-any-return]
        arrow, parquet = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
        about = self._paths[file]
        if self._cache is None:
            source: Any = arrow.OSFile(about.path)
        else:
            source = arrow.PythonFile(_CachedStream(CachedBlocks(about, self._cache)), mode="r")
        table = parquet.ParquetFile(source)
        leaf, in_struct = image_leaf(table.schema_arrow, self._settings, about.path)
        while len(self._tables) >= _MOST_TABLES:
            self._tables.popitem(last=False)
        self._tables[file] = table, leaf, in_struct
        return self._tables[file]  # type: ignore[no-any-return]

    def _forget(self, file: int) -> None:
        assert self._cache is not None
        about = self._paths[file]
        CachedBlocks(about, self._cache).forget(0, about.size)
        self._tables.pop(file, None)
        for key in [key for key in self._groups if key[0] == file]:
            del self._groups[key]


class _CachedStream(SeekableFile):
    """A remote file as a seekable binary file that is read through the cache."""

    def __init__(self, file: CachedBlocks) -> None:
        super().__init__(file.file.size)
        self._file = file

    def readinto(self, buffer: Any) -> int:
        content = self._file.read(self.place, min(self.size, self.place + len(buffer)))
        buffer[: len(content)] = content
        self.place += len(content)
        return len(content)


def _in_cache_here(path: str) -> str:
    """Return the path of the same file of the hub in the cache of this machine, if it is there; else ``path``.

    An index may be built on a machine whose cache is at another place than that of the nodes.
    """
    if below := path_in_cache(path):
        here = cache_folder(os.environ) / below
        if here.exists():
            return str(here)
    return path


def _images_of(folder: Path, document: Mapping[str, Any], settings: ImageSettings, cache: BlockCache | None) -> _Images:
    """Return what reads the images of an index. Raises CorruptDataError if files.json is damaged."""
    sections = read_document(folder / FILES) or {}
    try:
        if "embedded" in sections:
            return _Shards([str(folder / sections["embedded"])], ", ")
        if document["format"] == FOLDER:
            return _LooseImages(_in_cache_here(str(sections["root"])))
        files = [RemoteFile(_in_cache_here(str(path)), int(size), str(etag)) for path, size, etag in sections["shards"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptDataError(folder / FILES, f"it lacks a value: {error}") from error
    is_far = any(is_remote(file.path) for file in files)
    used = (cache or block_cache()) if is_far else None
    if document["format"] == TABLES:
        return _RowsOfTables(files, settings, used)
    return _Shards([file.path for file in files]) if used is None else _RemoteShards(files, used)
