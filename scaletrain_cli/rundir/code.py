"""The user's code in a run directory: the record of a snapshot in run.json, and its files.

``code/<name>.tar.gz`` is the tree, ``.sha256`` one line per file as sha256sum writes it, ``<name>-<commit>.patch`` the
uncommitted changes. The name is the first digits of the hash over those lines: a run that is resumed with newer code
keeps both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.rundir.paths import RunDir

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class CodeRecord:
    """The record of a snapshot in run.json. ``sha256`` is of the text of listing(); ``uncommitted`` counts files."""

    commit: str
    uncommitted: int
    sha256: str
    files: int
    bytes: int

    @property
    def name(self) -> str:
        """Return the name of its files without suffixes."""
        return self.sha256[:12]

    @property
    def shown(self) -> str:
        """Return the commit and the number of uncommitted files as short text."""
        beside = f" and {self.uncommitted} uncommitted" if self.uncommitted else ""
        return f"{self.name} (commit {self.commit[:10]}{beside}, {self.files} files, {self.bytes:,} bytes)"


def code_file(run: RunDir, code: CodeRecord, suffix: str) -> Path:
    """Return the path of the ``tar.gz``, ``sha256`` or ``patch`` of a snapshot in this run directory."""
    name = f"{code.name}-{code.commit[:12]}" if suffix == "patch" else code.name  # the same files, of another commit
    return run.path / "code" / f"{name}.{suffix}"


def listing(hashes: Mapping[str, str]) -> str:
    """Return the SHA-256 by path as text for ``sha256sum --check``, sorted. Paths contain no line breaks."""
    return "".join(f"{hashes[path]}  {path}\n" for path in sorted(hashes))


def paths_in(text: str) -> frozenset[str]:
    """Return the paths in a listing."""
    return frozenset(line.partition("  ")[2] for line in text.split("\n") if line)


def hash_of(text: str) -> str:
    """Return the hash of a listing, which names the snapshot."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def differences(folder: Path, text: str) -> list[str]:
    """Return the files of the listing that are missing below ``folder`` or differ, as text."""
    found = []
    for line in filter(None, text.split("\n")):
        expected, _, path = line.partition("  ")
        try:
            differs = file_hash(folder / path) != expected
        except OSError:
            found.append(f"{path} is missing")
        else:
            found += [f"{path} differs"] * differs
    return found


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file's bytes. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
