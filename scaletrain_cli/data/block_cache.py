"""A cache of blocks of remote files on a node: bounded, shared by its processes, least recently used blocks go first.

The folder never has more bytes than its limit, whatever is killed: a block is written while the lock of the cache is
held, after others were removed for it. Each block is fetched once, by the process that holds the lock of its group.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import expand_home, locked, make_folder, make_private_folder, open_new, open_to_read
from scaletrain_cli.spec.sources import CacheSpec

if TYPE_CHECKING:
    from scaletrain_cli.data.sources.places import RemoteFile

# A smaller block would be mostly waiting for the store, a larger one mostly bytes of other samples.
BLOCK_BYTES = 1 << 20
_LOCKS, _TOTAL, _BLOCKS = "locks", "total", "blocks"
_LOCK_GROUPS = 256
_LOCK_SECONDS = 60.0  # a step waits no longer for another process of this user, which may be stopped
_KEPT_SHARE = 0.9  # of the limit, after removing blocks
_TOUCH_SECONDS = 5.0  # the time of the last use is this exact
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BlockCache:
    """``folder``: of this user alone, created when it is first used. ``size``: most bytes of blocks in it."""

    folder: Path
    size: int

    def read(self, name: str, start: int, stop: int, fetch: Callable[[], bytes]) -> bytes:
        """Return bytes ``start`` to ``stop - 1`` of a block; ``fetch`` returns the whole of a block that is missing.

        ``name`` is the identity of the block, with the version of its file. Raises what ``fetch`` raises, and OSError
        if the folder cannot be used.
        """
        path = self._path(name)
        with contextlib.suppress(FileNotFoundError):
            return self._read(path, start, stop)
        self.make_folders()
        group = str(int(path.name[:2], 16) % _LOCK_GROUPS)
        with locked(self.folder / _LOCKS / group, wait_seconds=_LOCK_SECONDS):  # else it is fetched twice
            with contextlib.suppress(FileNotFoundError):  # another process has fetched it meanwhile
                return self._read(path, start, stop)
            content = fetch()
            try:
                self._add(path, content)
            except OSError as error:  # a full disk: training goes on, with a request for each read
                if str(self.folder) not in _warned:
                    _warned.add(str(self.folder))
                    params = {"folder": str(self.folder), "error": error.strerror or str(error)}
                    _log.warning("%s", Reason("remote.cache-not-written", params))
        return content[start:stop]

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path(name).unlink()

    def _path(self, name: str) -> Path:
        digest = hashlib.blake2b(name.encode(), digest_size=20).hexdigest()
        return self.folder / _BLOCKS / digest[:2] / digest

    def require_usable(self, *, create: bool) -> None:
        """Raise OSError if the cache cannot be used, as far as that is certain. ``create``: creates its folders."""
        if create:
            self.make_folders()
            with locked(self.folder / _LOCKS / _TOTAL, wait_seconds=0):
                return
        if os.path.lexists(self.folder):
            make_private_folder(self.folder)
            return
        parent = next(path for path in self.folder.parents if os.path.lexists(path))
        if not parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(parent))
        if not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(parent))

    @staticmethod
    def _read(path: Path, start: int, stop: int) -> bytes:
        with open_to_read(path) as file:
            descriptor = file.fileno()
            if time.time() - os.fstat(descriptor).st_mtime > _TOUCH_SECONDS:
                os.utime(descriptor)
            return os.pread(descriptor, stop - start, start)

    def make_folders(self) -> None:
        """Create the folders of the cache unless they are there. Raises OSError."""
        if not (self.folder / _LOCKS).is_dir():
            make_folder(self.folder.parent)
            for folder in (self.folder, self.folder / _BLOCKS, self.folder / _LOCKS):
                make_private_folder(folder)

    def _add(self, path: Path, content: bytes) -> None:
        """Write a block, after removing others if necessary. Raises OSError."""
        if len(content) > self.size:
            return
        with locked(self.folder / _LOCKS / _TOTAL, wait_seconds=_LOCK_SECONDS) as alone:
            if not alone:  # a stopped process has the lock; the block is not kept
                return
            total = None  # the blocks must be counted
            with contextlib.suppress(OSError, ValueError):
                total = int((self.folder / _TOTAL).read_text())
            if total is None or total + len(content) > self.size:
                total = self._shrink(len(content))
            (self.folder / _TOTAL).unlink(missing_ok=True)  # unknown, should this process be killed now
            make_private_folder(path.parent)
            draft = path.with_name(f".{path.name}.tmp")
            try:
                _write(draft, content)
                draft.rename(path)
            except OSError:
                draft.unlink(missing_ok=True)
                raise
            draft = self.folder / f".{_TOTAL}.tmp"
            _write(draft, str(total + len(content)).encode())
            draft.rename(self.folder / _TOTAL)

    def _shrink(self, more: int) -> int:
        """Remove the blocks that were not used for longest, until ``more`` bytes fit; return the bytes that remain."""
        blocks = sorted(self._blocks())
        total = sum(size for _, size, _ in blocks)
        if total + more <= self.size:
            return total
        for _, size, path in blocks:
            if total + more <= self.size * _KEPT_SHARE:
                break
            Path(path).unlink(missing_ok=True)
            total -= size
        return total

    def _blocks(self) -> Iterator[tuple[float, int, str]]:
        """Yield (time of the last use, bytes, path) of each block; remove what a killed process was writing."""
        for group in os.scandir(self.folder / _BLOCKS):
            for entry in os.scandir(group):
                if entry.name.endswith(".tmp"):
                    os.unlink(entry.path)
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    yield status.st_mtime, status.st_size, entry.path


def _write(path: Path, content: bytes) -> None:
    """Write a file without fsync: a block that a crash of the node damages differs from its hash."""
    with open_new(path, private=True) as file:
        file.write(content)


class CachedBlocks:
    """A remote file in blocks of the cache of the node."""

    def __init__(self, file: RemoteFile, cache: BlockCache) -> None:
        self.file, self.cache = file, cache

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes ``start`` to ``stop - 1``. Raises PlaceError, UnavailableError and OSError."""
        parts = []
        while start < stop:
            block = start // BLOCK_BYTES
            end = min(stop, (block + 1) * BLOCK_BYTES)
            parts.append(self.read_block(block, start, end))
            start = end
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_block(self, block: int, start: int, stop: int) -> bytes:
        """Return bytes ``start`` to ``stop - 1`` of the file, which are in one block."""
        base = block * BLOCK_BYTES
        return self.cache.read(self._name(block), start - base, stop - base, lambda: self.fetch(block))

    def fetch(self, block: int) -> bytes:
        """Return a whole block from the store."""
        from scaletrain_cli.data.sources.places import read_range

        return read_range(self.file, block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, self.file.size))

    def forget(self, start: int, stop: int) -> None:
        """Remove the blocks of some bytes from the cache."""
        for block in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            self.cache.remove(self._name(block))

    def _name(self, block: int) -> str:
        return f"{self.file.path}\n{self.file.etag}\n{self.file.size}\n{block}"


_warned = set[str]()  # folders; a warning each is enough


def block_cache(settings: CacheSpec | None = None) -> BlockCache:
    """Return the cache of this user on this node, below ``data.cache.path`` or TMPDIR."""
    size, path = (settings or CacheSpec()).size, settings.path if settings else None
    base = expand_home(path) if path else Path(tempfile.gettempdir())
    return BlockCache(base / f"scaletrain-cache-{os.geteuid()}", size)
