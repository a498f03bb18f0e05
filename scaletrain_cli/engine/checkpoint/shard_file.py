"""The format of a rank's checkpoint file, and reading state from files that any layout saved."""

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scaletrain_cli.engine.parallel.mesh import ShardSpec
from scaletrain_cli.errors import ScaletrainError, UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import FileDigest
from scaletrain_cli.worker.checkpoint_commit import HashingWriter

# Slices of matrices and their overlaps, by which a layout reads the state that another one saved.


@dataclass(frozen=True)
class Slice:
    """Elements ``start`` to ``stop`` of a rank's shard of a matrix, flattened.

    ``name`` and ``whole_shape`` are those of the matrix in a Hugging Face file; ``shard_spec`` says which part of it
    the rank has, None for all of it. So slices of one matrix can be compared across layouts.
    """

    name: str
    whole_shape: tuple[int, ...]
    shard_spec: ShardSpec | None
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def contains(self, other: "Slice") -> bool:
        """Return True if this slice certainly contains all of another slice of the same matrix."""
        return self.shard_spec == other.shard_spec and self.start <= other.start and other.stop <= self.stop

    def to_json(self) -> dict[str, Any]:
        """Return the slice as JSON values, for a file's header."""
        spec = (
            None
            if self.shard_spec is None
            else [self.shard_spec.dim, self.shard_spec.ranks, self.shard_spec.rank, self.shard_spec.parts]
        )
        return {"shape": list(self.whole_shape), "cut": spec, "start": self.start, "stop": self.stop}

    @classmethod
    def from_json(cls, name: str, data: dict[str, Any]) -> "Slice":
        """Return the slice that ``to_json`` was called on. Raises ValueError for numbers that no slice has."""
        shape, spec, (dim, ranks, rank, parts) = tuple(data["shape"]), None, data["cut"] or (0, 1, 0, 1)
        ratio = [parts] if isinstance(parts, int) else [*parts]
        numbers = (*shape, dim, ranks, rank, *ratio, data["start"], data["stop"])
        if any(type(number) is not int or not 0 <= number < _MOST_ELEMENTS for number in numbers):
            raise ValueError(f"{name} has a number that is not allowed")
        held = math.prod(shape)
        if data["cut"] is not None:
            if not (rank < ranks and dim < len(shape) and 0 < sum(ratio) <= _MOST_PARTS):
                raise ValueError(f"{name} has shard {rank} of {ranks} along dimension {dim} of {shape}")
            spec = ShardSpec(dim, ranks, rank, tuple(parts) if isinstance(parts, list) else parts)
            held = held // max(1, shape[dim]) * spec.held(shape[dim])
        if not data["start"] <= data["stop"] <= held:
            raise ValueError(f"{name} has elements {data['start']} to {data['stop']} of {held}")
        return cls(name, shape, spec, data["start"], data["stop"])


class Overlap(NamedTuple):
    """``length`` elements that two slices share, and where they start in each."""

    at_first: int
    at_second: int
    length: int


def overlaps(first: Slice, second: Slice) -> Iterator[Overlap]:
    """Yield what two slices of one matrix share, as runs of elements that are contiguous in both."""
    if first.shard_spec == second.shard_spec:
        start, stop = max(first.start, second.start), min(first.stop, second.stop)
        if start < stop:
            yield Overlap(start - first.start, start - second.start, stop - start)
        return
    one, other = first.shard_spec, second.shard_spec
    if one is not None and other is not None and replace(one, rank=other.rank) == other:
        return  # of two ranks in one partition
    ours, theirs = _runs(first), _runs(second)
    # The runs of a slice are ordered and disjoint, so those that overlap a run of the other slice are consecutive.
    begin = np.searchsorted(theirs[:, 0] + theirs[:, 2], ours[:, 0], side="right")
    end = np.searchsorted(theirs[:, 0], ours[:, 0] + ours[:, 2], side="left")
    for (whole, here, length), low, high in zip(ours.tolist(), begin.tolist(), end.tolist(), strict=True):
        for also, there, other_length in theirs[low:high].tolist():
            start, stop = max(whole, also), min(whole + length, also + other_length)
            if start < stop:
                yield Overlap(here + start - whole, there + start - also, stop - start)


def _runs(part: Slice) -> npt.NDArray[np.int64]:
    """Return [n, 3]: position in the flattened matrix, position in the slice, length; ordered by the first."""
    if part.shard_spec is None:
        return np.array([[part.start, 0, part.numel]], dtype=np.int64)
    spec, shape = part.shard_spec, part.whole_shape
    inner, outer = math.prod(shape[spec.dim + 1 :]), math.prod(shape[: spec.dim])
    spans = np.array(spec.spans(shape[spec.dim]), dtype=np.int64) * inner
    row = np.arange(outer, dtype=np.int64)[:, None]
    held = int(spans[:, 1].sum())
    whole = (row * shape[spec.dim] * inner + spans[:, 0]).ravel()
    local = (row * held + np.cumsum(spans[:, 1]) - spans[:, 1]).ravel()
    length = np.tile(spans[:, 1], outer)
    start, stop = np.maximum(local, part.start), np.minimum(local + length, part.stop)
    runs = np.stack([whole + start - local, start - part.start, stop - start], axis=1)
    kept: npt.NDArray[np.int64] = runs[runs[:, 2] > 0]
    return kept


