"""The hash of what the files of a source contain, computed once and remembered while the files are unchanged."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scaletrain_cli.data.sources.local_files import paths_of, require_unchanged
from scaletrain_cli.data.sources.records import SourceFile
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import replace_file

_BLOCK_BYTES = 1 << 20
# The name of a format in the identity of a corpus for datasets before v4, where it was called otherwise.
_EARLIER_NAMES = {"code": "py"}


def embedded_content(source: str) -> str:
    """Return a hash of what an embedded source contains, which depends on the interpreter's version."""
    return _combined([source, sys.version])


def known_content(source: str, files: Sequence[SourceFile], runs_root: Path) -> str:
    """Return the hash of rows for fine-tuning, whose datasets are named as before v4; see known_hashes()."""
    return earlier_content(files, known_hashes(source, files, runs_root) or {})


def known_hashes(
    source: str, files: Sequence[SourceFile], runs_root: Path, workers: int = 1, *, may_read: bool = True
) -> dict[str, str] | None:
    """Return a hash of what each local file contains, by its path; remember them below ``runs_root``.

    ``source``: the path in the spec, which names the note. ``may_read``: read files whose content is not remembered;
    otherwise None is returned for them. Raises UsageError for a file that cannot be read, or changes meanwhile.
    """
    folder, name = runs_root / "datasets", _combined([os.path.abspath(source)])[:32]
    note = folder / f".content-{os.geteuid()}-{name}.json"
    known = _read_note(note)
    if not known and os.geteuid() == 0:  # as in a container, whose submitter has read the files
        notes = map(_read_note, sorted(folder.glob(f".content-*-{name}.json")))
        known = {path: found for each in notes for path, found in each.items()}
    local = [file for file in files if not file.etag]
    missing = [file for file in local if known.get(file.path, ("", ""))[0] != file.state]
    if missing:
        if not may_read:
            return None
        with ThreadPoolExecutor(max(1, workers)) as pool:  # hashing and reading release the interpreter's lock
            hashes = list(pool.map(_hash_of, missing))
        known = {file.path: known[file.path] for file in local if file.path in known}
        known |= {file.path: (file.state, digest) for file, digest in zip(missing, hashes, strict=True)}
        with contextlib.suppress(OSError):  # this user may not write to the runs root: computed again next time
            if note.parent.is_dir():
                replace_file(note, json.dumps(known))
    return {path: digest for path, (_, digest) in known.items()}


def combined_content(files: Sequence[SourceFile], hashes: Mapping[str, str]) -> str:
    """Return the hash of a source from those of its local files by path; a remote file counts by its ETag."""
    return _combined([_identity(file, hashes) for file in files])


def earlier_content(files: Sequence[SourceFile], hashes: Mapping[str, str]) -> str:
    """Return the hash of local files that is in the names of datasets before v4; it does not have the compression."""
    return _combined([f"{_EARLIER_NAMES.get(file.kind, file.kind)} {hashes[file.path]}" for file in files])


def _identity(file: SourceFile, hashes: Mapping[str, str]) -> str:
    """Return all that the documents of a file depend on: how it is read, and what it contains."""
    read_as = f"{file.kind}.{file.compression}" if file.compression else file.kind
    return f"{read_as} {file.path} {file.size} {file.etag}" if file.etag else f"{read_as} {hashes[file.path]}"


def _read_note(path: Path) -> dict[str, tuple[str, str]]:
    """Return (state, hash) of files by path. A note of another user is not trusted, unless this user is root."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        found = path.lstat()
        if stat.S_ISREG(found.st_mode) and os.geteuid() in (0, found.st_uid):
            return {
                name: (str(state), str(digest))
                for name, (state, digest) in json.loads(path.read_text(encoding="utf-8")).items()
            }
    return {}


def _hash_of(file: SourceFile) -> str:
    """Return the hash of a local file. Raises UsageError."""
    found = []
    for path in paths_of(file):
        digest = hashlib.blake2b(digest_size=32)
        try:
            with path.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
                while block := opened.read(_BLOCK_BYTES):
                    digest.update(block)
        except OSError as error:
            params = {"path": str(path), "error": error.strerror or str(error)}
            raise UsageError(Reason("engine.file-unreadable", params), file=str(path)) from error
        found.append(digest.hexdigest())
    require_unchanged(file)
    return " ".join(found)


def _combined(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()
