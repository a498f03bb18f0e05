"""Everything in a run's checkpoint folder, valid or not, for listing, verifying and pruning.

Reads names and manifests; the content of files is hashed only by verify_files().
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.rundir.checkpoints import (
    MANIFEST,
    Checkpoint,
    checkpoints_to_prune,
    latest_valid,
    read_checkpoint,
    verify,
)
from scaletrain_cli.rundir.documents import DamagedError, entries

_FOLDER = re.compile(r"(damaged-|misnamed-)?step-(\d{8,})(?:\.\d+)?")
_ATTEMPT = re.compile(r"attempt-\d{4,}\.tmp")
_MOST_THREADS = 8


@dataclass(frozen=True)
class Entry:
    """One folder. ``problem``: the defect found in names and sizes, empty for none; ``written``: in Unix seconds."""

    path: Path
    step: int
    written: float
    checkpoint: Checkpoint | None
    problem: str = ""


@dataclass(frozen=True)
class Pruning:
    """The checkpoints to delete, and the latest valid one, which is never deleted."""

    to_delete: tuple[Checkpoint, ...]
    newest: Checkpoint


def take_inventory(folder: Path) -> list[Entry]:
    """Return the entries by step, oldest first. Reads manifests and sizes only."""
    found = [entry for path in entries(folder) for entry in _entries_at(path)]
    return sorted(found, key=lambda entry: (entry.step, entry.path.name))


def verify_files(checkpoint: Checkpoint, on_file: Callable[[str, int], None] = lambda name, size: None) -> list[str]:
    """Verify several files at a time; return the problems. ``on_file`` is called with each file and its bytes."""
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        names = {pool.submit(verify, checkpoint, [name]): name for name in checkpoint.files}
        problems = {}
        for done in as_completed(names):
            problems[names[done]] = done.result()
            on_file(names[done], checkpoint.files[names[done]].size)
    return [problem for name in checkpoint.files for problem in problems[name]]


def plan_pruning(folder: Path, keep: int, keep_every: int | None, also_kept: Collection[int] = ()) -> Pruning | None:
    """Return what pruning deletes; None if no checkpoint is valid, because any of them may still be repaired."""
    newest, _ = latest_valid(folder)
    if newest is None:
        return None
    to_delete = checkpoints_to_prune(folder, keep, keep_every, also_kept)
    return Pruning(tuple(one for one in to_delete if one.step != newest.step), newest)


def _entries_at(path: Path) -> Iterator[Entry]:
    if _ATTEMPT.fullmatch(path.name):
        with contextlib.suppress(DamagedError):
            for inner in entries(path):
                if match := _FOLDER.fullmatch(inner.name):
                    yield Entry(inner, int(match[2]), _written(inner), None, f"incomplete, in {path.name}")
    elif match := _FOLDER.fullmatch(path.name):
        read = read_checkpoint(path)
        checkpoint = read if isinstance(read, Checkpoint) else None
        problem = _missing(checkpoint) if checkpoint is not None else str(read)
        yield Entry(path, int(match[2]), _written(path), checkpoint, _SET_ASIDE.get(match[1], problem))


def _written(path: Path) -> float:
    """Return the modification time of the manifest, else of the folder; 0 if neither is readable."""
    for place in (path / MANIFEST, path):
        with contextlib.suppress(OSError):
            return place.lstat().st_mtime
    return 0.0


_SET_ASIDE = {
    "damaged-": "moved aside as damaged; you can delete it",
    "misnamed-": "moved aside: it had the name of another step; rename or delete it",
}


def _missing(checkpoint: Checkpoint) -> str:
    """Return the first file that is missing or does not have the size in the manifest."""
    for name, expected in checkpoint.files.items():
        try:
            size = (checkpoint.path / name).stat().st_size
        except OSError as error:
            return f"{name}: {error.strerror or error}"
        if size != expected.size:
            return f"{name}: {size} bytes instead of {expected.size}"
    return ""
