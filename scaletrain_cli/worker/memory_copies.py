"""Copies of the state of a run in the host memory of its nodes, with the files of checkpoints. None of them is durable.

``/dev/shm/scaletrain-UID-RUN-HASH/step-N`` has the files of the ranks of this node. A rank writes a manifest of its own
after its files, so that no rank waits for another one. A step is complete if every rank has its manifest, with the same
key; the ranks find that out together when they resume.
"""

import fcntl
import math
import os
import shutil
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from scaletrain_cli.rundir.checkpoints import (
    Checkpoint,
    FileDigest,
    checkpoint_path,
    committed_folders,
    parse_manifest,
)
from scaletrain_cli.rundir.documents import DamagedError, documents_in, entries, parse_json, read_content
from scaletrain_cli.rundir.paths import RunDir, copies_folder
from scaletrain_cli.safe_files import locked, make_private_folder, open_to_append
from scaletrain_cli.worker.checkpoint_commit import write_manifest

_LOCK = "lock"
# Between two attempts no process has the folder open; a restart in place takes less.
_ABANDONED_SECONDS = 3600.0


def open_copies(folder: Path) -> int:
    """Create the folder, private to this user; ``remove_abandoned`` leaves it while the returned descriptor is open.

    Raises PermissionError for a folder or link of another user, and OSError.
    """
    make_private_folder(folder)
    descriptor = open_to_append(folder / _LOCK)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def complete_copy(
    folder: Path, step: int, rank: int, files: Mapping[str, FileDigest], *, key: str, world_size: int, attempt: int
) -> None:
    """Write the manifest of a rank's files of a step. Raises OSError."""
    path = checkpoint_path(folder, step) / _manifest(rank)
    write_manifest(path, step, files, world_size=world_size, clean=False, attempt=attempt, key=key)


def read_copies(folder: Path, rank: int, key: str) -> dict[int, Checkpoint]:
    """Return by step what the manifests of a rank with this key state; no other file is read."""
    try:
        make_private_folder(folder)
        found = {path: read_content(path / _manifest(rank)) for path in committed_folders(folder)}
    except (DamagedError, OSError):
        return {}
    copies = [
        parse_manifest(content, path)
        for path, content in found.items()
        if content is not None and _has_key(content, key)
    ]
    return {copy.step: copy for copy in copies if isinstance(copy, Checkpoint)}


def newest_copy(run: RunDir) -> int | None:
    """Return the step of the newest copy of which this node has a manifest; None if there is none. Nothing is verified.

    For the node of the first rank.
    """
    paths = reversed(committed_folders(copies_folder(run)))
    manifests = (file for path in paths for file in documents_in(path) if file.name.startswith("rank-"))
    return next((int(file.parent.name.removeprefix("step-")) for file in manifests), None)


def _has_key(content: bytes, key: str) -> bool:
    try:
        document = parse_json(content)
    except ValueError:
        return False
    return isinstance(document, dict) and document.get("key") == key


def drop_copies(folder: Path, rank: int, *, before: float = -math.inf, after: float = math.inf) -> None:
    """Remove a rank's files of the steps below ``before`` and above ``after``, the manifests first.

    No rank may be about to write one of these steps.
    """
    for path in committed_folders(folder):
        if not before <= int(path.name.removeprefix("step-")) <= after:
            (path / _manifest(rank)).unlink(missing_ok=True)
            for file in entries(path):
                if file.name.startswith(f"rank-{rank:05d}."):
                    file.unlink(missing_ok=True)
            # The last rank of this node; two ranks may do so at once.
            if not any(file.name.startswith("rank-") for file in entries(path)):
                shutil.rmtree(path, ignore_errors=True)


def remove_copies(folder: Path) -> None:
    """Remove the folder; a link, or a folder of another user, stays."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(own: Path, now: float | None = None) -> None:
    """Remove what runs of this user have left beside ``own``: unused, and not changed for an hour."""
    for folder in own.parent.glob(f"scaletrain-{os.geteuid()}-*"):
        try:
            about = folder.lstat()
            if folder == own or not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
                continue
            changed = max(path.lstat().st_mtime for path in (folder, *folder.iterdir()))
            with locked(folder / _LOCK, wait_seconds=0) as unused:
                if unused and (now or time.time()) - changed > _ABANDONED_SECONDS:
                    remove_copies(folder)
        except OSError:  # removed meanwhile, or not ours
            continue


def _manifest(rank: int) -> str:
    return f"rank-{rank:05d}.json"
