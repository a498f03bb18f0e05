"""What a rank or a node says about its own end: attempts/NNNN/failures/<name>.json. For engine and agent alike."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from scaletrain_cli.rundir.documents import from_document, read_document, write_document
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import make_folder


@dataclass(frozen=True)
class Failure:
    """A rank (or, with rank None, a node) saying itself why it gives up; or its agent, of a rank that cannot.

    ``node`` is the node record's name for it, where an agent speaks. Not ``sure``: another node may know better.
    """

    rank: int | None
    reason: str
    message: str
    exit_code: int
    node: str = ""
    sure: bool = True


def write_failure(run: RunDir, attempt: int, name: str, failure: Failure) -> None:
    """Leave the reason where judging the attempt will look for it. Raises OSError."""
    folder = run.attempt(attempt) / "failures"
    make_folder(folder)
    write_document(folder / f"{name}.json", dataclasses.asdict(failure))


def read_failures(run: RunDir, attempt: int) -> list[Failure]:
    """Every reason left, by file name."""
    paths = sorted((run.attempt(attempt) / "failures").glob("[!.]*.json"))
    return [from_document(Failure, data, path) for path in paths if (data := read_document(path)) is not None]
