"""sweep.json: which sweep a run belongs to, and which run its first submission has to wait for. Written once."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from scaletrain_cli.rundir.documents import read_document, write_document
from scaletrain_cli.rundir.paths import RunDir


@dataclass(frozen=True)
class SweepPlace:
    """Point ``number`` (1 the first) of the ``points`` of a sweep; ``after`` is the run before it in its lane."""

    sweep: str
    number: int
    points: int
    overrides: tuple[str, ...]
    after: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As it stands in the file."""
        return {"schema": "scaletrain.sweep/v1", **dataclasses.asdict(self)}


def write_sweep_place(run: RunDir, place: SweepPlace) -> None:
    """Before the run is handed over: its scheduler reads it."""
    write_document(run.path / "sweep.json", place.to_json())


def read_sweep_place(run: RunDir) -> SweepPlace | None:
    """None for a run of its own."""
    data = read_document(run.path / "sweep.json")
    if data is None:
        return None
    return SweepPlace(data["sweep"], data["number"], data["points"], tuple(data["overrides"]), data["after"])
