"""Copies of the state of a run in the host memory of its nodes, with the files of checkpoints. None of them is durable.

``/dev/shm/scaletrain-UID-RUN-HASH/step-N`` has the files of the ranks of this node, and those that ranks of another one
sent here. A rank writes a manifest of its own after its files, so that no rank waits for another one. A step is
complete if the manifest of every rank is on some node, with the same key; the ranks find that out when they resume.
"""

import contextlib
import fcntl
import math
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.available_memory import available_bytes
from scaletrain_cli.own_processes import boot_id
from scaletrain_cli.rundir.checkpoints import (
    Checkpoint,
    FileDigest,
    checkpoint_path,
    committed_folders,
    parse_manifest,
)
from scaletrain_cli.rundir.documents import DamagedError, documents_in, entries, parse_json, read_content
from scaletrain_cli.rundir.paths import MEMORY, RunDir, copies_folder
from scaletrain_cli.safe_files import locked, make_private_folder, open_to_append, replace_file
from scaletrain_cli.worker.checkpoint_commit import write_manifest

_LOCK = "lock"
_MANIFEST = re.compile(r"rank-(\d{5,})\.json")
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


@dataclass(frozen=True)
class Copy(Checkpoint):
    """The files of one rank. ``needs``: other ranks of which it needs the files too, as each replica saves a share."""

    needs: tuple[int, ...] = ()


def complete_copy(
    folder: Path,
    step: int,
    rank: int,
    files: Mapping[str, FileDigest],
    *,
    key: str,
    world_size: int,
    attempt: int,
    needs: Sequence[int] = (),
) -> None:
    """Write the manifest of a rank's files of a step. Raises OSError."""
    path, more = checkpoint_path(folder, step) / _manifest(rank), {"key": key, "needs": [*needs]}
    write_manifest(path, step, files, world_size=world_size, clean=False, attempt=attempt, **more)


def read_copies(folder: Path, key: str) -> dict[int, dict[int, Copy]]:
    """Return by step and rank what the manifests with this key state; no other file is read."""
    copies: dict[int, dict[int, Copy]] = {}
    with contextlib.suppress(DamagedError, OSError):
        make_private_folder(folder)
        for path in committed_folders(folder):
            for file in entries(path):
                if (match := _MANIFEST.fullmatch(file.name)) is not None:
                    content = read_manifest(path, rank := int(match[1]))
                    copy = parse_manifest(content, path)
                    if isinstance(copy, Checkpoint) and (stated := parse_json(content)).get("key") == key:
                        needs = tuple(map(int, stated.get("needs", ())))
                        copies.setdefault(copy.step, {})[rank] = Copy(**vars(copy), needs=needs)
    return copies


def read_manifest(path: Path, rank: int) -> bytes:
    """Return the manifest of a rank's files in the folder of a step; empty if it cannot be read."""
    with contextlib.suppress(DamagedError):
        return read_content(path / _manifest(rank)) or b""
    return b""


def write_received_manifest(path: Path, rank: int, content: bytes) -> None:
    """Write what ``read_manifest`` has returned on another node, once the files are here. Raises OSError."""
    replace_file(path / _manifest(rank), content)


def place_of(folder: Path) -> str:
    """Return what the same folder has in common for all ranks, and no other one: machine, file system and inode.

    Nodes of a test may be on one machine, and have one host memory or several. Empty if the folder cannot be used.
    """
    with contextlib.suppress(OSError):
        make_private_folder(folder)
        about = folder.stat()
        return f"{boot_id() or socket.gethostname()} {about.st_dev} {about.st_ino}"
    return ""


def free_bytes() -> int:
    """Return the host memory that copies could still take: free in /dev/shm and for the job; 0 if that is not known."""
    with contextlib.suppress(OSError):
        about = os.statvfs(MEMORY)
        return min(about.f_bavail * about.f_frsize, available_bytes() or 0)
    return 0


def newest_copy(run: RunDir) -> int | None:
    """Return the step of the newest copy of which this node has a manifest; None if there is none. Nothing is verified.

    For the node of the first rank.
    """
    paths = reversed(committed_folders(copies_folder(run)))
    manifests = (file for path in paths for file in documents_in(path) if file.name.startswith("rank-"))
    return next((int(file.parent.name.removeprefix("step-")) for file in manifests), None)


def drop_copies(folder: Path, *, before: float = -math.inf, after: float = math.inf) -> None:
    """Remove the copies of the steps below ``before`` and above ``after``, the manifests first.

    For one rank of each node, while none is writing one of these steps.
    """
    for path in committed_folders(folder):
        if not before <= int(path.name.removeprefix("step-")) <= after:
            for file in entries(path):
                if _MANIFEST.fullmatch(file.name):
                    file.unlink(missing_ok=True)
            remove_copies(path)


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
