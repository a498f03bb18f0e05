"""The step ``score``: keep documents by a number that their rows carry."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from scaletrain_cli.data.steps.base import Document, DocumentError, Kept, Removed, Step
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec.preparation import PreparationStep, ScoreSpec

if TYPE_CHECKING:
    from scaletrain_cli.data.sources.records import Record


class Score(Step):
    """Limits of one column."""

    def __init__(self, spec: ScoreSpec) -> None:
        self.spec = spec

    def __call__(self, document: Document) -> Kept | Removed:
        """Keep the document if its score is between ``min`` and ``max``, both included."""
        column = self.spec.column
        if column not in document.columns:
            params = {"column": column, "columns": sorted(map(str, document.columns))}
            raise DocumentError(document.place, Reason("document_steps.column-missing", params))
        value = document.columns[column]
        if not _is_number(value):
            params = {"column": column, "kind": "null" if value is None else f"a value of type {type(value).__name__}"}
            raise DocumentError(document.place, Reason("document_steps.column-not-number", params))
        score, spec = float(value), self.spec
        if spec.min is not None and score < spec.min:
            return Removed("score.min", score, spec.min)
        if spec.max is not None and score > spec.max:
            return Removed("score.max", score, spec.max)
        return Kept(document.text)


def score_problem(source: str, sections: Iterable[PreparationStep]) -> Callable[[Record], Reason | None]:
    """Return what tells why the steps ``score`` of a source cannot use a document; None if they can."""
    steps = [
        Score(section)
        for section in sections
        if isinstance(section, ScoreSpec) and (section.only is None or source in section.only)
    ]

    def problem(record: Record) -> Reason | None:
        document = Document(record.text, source, "", record.columns)
        try:
            for step in steps:
                step(document)
        except DocumentError as error:
            return error.reason
        return None

    return problem


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return not math.isnan(float(value))
    except OverflowError:  # an integer of more than 300 digits
        return False
