"""Bars of a breakdown: each part starts where the one before it ended, so that together they fill the whole."""

from __future__ import annotations

import math

from rich.text import Text

PART, AMOUNT = 22, 9  # columns of a part's name and size
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")


def waterfall(parts: list[float], whole: float, width: int, *, unicode: bool) -> list[str]:
    """One bar per part, ``width`` characters for ``whole``; a part too small to see is a tick."""
    bars, before = [], 0.0
    for part in parts:
        bars.append(_bar(before / whole * width, part / whole * width, unicode) if whole > 0 else "")
        before += part
    return bars


def _bar(start: float, length: float, unicode: bool) -> str:
    first = math.floor(start + 1e-9)
    if length <= 0:
        return ""
    if not unicode:
        return " " * first + "#" * max(1, round(start + length) - first)
    # Blocks of an eighth fill from the left only, so the start is cut to a whole cell and the end keeps its eighth.
    end = start + length
    eighths = max(1, round((end - first) * 8))
    return " " * first + "█" * (eighths // 8) + _EIGHTHS[eighths % 8]


def part_line(name: str, amount: str, bar: str, style: str) -> Text:
    """One part of a whole: what, how much, and its bar."""
    return Text.assemble(f"  {name:<{PART}}{amount:>{AMOUNT}} ", (bar, style))
