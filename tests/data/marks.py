"""Count the combining marks in a row that reach Python's normalization, whose time is quadratic in their number."""

import itertools
import unicodedata

import pytest


def normalized_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each text that is normalized from now on adds its longest run of marks."""
    longest: list[int] = []
    normalize = unicodedata.normalize

    def noted(form: str, text: str) -> str:
        runs = itertools.groupby(text, key=lambda character: unicodedata.combining(character) > 0)
        longest.append(max((len(list(run)) for are_marks, run in runs if are_marks), default=0))
        return normalize(form, text)  # type: ignore[arg-type]

    monkeypatch.setattr(unicodedata, "normalize", noted)
    return longest
