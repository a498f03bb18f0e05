"""Open the files of a source as bytes, decompressed. A stream that ends too early is an error, never a short file."""

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

from scaletrain_cli.data.sources.places import RemoteFile, RemoteStream, find_file
from scaletrain_cli.data.sources.records import SourceFile
from scaletrain_cli.data.sources.stores import PlaceError, is_remote
from scaletrain_cli.extras import require
from scaletrain_cli.reasons import Reason

_BLOCK = 1 << 20


class DamagedFileError(Exception):
    """The compressed data of a file are incomplete or invalid."""

    def __init__(self, compression: str, error: str) -> None:
        self.reason = Reason("sources.damaged", {"compression": compression, "error": error})
        super().__init__(str(self.reason))


@contextmanager
def opened(file: SourceFile) -> Iterator[IO[bytes]]:
    """Open a file for buffered reading. Raises OSError, and DamagedFileError while it is read or opened."""
    try:
        with stored(file) as raw:
            if file.compression == "gz":
                with gzip.GzipFile(fileobj=raw) as stream:
                    yield cast(IO[bytes], stream)
            elif file.compression == "zst":
                with io.BufferedReader(_ZstdStream(raw), _BLOCK) as stream:
                    yield stream
            else:
                yield raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DamagedFileError("gzip", str(error)) from error


@contextmanager
def stored(file: SourceFile) -> Iterator[IO[bytes]]:
    """Open a file as it is stored, here or remote: seekable, and not decompressed.

    Raises OSError; for a remote file also PlaceError and UnavailableError.
    """
    if is_remote(file.path):
        with io.BufferedReader(RemoteStream(RemoteFile(file.path, file.size, file.etag)), _BLOCK) as remote:
            yield remote
    else:
        with open(file.path, "rb") as local:
            yield local


def beside(file: SourceFile, suffix: str) -> SourceFile:
    """Return the file that differs from ``file`` in its suffix alone, such as ``.idx``. Raises as stored() does."""
    path = f"{os.path.splitext(file.path)[0]}{suffix}"
    if is_remote(path):
        remote = find_file(path)
        if file.etag and remote.etag not in file.etag.split():
            raise PlaceError(Reason("remote.changed", {"path": path}), file=path)
        return SourceFile(path, remote.size, file.kind, etag=remote.etag)
    return SourceFile(path, os.stat(path).st_size, file.kind)


class _ZstdStream(io.RawIOBase):
    """The decompressed bytes of all frames of a zstd file (RFC 8878). Unlike the library's reader it misses no end."""

    def __init__(self, raw: IO[bytes]) -> None:
        zstandard = require("zstandard", "data")
        self._raw, self._error = raw, zstandard.ZstdError
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame: Any = None
        self._rest = b""  # compressed bytes that are not yet decompressed
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._rest and not (given := self._raw.read(_BLOCK)):
                if self._frame is not None:
                    raise DamagedFileError("zstd", "the last frame is incomplete")
                return 0
            elif not self._rest:
                self._rest = given
            self._frame = self._frame or self._decompressor.decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(self._rest))
            except self._error as error:
                raise DamagedFileError("zstd", str(error)) from error
            self._rest = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count
