"""From where a run spec is looked at, what is seen from there, and what was found."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from scaletrain_cli.errors import Problem
from scaletrain_cli.launch.backends.registry import backend_for
from scaletrain_cli.spec import RunSpec


@dataclass(frozen=True)
class CheckResults:
    """``problems`` keep the run from starting; ``notes`` name what could not be checked from here."""

    problems: tuple[Problem, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class View:
    """From where a spec is looked at.

    ``folder``: what its relative paths are relative to. ``code``: the files kept of code.path, None where they were not
    taken. ``begun``: a checkpoint was committed, so that no first weights are read. ``on_node``: as the ranks see it.
    ``secrets``: names whose values the run directory holds.
    """

    spec: RunSpec
    folder: Path
    environment: Mapping[str, str]
    code: Collection[str] | None = None
    begun: bool = False
    on_node: bool = False
    secrets: Collection[str] = ()

    def problem(self, key: str, message: str, given: object, hint: str) -> Problem:
        return Problem(self.spec.where(key), key, message, str(given), hint)

    def unseen(self, path: str) -> str:
        """Where the ranks look for ``path``, if this machine cannot see that place; empty if it can."""
        return "" if self.on_node else backend_for(self.spec.cluster.scheduler).unseen_place(self, path)


def parent_of_glob(source: str) -> str:
    """The part of a path before the first component with a wildcard."""
    if os.path.lexists(source):
        return source
    parts: list[str] = []
    for part in PurePosixPath(source).parts:
        if set(part) & set("*?["):
            break
        parts.append(part)
    return str(PurePosixPath(*parts)) if parts else "."


def is_missing(path: str) -> bool:
    return not os.path.lexists(path) and is_shared(PurePosixPath(path))


def is_shared(path: PurePosixPath) -> bool:
    """Return whether nodes are taken to see at ``path`` what this machine does: not below folders of each host alone,
    nor below a top-level folder that is missing here."""
    own = ("/tmp", "/var", "/run", "/dev", "/proc", "/scratch", "/local", "/localscratch", "/opt", "/usr", "/etc")
    if any(path.is_relative_to(folder) for folder in own):
        return False
    return len(path.parts) < 2 or os.path.isdir(os.path.join("/", path.parts[1]))
