"""Remote files: list them, read ranges of them, read them as a stream, and write them.

Every request is repeated until a deadline if it fails in a way that passes: no connection, a reset, a body that is too
short, a busy server. An object that is replaced while it is read is an error: its ETag is compared with each range.
"""

import io
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from scaletrain_cli.data.sources.stores import Place, PlaceError, is_remote, parse_place, store_of
from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.extras import require
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.secret_text import hide_values
from scaletrain_cli.spec.hub_files import path_matches

__all__ = ["PlaceError", "RemoteFile", "RemoteStream", "UnavailableError", "is_remote", "list_files", "read_range"]

# Seconds after which a request is not repeated any more.
TIMEOUT = "SCALETRAIN_REMOTE_TIMEOUT"
_TIMEOUT_SECONDS = 300.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 10.0
_SMALLEST_READ, _LARGEST_READ = 1 << 18, 1 << 23
_WILDCARDS = re.compile(r"[*?\[]")
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_BUSY = (408, 425, 429)  # besides 5xx
_METADATA_SERVERS = ("169.254.169.254", "metadata.google.internal", "169.254.170.2")

Result = TypeVar("Result")


class UnavailableError(ScaletrainError):
    """A store did not answer until the deadline."""

    code = "remote-unavailable"


@contextmanager
def naming_key(key: str) -> Iterator[None]:
    """Name the key of the spec in the errors of its remote source."""
    try:
        yield
    except ScaletrainError as error:
        error.explain(Reason("remote.of-key", {"key": key, "cause": error.reason or recorded(error.message)}))
        raise


class _ShortBodyError(Exception):
    """Fewer bytes arrived than asked for."""


@dataclass(frozen=True)
class RemoteFile:
    """An object of a store. ``etag`` changes with its content: its ETag, else the time of the last change."""

    path: str
    size: int
    etag: str


def timeout_seconds() -> float:
    """Return the seconds after which a request is not repeated any more."""
    try:
        return max(0.0, float(os.environ.get(TIMEOUT, "")))
    except ValueError:
        return _TIMEOUT_SECONDS


def list_files(path: str, seconds: float | None = None) -> tuple[RemoteFile, ...]:
    """Return the files that a path names, in the order of their keys: an object, a folder, or a glob (``*``, ``**``).

    ``seconds``: None for the deadline of the environment. Raises PlaceError, also if there are none, and
    UnavailableError.
    """
    place = parse_place(path)
    wildcard = _WILDCARDS.search(place.key)
    if place.scheme in ("http", "https"):
        if wildcard or place.key.endswith("/"):
            raise PlaceError(Reason("remote.no-listing", {"path": path}))
        return (find_file(path, seconds),)
    is_object = wildcard is None and place.key and not place.key.endswith("/")
    if is_object and (file := unless_missing(lambda: find_file(path, seconds))) is not None:
        return (file,)
    folder = place.key[: place.key.rfind("/", 0, wildcard.start()) + 1] if wildcard else place.key
    pattern = tuple(place.key.split("/")) if wildcard else ()
    deep = not wildcard or "/" in place.key[wildcard.start() :] or "**" in pattern
    files = [
        RemoteFile(place.sibling(entry["path"]), entry["size"], _identity(entry))
        for entry in retried(lambda: list(_listed(place, folder.rstrip("/"), deep)), place, path, seconds)
        if not pattern or path_matches(tuple(entry["path"].split("/")), pattern)
    ]
    if not files:
        raise PlaceError(Reason("remote.nothing-found" if wildcard else "remote.not-found", {"path": path}))
    return tuple(sorted(files, key=lambda file: file.path))


def _listed(place: Place, folder: str, deep: bool) -> Iterator[Any]:
    obstore, store = require("obstore", "remote"), store_of(place)
    if deep:
        for chunk in obstore.list(store, folder or None):
            yield from chunk
    else:
        yield from obstore.list_with_delimiter(store, folder or None)["objects"]


def find_file(path: str, seconds: float | None = None) -> RemoteFile:
    """Return one object with its size and ETag. Raises PlaceError and UnavailableError."""
    place = parse_place(path)
    metadata = retried(lambda: require("obstore", "remote").head(store_of(place), place.key), place, path, seconds)
    return RemoteFile(path, metadata["size"], _identity(metadata))


def unless_missing(request: Callable[[], Result]) -> Result | None:
    """Return what a request returns; None if the store has no object or folder of that name."""
    try:
        return request()
    except PlaceError as error:
        if error.code_of_reason == "remote.not-found":
            return None
        raise


def _identity(metadata: Any) -> str:
    return str(metadata["e_tag"] or metadata["last_modified"].isoformat())


def read_range(file: RemoteFile, start: int, stop: int, seconds: float | None = None) -> bytes:
    """Return the bytes from ``start`` to ``stop - 1``, which must exist.

    Raises PlaceError, also if the object was replaced since it was listed, and UnavailableError.
    """
    if start >= stop:
        return b""
    place = parse_place(file.path)

    def read() -> bytes:
        options: dict[str, Any] = {"range": (start, stop)}
        if file.etag.startswith('"'):  # strong; others cannot be asked for, only compared
            options["if_match"] = file.etag
        result = require("obstore", "remote").get(store_of(place), place.key, options=options)
        if (result.meta["size"], _identity(result.meta)) != (file.size, file.etag):
            raise PlaceError(Reason("remote.changed", {"path": file.path}), file=file.path)
        content = bytes(result.bytes())
        if len(content) != stop - start:
            raise _ShortBodyError(f"{len(content)} bytes arrived of {stop - start}")
        return content

    return retried(read, place, file.path, seconds)


