"""attempts/NNNN/ledger.json: where the seconds of one attempt went, as its engine counted them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

from scaletrain_cli.rundir.documents import from_document, read_document, write_document
from scaletrain_cli.rundir.paths import RunDir

SCHEMA = "scaletrain.ledger/v1"
# step: without waiting for data; save: what a checkpoint held up; restore: the set-up of an attempt and all it loads.
Category = Literal["step", "data", "save", "restore", "evaluation", "rollback", "other"]
CATEGORIES: tuple[Category, ...] = get_args(Category)


@dataclass(frozen=True)
class Ledger:
    """Of rank 0. ``began`` and ``updated`` in Unix seconds; ``closed`` once the engine came to its end."""

    attempt: int
    began: float
    updated: float
    closed: bool
    steps: int  # trained by this attempt, each as often as it was trained
    seconds: dict[Category, float]


def write_ledger(run: RunDir, ledger: Ledger) -> None:
    """Raises OSError."""
    write_document(run.ledger(ledger.attempt), {"schema": SCHEMA, **dataclasses.asdict(ledger)})


def read_ledger(run: RunDir, attempt: int) -> Ledger | None:
    """None where the attempt did not come to write one."""
    data = read_document(run.ledger(attempt))
    if data is None or data.pop("schema", None) != SCHEMA:
        return None
    return from_document(Ledger, data, run.ledger(attempt))
