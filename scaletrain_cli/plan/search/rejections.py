"""Why layouts were not chosen, counted by reason with one example each. Judges nothing; the search does."""

from __future__ import annotations

import re
from math import isqrt
from typing import NamedTuple

from scaletrain_cli.plan.result import Rejection

# A rule that degrees of parallelism break, and the numbers near a wrong one that would do.


class Rule(NamedTuple):
    """A rule that degrees break: the key, what it says, what stands there and what would do."""

    key: str
    given: object
    message: str
    hint: str = ""

    @property
    def text(self) -> str:
        """On one line."""
        return f"{self.key} = {self.given}: {self.message} {self.hint}".strip()


def divisors(number: int) -> list[int]:
    """Ascending. In time of the square root: a number of the spec is at most 1e9."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def near(number: int, wanted: int) -> str:
    """The divisors of ``number`` on either side of what was asked for."""
    found = divisors(number) if number <= 10**12 else [1]
    below = max((n for n in found if n <= wanted), default=1)
    above = min((n for n in found if n > wanted), default=below)
    return f"Use {below}." if above == below else f"Use {below} or {above}."


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
