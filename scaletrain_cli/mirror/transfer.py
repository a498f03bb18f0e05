"""Copy files for both kinds of mirror: with bounded bandwidth, hashed while they are read, continued after a cut."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import FileDigest
from scaletrain_cli.safe_files import make_folder, open_to_append, open_to_read

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
    found, size = hashlib.sha256(), 0
    while block := file.read(BLOCK_BYTES):
        found.update(block)
        size += len(block)
        throttle.take(len(block))
        yield block
    if (size, found.hexdigest()) != (digest.size, digest.sha256):
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
    if target.is_file() and _digest_of(target) == digest:
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
        if _digest_of(part) == digest:
            part.rename(target)
            return
        part.unlink()
        on_bytes(-received)
    raise MirrorError(Reason("mirror.damaged", {"file": name, "reads": _READS_OF_A_FILE}))


def _digest_of(path: Path) -> FileDigest:
    found = hashlib.sha256()
    with open_to_read(path) as file:
        while block := file.read(BLOCK_BYTES):
            found.update(block)
        return FileDigest(file.tell(), found.hexdigest())
