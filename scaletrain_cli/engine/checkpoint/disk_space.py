"""Whether a disk has room for the checkpoints to come, asked before the first step instead of found out at a save."""

from __future__ import annotations

import os
from pathlib import Path

from scaletrain_cli.errors import DoNotRequeueError
from scaletrain_cli.rundir.checkpoints import list_checkpoints

_FILES_BESIDE_SHARDS = 3  # the folder, its manifest, what all ranks know alike


class NoRoomError(DoNotRequeueError):
    """The disk cannot hold the checkpoints that the run will keep."""


def check_room(folder: Path, checkpoint_bytes: int, ranks: int, keep: int, keep_every: int | None = None) -> None:
    """Raise NoRoomError unless the newest ``keep``, a clean one and one in the making fit beside what is there.

    What ``keep_every`` keeps for ever makes no room.
    """
    passing = [c for c in list_checkpoints(folder) if keep_every is None or c.step % keep_every]
    missing = max(1, keep + 2 - len(passing))
    found = os.statvfs(folder)
    free_bytes, free_files = found.f_bavail * found.f_frsize, found.f_favail
    files = missing * (ranks + _FILES_BESIDE_SHARDS)
    if free_bytes < missing * checkpoint_bytes:
        raise NoRoomError(
            f"{folder} has {free_bytes / 1e9:.1f} GB of room and checkpoints will need {missing} x "
            f"{checkpoint_bytes / 1e9:.1f} GB more: checkpoint.keep = {keep}, a clean one and the next. "
            f"Make room, lower checkpoint.keep, or set checkpoint.dir to a larger disk."
        )
    if found.f_files and free_files < files:  # some file systems make inodes as they go and say 0
        raise NoRoomError(
            f"{folder} can take {free_files:,} more files and checkpoints of {ranks} ranks will need {files:,}. "
            f"Delete files, or set checkpoint.dir to another disk."
        )
