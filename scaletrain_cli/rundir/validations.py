"""Measures of the validations of a training job beside the loss: ``evaluations/validation-N.json``, and their names.

The figures of the whole split are ``validation_<name>`` in metrics.jsonl; the file of a step also has those of each
class, and sample answers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scaletrain_cli.rundir.documents import json_value, read_as, undamaged_in, write_document
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import make_folder

SCHEMA = "scaletrain.validation/v1"
PREFIX = "validation_"
_FILE = re.compile(r"validation-(\d{8,})\.json")
_COUNTS = tuple(f"{PREFIX}{samples}" for samples in ("sequences", "images", "pairs"))
# Names of figures of which the least is the best.
ERRORS = ("mae", "rmse")


@dataclass(frozen=True)
class Validation:
    """The figures after ``step`` steps. ``metrics``: of the split, by name. ``details``: such as a list of classes."""

    step: int
    time: float
    metrics: dict[str, float | None] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


def measures_in(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures beside the loss in a line of metrics.jsonl, by their names without ``validation_``."""
    return {
        name.removeprefix(PREFIX): value
        for name, value in line.items()
        if name.startswith(PREFIX) and not name.startswith(f"{PREFIX}loss") and name not in _COUNTS
    }


def validation_path(run: RunDir, step: int) -> Path:
    """Return the file of the validation after ``step`` steps."""
    return run.path / "evaluations" / f"validation-{step:08d}.json"


def write_validation(run: RunDir, step: int, metrics: Mapping[str, float], details: Mapping[str, Any]) -> None:
    """Write the file of a validation; figures that are not finite are null. Raises OSError."""
    found = Validation(step, round(time.time(), 3), json_value(dict(metrics)), json_value(dict(details)))
    make_folder(validation_path(run, step).parent)
    write_document(validation_path(run, step), {"schema": SCHEMA, **asdict(found)})


def read_validation(run: RunDir, step: int) -> Validation | None:
    """Return the validation after ``step`` steps; None if it has no file. Raises UsageError for a damaged file."""
    return read_as(Validation, validation_path(run, step))


def read_validations(run: RunDir) -> list[Validation]:
    """Return all validations with a file, by step, without files that are damaged."""
    return undamaged_in(Validation, run.path / "evaluations", _FILE)


def forget_newer_validations(run: RunDir, step: int) -> None:
    """Remove the files of later steps than ``step``, which were rolled back."""
    for validation in read_validations(run):
        if validation.step > step:
            validation_path(run, validation.step).unlink(missing_ok=True)
