"""What an explanation of a plan is: questions in order, each with its arithmetic and an answer.

Part of the JSON of ``scaletrain plan --explain --json``, under ``explanation``; keys are added, never renamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Row:
    """One line of arithmetic. ``share`` is of the device's memory for bytes, of the step for seconds."""

    name: str
    bytes: int | None = None
    seconds: float | None = None
    share: float | None = None
    fits: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Question:
    """One step of the decision. ``answer`` is None where the question is how much; ``follows`` leads to the next."""

    key: str
    question: str
    rows: tuple[Row, ...]
    answer: bool | None
    verdict: str
    follows: str = ""


def distinct(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Without the rows that need just as much memory as the one before and more time: they change nothing."""
    kept: list[Row] = []
    for row in rows:
        same = kept and kept[-1].bytes == row.bytes and (row.seconds or 0.0) >= (kept[-1].seconds or 0.0)
        if same:
            kept[-1] = replace(kept[-1], note="recomputation saves nothing")
        else:
            kept.append(row)
    return tuple(kept)


def percent(share: float) -> str:
    """``86 %``, and a decimal below ten."""
    return f"{share:.0%}".replace("%", " %") if share >= 0.0995 else f"{share:.1%}".replace("%", " %")


def times(share: float) -> str:
    """``86 % of`` or ``15 times``."""
    return f"{percent(share)} of" if share < 9.995 else f"{share:,.0f} times"
