"""Check whether a folder is on a shared file system, and whether the checkpoints of a run fit on it.

Uses only this machine's mounts and free space; launch/node/inspection.py checks the nodes themselves.
"""

import os
import re
from pathlib import Path

from scaletrain_cli.errors import Problem, SchedulerError
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec import RunSpec

# File systems on a drive or in the memory of one machine.
_LOCAL = frozenset("ext2 ext3 ext4 xfs btrfs zfs tmpfs ramfs overlay f2fs jfs reiserfs apfs vfat exfat".split())
_ESCAPE = re.compile(r"\\([0-7]{3})")


def unshared_notes(folder: Path, nodes: int, mounts: str | None = None) -> list[Reason]:
    """Return a warning if the file system of the folder is local to this machine, by its type."""
    kind = file_system(folder, _mounts() if mounts is None else mounts)
    if nodes < 2 or kind not in _LOCAL:
        return []
    return [Reason("launch.runs-root-local", {"folder": str(folder), "file_system": kind})]


def is_of_one_machine(folder: Path) -> bool:
    """Return True if the file system of the folder is on a drive or in the memory of this machine, by its type."""
    return file_system(folder, _mounts()) in _LOCAL


def file_system(folder: Path, mounts: str) -> str:
    """Return the type of the file system that holds the folder; ``mounts`` is the text of /proc/self/mounts."""
    kind, longest = "", -1
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(_ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[1]))
        if folder.is_relative_to(point) and len(point.parts) >= longest:  # the last mount at a point is visible
            kind, longest = fields[2], len(point.parts)
    return kind


def disk_space_notes(spec: RunSpec, plan: RunPlan, folder: Path, runs: int = 1, there: int = 0) -> list[Reason]:
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
    params = {"folder": str(folder), "free": free, "runs": runs}
    which = "" if runs == 1 else "-of-runs"
    if free < one:
        key, why = "checkpoint.dir", Reason(f"launch.disk-too-small{which}", params | {"needed": one})
        problem = Problem.because(spec.where(key), key, why, spec.checkpoint.dir)
        raise SchedulerError(Reason("launch.nothing-can-be-saved"), (problem,))
    return [Reason(f"launch.disk-space-low{which}", params | {"checkpoints": kept, "needed": one * kept})]


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
