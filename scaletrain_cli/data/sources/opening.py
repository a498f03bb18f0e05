"""Open the files of a source as bytes, decompressed. A stream that ends too early is an error, never a short file."""

from __future__ import annotations

import gzip
import importlib
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

from scaletrain_cli.data.sources.records import SourceFile
from scaletrain_cli.errors import UsageError
from scaletrain_cli.extras import install_command
from scaletrain_cli.reasons import Reason

_BLOCK = 1 << 20


class DamagedFileError(Exception):
    """The compressed data of a file are incomplete or invalid."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


@contextmanager
def opened(file: SourceFile) -> Iterator[IO[bytes]]:
    """Open a file for buffered reading. Raises OSError, and DamagedFileError while it is read or opened."""
    try:
        with open(file.path, "rb") as raw:
            if file.compression == "gz":
                with gzip.GzipFile(fileobj=raw) as stream:
                    yield cast(IO[bytes], stream)
            elif file.compression == "zst":
                with io.BufferedReader(_ZstdStream(raw), _BLOCK) as stream:
                    yield stream
            else:
                yield raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DamagedFileError(Reason("sources.damaged", {"compression": "gzip", "error": str(error)})) from error


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
                    raise self._damaged("the last frame is incomplete")
                return 0
            elif not self._rest:
                self._rest = given
            self._decompress()
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _decompress(self) -> None:
        self._frame = self._frame or self._decompressor.decompressobj()
        try:
            self._ready = memoryview(self._frame.decompress(self._rest))
        except self._error as error:
            raise self._damaged(str(error)) from error
        self._rest = self._frame.unused_data
        if self._frame.eof:
            self._frame = None

    @staticmethod
    def _damaged(error: str) -> DamagedFileError:
        return DamagedFileError(Reason("sources.damaged", {"compression": "zstd", "error": error}))


def require(module: str, extra: str) -> Any:
    """Return a module of an optional extra. Raises UsageError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            Reason("sources.library-missing", {"module": module, "command": install_command(extra)})
        ) from error
