"""Pieces of the measurements: the machine they run on, their rows, and their limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Setting:
    """The place of a measurement. ``gpu``: the catalogue's name of the GPU; None on the CPU, with small models.

    ``ceiling``: FLOP/s of a large bf16 matrix product on this device; None if it was not measured. ``folder``: for the
    row's files. The environment has SCALETRAIN_RUNS, which all rows share, so that data are prepared once.
    """

    gpu: str | None
    ceiling: float | None
    folder: Path


@dataclass(frozen=True)
class Result:
    """The measurement of one row: lines of the piece's table, and figures that other rows use.

    ``failed``: it should have been measured and was not. A row that the product refuses has not failed.
    """

    lines: list[list[str]]
    facts: dict[str, Any] = field(default_factory=dict)
    failed: bool = False


Measure = Callable[[Setting], Result]


@dataclass(frozen=True)
class Piece:
    """A table of the page. ``rows``: in order of their value; ``tiny``: those of a trial on the CPU.

    ``seconds``: that all rows may take, and ``row_seconds`` one of them.
    """

    name: str
    title: str
    text: str
    columns: tuple[str, ...]
    rows: Mapping[str, Measure]
    tiny: Mapping[str, Measure]
    seconds: float
    row_seconds: float

    def header(self) -> list[str]:
        """Return the two first lines of the table in Markdown."""
        return [f"| {' | '.join(self.columns)} |", "|" + "---|" * len(self.columns)]


def verdict(**met: bool | None) -> str:
    """Return which targets are met, by their names; None: nothing was measured to judge by."""
    judged = {name.replace("_", " "): each for name, each in met.items() if each is not None}
    missed = [name for name, each in judged.items() if not each]
    if not judged:
        return "-"
    return f"missed: {', '.join(missed)}" if missed else f"met: {', '.join(judged)}"
