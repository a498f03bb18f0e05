"""Steps that look at one document at a time: what each is built from, and the order in which they run."""

from collections.abc import Callable, Mapping
from typing import Any

from scaletrain_cli.data.steps.base import Document, DocumentError, Kept, Removed, Step
from scaletrain_cli.data.steps.identifiers import Identifiers
from scaletrain_cli.data.steps.language import Language
from scaletrain_cli.data.steps.normalization import Normalization
from scaletrain_cli.data.steps.quality_filters import C4, FineWeb, GopherQuality, GopherRepetition
from scaletrain_cli.data.steps.score import Score
from scaletrain_cli.spec.preparation import (
    C4Spec,
    ContaminationSpec,
    FineWebSpec,
    GopherQualitySpec,
    GopherRepetitionSpec,
    IdentifiersSpec,
    LanguageSpec,
    NormalizationSpec,
    PreparationStep,
    ScoreSpec,
)

__all__ = ["STEPS", "Document", "DocumentError", "Kept", "Removed", "Step", "identity", "step_of"]


def _contamination(section: ContaminationSpec) -> Step:
    from scaletrain_cli.data.steps.contamination import Contamination  # loads numpy

    return Contamination(section)


# What builds the step of a section. A builder loads models and files, so that it runs once in each worker process.
STEPS: dict[type[PreparationStep], Callable[[Any], Step]] = {
    NormalizationSpec: Normalization,
    LanguageSpec: Language,
    GopherQualitySpec: GopherQuality,
    GopherRepetitionSpec: GopherRepetition,
    C4Spec: C4,
    FineWebSpec: FineWeb,
    ScoreSpec: Score,
    ContaminationSpec: _contamination,
    IdentifiersSpec: Identifiers,
}


# Settings that are paths: ``depends_on`` has what the files contain.
_PATHS = ("files", "bad_words")


def step_of(section: PreparationStep) -> Step:
    """Return the step of a section of the spec. Raises UsageError if a library or a file that it needs is missing."""
    return STEPS[type(section)](section)


def identity(section: PreparationStep, step: Step) -> Mapping[str, Any]:
    """Return everything that the results of a step depend on beside the documents, as JSON values.

    The same value means the same results; ``only`` is not part of it, because it selects documents, and neither are
    the paths of files, whose content counts.
    """
    settings = section.model_dump(mode="json", exclude={"only", *_PATHS})
    return {"settings": settings, "version": step.version, "depends_on": dict(step.depends_on)}
