"""Find what killed processes may leave behind: descendants, and shared memory without a user."""

from __future__ import annotations

import contextlib
from pathlib import Path

_SHARED = "/dev/shm/"


def children(pid: int) -> set[int]:
    """All descendants, alive or zombie."""
    found = {int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()}
    return found | {grandchild for child in found for grandchild in children(child)}


def abandoned_shared_memory() -> set[str]:
    """Names in /dev/shm that no living process has open or mapped; other tests may have some of their own."""
    there, held = {str(path) for path in Path(_SHARED).iterdir()}, set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for mapped in (process / "map_files", process / "fd"):
                held |= {name for file in mapped.iterdir() if (name := _target(file))}
    return {name for name in there - held if Path(name).exists()}  # not those that another test has just given back


def _target(link: Path) -> str:
    with contextlib.suppress(OSError):
        return str(link.readlink())
    return ""
