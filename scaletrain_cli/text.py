"""Text for people that every package may use: what a terminal may be sent, and the nearest known name."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

# Controls but line end and tab, C1 controls, directions of writing, invisible formats and separators, halves of
# characters. What joins letters and emoji (U+200C, U+200D) stays.
_OBEYED = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\ud800-\udfff\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f"
)


def nearest_name(given: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return the known name that ``given`` most likely means, or None; upper and lower case are the same."""
    import difflib

    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(given.strip().lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[near[0]] if near else None


def did_you_mean(given: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return ``Did you mean X? `` with the nearest known name and a blank after it, or an empty text."""
    near = nearest_name(given, known, cutoff)
    return f"Did you mean {near}? " if near else ""


def visible(text: str) -> str:
    """Return text of others with everything but line ends and tabs that a terminal would obey written out."""
    return _obeyed().sub(lambda found: found[0].encode("unicode_escape").decode(), text)


@functools.cache
def _obeyed() -> re.Pattern[str]:
    return re.compile(f"[{_OBEYED}]")
