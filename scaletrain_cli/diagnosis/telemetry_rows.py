"""Rows of the telemetry that stand for training at its usual speed, and figures of them."""

from collections.abc import Mapping
from typing import TypeVar

from scaletrain_cli.diagnosis.case import Case
from scaletrain_cli.diagnosis.curves import median
from scaletrain_cli.telemetry.series import Series

FEWEST = 3  # rows: one covers a second of training, or several older seconds
_RECENT = 60
_FIRST_STEPS = 5  # of an attempt: they allocate, compile and fill caches
_Key = TypeVar("_Key", str, int)


def recent(case: Case, series: Series, column: str) -> list[float]:
    """Return the newest measured means of a column, at most 60 rows, without those of the first steps of the attempt.

    Of nodes and GPUs also without those in which a checkpoint or a rollback was written, or a validation measured: that
    is other work than a step. The columns of ranks measure steps alone.
    """
    pauses = () if series.subject.startswith("rank") else case.pauses
    first = min((step for step in series.steps if step > 0), default=0)
    rows = zip(series.times, series.steps, series.mean.get(column, ()), strict=False)
    kept = [
        value
        for time, step, value in rows
        if value == value and step > first + _FIRST_STEPS and not any(begin <= time <= end for begin, end in pauses)
    ]
    return kept[-_RECENT:]


def level(case: Case, series: Series, column: str) -> float | None:
    """Return the median of the recent rows of a column; None for fewer than three."""
    values = recent(case, series, column)
    return median(values) if len(values) >= FEWEST else None


def levels(case: Case, subjects: Mapping[_Key, Series], column: str) -> dict[_Key, float]:
    """Return the level of a column by subject, of those that measure it."""
    found = ((key, level(case, series, column)) for key, series in subjects.items())
    return {key: value for key, value in found if value is not None}


def share(case: Case, series: Series, column: str) -> float | None:
    """Return the mean of the recent rows of a share of time; None for fewer than three."""
    values = recent(case, series, column)
    return sum(values) / len(values) if len(values) >= FEWEST else None


def worst(values: Mapping[_Key, float | None]) -> tuple[_Key, float] | None:
    """Return the subject with the largest value, and the value; None if none is known."""
    known = {key: value for key, value in values.items() if value is not None}
    if not known:
        return None
    key = max(known, key=known.__getitem__)
    return key, known[key]


def grown(series: Series, column: str) -> float:
    """Return how much a counter rose over the rows; 0 if it is not measured, or began anew."""
    values = [value for value in series.highest.get(column, ()) if value == value]
    return max(0.0, values[-1] - values[0]) if values else 0.0
