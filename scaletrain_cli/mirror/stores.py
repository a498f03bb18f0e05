"""The interface of a mirror's place: a store with named files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from scaletrain_cli.mirror.transfer import Throttle
from scaletrain_cli.rundir.checkpoints import FileDigest


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

    def upload(self, name: str, path: Path, digest: FileDigest, throttle: Throttle) -> None:
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
