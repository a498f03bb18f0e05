"""The results of a step that are kept: for each task the documents that it removed, and its counts.

The text that a step changes is not kept: a step is a pure function, and runs again where the text is needed.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scaletrain_cli.data.steps.base import Removed
from scaletrain_cli.safe_files import make_folder, replace_file

_EXAMPLES_PER_RULE = 3
_EXAMPLE_CHARACTERS = 200


def chained(*parts: Any) -> str:
    """Return the key of a step: a hash of the key of the step before and of all that its results depend on."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]


@dataclass
class Decisions:
    """One step and task. ``removed``: numbers of documents in the task, by rule; characters are Unicode code points."""

    documents: int = 0
    characters: int = 0
    documents_left: int = 0
    characters_left: int = 0
    removed: dict[str, list[int]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)

    def take(self, text: str) -> None:
        """Count a document that arrives at the step."""
        self.documents += 1
        self.characters += len(text)

    def keep(self, text: str, counts: Mapping[str, int]) -> None:
        """Count a document that stays, with the text after the step."""
        self.documents_left += 1
        self.characters_left += len(text)
        self.counts.update(counts)

    def remove(self, number: int, removed: Removed, place: Callable[[], str], text: str) -> None:
        """Record a document that is removed; the first ones of each rule become examples, with their place."""
        numbers = self.removed.setdefault(removed.rule, [])
        numbers.append(number)
        if len(numbers) <= _EXAMPLES_PER_RULE:
            about = {"rule": removed.rule, "measured": removed.measured, "limit": removed.limit}
            self.examples.append(about | {"place": place(), "text": text[:_EXAMPLE_CHARACTERS]})

    @property
    def removed_numbers(self) -> frozenset[int]:
        """The numbers of all documents that the step removed."""
        return frozenset(number for numbers in self.removed.values() for number in numbers)

    def write(self, path: Path) -> None:
        """Write the decisions, whole or not at all. Raises OSError."""
        make_folder(path.parent, parents=True)
        document = vars(self) | {"counts": dict(sorted(self.counts.items()))}
        replace_file(path, json.dumps(document, ensure_ascii=False))


def read_decisions(path: Path) -> Decisions | None:
    """Return the decisions in a file; None if there is none, or one that this version cannot read."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return Decisions(**document | {"counts": Counter(document["counts"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
