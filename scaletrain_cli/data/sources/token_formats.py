"""Readers of files that are already tokenized. Places are numbers of documents, or positions of tokens.

Megatron-LM: ``NAME.idx`` describes ``NAME.bin`` (core/datasets/indexed_dataset.py); NumPy: one array of ids.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from scaletrain_cli.data.sources.opening import beside, stored
from scaletrain_cli.data.sources.records import BadRecord, Part, SourceFile, TokenRecord
from scaletrain_cli.reasons import Reason

_MAGIC = b"MMIDIDX\x00\x00"
_OLD_MAGIC = b"TNTIDX\x00\x00"
_NUMPY_MAGIC = b"\x93NUMPY"
_TOKENS_AT_ONCE = 1 << 20
_HEADER = struct.Struct("<9sQBQQ")
# By the number in the header; floating-point files hold no tokens.
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


class _WrongFileError(Exception):
    def __init__(self, code: str, **params: Any) -> None:
        super().__init__(code)
        self.reason = Reason(f"sources.{code}", params)


@dataclass(frozen=True)
class _Index:
    """The documents of a Megatron set: token counts and byte offsets of sequences, first sequence of each document."""

    dtype: np.dtype[Any]
    lengths: npt.NDArray[np.int32]
    pointers: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]


def _index_for(file: SourceFile) -> _Index:
    """Return the index of a set, which a process reads once if it would notice a change of the file.

    Raises _WrongFileError, and as stored() does.
    """
    return _kept_index(file) if file.state or file.etag else _index_of(beside(file, ".idx"))


@lru_cache(maxsize=1)
def _kept_index(file: SourceFile) -> _Index:
    return _index_of(beside(file, ".idx"))


def _index_of(file: SourceFile) -> _Index:
    """Read and check an .idx file. Raises _WrongFileError, and as stored() does."""
    with stored(file) as opened:
        content = opened.read()
    if content.startswith(_OLD_MAGIC):
        raise _WrongFileError("megatron-old")
    if len(content) < _HEADER.size or not content.startswith(_MAGIC):
        raise _WrongFileError("megatron-not-an-index")
    _, version, code, sequences, ends = _HEADER.unpack_from(content)
    if version != 1 or code not in _DTYPES:
        raise _WrongFileError("megatron-unknown", version=version, dtype=code)
    expected = _HEADER.size + 12 * sequences + 8 * ends
    if len(content) not in (expected, expected + sequences):  # the last array, of modes, is optional
        raise _WrongFileError("size-differs", bytes=len(content), expected=expected)
    place = _HEADER.size
    lengths = np.frombuffer(content, "<i4", sequences, place)
    pointers = np.frombuffer(content, "<i8", sequences, place + 4 * sequences)
    documents = np.frombuffer(content, "<i8", ends, place + 12 * sequences)
    dtype = np.dtype(_DTYPES[code]).newbyteorder("<")
    in_order = (lengths >= 0).all() and (np.diff(documents) >= 0).all()
    if not ends or documents[0] != 0 or documents[-1] != sequences or not in_order:
        raise _WrongFileError("megatron-inconsistent")
    return _Index(dtype, lengths, pointers, documents)


class Megatron:
    """A pair of files; the source names the .idx file, or the .bin file."""

    def parts(self, file: SourceFile, part_bytes: int) -> Iterator[tuple[int, int]]:
        try:
            index = _index_for(file)
        except _WrongFileError:
            yield 0, 0  # whose records name the fault
            return
        before = np.concatenate([[0], np.cumsum(index.lengths, dtype=np.int64)])[index.documents]
        per_part = max(1, part_bytes // index.dtype.itemsize)
        count = len(index.documents) - 1
        start = 0
        while start < count:
            stop = max(start + 1, int(np.searchsorted(before, before[start] + per_part)))
            yield start, min(stop, count)
            start = stop

    def records(self, part: Part) -> Iterator[TokenRecord | BadRecord]:
        try:
            index = _index_for(part.file)
            data_file = beside(part.file, ".bin")
            expected = int(index.lengths.sum(dtype=np.int64)) * index.dtype.itemsize
            if data_file.size != expected:
                raise _WrongFileError("size-differs", bytes=data_file.size, expected=expected)
        except _WrongFileError as error:
            yield BadRecord(0, error.reason)
            return
        with stored(data_file) as data:
            for number in range(part.start, min(part.stop, len(index.documents) - 1)):
                parts = []
                for sequence in range(index.documents[number], index.documents[number + 1]):
                    tokens = _read(data, index.dtype, int(index.pointers[sequence]), int(index.lengths[sequence]))
                    if tokens is None:
                        yield BadRecord(number, Reason("sources.megatron-inconsistent"))
                        return
                    parts.append(tokens)
                yield TokenRecord(number, np.concatenate(parts) if parts else np.empty(0, index.dtype), True)

    def place_text(self, file: SourceFile, place: int) -> str:
        """Return ``path, document N``, counted from 1."""
        return f"{file.path}, document {place + 1}"


class TokenArray:
    """One array of ids: a NumPy file, or with ``dtype`` the bare numbers that OLMo and Dolma write as .npy."""

    def __init__(self, dtype: str | None = None) -> None:
        self._dtype = None if dtype is None else np.dtype(dtype).newbyteorder("<")

    def parts(self, file: SourceFile, part_bytes: int) -> Iterator[tuple[int, int]]:
        try:
            dtype, count, _ = self._layout(file)
        except _WrongFileError:
            yield 0, 0  # whose records name the fault
            return
        parts = max(1, count * dtype.itemsize // part_bytes)
        yield from pairwise(count * number // parts for number in range(parts + 1))

    def records(self, part: Part) -> Iterator[TokenRecord | BadRecord]:
        try:
            dtype, count, offset = self._layout(part.file)
        except _WrongFileError as error:
            yield BadRecord(0, error.reason)
            return
        with stored(part.file) as data:
            for start in range(part.start, min(part.stop, count), _TOKENS_AT_ONCE):
                stop = min(start + _TOKENS_AT_ONCE, part.stop, count)
                tokens = _read(data, dtype, offset + start * dtype.itemsize, stop - start)
                if tokens is None:
                    yield BadRecord(start, Reason("sources.ends-early"))
                    return
                yield TokenRecord(start, tokens, False)

    def place_text(self, file: SourceFile, place: int) -> str:
        """Return ``path, token N``, counted from 1."""
        return f"{file.path}, token {place + 1}"

    def _layout(self, file: SourceFile) -> tuple[np.dtype[Any], int, int]:
        """Return (type, number of tokens, offset of the first). Raises _WrongFileError and OSError."""
        with stored(file) as data:
            has_header = data.read(len(_NUMPY_MAGIC)) == _NUMPY_MAGIC
            data.seek(0)
            if has_header == (self._dtype is not None):
                raise _WrongFileError("npy-with-header" if has_header else "npy-without-header")
            if self._dtype is not None:
                return self._dtype, _whole(file, self._dtype, 0), 0
            try:
                newer = np.lib.format.read_magic(data) != (1, 0)
                read = np.lib.format.read_array_header_2_0 if newer else np.lib.format.read_array_header_1_0
                shape, _, dtype = read(data)
            except ValueError as error:
                raise _WrongFileError("npy-damaged", error=str(error)) from error
            offset = data.tell()
        if len(shape) != 1 or dtype.kind not in "ui":
            raise _WrongFileError("npy-shape", dtype=str(dtype), dimensions=len(shape))
        if shape[0] != _whole(file, dtype, offset):
            raise _WrongFileError("size-differs", bytes=file.size, expected=offset + shape[0] * dtype.itemsize)
        return dtype, shape[0], offset


def _whole(file: SourceFile, dtype: np.dtype[Any], offset: int) -> int:
    """Return the count of numbers from a byte offset on. Raises _WrongFileError if the last one is incomplete."""
    count, rest = divmod(file.size - offset, dtype.itemsize)
    if rest:
        raise _WrongFileError("size-differs", bytes=file.size, expected=file.size - rest)
    return count


def _read(file: IO[bytes], dtype: np.dtype[Any], offset: int, count: int) -> npt.NDArray[Any] | None:
    """Return ``count`` numbers from a byte offset on; None if the file ends before them.

    Not mapped: a file that is cut while it is mapped ends the process.
    """
    if offset < 0:
        return None
    file.seek(offset)
    content = file.read(count * dtype.itemsize)
    return np.frombuffer(content, dtype) if len(content) == count * dtype.itemsize else None
