"""Hashes of the chunks of a data file: written with the file, compared when a chunk is first read.

Each process compares the chunks that it reads, once, so that every rank hashes only the part that it trains on.
"""

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from scaletrain_cli.errors import DoNotRequeueError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import open_new, open_to_read

if TYPE_CHECKING:  # numpy takes as long to load as the rest of a command that only reads hashes
    import numpy as np
    import numpy.typing as npt

# A sequence of 4,096 tokens has 8 to 16 KiB. With larger chunks a rank would read much more than it trains on; with
# smaller ones the hashes would be a large file. They take one byte for each 8 KiB of data.
CHUNK_BYTES = 1 << 17
DIGEST_BYTES = 16


class CorruptDataError(DoNotRequeueError):
    """A file of the prepared dataset has changed since it was written (exit 93). ``evidence`` is for an event."""

    failure_reason = "data"

    def __init__(self, path: Path | str, what: str, **evidence: int | str) -> None:
        """``path``: also that of a remote file."""
        params = {"file": str(path), "problem": what, "folder": str(path).rpartition("/")[0]}
        super().__init__(Reason("engine.data-corrupt", params))
        self.evidence = {"file": str(path), "problem": what, **evidence}


def hashes_path(path: Path) -> Path:
    """Return the path of a data file's hashes: 16 bytes of BLAKE2b for each chunk of 128 KiB, in order."""
    return path.with_name(f"{path.name}.blake2b")


class HashedFile:
    """A new data file, written sequentially. ``finish`` syncs it to disk and writes its hashes."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, open_new(path)
        self._digests = bytearray()
        self._chunk, self._room = _new_hash(), CHUNK_BYTES

    def write(self, data: bytes) -> None:
        """Append ``data``. Raises OSError."""
        self._file.write(data)
        rest = memoryview(data)
        while len(rest) >= self._room:
            self._chunk.update(rest[: self._room])
            self._digests += self._chunk.digest()
            rest = rest[self._room :]
            self._chunk, self._room = _new_hash(), CHUNK_BYTES
        self._chunk.update(rest)
        self._room -= len(rest)

    def finish(self) -> bytes:
        """Close the file, write the hashes and return them. Raises OSError."""
        if self._room < CHUNK_BYTES:
            self._digests += self._chunk.digest()
        _close_durably(self._file)
        hashes = open_new(hashes_path(self._path))
        hashes.write(self._digests)
        _close_durably(hashes)
        return bytes(self._digests)

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class CheckedFile:
    """A memory-mapped data file, with a record of the chunks that were compared with their hashes."""

    def __init__(self, path: Path, content: "npt.NDArray[np.uint8]") -> None:
        """``content``: the whole file as bytes. Raises CorruptDataError if the number of hashes is wrong."""
        self._path, self._content = path, content
        self.hashes = read_hashes(path, len(content))
        self._compared = bytearray(-(-len(content) // CHUNK_BYTES))

    def check(self, start: int, stop: int) -> None:
        """Compare the chunks that hold bytes ``start`` to ``stop``, unless they were compared before.

        Raises CorruptDataError with the first chunk that differs.
        """
        for chunk in range(start // CHUNK_BYTES, -(-stop // CHUNK_BYTES)):
            if not self._compared[chunk]:
                self._compare(chunk)

    def check_share(self, rank: int, ranks: int) -> None:
        """Compare every chunk with ``number % ranks == rank``. Raises CorruptDataError."""
        for chunk in range(rank, len(self._compared), ranks):
            self._compare(chunk)

    def _compare(self, chunk: int) -> None:
        compare_chunk(self._path, self.hashes, chunk, self._content[chunk * CHUNK_BYTES :][:CHUNK_BYTES].data)
        self._compared[chunk] = 1


def _new_hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=DIGEST_BYTES)


def read_hashes(path: Path, size: int) -> bytes:
    """Return the hashes of a data file of ``size`` bytes. Raises CorruptDataError for another number of chunks."""
    chunks = -(-size // CHUNK_BYTES)
    try:
        with open_to_read(hashes_path(path)) as file:
            hashes = file.read(chunks * DIGEST_BYTES + 1)  # however large another user has made the file
    except OSError as error:
        raise CorruptDataError(hashes_path(path), str(error.strerror)) from error
    if len(hashes) != chunks * DIGEST_BYTES:
        comparison = "fewer" if len(hashes) < chunks * DIGEST_BYTES else "more"
        raise CorruptDataError(
            hashes_path(path), f"{comparison} than {chunks * DIGEST_BYTES} bytes for the {chunks} chunks of {path.name}"
        )
    return hashes


def compare_chunk(path: Path | str, hashes: bytes, chunk: int, content: bytes | memoryview) -> None:
    """Raise CorruptDataError if ``content``, the whole chunk with this number, differs from its hash."""
    digest = _new_hash()
    digest.update(content)
    if digest.digest() != hashes[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]:
        start = chunk * CHUNK_BYTES
        stop = start + len(content)
        what = f"chunk {chunk} (bytes {start} to {stop}) has changed since it was prepared"
        raise CorruptDataError(path, what, chunk=chunk, first_byte=start, last_byte=stop - 1)


def _close_durably(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
