"""How much memory a job may still take on this node: the machine's, or what its memory cgroups leave of it.

Reads /proc and the cgroups, version 2 or 1; knows nothing of runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB", re.MULTILINE)
# Page cache and what the kernel keeps of files: given back when it is wanted. Version 1 has ``total_`` for the group
# and all below it.
_GIVEN_BACK = ("active_file", "inactive_file", "slab_reclaimable")
_FILES = {
    2: ("memory.max", "memory.current", "memory.stat"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"),
}


def available_bytes(root: Path = Path("/")) -> int | None:
    """The least that the machine and every group above this process leave; None where /proc does not say."""
    try:
        found = _AVAILABLE.search((root / "proc/meminfo").read_text(encoding="utf-8"))
    except OSError:
        return None
    if found is None:
        return None
    return min([int(found[1]) * 1024, *_left_by_groups(root)])


def _left_by_groups(root: Path) -> Iterator[int]:
    for folder, version in _folders(root):
        limit, usage, statistics = (_text(folder / name) for name in _FILES[version])
        if limit.strip().isdigit() and usage.strip().isdigit():  # "max": no limit here
            yield max(0, int(limit) - int(usage) + _given_back(statistics))


def _given_back(statistics: str) -> int:
    told = dict(line.split(maxsplit=1) for line in statistics.splitlines() if " " in line)
    return sum(int(told.get(f"total_{name}", told.get(name, "0"))) for name in _GIVEN_BACK)


def _folders(root: Path) -> Iterator[tuple[Path, int]]:
    """This process's group and all above it: the limit of a job is above that of its step."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            version = 2 if controllers == "" else 1
            top = root / "sys/fs/cgroup" if version == 2 else root / "sys/fs/cgroup/memory"
            group = top / path.strip("/")
            yield group, version
            for parent in group.parents:
                if parent.is_relative_to(top):
                    yield parent, version


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
