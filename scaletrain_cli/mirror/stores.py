"""The interface of a mirror's place, a store with named files, the store that is a folder, and copies in parts."""

import contextlib
import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import FileDigest, file_digest
from scaletrain_cli.safe_files import (
    create_file,
    make_folder,
    open_new,
    open_to_append,
    open_to_read,
    replace_file,
    sync_folder,
)


class Stored(NamedTuple):
    """The size of a stored file, and in an object store its ETag."""

    size: int
    etag: str = ""


class MirrorStore(Protocol):
    """Files by name, with / between folders. Every method raises ScaletrainError or OSError if the store fails."""

    place: str

    def list(self, folder: str) -> dict[str, Stored]:
        """Return all files below a folder by name; empty if there are none."""

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if it is not there."""

    def write(self, name: str, content: bytes, *, private: bool = False) -> None:
        """Write a small file, which appears whole or not at all, and verify it. ``private``: for this user alone."""

    def create(self, name: str, content: bytes) -> bool:
        """Write a small file unless it is there; return whether this call did. Only one of several callers does."""

    def upload(self, name: str, path: Path, digest: FileDigest, throttle: "Throttle") -> None:
        """Write a file, which appears whole or not at all, and verify what is stored.

        Raises LocalFileError if the local file is not that of the digest.
        """

    def holds(self, name: str, stored: Stored, path: Path, digest: FileDigest) -> bool:
        """Return whether a file that an earlier process has stored is the local one."""

    def download(
        self, name: str, target: Path, digest: FileDigest, on_bytes: Callable[[int], None] = lambda count: None
    ) -> None:
        """Write a file of the mirror to ``target`` and verify it. Raises MirrorError if it is another one."""

    def delete(self, name: str) -> None:
        """Delete a file; nothing if it is not there."""


class FolderStore:
    """A folder with the files of a mirror."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.place = folder, str(folder)

    def list(self, folder: str) -> dict[str, Stored]:
        """Return all files below a folder by name, also drafts of writers that were killed."""
        files: dict[str, Stored] = {}
        for path in sorted((self._folder / folder).rglob("*")):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    files[path.relative_to(self._folder).as_posix()] = Stored(path.stat().st_size)
        return files

    def read(self, name: str) -> bytes | None:
        try:
            with open_to_read(self._folder / name) as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, name: str, content: bytes, *, private: bool = False) -> None:
        """Replace a small file atomically. ``private``: other users may not read it."""
        path = self._folder / name
        make_folder(path.parent)
        replace_file(path, content, private=private)
        sync_folder(path.parent)

    def create(self, name: str, content: bytes) -> bool:
        path = self._folder / name
        make_folder(path.parent)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            create_file(draft, content)
            os.link(draft, path)  # unlike a rename it fails if the name is taken
        except FileExistsError:
            return self.read(name) == content
        finally:
            draft.unlink(missing_ok=True)
        sync_folder(path.parent)
        return True

    def upload(self, name: str, path: Path, digest: FileDigest, throttle: "Throttle") -> None:
        """Copy a file, and read it again from the disk. Raises LocalFileError, MirrorError and OSError."""
        target = self._folder / name
        make_folder(target.parent)
        draft = target.with_name(f".{target.name}.draft")  # one name, so that the next upload replaces what a kill left
        try:
            with opened(path) as source, open_new(draft) as file:
                for block in hashed_blocks(source, path, digest, throttle):
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
            with open_to_read(draft) as file, contextlib.suppress(OSError):  # not what the page cache has
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if file_digest(draft) != digest:
                raise MirrorError(Reason("mirror.wrong-bytes", {"file": str(target), "writes": 1}))
            draft.rename(target)
        finally:
            draft.unlink(missing_ok=True)
        sync_folder(target.parent)

    def holds(self, name: str, stored: Stored, path: Path, digest: FileDigest) -> bool:
        return stored.size == digest.size and file_digest(self._folder / name) == digest

    def download(
        self, name: str, target: Path, digest: FileDigest, on_bytes: Callable[[int], None] = lambda count: None
    ) -> None:
        def read(start: int, stop: int) -> bytes:
            with contextlib.suppress(FileNotFoundError), open_to_read(self._folder / name) as file:
                if os.fstat(file.fileno()).st_size == digest.size:
                    return os.pread(file.fileno(), stop - start, start)
            raise MirrorError(Reason("mirror.damaged", {"file": str(self._folder / name), "reads": 1}))

        download(str(self._folder / name), target, digest, read, on_bytes)

    def delete(self, name: str) -> None:
        """Delete a file, and the folders of its name that are empty then."""
        path = self._folder / name
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty, or gone
            for folder in path.parents[: name.count("/")]:
                folder.rmdir()


