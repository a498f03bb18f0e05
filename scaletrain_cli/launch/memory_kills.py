"""How many processes of this node's job the kernel has killed for want of memory so far.

Reads the memory cgroup, version 2 or 1, or the whole machine's counter; knows nothing of runs and ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_FIELD = "oom_kill"


def memory_kills(root: Path = Path("/")) -> int | None:
    """The count since the group was made, which only a difference makes meaningful; None where none can be read."""
    for path in _counters(root):
        try:
            fields = dict(line.split()[:2] for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
        except (OSError, ValueError):
            continue
        if _FIELD in fields:
            return int(fields[_FIELD])
    return None


def _counters(root: Path) -> Iterator[Path]:
    """This process's own group first. In a container its path may be the host's and mean nothing here."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for folder in (path.strip("/"), ""):
            if controllers == "":
                yield root / "sys/fs/cgroup" / folder / "memory.events"
            elif "memory" in controllers.split(","):
                yield root / "sys/fs/cgroup/memory" / folder / "memory.oom_control"
    yield root / "proc/vmstat"
