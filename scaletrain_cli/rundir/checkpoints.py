"""The commit protocol of checkpoints, apart from what the shards hold: write, hash, fsync, manifest, rename.

A checkpoint exists when ``step-N/manifest.json`` does and every file that it names has the size and hash it states.
"Latest" is computed, never a pointer file. Deleting removes the manifest first, so a half-deleted one is no checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d{8,})")
_HASH_BLOCK_BYTES = 1 << 20


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


class HashingWriter:
    """A binary file that hashes what passes through it; ``close`` makes the bytes durable and yields the digest."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes | memoryview) -> int:
        """Append ``data``; the whole of it, or an OSError."""
        self._hash.update(data)
        written = self._file.write(data)
        self._size += written
        return written

    def flush(self) -> None:
        """Required of a file object; durability waits for close()."""
        self._file.flush()

    def close(self) -> FileDigest:
        """Flush to the disk itself and return the digest. Raises OSError when the disk did not take it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileDigest(self._size, self._hash.hexdigest())


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` stands once committed."""
    return folder / f"step-{step:08d}"


def staging_path(folder: Path, step: int) -> Path:
    """Where it is written before that; a leftover of a dead attempt may be removed by the next one."""
    return folder / f"step-{step:08d}.tmp"


def commit(
    folder: Path, step: int, files: Mapping[str, FileDigest], *, world_size: int, clean: bool, attempt: int
) -> Path:
    """Turn the staged shards into a checkpoint. Call on one rank, after every rank's shards are durable.

    ``files`` maps each name, relative to the staging folder, to its digest. Raises OSError; nothing is committed then.
    """
    staging, final = staging_path(folder, step), checkpoint_path(folder, step)
    manifest: dict[str, object] = {
        "schema": "scaletrain.checkpoint/v1",
        "step": step,
        "world_size": world_size,
        "clean": clean,
        "attempt": attempt,
        "files": {name: {"size": digest.size, "sha256": digest.sha256} for name, digest in sorted(files.items())},
    }
    with (staging / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump({**manifest, "sha256": _manifest_hash(manifest)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _fsync_folder(staging)
    if final.exists():
        # Set aside, not deleted: removing gigabytes takes seconds, in which a kill would leave neither of the two.
        aside = final.with_name(f"{final.name}.old.tmp")
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
        staging.rename(final)
        _fsync_folder(folder)
        delete(aside)
    else:
        staging.rename(final)
        _fsync_folder(folder)
    return final


def delete(path: Path) -> None:
    """Remove a checkpoint, manifest first."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def remove_staging(folder: Path) -> None:
    """Remove what dead attempts left half-written."""
    for entry in folder.glob("step-*.tmp"):
        shutil.rmtree(entry, ignore_errors=True)


def set_aside_newer(folder: Path, step: int) -> list[str]:
    """Take what stands above ``step`` out of the count, as ``damaged-step-N``; returns the names they had.

    For who resumes at ``step``: the damaged would count as the newest, and push sound ones out of what prune() keeps.
    """
    doubtful = [path for path in _committed_folders(folder) if int(path.name.removeprefix("step-")) > step]
    for path in doubtful:
        aside = path.with_name(f"damaged-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    return [path.name for path in doubtful]


def prune(folder: Path, keep: int) -> list[int]:
    """Delete all but the ``keep`` newest checkpoints and the newest clean one; returns the steps deleted."""
    committed = list_checkpoints(folder)
    kept = committed[-keep:]
    newest_clean = next((c for c in reversed(committed) if c.clean), None)
    doomed = [c for c in committed if c not in kept and c is not newest_clean]
    for checkpoint in doomed:
        delete(checkpoint.path)
    return [checkpoint.step for checkpoint in doomed]


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Every committed checkpoint by step, oldest first, by its manifest alone."""
    return [read for path in _committed_folders(folder) if isinstance(read := _read(path), Checkpoint)]


def verify(checkpoint: Checkpoint) -> list[str]:
    """What is wrong with the files, one line each; empty when every byte is as it was written."""
    problems = []
    for name, expected in checkpoint.files.items():
        try:
            with (checkpoint.path / name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != expected.size:
                    problems.append(f"{name}: {size} bytes instead of {expected.size}")
                elif _file_hash(file) != expected.sha256:
                    problems.append(f"{name}: content does not match its hash")
        except OSError as error:
            problems.append(f"{name}: {error.strerror}")
    return problems


def newest_that_verifies(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to resume from, and what was wrong with each newer one that was passed over."""
    passed_over: list[str] = []
    for path in reversed(_committed_folders(folder)):
        checkpoint = _read(path)
        problems = verify(checkpoint) if isinstance(checkpoint, Checkpoint) else [f"{MANIFEST}: {checkpoint}"]
        if isinstance(checkpoint, Checkpoint) and not problems:
            return checkpoint, passed_over
        passed_over += [f"{path.name}/{problem}" for problem in problems]
    return None, passed_over


def newest_clean(folder: Path) -> Checkpoint | None:
    """The newest one that is marked clean and verifies."""
    marked = (checkpoint for checkpoint in reversed(list_checkpoints(folder)) if checkpoint.clean)
    return next((checkpoint for checkpoint in marked if not verify(checkpoint)), None)


def mark_clean(checkpoint: Checkpoint) -> None:
    """State in its manifest that the steps after it were healthy. Raises OSError; it is as it was then."""
    path = checkpoint.path / MANIFEST
    manifest = json.loads(path.read_text(encoding="utf-8")) | {"clean": True}
    del manifest["sha256"]
    draft = path.with_name(f"{MANIFEST}.tmp")
    with draft.open("w", encoding="utf-8") as file:
        json.dump({**manifest, "sha256": _manifest_hash(manifest)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    _fsync_folder(checkpoint.path)


def _committed_folders(folder: Path) -> list[Path]:
    """Folders that bear a step's final name, oldest first, whatever is in them."""
    found = {int(match[1]): entry for entry in _entries(folder) if (match := _STEP.fullmatch(entry.name))}
    return [found[step] for step in sorted(found)]


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _read(path: Path) -> Checkpoint | str:
    """The checkpoint as its manifest states it, or why there is none to be had."""
    try:
        data = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        stated = data.pop("sha256")
        if stated != _manifest_hash(data):
            return "content does not match its hash"
        files = {name: FileDigest(**digest) for name, digest in data["files"].items()}
        return Checkpoint(path, data["step"], data["world_size"], data["clean"], data["attempt"], files)
    except FileNotFoundError:
        return "missing (deleting was cut short, or the file was lost)"
    except OSError as error:
        return str(error.strerror)
    except (ValueError, KeyError, TypeError, AttributeError):
        return "not the manifest of a checkpoint"


def _manifest_hash(manifest: dict[str, object]) -> str:
    """Hash of the manifest's own content: a flipped bit in ``step`` or ``clean`` must not pass for the truth."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _file_hash(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while block := file.read(_HASH_BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()


def _fsync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
