"""The memory that this process may still use, by the machine and by its control groups."""

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
    match = _AVAILABLE.search(text_of(root / "proc/meminfo"))
    return None if match is None else min([int(match[1]) * 1024, *_left_by_groups(root)])


def used_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes in use, without what the kernel reclaims on demand; None if unknown.

    Those of the lowest cgroup of this process that has a limit, else of the machine.
    """
    for folder, _, version in control_groups(root, "memory"):
        limit, usage, statistics = (text_of(folder / name) for name in _FILES[version])
        if limit.strip().isdigit() and int(limit) < _NO_LIMIT and usage.strip().isdigit():
            return max(0, int(usage) - _reclaimable(statistics))
    text = text_of(root / "proc/meminfo")
    total, available = _TOTAL.search(text), _AVAILABLE.search(text)
    return None if total is None or available is None else 1024 * (int(total[1]) - int(available[1]))


def _left_by_groups(root: Path) -> Iterator[int]:
    for folder, _, version in control_groups(root, "memory"):
        limit, usage, statistics = (text_of(folder / name) for name in _FILES[version])
        if limit.strip().isdigit() and usage.strip().isdigit():  # "max": no limit here
            yield max(0, int(limit) - int(usage) + _reclaimable(statistics))


def _reclaimable(statistics: str) -> int:
    values = dict(line.split(maxsplit=1) for line in statistics.splitlines() if " " in line)
    return sum(int(values.get(f"total_{name}", values.get(name, "0"))) for name in _RECLAIMED)


def control_groups(root: Path, controller: str) -> Iterator[tuple[Path, Path, int]]:
    """Yield folder, top folder and version of this process's cgroup and its ancestors, the lowest first.

    The limit of a job is above that of its step.
    """
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / (controller if controllers else "")
            group = top / path.strip("/")
            for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(top))):
                yield folder, top, 1 if controllers else 2


def text_of(path: Path) -> str:
    """Return the content of a file of the kernel; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
