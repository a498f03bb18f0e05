"""What stands in a checkpoint folder, and whether it is sound. Reads only; knows not how a checkpoint comes about.

A checkpoint exists when ``step-N/manifest.json`` does and every file that it names has the size and hash it states.
"Latest" is computed, never a pointer file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d{8,})")
_HASH_BLOCK_BYTES = 1 << 20
_VERIFYING_THREADS = 4


@dataclass(frozen=True)
class FileDigest:
    """Size in bytes and SHA-256 of one file of a checkpoint."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint as its manifest states it; ``problems`` of the files are found by verify()."""

    path: Path
    step: int
    world_size: int
    clean: bool
    attempt: int
    files: Mapping[str, FileDigest]

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.files.values())


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` stands once committed."""
    return folder / f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Every committed checkpoint by step, oldest first, by its manifest alone."""
    return [read for path in committed_folders(folder) if isinstance(read := read_checkpoint(path), Checkpoint)]


def verify(
    checkpoint: Checkpoint, names: Collection[str] | None = None, *, unreadable_is_damaged: bool = True
) -> list[str]:
    """What is wrong with the files, or some of them, one line each; empty when every byte is as it was written.

    A file that cannot be read here may be sound elsewhere: unless that counts as damage, it raises OSError.
    """
    wanted = sorted(checkpoint.files if names is None else names)
    with ThreadPoolExecutor(_VERIFYING_THREADS) as threads:  # hashing and reading leave the interpreter alone
        found = threads.map(lambda name: _problem_of(checkpoint.path / name, checkpoint.files[name]), wanted)
        problems = dict(zip(wanted, found, strict=True))
    for problem in problems.values():
        if isinstance(problem, OSError) and not unreadable_is_damaged:
            raise problem
    words = {name: str(p.strerror) if isinstance(p, OSError) else p for name, p in problems.items()}
    return [f"{name}: {problem}" for name, problem in words.items() if problem]


def newest_that_verifies(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to resume from, and what was wrong with each newer one that was passed over."""
    passed_over: list[str] = []
    for path in reversed(committed_folders(folder)):
        checkpoint = read_checkpoint(path)
        problems = verify(checkpoint) if isinstance(checkpoint, Checkpoint) else [checkpoint]
        if isinstance(checkpoint, Checkpoint) and not problems:
            return checkpoint, passed_over
        passed_over += [f"{path.name}/{problem}" for problem in problems]
    return None, passed_over


def committed_folders(folder: Path) -> list[Path]:
    """Folders that bear a step's final name, oldest first, whatever is in them."""
    found = {int(match[1]): entry for entry in entries(folder) if (match := _STEP.fullmatch(entry.name))}
    return [found[step] for step in sorted(found)]


def entries(folder: Path) -> list[Path]:
    """Everything in a folder; nothing if it is not there."""
    return list(folder.iterdir()) if folder.is_dir() else []


def read_checkpoint(path: Path) -> Checkpoint | str:
    """The checkpoint as its manifest states it, or what is wrong with the manifest."""
    try:
        data = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        stated = data.pop("sha256")
        if stated != manifest_hash(data):
            return f"{MANIFEST}: content does not match its hash"
        files = {name: FileDigest(**digest) for name, digest in data["files"].items()}
        return Checkpoint(path, data["step"], data["world_size"], data["clean"], data["attempt"], files)
    except FileNotFoundError:
        return f"{MANIFEST}: missing (deleting was cut short, or the file was lost)"
    except OSError as error:
        return f"{MANIFEST}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST}: not the manifest of a checkpoint"


def manifest_hash(manifest: Mapping[str, object]) -> str:
    """Hash of the manifest's own content: a flipped bit in ``step`` or ``clean`` must not pass for the truth."""
    return hashlib.sha256(json.dumps(dict(manifest), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _problem_of(path: Path, expected: FileDigest) -> str | OSError:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected.size:
                return f"{size} bytes instead of {expected.size}"
            return "" if _file_hash(file) == expected.sha256 else "content does not match its hash"
    except FileNotFoundError as error:
        return str(error.strerror)
    except OSError as error:
        return error


def _file_hash(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while block := file.read(_HASH_BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()