def read_all(path: str, seconds: float | None = None) -> bytes:
    """Return the content of a small object. Raises PlaceError and UnavailableError."""
    file = find_file(path, seconds)
    return read_range(file, 0, file.size, seconds)


def write_file(path: str, content: Path | bytes) -> None:
    """Write an object, which appears whole or not at all. Raises PlaceError, UnavailableError and OSError."""
    place = parse_place(path)
    if place.scheme in ("http", "https"):
        raise PlaceError(Reason("remote.not-writable", {"path": path}))
    size = len(content) if isinstance(content, bytes) else content.stat().st_size

    def write() -> None:
        obstore = require("obstore", "remote")
        if isinstance(content, bytes):
            obstore.put(store_of(place), place.key, content)
            return
        with content.open("rb") as file:
            obstore.put(store_of(place), place.key, file)

    retried(write, place, path, None)
    if (stored_bytes := find_file(path).size) != size:
        raise PlaceError(Reason("remote.size-differs", {"path": path, "bytes": stored_bytes, "expected": size}))


def retried(action: Callable[[], Result], place: Place, path: str, seconds: float | None) -> Result:
    """Return what ``action`` returns; repeat it until a deadline while its fault is one that passes.

    ``seconds``: None for the deadline of the environment. Raises PlaceError and UnavailableError.
    """
    exceptions = require("obstore.exceptions", "remote")
    limit = timeout_seconds() if seconds is None else min(seconds, timeout_seconds())
    end, pause, tries = time.monotonic() + limit, _FIRST_PAUSE_SECONDS, 0
    while True:
        tries += 1
        try:
            return action()
        except (exceptions.BaseError, FileNotFoundError, TimeoutError, ValueError, _ShortBodyError) as error:
            if (reason := _final(error, place, path)) is not None:
                raise PlaceError(reason, file=path) from None
            problem = _fault(error)
        if time.monotonic() + pause > end:
            params = {"path": path, "error": problem, "seconds": limit, "tries": tries}
            raise UnavailableError(Reason("remote.unavailable", params), file=path)
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _final(error: Exception, place: Place, path: str) -> Reason | None:
    """Return why a request can never succeed; None if it may when it is repeated."""
    text, (status, code) = str(error), _answer(error)
    at = {"path": path}
    if isinstance(error, _ShortBodyError):
        return None
    if any(server in text for server in _METADATA_SERVERS):
        return Reason("remote.no-credentials", {"bucket": f"{place.scheme}://{place.bucket}"})
    if status == 412 or type(error).__name__ == "PreconditionError":
        return Reason("remote.changed", at)
    if code == "NoSuchBucket":
        return Reason("remote.no-bucket", at | {"bucket": place.bucket})
    if status in (401, 403):
        return Reason("remote.denied", at | {"status": status, "code": f", {code}" if code else ""})
    if status in (404, 410) or isinstance(error, FileNotFoundError):
        return Reason("remote.not-found", at)
    if type(error).__name__ == "NotSupportedError":
        return Reason("remote.no-ranges", at)
    if status is not None and 300 <= status < 500 and status not in _BUSY:
        return Reason("remote.refused", at | {"status": status, "code": f", {code}" if code else ""})
    return None


def _fault(error: Exception) -> str:
    """Return one line on a fault, without the settings of the store that the library adds."""
    status, code = _answer(error)
    if status is not None:
        return f"HTTP {status}{f', {code}' if code else ''}"
    return hide_values(re.sub(r"^.* - ", "", str(error).partition("\n")[0]), ())[:200]


def _answer(error: Exception) -> tuple[int | None, str]:
    """Return the status and the code of a store's answer in the text of an error, as far as it has them."""
    status, code = _STATUS.search(str(error)), _CODE.search(str(error))
    return int(status[1]) if status else None, code[1] if code else ""


class SeekableFile(io.RawIOBase):
    """The base of binary files of ``size`` bytes that are read from any place. ``place``: of the next byte."""

    def __init__(self, size: int) -> None:
        self.size, self.place = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: self.size}[whence]
        self.place = max(0, base + offset)
        return self.place


class RemoteStream(SeekableFile):
    """A remote file as a seekable binary file. Reads ahead, more with every read that follows the one before."""

    def __init__(self, file: RemoteFile) -> None:
        super().__init__(file.size)
        self._file = file
        self._ready, self._start = b"", 0  # bytes that were read, and the place of the first one
        self._ahead = _SMALLEST_READ

    @property
    def name(self) -> str:
        return self._file.path

    def readinto(self, buffer: Any) -> int:
        """Read at most as many bytes as the buffer has. Raises PlaceError and UnavailableError."""
        if not (wanted := min(len(buffer), max(0, self.size - self.place))):
            return 0
        if not self._start <= self.place < self._start + len(self._ready):
            follows = self.place == self._start + len(self._ready)
            self._ahead = min(2 * self._ahead, _LARGEST_READ) if follows and self._ready else _SMALLEST_READ
            stop = min(self.size, self.place + max(wanted, self._ahead))
            self._ready, self._start = read_range(self._file, self.place, stop), self.place
        first = self.place - self._start
        part = self._ready[first : first + wanted]
        buffer[: len(part)] = part
        self.place += len(part)
        return len(part)
