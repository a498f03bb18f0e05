"""Which version of this package runs, to the byte: a release's number says nothing of a checkout or of an image."""

from __future__ import annotations

import hashlib
from pathlib import Path


def code_hash() -> str:
    """SHA-256 over the source of this package: names and contents of its Python files."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
