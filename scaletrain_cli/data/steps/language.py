"""The step ``language``: keep documents in some languages."""

from functools import cache
from typing import Any

from scaletrain_cli.data.steps.base import Document, Kept, Removed, Step
from scaletrain_cli.errors import MissingPackageError
from scaletrain_cli.extras import install_command
from scaletrain_cli.spec.preparation import LanguageSpec


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