# A rank's file: flat tensors in the safetensors format, with their slices in the header.


SCHEMA = "scaletrain.shard/v1"
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8", torch.int64: "I64"}
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}
_ALIGNMENT_BYTES = 8
_MOST_ELEMENTS, _MOST_PARTS = 1 << 48, 1 << 16  # of a matrix; a header that states more was forged


class Entry(NamedTuple):
    """A flat tensor on the host, with its name in the file: ``weight/NAME``, ``exp_avg/NAME`` and so on."""

    key: str
    values: Tensor


@dataclass(frozen=True)
class ShardHeader:
    """The header of a file: the slice of each name, and the counters of the rank's optimizer, such as steps.

    ``other_counts``: by name, for parameters that have taken another number of steps.
    """

    rank: int
    slices: Mapping[str, Slice]
    counts: Mapping[str, float]
    other_counts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def counts_of(self, name: str) -> Mapping[str, float]:
        return self.other_counts.get(name, self.counts)

    def to_metadata(self) -> dict[str, str]:
        """Return the header as strings, which is what safetensors allows."""
        slices = {name: part.to_json() for name, part in self.slices.items()}
        plain: dict[str, Any] = {"schema": SCHEMA, "rank": self.rank, "pieces": slices, "counts": dict(self.counts)}
        if self.other_counts:
            plain["other_counts"] = {name: dict(counts) for name, counts in self.other_counts.items()}
        return {key: value if isinstance(value, str) else json.dumps(value) for key, value in plain.items()}


