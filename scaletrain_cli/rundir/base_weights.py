"""The identity of the weights that a run starts from and a checkpoint does not store: names, sizes and hashes of files.

Parameters that never train keep the values of ``model.weights``. A checkpoint records which files those were, so that
training cannot continue from other ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import Checkpoint, FileDigest, file_digest

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
# A file of the cache of the Hugging Face Hub is a link to one that is called by its hash.
_HASH = re.compile(r"[0-9a-f]{64}")
_STATE = "state.json"  # of a checkpoint

Digests = Mapping[str, FileDigest]


def weight_files(folder: Path) -> list[str]:
    """Return the names of the files with the weights in a folder. Raises UsageError if they cannot be read."""
    try:
        if not (folder / _INDEX).exists():
            (folder / _SINGLE).stat()
            return [_SINGLE]
        return [_INDEX, *sorted(set(json.loads((folder / _INDEX).read_bytes())["weight_map"].values()))]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise _unreadable(folder, error) from error


def digests_of(folder: Path, names: Sequence[str]) -> dict[str, FileDigest]:
    """Return sizes and hashes of files; every byte is read, except in the cache of the hub. Raises UsageError."""
    found: dict[str, FileDigest] = {}
    for name in names:
        path = folder / name
        try:
            target = path.resolve(strict=True)
            if path.is_symlink() and _HASH.fullmatch(target.name):
                found[name] = FileDigest(target.stat().st_size, target.name)
            else:
                found[name] = file_digest(path)
        except OSError as error:
            raise _unreadable(folder, error) from error
    return found


def to_document(folder: Path, digests: Digests) -> dict[str, Any]:
    """Return the identity as JSON values, for the state of a checkpoint."""
    return {"folder": str(folder), "files": {name: asdict(digest) for name, digest in sorted(digests.items())}}


def check_same_base(checkpoint: str, saved: Mapping[str, Any] | None, folder: Path, digests: Digests) -> None:
    """Raise UsageError unless the files are those that the checkpoint was trained on."""
    if saved is None:
        return
    recorded = {name: FileDigest(**digest) for name, digest in saved["files"].items()}
    for name in sorted(recorded.keys() | digests.keys()):
        if recorded.get(name) != digests.get(name):
            params = {"checkpoint": checkpoint, "folder": str(folder), "file": name, "saved": str(saved["folder"])}
            raise UsageError(Reason("engine.base-weights-differ", params))


def read_base(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return the identity that a checkpoint recorded; None if it stores all weights itself. Raises OSError."""
    if _STATE not in checkpoint.files:  # that of another program
        return None
    state = json.loads((checkpoint.path / _STATE).read_text(encoding="utf-8"))
    found: dict[str, Any] | None = state.get("base")
    return found


def check_base_of(checkpoint: Checkpoint, folder: Path) -> None:
    """Raise UsageError if weights that the checkpoint does not store are missing from ``folder``, or are others."""
    if (saved := read_base(checkpoint)) is not None:
        check_same_base(checkpoint.path.name, saved, folder, digests_of(folder, weight_files(folder)))


def _unreadable(folder: Path, error: Exception) -> UsageError:
    return UsageError(Reason("engine.base-weights-unreadable", {"folder": str(folder), "error": str(error)}))
