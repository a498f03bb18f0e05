"""Measurements of rows: kept line by line in a file, and written as a page of tables."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu.piece import Piece

_NONE_YET = (
    "Not measured yet: no row of this page is from a GPU. `make gpu` on a machine with one fills it in; "
    "[docs/engine.md](../../docs/engine.md#one-command-for-a-gpu) says how."
)


@dataclass(frozen=True)
class Row:
    """A measured row. ``commit`` and ``device`` (the catalogue's name) say what it is of; ``ended``: Unix time.

    ``ok`` is False for a row that failed or ran out of time; its only line says so.
    """

    piece: str
    name: str
    commit: str
    device: str
    seconds: float
    ended: float
    ok: bool
    lines: list[list[str]]
    facts: dict[str, Any]


class Results:
    """The rows in ``results.jsonl`` of a folder."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "results.jsonl"
        self.rows: list[Row] = []
        if self._file.exists():
            self.rows = [Row(**json.loads(line)) for line in self._file.read_text(encoding="utf-8").splitlines()]

    def add(self, row: Row) -> None:
        """Append a row, on disk before this returns."""
        self.rows.append(row)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def of(self, commit: str, device: str) -> dict[tuple[str, str], Row]:
        """Return the latest row of each piece and name that is of this commit and device."""
        found = [row for row in self.rows if (row.commit, row.device) == (commit, device)]
        return {(row.piece, row.name): row for row in found}


def page(pieces: Iterable[Piece], rows: dict[tuple[str, str], Row], command: str, *, on_gpu: bool) -> str:
    """Return the page in Markdown, with the tables of the pieces that have rows."""
    lines = ["# One GPU: speed, memory, parity and survival beside their targets", ""]
    if not on_gpu:
        lines += [f"{_NONE_YET}{' What follows is a trial on a CPU with tiny models.' if rows else ''}", ""]
    if rows:
        latest = max(rows.values(), key=lambda row: row.ended)
        day = time.strftime("%Y-%m-%d", time.gmtime(latest.ended))
        spent = sum(row.seconds for row in rows.values())
        lines += [f"{day}, {latest.device}, commit {latest.commit}, {spent / 60:.0f} min: `{command}`", ""]
    for piece in pieces:
        own = [row for (name, _), row in rows.items() if name == piece.name]
        if not own:
            continue
        lines += [f"## {piece.title}", "", piece.text, "", *piece.header()]
        lines += [table_line(cells, len(piece.columns)) for row in own for cells in row.lines]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def table_line(cells: list[str], columns: int) -> str:
    """Return a line of a table in Markdown; missing cells are empty."""
    return f"| {' | '.join([*cells, *[''] * (columns - len(cells))])} |"
