"""The memory that this process may still use, by the machine and by its control groups."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB", re.MULTILINE)
_TOTAL = re.compile(r"^MemTotal:\s+(\d+) kB", re.MULTILINE)
_NO_LIMIT = 1 << 60  # version 1 shows the largest number of pages
# Page cache and other memory that the kernel reclaims on demand. Cgroups of version 1 have ``total_`` for the
# group and all below it.
_RECLAIMED = ("active_file", "inactive_file", "slab_reclaimable")
_FILES = {
    2: ("memory.max", "memory.current", "memory.stat"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"),
}


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that a job may still use: the minimum over the machine and each cgroup; None if unknown."""
    try:
        found = _AVAILABLE.search((root / "proc/meminfo").read_text(encoding="utf-8"))
    except OSError:
        return None
    if found is None:
        return None
    return min([int(found[1]) * 1024, *_left_by_groups(root)])


def used_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes in use, without what the kernel reclaims on demand; None if unknown.

    Those of the lowest cgroup of this process that has a limit, else of the machine.
    """
    for folder, version in _folders(root):
        limit, usage, statistics = (_text(folder / name) for name in _FILES[version])
        if limit.strip().isdigit() and int(limit) < _NO_LIMIT and usage.strip().isdigit():
            return max(0, int(usage) - _reclaimable(statistics))
    text = _text(root / "proc/meminfo")
    total, available = _TOTAL.search(text), _AVAILABLE.search(text)
    return None if total is None or available is None else 1024 * (int(total[1]) - int(available[1]))


def _left_by_groups(root: Path) -> Iterator[int]:
    for folder, version in _folders(root):
        limit, usage, statistics = (_text(folder / name) for name in _FILES[version])
        if limit.strip().isdigit() and usage.strip().isdigit():  # "max": no limit here
            yield max(0, int(limit) - int(usage) + _reclaimable(statistics))


def _reclaimable(statistics: str) -> int:
    values = dict(line.split(maxsplit=1) for line in statistics.splitlines() if " " in line)
    return sum(int(values.get(f"total_{name}", values.get(name, "0"))) for name in _RECLAIMED)


def _folders(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield this process's cgroup and its ancestors: the limit of a job is above that of its step."""
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
