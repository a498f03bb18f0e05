"""Small JSON documents of a run directory that are replaced as a whole: a reader sees the old one or the new one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scaletrain_cli.safe_files import replace_file


def write_document(path: Path, data: dict[str, Any], *, shared: bool = False) -> None:
    """Replace the file in one step. Raises OSError; the file is as it was then.

    A ``shared`` one is for all who may write to its folder.
    """
    replace_file(path, json.dumps(data, indent=1, allow_nan=False) + "\n", shared=shared)


def read_document(path: Path) -> dict[str, Any] | None:
    """The object in the file; None when there is no such file or it is not a JSON object (a disk that was full)."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return data if isinstance(data, dict) else None
