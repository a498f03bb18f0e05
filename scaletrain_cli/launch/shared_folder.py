"""Check whether a folder is on a shared file system, and whether the checkpoints of a run fit on it.

Uses only this machine's mounts and free space; launch/node/probe.py checks the nodes themselves.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from scaletrain_cli.errors import Problem, SchedulerError
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec import RunSpec

# File systems on a drive or in the memory of one machine.
_LOCAL = frozenset("ext2 ext3 ext4 xfs btrfs zfs tmpfs ramfs overlay f2fs jfs reiserfs apfs vfat exfat".split())
_ESCAPE = re.compile(r"\\([0-7]{3})")


def unshared_notes(folder: Path, nodes: int, mounts: str | None = None) -> list[str]:
    """Return a warning if the file system of the folder is local to this machine, by its type."""
    kind = file_system(folder, _mounts() if mounts is None else mounts)
    if nodes < 2 or kind not in _LOCAL:
        return []
    return [
        f"the runs root {folder} is on {kind}, which the nodes see only if this machine exports it. "
        "Put it on a file system that they share ($SCALETRAIN_RUNS), or ask the nodes with --probe."
    ]


def file_system(folder: Path, mounts: str) -> str:
    """Return the type of the file system that holds the folder; ``mounts`` is the text of /proc/self/mounts."""
    found, longest = "", -1
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(_ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[1]))
        if folder.is_relative_to(point) and len(point.parts) >= longest:  # the last mount at a point is visible
            found, longest = fields[2], len(point.parts)
    return found


def disk_space_notes(spec: RunSpec, plan: RunPlan, folder: Path, runs: int = 1, there: int = 0) -> list[str]:
    """Return a warning if the checkpoints to keep do not fit. Raises SchedulerError if not even one fits.

    ``runs``: the number of runs like this one; ``there``: the number of its checkpoints that already exist.
    """
    if not spec.cluster.traits.shared_run_directory:
        return []  # the nodes may save to another volume
    if spec.checkpoint.dir != "auto":
        folder = expand_home(spec.checkpoint.dir)
    # The next checkpoint is written before the oldest is deleted.
    one, kept = plan.durability.checkpoint_bytes * runs, max(1, spec.checkpoint.keep + 1 - there)
    free = _free_bytes(folder)
    if free is None or free >= one * kept:
        return []
    has, each = f"{folder} has room for {free / 1e9:.1f} GB", f" of each of {runs} runs" if runs > 1 else ""
    if free < one:
        message = f"{has}, and one checkpoint{each} takes {one / 1e9:.1f} GB."
        hint = "Make room, or set checkpoint.dir to another file system."
        raise SchedulerError(
            "The run could not save anything. Nothing was queued.",
            (Problem(spec.where("checkpoint.dir"), "checkpoint.dir", message, str(spec.checkpoint.dir), hint),),
        )
    return [
        f"{has}, and {kept}{' more' if there else ''} checkpoints{each} (checkpoint.keep, and the one in the making) "
        f"take {one * kept / 1e9:.1f} GB."
    ]


def _free_bytes(folder: Path) -> int | None:
    """Return the free bytes at the folder or its nearest existing parent; None if they cannot be read."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), None)
    try:
        usage = os.statvfs(there) if there is not None else None
    except OSError:
        return None
    return usage.f_bavail * usage.f_frsize if usage is not None else None


def _mounts() -> str:
    try:
        return Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
