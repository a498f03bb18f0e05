"""How every Python process of this project is started, and from where it may import.

No process imports a module, or runs a program, from the folder that it happens to start in: a `random.py` beside a run
spec is the user's, not the library's. Standard library only, and of that only what Python itself loads before any
module of ours; every package may import this.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # as type checkers read it; the typing module is not loaded yet
if TYPE_CHECKING:
    from collections.abc import Mapping

# Does what `python -P -m MODULE` does, also for Python 3.10, which has no -P. For -c Python puts '' first in the path,
# which is removed before the first import from a file. No quotes: batch scripts and manifests hold this text.
START = (
    "import sys; sys.path[:] = filter(None, sys.path); import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name=__name__, alter_sys=True)"
)
# For Python processes that libraries start (compilation workers, multiprocessing); Python has it since 3.11.
SAFE_CHILDREN = {"PYTHONSAFEPATH": "1"}
_SEARCHED = ("PATH", "PYTHONPATH")  # lists of folders, in which an empty or relative one means the current folder
_FOLDERS = ("PYTHONUSERBASE", "PYTHONPYCACHEPREFIX")


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs ``module`` in this process's interpreter."""
    own = ["-s"] if sys.flags.no_user_site else []
    return [sys.executable, *own, *python_words(module), *arguments]


def python_words(module: str) -> list[str]:
    """Return what follows the interpreter in a command line, for an interpreter of any version."""
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
    """Search neither modules nor programs in the current folder, in this process and in those that it starts.

    ``started_as_module``: by ``python -m``, which puts the current folder first.
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
