"""The hash of what the files of a source contain, computed once and remembered while the files are unchanged."""

import contextlib
import hashlib
import json
import os
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from scaletrain_cli.data.sources.records import SourceFile, paths_of, require_unchanged
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import replace_file

# Returns a hash of what each of some local files contains, by its path.
ReadHashes = Callable[[Sequence[SourceFile]], Mapping[str, str]]

_BLOCK_BYTES = 1 << 20
# The hash of a larger file is that of the hashes of its ranges, so that many processes share the reading.
_WHOLE_BYTES = 4 << 30
_RANGE_BYTES = 1 << 30


def embedded_content(source: str) -> str:
    """Return a hash of what an embedded source contains, which depends on the interpreter's version."""
    return _combined([source, sys.version])


def known_hashes(
    source: str, files: Sequence[SourceFile], runs_root: Path, read: ReadHashes | None
) -> dict[str, str] | None:
    """Return a hash of what each local file contains, by its path; remember them below ``runs_root``.

    ``source``: the path in the spec, which names the note. ``read``: returns the hashes of files whose content is not
    remembered; if it is None, None is returned for them. Raises UsageError for a file that cannot be read, or changes
    meanwhile.
    """
    folder, name = runs_root / "datasets", _combined([os.path.abspath(source)])[:32]
    note = folder / f".content-{os.geteuid()}-{name}.json"
    known = _read_note(note)
    if not known and os.geteuid() == 0:  # as in a container, whose submitter has read the files
        notes = map(_read_note, sorted(folder.glob(f".content-*-{name}.json")))
        known = {path: digest for note in notes for path, digest in note.items()}
    local = [file for file in files if not file.etag]
    missing = [file for file in local if known.get(file.path, ("", ""))[0] != file.state]
    if missing:
        if read is None:
            return None
        hashes = read(missing)
        known = {file.path: known[file.path] for file in local if file.path in known}
        known |= {file.path: (file.state, hashes[file.path]) for file in missing}
        with contextlib.suppress(OSError):  # this user may not write to the runs root: computed again next time
            if note.parent.is_dir():
                replace_file(note, json.dumps(known))
    return {path: digest for path, (_, digest) in known.items()}


def combined_content(files: Sequence[SourceFile], hashes: Mapping[str, str]) -> str:
    """Return the hash of a source from those of its local files by path; a remote file counts by its ETag."""
    identities = []
    for file in files:
        read_as = f"{file.kind}.{file.compression}" if file.compression else file.kind
        contents = f"{file.path} {file.size} {file.etag}" if file.etag else hashes[file.path]
        identities.append(f"{read_as} {contents}")
    return _combined(identities)


def _read_note(path: Path) -> dict[str, tuple[str, str]]:
    """Return (state, hash) of files by path. A note of another user is not trusted, unless this user is root."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and os.geteuid() in (0, status.st_uid):
            return {
                name: (str(state), str(digest))
                for name, (state, digest) in json.loads(path.read_text(encoding="utf-8")).items()
            }
    return {}


class FileRange(NamedTuple):
    """Bytes of one file of those that ``file`` consists of."""

    file: SourceFile
    path: Path
    start: int
    stop: int


def ranges_of(file: SourceFile) -> list[FileRange]:
    """Return the ranges of a local file that are hashed apart; they depend on its size alone. Raises OSError."""
    ranges = []
    paths = paths_of(file)
    for path in paths:
        size = file.size if len(paths) == 1 else path.stat().st_size
        step = size if size <= _WHOLE_BYTES else _RANGE_BYTES
        starts = range(0, size, step) if size else (0,)
        ranges += [FileRange(file, path, start, min(size, start + step)) for start in starts]
    return ranges


def hash_range(given: FileRange) -> str:
    """Return the hash of the bytes of a range. Raises UsageError if they cannot be read, or the file changes."""
    digest = hashlib.blake2b(digest_size=32)
    left = given.stop - given.start
    try:
        with given.path.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), given.start, left, os.POSIX_FADV_SEQUENTIAL)
            opened.seek(given.start)
            while left and (block := opened.read(min(left, _BLOCK_BYTES))):
                digest.update(block)
                left -= len(block)
    except OSError as error:
        params = {"path": str(given.path), "error": error.strerror or str(error)}
        raise UsageError(Reason("engine.file-unreadable", params), file=str(given.path)) from error
    require_unchanged(given.file)
    return digest.hexdigest()


def hashes_from_ranges(
    files: Sequence[SourceFile], ranges: Sequence[FileRange], digests: Sequence[str]
) -> dict[str, str]:
    """Return the hash of each file by its path, from those of its ranges: of a single range it is the hash itself."""
    parts: dict[str, dict[Path, list[str]]] = {file.path: {} for file in files}
    for part, digest in zip(ranges, digests, strict=True):
        parts[part.file.path].setdefault(part.path, []).append(digest)
    return {
        name: " ".join(hashes[0] if len(hashes) == 1 else f"ranges-{_combined(hashes)}" for hashes in paths.values())
        for name, paths in parts.items()
    }


def read_hashes(files: Sequence[SourceFile], workers: int = 1) -> dict[str, str]:
    """Return the hash of each local file by its path, which threads read. Raises UsageError and OSError."""
    ranges = [part for file in files for part in ranges_of(file)]
    with ThreadPoolExecutor(max(1, workers)) as pool:  # hashing and reading release the interpreter's lock
        return hashes_from_ranges(files, ranges, list(pool.map(hash_range, ranges)))


def _combined(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()
