"""Everything in a run's checkpoint folder, sound or not: what people list, verify and prune.

Knows the names of the folder and the manifests; what the files hold is hashed only where it is asked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from scaletrain_cli.rundir.checkpoints import (
    MANIFEST,
    Checkpoint,
    list_checkpoints,
    newest_that_verifies,
    verify,
)
from scaletrain_cli.rundir.retention import superfluous

_FOLDER = re.compile(r"(damaged-)?step-(\d{8,})(\.[\w.]*tmp)?")
_MOST_THREADS = 8


@dataclass(frozen=True)
class Entry:
    """One folder. ``problem`` is what keeps it from being a checkpoint, as far as names and sizes tell; else empty.

    ``written`` in Unix seconds.
    """

    path: Path
    step: int
    written: float
    checkpoint: Checkpoint | None
    problem: str = ""


@dataclass(frozen=True)
class Pruning:
    """What would be deleted, and the newest checkpoint that verifies, which never is."""

    doomed: tuple[Checkpoint, ...]
    sound: Checkpoint


def take_inventory(folder: Path) -> list[Entry]:
    """By step, oldest first. Reads manifests and sizes alone."""
    committed = {checkpoint.path: checkpoint for checkpoint in list_checkpoints(folder)}
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = _FOLDER.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        manifest = path / MANIFEST
        written = (manifest if manifest.exists() else path).stat().st_mtime
        checkpoint = committed.get(path)
        found.append(Entry(path, int(match[2]), written, checkpoint, _problem(path, checkpoint)))
    return sorted(found, key=lambda entry: (entry.step, entry.path.name))


def verify_files(checkpoint: Checkpoint, on_file: Callable[[str, int], None] = lambda name, size: None) -> list[str]:
    """As verify(), several files at a time; ``on_file`` is told of each that is done, with its size in bytes."""
    parts = {name: replace(checkpoint, files={name: digest}) for name, digest in checkpoint.files.items()}
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        names = {pool.submit(verify, part): name for name, part in parts.items()}
        problems = {}
        for done in as_completed(names):
            problems[names[done]] = done.result()
            on_file(names[done], checkpoint.files[names[done]].size)
    return [problem for name in checkpoint.files for problem in problems[name]]


def plan_pruning(folder: Path, keep: int, keep_every: int | None) -> Pruning | None:
    """None where no checkpoint verifies: then each may be the one that somebody can still mend."""
    sound, _ = newest_that_verifies(folder)
    if sound is None:
        return None
    doomed = superfluous(list_checkpoints(folder), keep, keep_every)
    return Pruning(tuple(one for one in doomed if one.step != sound.step), sound)


def _problem(path: Path, checkpoint: Checkpoint | None) -> str:
    if path.name.endswith(".tmp"):
        return "half-written; the next attempt removes it"
    if path.name.startswith("damaged-"):
        return "set aside as damaged; yours to delete"
    if checkpoint is None:
        return f"{MANIFEST}: missing or damaged"
    for name, expected in checkpoint.files.items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            return f"{name}: {error.strerror}"
        if size != expected.size:
            return f"{name}: {size} bytes instead of {expected.size}"
    return ""
