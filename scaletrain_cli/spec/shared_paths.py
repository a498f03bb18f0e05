"""Decide what a path names: a store, or a place that the nodes of a cluster are assumed to share with this machine.

Uses the standard library only.
"""

import os
from pathlib import PurePosixPath

# Schemes of object stores and web servers that data are read from.
REMOTE_SCHEMES = ("s3", "gs", "az", "https", "http")
# Folders that each host has for itself.
_OWN = ("/tmp", "/var", "/run", "/dev", "/proc", "/scratch", "/local", "/localscratch", "/opt", "/usr", "/etc")


def is_shared(path: PurePosixPath) -> bool:
    """Return whether ``path`` is assumed to be the same on the nodes as here.

    False below folders that each host has for itself, and below a top-level folder that does not exist here.
    """
    if any(path.is_relative_to(folder) for folder in _OWN):
        return False
    return len(path.parts) < 2 or os.path.isdir(os.path.join("/", path.parts[1]))


def parent_of_glob(source: str) -> str:
    """Return the part of a path before the first component with a wildcard."""
    if os.path.lexists(source):
        return source
    parts: list[str] = []
    for part in PurePosixPath(source).parts:
        if set(part) & set("*?["):
            break
        parts.append(part)
    return str(PurePosixPath(*parts)) if parts else "."
