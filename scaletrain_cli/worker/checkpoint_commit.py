"""The commit protocol of checkpoints, independent of their contents: write, hash, fsync, manifest, rename.

An attempt commits, marks and deletes by renames out of and into its own ``attempt-N.tmp`` folder. The next attempt
removes that folder, so that a superseded attempt, for example on a disconnected node, can no longer change anything.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from scaletrain_cli.errors import DoNotRequeueError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import (
    MANIFEST,
    Checkpoint,
    Defect,
    FileDigest,
    checkpoint_path,
    committed_folders,
    file_digest,
    manifest_hash,
    read_checkpoint,
)
from scaletrain_cli.rundir.documents import entries
from scaletrain_cli.safe_files import make_folder, open_new, open_to_read, replace_file, sync_folder

_ATTEMPT = re.compile(r"attempt-(\d{4,})\.tmp")
_REMOVED, _REPLACED = ".removed", ".replaced"
_REMOVED_ATTEMPT = re.compile(r"attempt-\d{4,}\.\d+\.removed")


class HashingWriter:
    """A binary file that hashes what is written to it; ``close`` makes the bytes durable and returns the digest."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = open_new(path)
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes | memoryview) -> int:
        """Append all of ``data`` and return its size. Raises OSError."""
        self._hash.update(data)
        written = self._file.write(data)
        self._size += written
        return written

    def flush(self) -> None:
        """Flush Python's buffer, as callers of a file object expect; ``close`` makes the bytes durable."""
        self._file.flush()

    def close(self) -> FileDigest:
        """Flush everything to disk (fsync) and return the digest. Raises OSError."""
        with self._file:  # closed also if it cannot be written
            self._file.flush()
            os.fsync(self._file.fileno())
        return FileDigest(self._size, self._hash.hexdigest())


class SupersededAttemptError(DoNotRequeueError):
    """A later attempt has begun: this one must no longer change the checkpoints."""


def open_attempt(folder: Path, attempt: int) -> None:
    """Make ``attempt`` the only one that may write checkpoints, and remove uncommitted files of earlier ones.

    Raises SupersededAttemptError if a later attempt has begun, and OSError.
    """
    make_folder(folder)
    make_folder(_own_folder(folder, attempt))
    others = {int(match[1]): entry for entry in entries(folder) if (match := _ATTEMPT.fullmatch(entry.name))}
    if max(others) > attempt:
        close_attempt(folder, attempt)
        raise SupersededAttemptError(Reason("engine.later-attempt", {"attempt": attempt, "later": max(others)}))
    for number in others:
        if number < attempt:
            close_attempt(folder, number)
    for entry in entries(folder):
        if _REMOVED_ATTEMPT.fullmatch(entry.name):  # left by an attempt that was killed during a removal
            shutil.rmtree(entry, ignore_errors=True)


def newest_attempt(folder: Path) -> int:
    """Return the number of the newest attempt that wrote, or could write, checkpoints to the folder; 0 for none."""
    matches = (_ATTEMPT.fullmatch(entry.name) for entry in entries(folder)) if folder.is_dir() else ()
    return max((int(match[1]) for match in matches if match), default=0)


def close_attempt(folder: Path, attempt: int) -> None:
    """Remove an attempt's folder with its uncommitted files; a process that still writes there gets errors."""
    aside = folder / f"attempt-{attempt:04d}.{os.getpid()}{_REMOVED}"
    with contextlib.suppress(FileNotFoundError):
        _own_folder(folder, attempt).rename(aside)
        for moved in aside.glob(f"*{_REPLACED}"):  # the attempt was killed between the two renames of a commit
            with contextlib.suppress(OSError):  # ENOTEMPTY: its replacement was committed
                moved.rename(folder / moved.name.removesuffix(_REPLACED))
        shutil.rmtree(aside, ignore_errors=True)


def staging_path(folder: Path, attempt: int, step: int) -> Path:
    """Return the folder in which an attempt writes the checkpoint of ``step`` before it is committed."""
    return _own_folder(folder, attempt) / f"step-{step:08d}"


def stage_checkpoint(folder: Path, attempt: int, step: int) -> Path:
    """Create and return the staging folder, on any rank. Raises SupersededAttemptError once a later attempt began."""
    staging = staging_path(folder, attempt, step)
    with _fenced(folder, attempt):
        make_folder(staging, parents=False)  # without parents: fails once a later attempt has removed the folder
    return staging


def scratch_folder(folder: Path, attempt: int) -> Path:
    """Create and return an attempt's folder for files of a library; ``adopt_folder`` makes a checkpoint of one in it.

    The next attempt removes it. Raises SupersededAttemptError once a later attempt began.
    """
    scratch = _own_folder(folder, attempt) / "scratch"
    with _fenced(folder, attempt):
        make_folder(scratch, parents=False)
    return scratch


def adopt_folder(folder: Path, attempt: int, step: int, source: Path) -> Path:
    """Rename ``source``, a folder on the same file system, to the staging folder of ``step``, and return that."""
    staging = staging_path(folder, attempt, step)
    with _fenced(folder, attempt):
        shutil.rmtree(staging, ignore_errors=True)
        source.rename(staging)
    return staging


def digest_file(path: Path) -> FileDigest:
    """Make a file that a library wrote durable (fsync), and return its size and hash. Raises OSError."""
    with open_to_read(path) as file:
        os.fsync(file.fileno())
    return file_digest(path)


