"""A rank's file of a checkpoint: flat tensors in the safetensors format, whose header says which pieces they are.

Any reader of safetensors opens it (https://github.com/huggingface/safetensors#format); only this file knows its header.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaletrain_cli.engine.state.pieces import Piece
from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.rundir.checkpoints import FileDigest
from scaletrain_cli.rundir.committing import HashingWriter

SCHEMA = "scaletrain.shard/v1"
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8", torch.int64: "I64"}
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}
_ALIGNMENT_BYTES = 8


class Entry(NamedTuple):
    """A flat tensor on the host under its name in the file: ``weight/NAME``, ``exp_avg/NAME``, ..."""

    key: str
    values: Tensor


@dataclass(frozen=True)
class ShardHeader:
    """What a file says of itself: the piece behind each name, and what its rank's optimizer counts, such as steps."""

    rank: int
    pieces: Mapping[str, Piece]
    counts: Mapping[str, float]

    def to_metadata(self) -> dict[str, str]:
        """Of strings, which is what safetensors allows."""
        pieces = {name: piece.to_json() for name, piece in self.pieces.items()}
        plain = {"schema": SCHEMA, "rank": self.rank, "pieces": pieces, "counts": dict(self.counts)}
        return {key: value if isinstance(value, str) else json.dumps(value) for key, value in plain.items()}


def write_shard(
    path: Path, header: ShardHeader, entries: Sequence[Entry], before_write: Callable[[], None] = lambda: None
) -> FileDigest:
    """Write a rank's file, hashed on the way and durable on return. Raises OSError.

    ``before_write`` is called before each write: where a fault may strike.
    """
    index: dict[str, Any] = {"__metadata__": header.to_metadata()}
    end = 0
    for key, values in entries:
        start, end = end, end + values.numel() * values.element_size()
        index[key] = {"dtype": _DTYPES[values.dtype], "shape": [values.numel()], "data_offsets": [start, end]}
    text = json.dumps(index, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    before_write()
    writer = HashingWriter(path)
    writer.write(len(text).to_bytes(8, "little") + text)
    for _, values in entries:
        before_write()
        writer.write(values.view(torch.uint8).numpy().data)
    before_write()
    return writer.close()


def _check_place(key: str, entry: dict[str, Any], data_bytes: int) -> None:
    first, last = entry["data_offsets"]
    width = _TORCH_DTYPES[entry["dtype"]].itemsize
    if not (type(first) is type(last) is int and 0 <= first <= last <= data_bytes and (last - first) % width == 0):
        raise ValueError(f"{key} is at bytes {first} to {last} of {data_bytes}")


class DamagedShardError(ScaletrainError, ValueError):
    """A file with the name of a shard that is none, or was made up."""


class ShardFile:
    """A rank's file, opened. Tensors are read when asked for, and only the part that is."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, or DamagedShardError where it is no such file; its hash does not tell who wrote it."""
        self._path = path
        try:
            with path.open("rb") as file:
                whole = os.fstat(file.fileno()).st_size
                size = int.from_bytes(file.read(8), "little")
                if size > whole - 8:  # or a forged size would have all memory allocated
                    raise ValueError(f"a header of {size} bytes in a file of {whole}")
                index: dict[str, Any] = json.loads(file.read(size))
            metadata = index.pop("__metadata__")
            if metadata["schema"] != SCHEMA:
                raise ValueError(f"has schema {metadata['schema']!r}; this version reads {SCHEMA}")
            pieces = {name: Piece.from_json(name, data) for name, data in json.loads(metadata["pieces"]).items()}
            self.header = ShardHeader(int(metadata["rank"]), pieces, json.loads(metadata["counts"]))
            for key, entry in index.items():
                _check_place(key, entry, whole - 8 - size)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DamagedShardError(f"{path} is no shard of a checkpoint: {error}") from error
        self._index, self._data_start = index, 8 + size

    @property
    def keys(self) -> list[str]:
        """Names of its tensors."""
        return list(self._index)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements ``start`` to ``stop`` of a tensor. Raises KeyError for a name that is not there."""
        found = self._index[key]
        dtype, (first, last) = _TORCH_DTYPES[found["dtype"]], found["data_offsets"]
        width = dtype.itemsize
        stop = (last - first) // width if stop is None else stop
        values = torch.empty(stop - start, dtype=dtype)
        with self._path.open("rb") as file:
            file.seek(self._data_start + first + start * width)
            file.readinto(values.view(torch.uint8).numpy().data)
        return values
