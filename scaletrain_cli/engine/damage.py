"""Damage on purpose to a committed checkpoint, as disks and people do it. Knows not what the files hold."""

from __future__ import annotations

import os
from pathlib import Path

from scaletrain_cli.rundir.checkpoints import Checkpoint
from scaletrain_cli.safe_files import open_to_change

DAMAGES = ("truncate", "flip", "delete")


def damage(checkpoint: Checkpoint, kind: str) -> Path:
    """Truncate, flip a bit of, or delete the largest file that the manifest names; returns which."""
    name = max(checkpoint.files, key=lambda name: checkpoint.files[name].size)
    path, middle = checkpoint.path / name, checkpoint.files[name].size // 2
    if kind == "delete":
        path.unlink()
    elif kind == "truncate":
        os.truncate(path, middle)
    else:
        with os.fdopen(open_to_change(path), "r+b") as file:
            file.seek(middle)
            byte = file.read(1)[0]
            file.seek(middle)
            file.write(bytes([byte ^ 1]))
    return path