def commit_checkpoint(
    folder: Path, step: int, files: Mapping[str, FileDigest], *, world_size: int, clean: bool, attempt: int
) -> Path:
    """Turn the staged files into a checkpoint, and return its folder. Call on one rank, after all files are durable.

    ``files`` maps each name, relative to the staging folder, to its digest. Raises SupersededAttemptError and OSError;
    nothing is committed then.
    """
    staging, final = staging_path(folder, attempt, step), checkpoint_path(folder, step)
    with _fenced(folder, attempt):
        write_manifest(staging / MANIFEST, step, files, world_size=world_size, clean=clean, attempt=attempt)
        for parent in {staging, *((staging / name).parent for name in files)}:
            sync_folder(parent)
        if _is_misnamed(final):
            _rename_misnamed(final, attempt)
        replaced = _move_to_attempt(final, attempt, _REPLACED) if os.path.lexists(final) else None
        staging.rename(final)
    sync_folder(folder)
    if replaced is not None:  # last, since it takes seconds: a kill before the rename must leave one of the two
        shutil.rmtree(replaced, ignore_errors=True)
    return final


def mark_clean(checkpoint: Checkpoint, attempt: int) -> None:
    """Mark in the manifest that training stayed healthy after it. Raises SupersededAttemptError and OSError."""
    folder, path = checkpoint.path.parent, checkpoint.path / MANIFEST
    draft = _own_folder(folder, attempt) / f"{checkpoint.path.name}.{MANIFEST}"
    with contextlib.suppress(FileNotFoundError), _fenced(folder, attempt):  # a user may have deleted it
        manifest = json.loads(path.read_text(encoding="utf-8"))
        del manifest["sha256"]
        _write_manifest(draft, {**manifest, "clean": True})
        draft.replace(path)
        sync_folder(checkpoint.path)


def remove_checkpoint(path: Path, attempt: int) -> None:
    """Remove a checkpoint atomically, as a running attempt. Raises SupersededAttemptError and OSError."""
    with contextlib.suppress(FileNotFoundError), _fenced(path.parent, attempt):  # a user may have deleted it
        shutil.rmtree(_move_to_attempt(path, attempt), ignore_errors=True)


def delete_checkpoint(path: Path) -> None:
    """Remove a checkpoint while no attempt runs; the manifest first, so that a partly deleted one is not valid."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def set_aside_newer(folder: Path, step: int, attempt: int) -> list[str]:
    """Rename the folders of later steps than ``step`` to ``damaged-step-N``, and return their former names.

    For an attempt that resumes at ``step``: otherwise retention would keep the damaged checkpoints in place of valid
    ones. A folder that contains the checkpoint of another step is not changed.
    """
    later = [path for path in committed_folders(folder) if int(path.name.removeprefix("step-")) > step]
    newer = [path for path in later if not _is_misnamed(path)]
    for path in newer:
        aside = path.with_name(f"damaged-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        with _fenced(folder, attempt):
            try:
                _move_to_attempt(path, attempt, _REPLACED).rename(aside)
            except PermissionError:  # a folder that this user may not write to can only be renamed where it is
                path.rename(aside)
    return [path.name for path in newer]


def _is_misnamed(path: Path) -> bool:
    checkpoint = read_checkpoint(path)
    return isinstance(checkpoint, Defect) and checkpoint.kind == "misnamed"


def _rename_misnamed(path: Path, attempt: int) -> None:
    """Rename a folder of this name that contains the checkpoint of another step; nothing is deleted."""
    free = path.with_name(f"misnamed-{path.name}")
    number = 1
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"misnamed-{path.name}.{number}")
    _move_to_attempt(path, attempt, _REPLACED).rename(free)


def _move_to_attempt(path: Path, attempt: int, suffix: str = _REMOVED) -> Path:
    moved = _own_folder(path.parent, attempt) / f"{path.name}{suffix}"
    shutil.rmtree(moved, ignore_errors=True)
    return path.rename(moved)


@contextlib.contextmanager
def _fenced(folder: Path, attempt: int) -> Iterator[None]:
    """Raise SupersededAttemptError for an error (ENOENT, ESTALE) if a later attempt has removed this one's folder.

    While the folder is there, a file is missing for another reason, or the file server has restarted.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE) or os.path.isdir(_own_folder(folder, attempt)):
            raise
        raise SupersededAttemptError(Reason("engine.attempt-superseded", {"attempt": attempt})) from error


def _own_folder(folder: Path, attempt: int) -> Path:
    return folder / f"attempt-{attempt:04d}.tmp"


def write_manifest(
    path: Path,
    step: int,
    files: Mapping[str, FileDigest],
    *,
    world_size: int,
    clean: bool,
    attempt: int,
    **more: object,
) -> None:
    """Write what ``parse_manifest`` reads, with ``more`` fields. Raises OSError."""
    manifest: dict[str, object] = {
        "schema": "scaletrain.checkpoint/v1",
        "step": step,
        "world_size": world_size,
        "clean": clean,
        "attempt": attempt,
        "files": {name: {"size": digest.size, "sha256": digest.sha256} for name, digest in sorted(files.items())},
    }
    _write_manifest(path, {**manifest, **more})


def _write_manifest(path: Path, manifest: Mapping[str, object]) -> None:
    replace_file(path, json.dumps({**manifest, "sha256": manifest_hash(manifest)}, indent=1))
