"""sweep.json: the sweep that a run belongs to, and the run that its first submission waits for. Written once.

A sweep has no folder: it is the set of runs under the runs root whose files name it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from scaletrain_cli.errors import UsageError
from scaletrain_cli.rundir.documents import undamaged_as, write_document
from scaletrain_cli.rundir.paths import RunDir, exact_run, find_run, list_runs, runs_root
from scaletrain_cli.sent_run import sent_run_folder


@dataclass(frozen=True)
class SweepPlace:
    """Point ``number`` (from 1) of the ``points`` of a sweep; ``after`` is the run before it in its lane.

    ``array``: the first submission of the run was task ``number`` of one job array for the whole sweep.
    """

    sweep: str
    number: int
    points: int
    overrides: tuple[str, ...]
    after: str | None = None
    array: bool = False


@dataclass(frozen=True)
class Sweep:
    """The existing runs of a sweep in the order of submission; ``points`` is the planned number."""

    name: str
    points: int
    runs: tuple[RunDir, ...]


def write_sweep_place(run: RunDir, place: SweepPlace) -> None:
    """Write sweep.json. Call it before the run is submitted, because its scheduler reads it."""
    write_document(run.path / "sweep.json", {"schema": "scaletrain.sweep/v1", **dataclasses.asdict(place)})


def read_sweep_place(run: RunDir) -> SweepPlace | None:
    """Return the place of a run in its sweep; None if it has none or the file is invalid."""
    return undamaged_as(SweepPlace, run.path / "sweep.json")


def list_sweeps(begin: str = "") -> dict[str, Sweep]:
    """Return the sweeps with runs under the runs root whose ids begin so, by name: as that of their sweep does."""
    found: dict[str, list[tuple[SweepPlace, RunDir]]] = {}
    for run in list_runs(begin):
        place = read_sweep_place(run)
        if place is not None:
            found.setdefault(place.sweep, []).append((place, run))
    for members in found.values():
        members.sort(key=lambda member: member[0].number)
    return {
        name: Sweep(name, members[0][0].points, tuple(run for _, run in members)) for name, members in found.items()
    }


def find_sweep(name: str) -> Sweep:
    """Return the sweep with this name or unique prefix. Raises UsageError."""
    sweeps = list_sweeps(name) or list_sweeps()
    begun = [sweep for sweep in sweeps if name and sweep.startswith(name)]
    if name in sweeps or len(begun) == 1:
        return sweeps.get(name) or sweeps[begun[0]]
    if begun:
        raise UsageError(f"{name} matches {len(begun)} sweeps: {', '.join(begun)}. Use a longer prefix.")
    known = f"Available sweeps: {', '.join(sweeps)}." if sweeps else "There are no sweeps."
    raise UsageError(f"no sweep {name[:200]!r} under {runs_root()}. {known}")


def find_runs(names: Iterable[str]) -> list[RunDir]:
    """Return the runs that are named, alone or by their sweep, in this order, each once. Raises UsageError."""
    chosen: dict[str, RunDir] = {}
    for name in names:
        named = find_run_or_sweep(name)
        for run in named.runs if isinstance(named, Sweep) else (named,):
            chosen.setdefault(str(run.path), run)
    return list(chosen.values())


def find_run_or_sweep(name: str) -> RunDir | Sweep:
    """Return a sweep for its full name, or for a prefix of its runs only; otherwise a run, as find_run() does."""
    if sent_run_folder() is not None or not name or exact_run(name) is not None:
        return find_run(name)
    begun = {run.run_id for run in list_runs(name)}
    if len(begun) < 2 and not any(run.startswith(f"{name}-") for run in begun):
        return find_run(name)
    sweeps = list_sweeps(name)
    if name in sweeps:
        return sweeps[name]
    of = [sweep for key, sweep in sweeps.items() if key.startswith(name)]
    if len(of) == 1 and begun <= {run.run_id for run in of[0].runs}:
        return of[0]
    return find_run(name)