def shard_parts(header: ShardHeader, entries: Sequence[Entry]) -> list[memoryview]:
    """Return the content of a rank's file in order: its index, and the bytes of each of the ``entries``, not copied."""
    index: dict[str, Any] = {"__metadata__": header.to_metadata()}
    end = 0
    for key, values in entries:
        start, end = end, end + values.numel() * values.element_size()
        index[key] = {"dtype": _DTYPES[values.dtype], "shape": [values.numel()], "data_offsets": [start, end]}
    text = json.dumps(index, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    prefix = memoryview(len(text).to_bytes(8, "little") + text)
    return [prefix, *(values.view(torch.uint8).numpy().data for _, values in entries)]


def write_parts(path: Path, parts: Sequence[memoryview], before_write: Callable[[], None] = lambda: None) -> FileDigest:
    """Write a file, hashed while written and fsynced, and return its digest. Raises OSError.

    ``before_write`` is called before each write, for fault injection.
    """
    before_write()
    writer = HashingWriter(path)
    for part in parts:
        writer.write(part)
        before_write()
    return writer.close()


OpenFile = Callable[[Path], BufferedReader]  # in a pod without a shared volume, one that reads a file of pod 0


def open_here(path: Path) -> BufferedReader:
    return path.open("rb")


class CorruptShardError(ScaletrainError, ValueError):
    """A file with the name of a shard that is not one, or was forged."""


class ShardFile:
    """An open file of a rank. Reads the requested part of a tensor only."""

    def __init__(self, path: Path, open_file: OpenFile = open_here) -> None:
        """Read the header. Raises OSError, and CorruptShardError if the file is not a shard."""
        self._path, self._open = path, open_file
        try:
            with open_file(path) as file:
                whole = file.seek(0, os.SEEK_END)
                file.seek(0)
                size = int.from_bytes(file.read(8), "little")
                if size > whole - 8:  # a forged size would allocate all memory
                    raise ValueError(f"a header of {size} bytes in a file of {whole}")
                index: dict[str, Any] = json.loads(file.read(size))
            metadata = index.pop("__metadata__")
            if metadata["schema"] != SCHEMA:
                raise ValueError(f"has schema {metadata['schema']!r}; this version reads {SCHEMA}")
            slices = {name: Slice.from_json(name, data) for name, data in json.loads(metadata["pieces"]).items()}
            counts, other_counts = json.loads(metadata["counts"]), json.loads(metadata.get("other_counts", "{}"))
            if not all(
                isinstance(value, int | float) for part in (counts, *other_counts.values()) for value in part.values()
            ):
                raise ValueError("a counter of the optimizer is no number")
            self.header = ShardHeader(int(metadata["rank"]), slices, counts, other_counts)
            for key, entry in index.items():
                (first, last), end = entry["data_offsets"], whole - 8 - size
                width = _TORCH_DTYPES[entry["dtype"]].itemsize
                if not (type(first) is type(last) is int and 0 <= first <= last <= end and (last - first) % width == 0):
                    raise ValueError(f"{key} is at bytes {first} to {last} of {end}")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CorruptShardError(Reason("engine.not-a-shard", {"path": str(path), "error": str(error)})) from error
        self._index, self._data_start = index, 8 + size

    @property
    def keys(self) -> Collection[str]:
        return self._index.keys()

    def read(self, key: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return elements ``start`` to ``stop`` of a tensor. Raises KeyError for an unknown name, and CorruptShardError
        if the file has fewer elements.
        """
        entry = self._index[key]
        dtype, (first, last) = _TORCH_DTYPES[entry["dtype"]], entry["data_offsets"]
        width = dtype.itemsize
        count = (last - first) // width
        stop = count if stop is None else stop
        if stop > count:
            params = {"path": str(self._path), "error": f"{key} has {count} elements, and {stop} are stated"}
            raise CorruptShardError(Reason("engine.not-a-shard", params))
        values = torch.empty(stop - start, dtype=dtype)
        with self._open(self._path) as file:
            file.seek(self._data_start + first + start * width)
            file.readinto(values.view(torch.uint8).numpy().data)
        return values


OPAQUE = "opaque"
RANDOM = "random"
_SHARD = re.compile(r"rank-\d{5,}\.safetensors")


def shard_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


class StateReader:
    """Reads a rank's own file if the layout is the one that saved it, otherwise all files that have its slices."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        owned: Sequence[Slice],
        files: Collection[str],
        open_file: OpenFile = open_here,
    ) -> None:
        """``owned``: the slices that the rank saves in its present layout.

        ``files``: the names in the manifest; other files in the folder are never read.
        """
        self._folder, self._own, self._open = folder, None, open_file
        self._shards = sorted(name for name in files if _SHARD.fullmatch(name))
        if shard_name(rank) in self._shards:
            own = ShardFile(folder / shard_name(rank), open_file)
            self._own = own if own.header.slices == {part.name: part for part in owned} else None
        self.counts = dict((self._own or self._files[0]).header.counts)

    def random_state(self) -> Tensor | None:
        """Return the random state of the rank with this number; None in another layout."""
        return None if self._own is None or RANDOM not in self._own.keys else self._own.read(RANDOM)

    @cached_property
    def kinds(self) -> set[str]:
        """Kinds of state that have one value per element of a matrix."""
        files = [self._own] if self._own is not None and self._own.header.slices else self._files
        return {key.partition("/")[0] for file in files for key in file.keys} - {OPAQUE, RANDOM}

    def has(self, kind: str, name: str) -> bool:
        """Return True if the checkpoint has this kind of state of a parameter."""
        return any(f"{kind}/{name}" in file.keys for file in self._files_of(name))

    def counts_of(self, name: str) -> Mapping[str, float]:
        return next((file.header.counts_of(name) for file in self._files_of(name)), self.counts)

    def _files_of(self, name: str) -> list[ShardFile]:
        """Return files that have slices of a parameter: the rank's own one if it has, else all."""
        if self._own is not None and name in self._own.header.slices:
            return [self._own]
        return [file for file, _ in self._index.get(name, [])]

    def read(self, kind: str, part: Slice) -> Tensor:
        """Return the values of a slice, flat. Raises ScaletrainError if the files do not have all of it."""
        key, count, values = f"{kind}/{part.name}", 0, torch.zeros(part.numel)
        for file, saved in self._sources(key, part):
            shared = list(overlaps(saved, part))
            if not shared:
                continue
            first = min(overlap.at_first for overlap in shared)
            last = max(overlap.at_first + overlap.length for overlap in shared)
            stored = file.read(key, first, last)
            for there, here, length in shared:
                values[here : here + length] = stored[there - first : there - first + length]
                count += length
        if count != part.numel:
            params = {"checkpoint": self._folder.name, "found": count, "needed": part.numel, "key": key}
            raise ScaletrainError(Reason("engine.checkpoint-incomplete", params))
        return values

    def opaque(self, shard: int) -> dict[str, Tensor]:
        """Return the states of a flat shard that only this layout can read. Raises UsageError in another layout."""
        prefix = f"{OPAQUE}/{shard}/"
        if self._own is not None:
            return {key.removeprefix(prefix): self._own.read(key) for key in self._own.keys if key.startswith(prefix)}
        if any(key.startswith(OPAQUE) for file in self._files for key in file.keys):
            raise UsageError(Reason("engine.layout-bound-states", {"checkpoint": self._folder.name}))
        return {}

    def _sources(self, key: str, part: Slice) -> Iterator[tuple[ShardFile, Slice]]:
        """Yield the files to read from: the rank's own if it has the whole slice, else all that have parts of it.

        Ranks of other groups of local SGD have the slice under other keys.
        """
        own = None if self._own is None else self._own.header.slices.get(part.name)
        if self._own is not None and own is not None and own.contains(part) and key in self._own.keys:
            yield self._own, own
        else:
            yield from ((file, saved) for file, saved in self._index.get(part.name, []) if key in file.keys)

    @cached_property
    def _files(self) -> list[ShardFile]:
        return [ShardFile(self._folder / name, self._open) for name in self._shards]

    @cached_property
    def _index(self) -> dict[str, list[tuple[ShardFile, Slice]]]:
        index: dict[str, list[tuple[ShardFile, Slice]]] = {}
        for file in self._files:
            for name, part in file.header.slices.items():
                index.setdefault(name, []).append((file, part))
        return index
