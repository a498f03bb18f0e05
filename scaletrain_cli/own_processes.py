"""The command lines of this project's Python processes, and their search paths.

No process imports a module or runs a program from its current folder: a `random.py` beside a run spec must not replace
the library's. Uses only modules that Python loads at start-up; every package may import this one.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # recognized by type checkers; avoids the import of typing
if TYPE_CHECKING:
    from collections.abc import Mapping

# Equivalent to `python -P -m MODULE`, also for Python 3.10, which has no -P. With -c, Python puts '' first in sys.path;
# it is removed before the first import from a file. No quotes: batch scripts and manifests contain this text.
START = (
    "import sys; sys.path[:] = filter(None, sys.path); import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name=__name__, alter_sys=True)"
)
# For Python processes that libraries start (compilation workers, multiprocessing); since Python 3.11.
SAFE_CHILDREN = {"PYTHONSAFEPATH": "1"}
_SEARCHED = ("PATH", "PYTHONPATH")  # in them an empty or relative entry refers to the current folder
_FOLDERS = ("PYTHONUSERBASE", "PYTHONPYCACHEPREFIX")


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs ``module`` with this process's interpreter."""
    own = ["-s"] if sys.flags.no_user_site else []
    return [sys.executable, *own, *python_words(module), *arguments]


def python_words(module: str) -> list[str]:
    """Return the command-line words after the interpreter that run ``module``, for any Python version."""
    return ["-c", START, module]


def absolute_paths(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the entries of its search paths that depend on the current folder."""
    kept = dict(environment)
    for name in _SEARCHED:
        if name in kept:
            kept[name] = os.pathsep.join(filter(os.path.isabs, kept[name].split(os.pathsep)))
    for name in (*_SEARCHED, *_FOLDERS):
        if name in kept and not os.path.isabs(kept[name]):
            del kept[name]
    return kept


def leave_current_folder(*, started_as_module: bool = False) -> None:
    """Remove the current folder from the search paths of this process and of those that it starts.

    ``started_as_module``: started with ``python -m``, which puts the current folder first.
    """
    if started_as_module and not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep) if "PYTHONPATH" in os.environ else []
    meant = {os.path.abspath(folder) for folder in given if not os.path.isabs(folder)}
    meant -= {os.path.abspath(folder) for folder in given if os.path.isabs(folder)}
    sys.path[:] = [folder for folder in sys.path if os.path.isabs(folder) and folder not in meant]
    kept = absolute_paths(os.environ)
    for name in (*_SEARCHED, *_FOLDERS):
        if os.environ.get(name) != kept.get(name):
            if name in kept:
                os.environ[name] = kept[name]
            else:
                del os.environ[name]


def process_stat(pid: object) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the third one, the state, on; [1]: parent, [19]: start in clock ticks.

    Raises OSError if there is no such process.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()  # a name may itself contain blanks and parentheses


def boot_id() -> str:
    """Return the id of this boot of the kernel, which all containers of a machine share; empty without /proc."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def usable_cores(cgroups: str = "/sys/fs/cgroup") -> int:
    """Return the number of CPU cores that this process may use: those of its affinity, within its cgroup's quota.

    A pod with a limit sees all cores of its node, but is stopped when it has used its share of them. ``cgroups``: where
    the container sees its own group, of version 2 or 1.
    """
    cores = len(os.sched_getaffinity(0))
    for read in (_quota_of_version_2, _quota_of_version_1):
        try:
            quota, period = read(cgroups)
        except (OSError, ValueError):
            continue
        if quota > 0 and period > 0:
            cores = min(cores, max(1, quota // period))
    return cores


def _quota_of_version_2(cgroups: str) -> tuple[int, int]:
    """Return microseconds of CPU time in a period, and the period. Raises OSError, and ValueError without a quota."""
    with open(f"{cgroups}/cpu.max", encoding="ascii") as file:
        quota, period = file.read().split()
    return int(quota), int(period)


def _quota_of_version_1(cgroups: str) -> tuple[int, int]:
    """Return the same; -1 without a quota."""
    values = []
    for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"):
        with open(f"{cgroups}/cpu/{name}", encoding="ascii") as file:
            values.append(int(file.read()))
    return values[0], values[1]
