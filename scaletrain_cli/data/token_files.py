"""Prepared tokens of one source, read from all of its shards as if they were one file.

Files are read, not mapped: a file that is cut while it is mapped ends the process, and some file systems allow a few
hundred mappings only. Each chunk is compared with its hash when a process first reads from it.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrain_cli.data.chunk_hashes import CHUNK_BYTES, CorruptDataError, compare_chunk, read_hashes
from scaletrain_cli.data.pipeline.prepare import SCHEMA, shard_folder
from scaletrain_cli.data.pipeline.shards import SPLITS
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import read_document

_MOST_OPEN_FILES = 64


class NumberFiles:
    """The numbers in several files, one after another: tokens, or positions of the ends of documents."""

    def __init__(self, paths: Sequence[Path], counts: Sequence[int], dtype: str) -> None:
        """Raises CorruptDataError if a file has another size than its count says."""
        self.dtype = np.dtype(dtype)
        self._paths = list(paths)
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._hashes: dict[int, bytes] = {}
        self._compared = set[tuple[int, int]]()
        self._open = OrderedDict[int, int]()
        for path, count in zip(paths, counts, strict=True):
            _require_size(path, count * self.dtype.itemsize)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return the numbers from ``start`` to ``stop - 1``, which may be in several files.

        Raises CorruptDataError if a chunk that holds them has changed since it was written.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"numbers {start} to {stop} of {len(self)}")
        parts = [np.empty(0, self.dtype)]
        while start < stop:
            file = int(np.searchsorted(self._starts, start, side="right")) - 1
            first, last = int(self._starts[file]), int(self._starts[file + 1])
            end = min(stop, last)
            parts.append(self._read(file, start - first, end - first))
            start = end
        return parts[1] if len(parts) == 2 else np.concatenate(parts)

    def check_share(self, rank: int, ranks: int) -> None:
        """Compare every file with ``number % ranks == rank`` with its hashes. Raises CorruptDataError."""
        for file in range(rank, len(self._paths), ranks):
            self._read(file, 0, self._count(file))

    def close(self) -> None:
        """Close all files; the next read opens them again."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _count(self, file: int) -> int:
        return int(self._starts[file + 1] - self._starts[file])

    def _read(self, file: int, start: int, stop: int) -> npt.NDArray[Any]:
        size = self.dtype.itemsize
        first, last, total = start * size, stop * size, self._count(file) * size
        chunks = range(first // CHUNK_BYTES, -(-last // CHUNK_BYTES))
        new = [chunk for chunk in chunks if (file, chunk) not in self._compared]
        if not new:
            return np.frombuffer(self._bytes(file, first, last), self.dtype)
        whole = chunks.start * CHUNK_BYTES
        content = self._bytes(file, whole, min(chunks.stop * CHUNK_BYTES, total))
        if file not in self._hashes:
            self._hashes[file] = read_hashes(self._paths[file], total)
        for chunk in new:
            place = (chunk - chunks.start) * CHUNK_BYTES
            compare_chunk(self._paths[file], self._hashes[file], chunk, content[place : place + CHUNK_BYTES])
            self._compared.add((file, chunk))
        return np.frombuffer(content[first - whole : last - whole], self.dtype)

    def _bytes(self, file: int, start: int, stop: int) -> bytes:
        try:
            content = os.pread(self._descriptor(file), stop - start, start)
        except OSError as error:
            raise CorruptDataError(self._paths[file], error.strerror or str(error)) from error
        if len(content) != stop - start:
            raise CorruptDataError(self._paths[file], f"it ends before byte {stop}")
        return content

    def _descriptor(self, file: int) -> int:
        if file in self._open:
            self._open.move_to_end(file)
        else:
            if len(self._open) == _MOST_OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            self._open[file] = os.open(self._paths[file], os.O_RDONLY | os.O_CLOEXEC)
        return self._open[file]


def _require_size(path: Path, expected: int) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CorruptDataError(path, str(error.strerror)) from error
    if size != expected:
        raise CorruptDataError(path, f"{size} bytes instead of the {expected} that dataset.json states")


@dataclass(frozen=True)
class Split:
    """One split of a source. ``ends``: the position of the last token of each document, within its shard."""

    tokens: NumberFiles
    ends: NumberFiles


def open_source(dataset: Path) -> tuple[dict[str, Any], dict[str, Split]]:
    """Return dataset.json and the splits of a prepared source.

    The hashes of every shard are compared with dataset.json now, the tokens with their hashes when they are read.
    Raises UsageError, and CorruptDataError if a file has changed since it was written.
    """
    document = read_document(dataset / "dataset.json")
    if document is None or document.get("schema") != SCHEMA:
        found = None if document is None else document.get("schema")
        params = {"folder": str(dataset), "schema": str(found), "expected": SCHEMA}
        raise UsageError(Reason("engine.dataset-schema-unknown", params))
    try:
        dtype, shards = str(document["tokenizer"]["dtype"]), list(document["shards"])
        folders = [shard_folder(dataset, number) for number in range(len(shards))]
        splits = {}
        for split in SPLITS:
            counts = [[int(shard[f"{split}_{what}"]) for shard in shards] for what in ("tokens", "documents")]
            splits[split] = Split(
                NumberFiles([folder / f"{split}.bin" for folder in folders], counts[0], dtype),
                NumberFiles([folder / f"{split}.ends.bin" for folder in folders], counts[1], "int64"),
            )
        for folder, shard in zip(folders, shards, strict=True):
            _compare_hashes(folder, shard, np.dtype(dtype).itemsize)
    except (KeyError, TypeError, ValueError) as error:
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
