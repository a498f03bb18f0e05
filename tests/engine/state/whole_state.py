"""A checkpoint as whole matrices, whatever layout saved it."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from scaletrain_cli.engine.state.pieces import Piece
from scaletrain_cli.engine.state.reader import StateReader


def whole_state(folder: Path) -> dict[str, Tensor]:
    """Every matrix of every kind, flat, as ``KIND/NAME``."""
    reader = StateReader(folder, -1, ())
    return {
        f"{kind}/{name}": reader.read(kind, Piece(name, shape, None, 0, shape.numel()))
        for kind in reader.kinds
        for name, shape in reader.shapes.items()
    }
