"""Words for people that every package may use: the known name that is nearest to a wrong one."""

from __future__ import annotations

from collections.abc import Iterable


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
