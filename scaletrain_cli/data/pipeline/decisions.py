"""The results of a step that are kept: for each task the documents that it removed, and its counts.

The text that a step changes is not kept: a step is a pure function, and runs again where the text is needed.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from scaletrain_cli.data.drafts import write_whole
from scaletrain_cli.data.pipeline.tasks import Place
from scaletrain_cli.data.steps.base import Document, Removed
from scaletrain_cli.data.steps.identifiers import Identifiers
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec.preparation import IDENTIFIERS, IdentifiersSpec

_EXAMPLES_PER_RULE = 3
_BAD_PER_REASON = 20
_EXAMPLE_CHARACTERS = 300
# No expression of the step ``identifiers`` matches more characters, except for private keys of many lines.
_LONGEST_IDENTIFIER = 1 << 15


def chained(*parts: Any) -> str:
    """Return the key of a step: a hash of the key of the step before and of all that its results depend on."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]


@dataclass
class Decisions:
    """One step and task. ``removed``: numbers of documents in the task, by rule; characters are Unicode code points.

    ``removed_characters``: of the same documents. ``measured``: for each rule, how many of its documents had a value,
    numbers rounded to two digits. ``examples``, ``bad`` and ``shown``: few documents with their places, without
    identifiers; ``bad``: those that could not be read; ``shown``: those that the report of duplicates names, by number.
    """

    documents: int = 0
    characters: int = 0
    documents_left: int = 0
    characters_left: int = 0
    removed: dict[str, list[int]] = field(default_factory=dict)
    removed_characters: dict[str, int] = field(default_factory=dict)
    measured: dict[str, dict[str, int]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)
    bad: list[dict[str, Any]] = field(default_factory=list)
    shown: dict[str, dict[str, Any]] = field(default_factory=dict)

    def take(self, text: str) -> None:
        """Count a document that arrives at the step."""
        self.documents += 1
        self.characters += len(text)

    def keep(self, text: str, counts: Mapping[str, int]) -> None:
        """Count a document that stays, with the text after the step."""
        self.documents_left += 1
        self.characters_left += len(text)
        self.counts.update(counts)

    def remove(self, number: int, removed: Removed, place: Place, text: str) -> None:
        """Record a document that is removed; the first ones of each rule become examples."""
        rule = removed.rule
        self.removed_characters[rule] = self.removed_characters.get(rule, 0) + len(text)
        measured, value = self.measured.setdefault(rule, {}), removed.measured
        if not isinstance(value, str):
            value = f"{float(f'{value:.2g}'):g}"  # so that there are few different ones
        measured[value] = measured.get(value, 0) + 1
        if self._count(number, rule) <= _EXAMPLES_PER_RULE:
            about = {"rule": rule, "measured": removed.measured, "limit": removed.limit}
            self.examples.append(about | place.to_document() | {"text": shortened(text)})

    def remove_bad(self, number: int, reason: Reason, place: Place, text: str) -> None:
        """Record a document that cannot be read; ``text`` is empty if there is none."""
        self.removed_characters[reason.code] = self.removed_characters.get(reason.code, 0) + len(text)
        if self._count(number, reason.code) <= _BAD_PER_REASON:
            self.bad.append({"rule": reason.code, **place.to_document(), "problem": shortened(str(reason))})

    def show(self, number: int, place: Place, text: str) -> None:
        """Record the beginning of a document that the report shows."""
        self.shown[str(number)] = place.to_document() | {"text": shortened(text)}

    def _count(self, number: int, rule: str) -> int:
        numbers = self.removed.setdefault(rule, [])
        numbers.append(number)
        return len(numbers)

    def write(self, path: Path) -> None:
        """Write the decisions, whole or not at all. Raises OSError."""
        write_whole(path, json.dumps(vars(self) | {"counts": dict(sorted(self.counts.items()))}, ensure_ascii=False))


def read_decisions(path: Path) -> Decisions | None:
    """Return the decisions in a file; None if there is none, or one that this version cannot read."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return Decisions(**document | {"counts": Counter(document["counts"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def shortened(text: str) -> str:
    """Return the beginning of a text with placeholders for mail addresses, IP addresses, phone numbers and keys."""
    window = text[: 2 * _LONGEST_IDENTIFIER]
    replaced = _identifiers()(Document(window, "", "")).text
    if len(window) < len(text):  # the last match may be incomplete, and was not found
        replaced = replaced[: max(0, len(replaced) - _LONGEST_IDENTIFIER)]
    return replaced if len(replaced) <= _EXAMPLE_CHARACTERS else f"{replaced[:_EXAMPLE_CHARACTERS]}…"


@cache
def _identifiers() -> Identifiers:
    return Identifiers(IdentifiersSpec(step="identifiers", replace=IDENTIFIERS))
