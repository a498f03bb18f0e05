"""A rule that degrees of parallelism break, and the numbers near a wrong one that would do. Knows no spec."""

from __future__ import annotations

from math import isqrt
from typing import NamedTuple


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
