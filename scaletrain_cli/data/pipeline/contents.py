"""The stage that reads whole files for the hashes of what they contain: any number of processes share the reading."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from scaletrain_cli.data.content import FileRange, ReadHashes, hash_range, hashes_from_ranges, ranges_of
from scaletrain_cli.data.drafts import write_whole
from scaletrain_cli.data.pipeline.claims import Claims, Timing
from scaletrain_cli.data.pipeline.decisions import chained
from scaletrain_cli.data.pipeline.schedule import Progress, Stage, Workers, run_stage
from scaletrain_cli.data.sources.records import SourceFile
from scaletrain_cli.rundir.shared_datasets import require_own_place, steps_folder
from scaletrain_cli.safe_files import make_folder

UNIT_BYTES = 1 << 30  # a process that is killed loses no more
_OPENING_BYTES = 1 << 16  # what is read in the time in which a file is opened
_VERSION = "contents/v1"


class _Unit(NamedTuple):
    result: Path
    ranges: tuple[FileRange, ...]


@contextmanager
def shared_reading(
    datasets: Path, workers: int, progress: Progress, failure: Path | None = None, timing: Timing | None = None
) -> Iterator[ReadHashes]:
    """Yield a function that returns a hash of what each of some files contains, by its path.

    All processes that call it with the same files share the reading, and what a killed one has read is not read again.
    The hashes must be remembered before the end of the context, which removes them. ``failure``: as for prepare().
    """
    steps = steps_folder(datasets)
    require_own_place(steps)
    folder = steps / ".content"
    make_folder(folder, parents=True)
    used: list[Path] = []
    with Claims(steps / ".work", failure, timing) as claims:

        def read(files: Sequence[SourceFile]) -> dict[str, str]:
            claims.remove_drafts(folder)
            claims.raise_failure()
            used.append(folder / chained(_VERSION, UNIT_BYTES, [(file.path, file.state) for file in files]))
            return _read(files, used[-1], workers, claims, progress)

        yield read

        def remove_hashes() -> None:
            for folder in used:
                shutil.rmtree(folder, ignore_errors=True)

        claims.at_last_end(remove_hashes)


def _read(
    files: Sequence[SourceFile], folder: Path, workers: int, claims: Claims, progress: Progress
) -> dict[str, str]:
    ranges = [part for file in files for part in ranges_of(file)]
    units = [_Unit(folder / f"{number:06d}.json", unit) for number, unit in enumerate(_units(ranges))]
    stage = Stage(
        "read the sources",
        f"{folder.name}-content",
        folder,
        tuple(unit.result.name for unit in units),
        _hash_unit,
        units.__getitem__,
    )
    for unit in units:
        if unit.result.exists() and _result(unit) is None:  # damaged
            unit.result.unlink(missing_ok=True)
    with Workers(min(workers, len(units)), claims.owner) as pool:
        run_stage(stage, claims, pool, progress)
    results = [_result(unit) for unit in units]
    return hashes_from_ranges(files, ranges, [digest for hashes in results for digest in hashes or ()])


def _units(ranges: Sequence[FileRange]) -> Iterator[tuple[FileRange, ...]]:
    """Yield the ranges in groups of about UNIT_BYTES."""
    held: list[FileRange] = []
    size = 0
    for part in ranges:
        held.append(part)
        size += part.stop - part.start + _OPENING_BYTES
        if size >= UNIT_BYTES:
            yield tuple(held)
            held, size = [], 0
    if held:
        yield tuple(held)


def _hash_unit(unit: _Unit) -> None:
    """Write the hashes of the ranges of a unit, in order. Raises UsageError and OSError."""
    write_whole(unit.result, json.dumps([hash_range(part) for part in unit.ranges]))


def _result(unit: _Unit) -> list[str] | None:
    """Return the hashes of a unit; None if its result cannot be used."""
    with suppress(OSError, ValueError):
        digests = json.loads(unit.result.read_text(encoding="utf-8"))
        if (
            isinstance(digests, list)
            and len(digests) == len(unit.ranges)
            and all(isinstance(digest, str) for digest in digests)
        ):
            return digests
    return None
