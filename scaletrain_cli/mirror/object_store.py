"""A mirror in an object store, by obstore: s3://, gs:// and az://; and the opening of a mirror of any kind.

An upload is verified by what the store states. The ETag of S3 is the MD5 of an object, or of the MD5s of its parts,
unless its encryption hides it; where it is another one, and in other stores, the object is read again and its SHA-256
compared. Parts that the network lost are sent again; an object appears whole or not at all.
"""

import contextlib
import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scaletrain_cli.data.sources.places import RemoteFile, find_file, list_files, read_range, retried, unless_missing
from scaletrain_cli.data.sources.stores import Place, PlaceError, parse_place, store_of
from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.extras import require
from scaletrain_cli.mirror.stores import (
    FolderStore,
    MirrorError,
    MirrorStore,
    Stored,
    Throttle,
    download,
    hashed_blocks,
    opened,
)
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import FileDigest
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec.mirror import is_in_store

_PART_BYTES, _MOST_PARTS = 8 << 20, 9_000  # S3 takes 10,000 parts
_PARTS_AT_ONCE = 4
_WRITES_OF_A_FILE = 3
_READ_BYTES = 8 << 20


class ObjectStore:
    """A folder of an object store. ``seconds``: after which a request is not repeated; None: of the environment."""

    def __init__(self, place: str, seconds: float | None = None) -> None:
        self.place, self._seconds = place.rstrip("/"), seconds

    def list(self, folder: str) -> dict[str, Stored]:
        """Return all files below a folder by name. Raises PlaceError and UnavailableError."""
        files = unless_missing(lambda: list_files(f"{self.place}/{folder}/", self._seconds)) or ()
        return {file.path.removeprefix(f"{self.place}/"): Stored(file.size, file.etag) for file in files}

    def read(self, name: str) -> bytes | None:
        place = self._of(name)

        def get() -> bytes:
            result = require("obstore", "remote").get(store_of(place), place.key)
            content = bytes(result.bytes())
            if len(content) != result.meta["size"]:
                raise TimeoutError(f"{len(content)} bytes arrived of {result.meta['size']}")
            return content

        return unless_missing(lambda: retried(get, place, self._path(name), self._seconds))

    def write(self, name: str, content: bytes, *, private: bool = False) -> None:
        """Write a small file; the bucket decides who may read it. Raises MirrorError if other bytes are stored."""
        place, expected = self._of(name), hashlib.md5(content, usedforsecurity=False).hexdigest()

        def put() -> str:
            return str(require("obstore", "remote").put(store_of(place), place.key, content)["e_tag"]).strip('"')

        for _ in range(_WRITES_OF_A_FILE):
            if retried(put, place, self._path(name), self._seconds) == expected or self.read(name) == content:
                return
        raise self._wrong(name)

    def create(self, name: str, content: bytes) -> bool:
        place = self._of(name)
        exceptions = require("obstore.exceptions", "remote")

        def put() -> bool:
            try:
                require("obstore", "remote").put(store_of(place), place.key, content, mode="create")
            except exceptions.AlreadyExistsError:
                return False
            return True

        # After a lost answer, the file that is there may be the one that was sent.
        return retried(put, place, self._path(name), self._seconds) or self.read(name) == content

    def upload(self, name: str, path: Path, digest: FileDigest, throttle: Throttle) -> None:
        """Write a file and verify what is stored. Raises LocalFileError, MirrorError and errors of the store."""
        place, part_bytes = self._of(name), _part_bytes(digest.size)
        with opened(path) as file:

            def put() -> str:
                md5s: list[bytes] = []
                blocks = _with_md5(hashed_blocks(file, path, digest, throttle), part_bytes, md5s)
                content: Any = b"".join(blocks) if digest.size <= part_bytes else blocks
                stored = require("obstore", "remote").put(
                    store_of(place, repeats_parts=True),
                    place.key,
                    content,
                    use_multipart=digest.size > part_bytes,
                    chunk_size=part_bytes,
                    max_concurrency=_PARTS_AT_ONCE,
                )
                return "" if str(stored["e_tag"]).strip('"') == _etag(md5s, digest.size > part_bytes) else "unknown"

            for _ in range(_WRITES_OF_A_FILE):
                differs = retried(put, place, self._path(name), self._seconds)
                if not differs or self._has(name, digest):
                    return
        self.delete(name)
        raise self._wrong(name)

    def holds(self, name: str, stored: Stored, path: Path, digest: FileDigest) -> bool:
        if stored.size != digest.size:
            return False
        part_bytes, md5s = _part_bytes(digest.size), list[bytes]()
        with opened(path) as file:
            for _ in _with_md5(hashed_blocks(file, path, digest, Throttle(math.inf)), part_bytes, md5s):
                pass
        return stored.etag.strip('"') == _etag(md5s, digest.size > part_bytes) or self._has(name, digest)

    def download(self, name: str, target: Path, digest: FileDigest, on_bytes: Any = lambda count: None) -> None:
        file: RemoteFile | None = None

        def read(start: int, stop: int) -> bytes:
            nonlocal file
            try:
                file = file or find_file(self._path(name), self._seconds)
                if file.size == digest.size:
                    return read_range(file, start, stop, self._seconds)
            except PlaceError as error:
                if error.code_of_reason not in ("remote.not-found", "remote.changed"):
                    raise
            raise MirrorError(Reason("mirror.damaged", {"file": self._path(name), "reads": 1}))

        download(self._path(name), target, digest, read, on_bytes)

    def delete(self, name: str) -> None:
        place = self._of(name)

        def remove() -> None:
            try:
                require("obstore", "remote").delete(store_of(place), place.key)
            except FileNotFoundError:
                return

        retried(remove, place, self._path(name), self._seconds)

    def _has(self, name: str, digest: FileDigest) -> bool:
        """Read a stored file and return whether it has this size and hash."""
        file, hasher = find_file(self._path(name), self._seconds), hashlib.sha256()
        if file.size != digest.size:
            return False
        for start in range(0, file.size, _READ_BYTES):
            hasher.update(read_range(file, start, min(file.size, start + _READ_BYTES), self._seconds))
        return hasher.hexdigest() == digest.sha256

    def _path(self, name: str) -> str:
        return f"{self.place}/{name}"

    def _of(self, name: str) -> Place:
        return parse_place(self._path(name))

    def _wrong(self, name: str) -> ScaletrainError:
        return MirrorError(Reason("mirror.wrong-bytes", {"file": self._path(name), "writes": _WRITES_OF_A_FILE}))


