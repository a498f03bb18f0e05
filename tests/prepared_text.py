"""Text that is prepared for a test."""

from __future__ import annotations

from pathlib import Path

from scaletrain_cli.data.prepared import prepare_data
from scaletrain_cli.spec import DataSpec


def prepared_text(data: DataSpec, runs_root: Path) -> Path:
    """Return the dataset of the single source, prepared in this process."""
    (folder,) = prepare_data(data, runs_root, 1, lambda *_: None).values()
    return folder
