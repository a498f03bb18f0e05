"""Find what killed processes may leave behind: descendants, and shared memory without a user."""

import contextlib
from pathlib import Path

_SHARED = "/dev/shm/"


def children(pid: int) -> set[int]:
    found = {int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()}
    return found | {grandchild for child in found for grandchild in children(child)}


def abandoned_shared_memory() -> set[str]:
    """Return names in /dev/shm that no running process has open or mapped; those of other tests may be among them."""
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
