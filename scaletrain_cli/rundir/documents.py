"""Small JSON documents of a run directory that are replaced as a whole: a reader sees the old one or the new one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_document(path: Path, data: dict[str, Any]) -> None:
    """Replace the file in one step. Raises OSError; the file is as it was then."""
    # The process id keeps two writers from truncating each other's draft.
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # or a power cut could leave the new name with nothing in it
    draft.replace(path)


def read_document(path: Path) -> dict[str, Any] | None:
    """The object in the file; None when there is no such file or it is not a JSON object (a disk that was full)."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return data if isinstance(data, dict) else None
