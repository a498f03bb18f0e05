"""Prepared tokens of one source, read from all of its shards as if they were one file.

Files are read, not mapped: a file that is cut while it is mapped ends the process, and some file systems allow a few
hundred mappings only. Each chunk is compared with its hash when a process first reads from it.
"""

import hashlib
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrain_cli.data.block_cache import BlockCache
from scaletrain_cli.data.chunk_hashes import CHUNK_BYTES, CorruptDataError, compare_chunk, read_hashes
from scaletrain_cli.data.pipeline.shards import SCHEMA, SPLITS, read_description, shard_folder
from scaletrain_cli.data.remote_datasets import CachedFile, prepared_files

DTYPES = ("uint16", "uint32")
_COUNTED = ("tokens", "documents")
_MOST_OPEN_FILES = 64  # of a process, however many sources it reads
_MOST_ENDS_KEPT = 256  # files with the ends of documents, of about 100 KB each


class _OpenFiles:
    """The files that a process has open for reading; the one that was not read for longest is closed first.

    Threads may read at the same time: a file is not closed, and its number not given to another one, during a read.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, path: Path, start: int, count: int) -> bytes:
        """Return ``count`` bytes from ``start`` on, fewer at the end of the file. Raises OSError."""
        with self._lock:
            if path in self._open:
                self._open.move_to_end(path)
            else:
                while len(self._open) >= _MOST_OPEN_FILES:
                    os.close(self._open.popitem(last=False)[1])
                self._open[path] = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # no FIFO
            return os.pread(self._open[path], count, start)

    def begin_in_child(self) -> None:
        """Open files anew in a forked process, whose lock another thread of the parent may have held."""
        self._open, self._lock = OrderedDict(), threading.Lock()


OPEN_FILES = _OpenFiles()
os.register_at_fork(after_in_child=OPEN_FILES.begin_in_child)


class LocalFile:
    """A file of this machine, whose chunks are compared with their hashes when they are first read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hashes = b""
        self._compared = set[int]()

    @property
    def path(self) -> str:
        return str(self._path)

    @property
    def size(self) -> int:
        """Bytes of the file. Raises CorruptDataError."""
        try:
            return self._path.stat().st_size
        except OSError as error:
            raise CorruptDataError(self._path, str(error.strerror)) from error

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes ``start`` to ``stop - 1``, after comparing their chunks. Raises CorruptDataError."""
        chunks = range(start // CHUNK_BYTES, -(-stop // CHUNK_BYTES))
        if self._compared.issuperset(chunks):
            return self._bytes(start, stop)
        new = [chunk for chunk in chunks if chunk not in self._compared]
        total = self.size
        whole = chunks.start * CHUNK_BYTES
        content = self._bytes(whole, min(chunks.stop * CHUNK_BYTES, total))
        self._hashes = self._hashes or read_hashes(self._path, total)
        for chunk in new:
            place = (chunk - chunks.start) * CHUNK_BYTES
            compare_chunk(self._path, self._hashes, chunk, content[place : place + CHUNK_BYTES])
            self._compared.add(chunk)
        if len(content) < stop - whole:
            raise CorruptDataError(self._path, f"it ends before byte {stop}")
        return content[start - whole : stop - whole]

    def _bytes(self, start: int, stop: int) -> bytes:
        try:
            content = OPEN_FILES.read(self._path, start, stop - start)
        except OSError as error:
            raise CorruptDataError(self._path, error.strerror or str(error)) from error
        if len(content) != stop - start:
            raise CorruptDataError(self._path, f"it ends before byte {stop}")
        return content


class NumberFiles:
    """The numbers in several files, one after another: tokens, or positions of the ends of documents.

    ``starts``: the place of the first number of each file among all numbers, and the number of all.
    """

    def __init__(self, files: Sequence[Path | CachedFile], counts: Sequence[int], dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        self._files = [LocalFile(file) if isinstance(file, Path) else file for file in files]
        self._starts = [0, *accumulate(map(int, counts))]  # a list is searched faster than an array
        self.starts: npt.NDArray[np.int64] = np.array(self._starts, np.int64)

    def require_size(self, file: int) -> None:
        """Raise CorruptDataError if a file, by number, has another size than its count says."""
        expected = int(self.starts[file + 1] - self.starts[file]) * self.dtype.itemsize
        if (size := self._files[file].size) != expected:
            what = f"{size} bytes instead of the {expected} that dataset.json states"
            raise CorruptDataError(self._files[file].path, what)

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return the numbers from ``start`` to ``stop - 1``, which may be in several files.

        Raises CorruptDataError if a chunk that holds them has changed since it was written; for remote files also
        PlaceError and UnavailableError.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"numbers {start} to {stop} of {len(self)}")
        parts: list[npt.NDArray[Any]] = []
        width = self.dtype.itemsize
        while start < stop:
            file = bisect_right(self._starts, start) - 1
            first = self._starts[file]
            end = min(stop, self._starts[file + 1])
            content = self._files[file].read((start - first) * width, (end - first) * width)
            parts.append(np.frombuffer(content, self.dtype))
            start = end
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self.dtype), *parts])


@dataclass(frozen=True)
class Split:
    """One split of a source. ``ends``: the position of the last token of each document, within its shard."""

    tokens: NumberFiles
    ends: NumberFiles

    def ends_between(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the positions among all tokens, from ``start`` to ``stop - 1``, of tokens that end documents.

        Raises CorruptDataError if a chunk that holds them has changed since it was written.
        """
        positions = [np.empty(0, np.int64)]
        shard = int(np.searchsorted(self.tokens.starts, start, side="right")) - 1
        while start < stop and shard < len(self.ends.starts) - 1 and self.tokens.starts[shard] < stop:
            first = int(self.tokens.starts[shard])
            ends = _ends_of_shard(self.ends, shard)
            low, high = np.searchsorted(ends, (start - first, stop - first))
            positions.append(ends[low:high] + first)
            shard += 1
        return np.concatenate(positions)

    def ends_before(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return how many documents end before each of these places among all tokens.

        Raises CorruptDataError if a chunk that holds them has changed since it was written.
        """
        counts = np.zeros(len(places), np.int64)
        shards = np.searchsorted(self.tokens.starts, places, side="right") - 1
        shards = np.minimum(shards, len(self.ends.starts) - 2)
        for shard in np.unique(shards):
            chosen = shards == shard
            within = places[chosen] - self.tokens.starts[shard]
            counts[chosen] = self.ends.starts[shard] + np.searchsorted(_ends_of_shard(self.ends, int(shard)), within)
        return counts


@lru_cache(maxsize=_MOST_ENDS_KEPT)
def _ends_of_shard(ends: NumberFiles, shard: int) -> npt.NDArray[np.int64]:
    """Return the ends of all documents of a shard, ascending, within the shard."""
    first, last = int(ends.starts[shard]), int(ends.starts[shard + 1])
    return ends.read(first, last)


def open_source(
    dataset: Path, rank: int = 0, ranks: int = 1, cache: BlockCache | None = None
) -> tuple[dict[str, Any], dict[str, Split]]:
    """Return dataset.json and the splits of a prepared source.

    The sizes and hashes of this rank's share of the shards are compared with dataset.json now, the tokens with their
    hashes when they are read. The tokens of an attached remote dataset are read through ``cache``; None for one of the
    default size.

    Raises UsageError, and CorruptDataError if a file has changed since it was written.
    """
    document = read_description(dataset, SCHEMA)
    try:
        dtype, shards = str(document["tokenizer"]["dtype"]), list(document["shards"])
        names = [f"{split}_{what}" for split in SPLITS for what in _COUNTED]
        stated = [document.get(name, 0) for name in names] + [shard[name] for shard in shards for name in names]
        if dtype not in DTYPES or any(type(count) is not int or not 0 <= count < 2**62 for count in stated):
            raise ValueError("a number of tokens or documents, or the dtype of tokens, is not allowed")
        folders = [shard_folder(dataset, number) for number in range(len(shards))]
        files_of = prepared_files(dataset, cache)
        splits = {}
        for split in SPLITS:
            counts = [[shard[f"{split}_{what}"] for shard in shards] for what in _COUNTED]
            splits[split] = Split(
                NumberFiles(files_of([folder / f"{split}.bin" for folder in folders]), counts[0], dtype),
                NumberFiles(files_of([folder / f"{split}.ends.bin" for folder in folders]), counts[1], "int64"),
            )
        for number in range(rank, len(shards), ranks):
            for opened in splits.values():
                opened.tokens.require_size(number)
                opened.ends.require_size(number)
            _compare_hashes(folders[number], shards[number], np.dtype(dtype).itemsize)
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise CorruptDataError(dataset / "dataset.json", f"it lacks a value: {error}") from error
    return document, splits


def _compare_hashes(folder: Path, shard: dict[str, Any], width: int) -> None:
    """Raise CorruptDataError if the hashes of a shard are not those that dataset.json states."""
    digest = hashlib.sha256()
    for split in SPLITS:
        sizes = {f"{split}.bin": shard[f"{split}_tokens"] * width, f"{split}.ends.bin": shard[f"{split}_documents"] * 8}
        for name, size in sizes.items():
            digest.update(hashlib.sha256(read_hashes(folder / name, size)).digest())
    if digest.hexdigest() != shard["digest"]:
        raise CorruptDataError(folder, "its hashes do not match dataset.json")
