"""The steps ``score``, which keeps documents by a number that their rows carry, and ``language``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from scaletrain_cli.data.steps.base import Document, DocumentError, Kept, Removed, Step
from scaletrain_cli.errors import MissingPackageError
from scaletrain_cli.extras import install_command
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec.preparation import LanguageSpec, PreparationStep, ScoreSpec

if TYPE_CHECKING:
    from scaletrain_cli.data.sources.records import Record


class Language(Step):
    """The most likely language of the beginning of a text, by py3langid."""

    def __init__(self, spec: LanguageSpec) -> None:
        self.spec = spec
        self.keep, self.limit = frozenset(spec.keep), ", ".join(spec.keep)
        self.identifier, version = _load()
        self.depends_on = {"py3langid": version}

    def __call__(self, document: Document) -> Kept | Removed:
        """Keep the document if its language is one of ``keep`` and likely enough."""
        language, probability = self.classify(document.text)
        if language not in self.keep:
            return Removed("language.keep", language, self.limit)
        if probability < self.spec.min_probability:
            return Removed("language.min_probability", probability, self.spec.min_probability)
        return Kept(document.text, {f"language.{language}": 1})

    def classify(self, text: str) -> tuple[str, float]:
        """Return the most likely language (ISO 639) and its probability among all languages of the model."""
        language, probability = self.identifier.classify(text[: self.spec.characters])
        return language, round(float(probability), 4)


@cache  # takes half a second
def _load() -> tuple[Any, str]:
    try:
        import py3langid
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise MissingPackageError(
            f"data.prepare with step: language needs py3langid ({error}).", install_command("data")
        ) from error
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True), py3langid.__version__


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