BLOCK_BYTES = 1 << 20
_READ_BYTES = 8 << 20  # of a download at a time
_BURST_SECONDS = 0.25  # of bandwidth that may be used at once
_READS_OF_A_FILE = 3


class MirrorError(ScaletrainError):
    """A mirror cannot be used: what is stored is not what was sent, or it belongs to another place."""

    code = "mirror"


class LocalFileError(ScaletrainError):
    """A file of a checkpoint here is not what its manifest states, or is no longer there."""

    code = "mirror-local-file"


class Throttle:
    """Bounds the bytes per second of all threads of a process, and counts the bytes in ``sent``."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free = time.monotonic()  # when the next block may be sent
        self.sent = 0

    def take(self, count: int) -> None:
        """Wait until ``count`` more bytes may be sent."""
        with self._lock:
            now = time.monotonic()
            self._free = max(self._free, now - _BURST_SECONDS) + count / self._rate
            pause = self._free - now
            self.sent += count
        if pause > 0:
            time.sleep(pause)


def hashed_blocks(file: BinaryIO, path: Path, digest: FileDigest, throttle: Throttle) -> Iterator[bytes]:
    """Yield the blocks of an open file from its beginning. Raises LocalFileError at the end if its hash differs."""
    file.seek(0)
    hasher, size = hashlib.sha256(), 0
    while block := file.read(BLOCK_BYTES):
        hasher.update(block)
        size += len(block)
        throttle.take(len(block))
        yield block
    if (size, hasher.hexdigest()) != (digest.size, digest.sha256):
        raise LocalFileError(Reason("mirror.local-file-damaged", {"file": str(path)}))


def opened(path: Path) -> BinaryIO:
    """Open a file of a checkpoint here. Raises LocalFileError if it is not there: retention may have deleted it."""
    try:
        return open_to_read(path)
    except FileNotFoundError:
        raise LocalFileError(Reason("mirror.local-file-missing", {"file": str(path)})) from None


def download(
    name: str,
    target: Path,
    digest: FileDigest,
    read: Callable[[int, int], bytes],
    on_bytes: Callable[[int], None] = lambda count: None,
) -> None:
    """Write a file of the mirror to ``target``, which appears only with the right size and hash.

    ``read``: returns bytes ``start`` to ``stop - 1``. What an earlier call received is kept in ``NAME.part``; a file
    that is there and right is not read again. Raises MirrorError if the mirror has other bytes.
    """
    if target.is_file() and file_digest(target) == digest:
        on_bytes(digest.size)
        return
    make_folder(target.parent)
    part = target.with_name(f"{target.name}.part")
    for _ in range(_READS_OF_A_FILE):
        received = part.stat().st_size if part.is_file() else 0
        if received > digest.size:
            part.unlink()
            received = 0
        on_bytes(received)
        descriptor = open_to_append(part)
        try:
            while received < digest.size:
                block = read(received, min(digest.size, received + _READ_BYTES))
                with memoryview(block) as left:
                    while left:
                        left = left[os.write(descriptor, left) :]
                received += len(block)
                on_bytes(len(block))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if file_digest(part) == digest:
            part.rename(target)
            return
        part.unlink()
        on_bytes(-received)
    raise MirrorError(Reason("mirror.damaged", {"file": name, "reads": _READS_OF_A_FILE}))
