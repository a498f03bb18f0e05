"""Read tables of measurements, and divide each row into the columns that describe the run and those measured on it.

The mapping to a run spec gets only the first, so that no measured value can reach the planner.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from planner_truth.mapping import Case, Unmapped

# Authors put results into their notes ("17GB", "Tokens/sec: 1650", "OOM"); the mapping needs the words around them.
_RESULT = re.compile(r"(?i)tokens/sec[^;\[]*|[\d.,]+ ?(?:GB|GiB|secs?|s|ms|%|TFLOPs?|tokens?/s)\b|\bOOM\b")
_LARGEST_FIELD = 10_000_000  # characters; whole argument lists stand in one column


@dataclass(frozen=True)
class Measured:
    """The measured values of a row, None if missing: seconds per optimizer step, bytes on one device."""

    step_seconds: float | None = None
    memory_bytes: float | None = None
    # Field of the planner's Memory that means the same: allocated, reserved, or what nvidia-smi shows, cached.
    memory_kind: str = "cached"
    memory_stage: str = "worst"  # pipeline stage of the rank that reported it: first, last or worst
    ran: bool | None = None  # False: crashed or out of memory
    mfu: float | None = None


@dataclass(frozen=True)
class Row:
    """One measurement: the columns that describe the run, and the measured ones."""

    row_id: str
    inputs: Mapping[str, str]
    truth: Mapping[str, str]


@dataclass(frozen=True)
class Table:
    """The format of one file of measurements: its columns, and the functions that read its rows.

    ``build`` sees only ``input_columns``. ``measure`` sees all columns, because a rate needs the batch to become a
    time. ``panel`` names the runs that compete with each other: same model, same machines. ``source`` names who
    measured a row; empty if the run that was measured is not the one that is planned. ``usual_kernels``: whether times
    are those of the kernels that a plan counts.
    """

    file: str
    input_columns: frozenset[str]
    truth_columns: frozenset[str]
    build: Callable[[Mapping[str, str]], Case]
    measure: Callable[[Mapping[str, str], Mapping[str, str]], Measured]
    panel: Callable[[Mapping[str, str]], str] = lambda inputs: ""
    source: Callable[[Mapping[str, str]], str] = lambda inputs: inputs.get("set") or "one"
    usual_kernels: bool = True

    def __post_init__(self) -> None:
        both = self.input_columns & self.truth_columns
        if both:
            raise ValueError(f"{self.file}: {', '.join(sorted(both))} cannot be input and measured at once")

    def path(self, directory: Path) -> Path:
        """Return the file in the directory, or if it has none, the one beside this module, which the project has."""
        given = directory / self.file
        return given if given.is_file() else Path(__file__).with_name(self.file)

    def read(self, directory: Path) -> list[Row]:
        """Return every row of the file; a missing column reads as empty."""
        csv.field_size_limit(_LARGEST_FIELD)
        with self.path(directory).open(encoding="utf-8", newline="") as file:
            return [self._split(number, row) for number, row in enumerate(csv.DictReader(file), start=2)]

    def _split(self, line: int, row: Mapping[str, str | None]) -> Row:
        def pick(columns: frozenset[str]) -> Mapping[str, str]:
            cells = {name: (row.get(name) or "").strip() for name in sorted(columns)}
            if "notes" in cells:
                cells["notes"] = _RESULT.sub("", cells["notes"])
            return MappingProxyType(cells)

        return Row(row.get("row_id") or f"line {line}", pick(self.input_columns), pick(self.truth_columns))


def whole(row: Mapping[str, str], column: str, default: int | None = None) -> int:
    """Return an integer, or the default for an empty cell. Raises Unmapped with the column."""
    value = number(row, column)
    if value is None:
        if default is None:
            raise Unmapped(f"no {column}")
        return default
    if value != int(value):
        raise Unmapped(f"{column} is not a whole number")
    return int(value)


def number(row: Mapping[str, str], column: str) -> float | None:
    """Return a finite number; None for an empty cell. Raises Unmapped for anything else."""
    text = row[column].replace(",", "")
    if text == "" or text.lower() in ("n/a", "na", "none", "nan", "-"):
        return None
    try:
        value = float(text)
    except ValueError:
        raise Unmapped(f"{column} is not a number") from None
    if not math.isfinite(value):
        raise Unmapped(f"{column} is not a finite number")
    return value