def _part_bytes(size: int) -> int:
    """Return the bytes of each part of an upload, which depend on the size alone."""
    return max(_PART_BYTES, math.ceil(size / _MOST_PARTS / _PART_BYTES) * _PART_BYTES)


def _with_md5(blocks: Iterator[bytes], part_bytes: int, md5s: list[bytes]) -> Iterator[bytes]:
    """Yield the blocks, and append the MD5 of each part. Parts are whole numbers of blocks, but for the last one."""
    part, size = hashlib.md5(usedforsecurity=False), 0
    for block in blocks:
        part.update(block)
        size += len(block)
        if size == part_bytes:
            md5s.append(part.digest())
            part, size = hashlib.md5(usedforsecurity=False), 0
        yield block
    if size or not md5s:
        md5s.append(part.digest())


def _etag(md5s: list[bytes], in_parts: bool) -> str:
    """Return the ETag of S3 for an object with these MD5s of its parts."""
    if not in_parts:
        return md5s[0].hex()
    return f"{hashlib.md5(b''.join(md5s), usedforsecurity=False).hexdigest()}-{len(md5s)}"


# Variables of a run that a store reads, such as its endpoint.
_OF_STORES = ("AWS_", "GOOGLE_", "AZURE_", "SCALETRAIN_ALLOW_HTTP")


def open_store(place: str, run_id: str, seconds: float | None = None) -> MirrorStore:
    """Return the store of a run's mirror. Sends no request.

    ``seconds``: after which a request to an object store is not repeated.
    """
    if is_in_store(place):
        return ObjectStore(f"{place.rstrip('/')}/{run_id}", seconds)
    return FolderStore(expand_home(place) / run_id)


@contextlib.contextmanager
def store_variables(env: Mapping[str, str]) -> Iterator[None]:
    """Set the variables of stores in the ``env`` of a run in this process; at the end, forget them and the stores."""
    from scaletrain_cli.data.sources.stores import forget_stores

    given = {name: value for name, value in env.items() if name.startswith(_OF_STORES)}
    before = {name: os.environ.get(name) for name in given}
    forget_stores()
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        forget_stores()
