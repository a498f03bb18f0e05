"""The place from which a run spec is checked, and the results of the checks."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from scaletrain_cli.errors import Problem
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.shared_paths import is_shared

if TYPE_CHECKING:
    from scaletrain_cli.data.sources.records import SourceFile

LOOK_SECONDS = 5.0  # for a request to a remote store, with its repetitions
# What a machine without credentials or network cannot see, and the nodes may.
UNSEEN_REMOTE = ("remote.no-credentials", "remote.unavailable", "remote.profile-without-keys")


@dataclass(frozen=True)
class CheckResults:
    """The results. ``problems`` keep the run from starting; ``warnings`` name what could not be checked here.

    ``files``: of each source of text that could be listed, by its name.
    """

    problems: tuple[Problem, ...] = ()
    warnings: tuple[Reason, ...] = ()
    files: Mapping[str, tuple[SourceFile, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class View:
    """The machine and folder from which a spec is checked.

    ``folder``: the base of its relative paths. ``code``: the files kept of code.path, None if no snapshot was taken.
    ``begun``: a checkpoint was committed, so initial weights are not read. ``on_node``: checked on a node of the job.
    ``secrets``: names whose values are in the run directory. ``hub``: commits of references that the run has recorded.
    ``prepared``: names of the sources whose datasets the run has recorded: their files are not read again.
    """

    spec: RunSpec
    folder: Path
    environment: Mapping[str, str]
    code: Collection[str] | None = None
    begun: bool = False
    on_node: bool = False
    secrets: Collection[str] = ()
    hub: Mapping[str, str] = field(default_factory=dict)
    prepared: Collection[str] = ()

    def problem(self, key: str, reason: Reason, given: object) -> Problem:
        """Return the problem of a key of the spec, with the line of the key."""
        return Problem.because(self.spec.where(key), key, reason, given)

    def unseen(self, path: str) -> str:
        """Return where the ranks look for ``path`` if that is not visible from here; empty if it is."""
        return "" if self.on_node else self.spec.cluster.section.unseen_place(self.folder, path)


def unwritable(folder: Path) -> Reason | None:
    """Return why this user cannot write to a folder, or to its nearest existing parent; None if that is possible."""
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not there.is_dir():
        return Reason("checks.checkpoints-no-folder", {"folder": str(there)})
    if not os.access(there, os.W_OK | os.X_OK):
        return Reason("checks.checkpoints-not-writable", {"folder": str(there)})
    return None


def notes_on_files(key: str, source: str, not_read: Mapping[str, int]) -> Iterator[Reason]:
    """Yield a note on files of a folder that are not read. ``not_read``: their numbers by suffix or split."""
    if not_read:
        kinds = [f"{count} {suffix}" for suffix, count in sorted(not_read.items())]
        yield Reason("checks.files-not-read", {"key": key, "source": source, "kinds": kinds})


def is_missing(path: str) -> bool:
    return not os.path.lexists(path) and is_shared(PurePosixPath(path))
