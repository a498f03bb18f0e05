"""Why layouts were not chosen, counted by reason with one example each. Judges nothing; the search does."""

from __future__ import annotations

import re

from scaletrain_cli.plan.result import Rejection

# Reasons that differ only in numbers become one beyond these, so that a listing stays readable.
_MOST_PER_FAMILY = 6


class Tally:
    """Reasons with how often each was given and the first example, in the order in which they first appeared."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, str]] = {}

    def add(self, reason: str, example: str, count: int = 1) -> None:
        """Count ``count`` more layouts, or degrees, for a reason; the first example stays."""
        if count:
            earlier, first = self._found.get(reason, (0, example))
            self._found[reason] = (earlier + count, first)

    def rejections(self) -> tuple[Rejection, ...]:
        """All reasons; many that differ in numbers alone are told as one, with N for the number."""
        families: dict[str, list[str]] = {}
        for reason in self._found:
            families.setdefault(re.sub(r"\d+(\.\d+)?", "N", reason), []).append(reason)
        found = []
        for family, reasons in families.items():
            merged = len(reasons) > _MOST_PER_FAMILY
            for group in [reasons] if merged else [[reason] for reason in reasons]:
                count = sum(self._found[reason][0] for reason in group)
                found.append(Rejection(family if merged else group[0], count, self._found[group[0]][1]))
        return tuple(found)
