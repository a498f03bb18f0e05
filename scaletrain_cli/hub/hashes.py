"""Compare a file with the hash that the hub states: SHA-256 for large files (LFS), git's hash for all others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from scaletrain_cli.hub.cache import HubFile

_CHUNK_BYTES = 1 << 22


def differing_hash(path: Path, file: HubFile, on_bytes: Callable[[int], None] = lambda count: None) -> str | None:
    """Return the name of the hash in which the content differs from what the hub states; None if it agrees.

    ``on_bytes`` is called with the number of bytes read, so that a long check shows progress. Raises OSError.
    """
    if file.sha256 is not None:
        return None if _hex(hashlib.sha256(), path, on_bytes) == file.sha256.lower() else "SHA-256"
    if file.blob_id is not None and len(file.blob_id) == 40:
        digest = hashlib.sha1(usedforsecurity=False)  # git's, of a header and the content
        digest.update(b"blob %d\0" % path.stat().st_size)
        return None if _hex(digest, path, on_bytes) == file.blob_id.lower() else "git hash"
    return None


def _hex(digest: hashlib._Hash, path: Path, on_bytes: Callable[[int], None]) -> str:
    with path.open("rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
            on_bytes(len(chunk))
    return digest.hexdigest()
