"""What a training pod prints, and what can be read from it again: whose line it is, which attempt, how far it is.

Pure text, so that the pods and whoever reads their logs use one format.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_BEGINS = re.compile(r"attempt (\d+) begins in (?:(the submitter's)|a) run directory\b")
_RANK = re.compile(r"rank (\d+): (.*)", re.DOTALL)
_STEP = re.compile(r"step +(\d+)/\d+  loss ([-+.\deE]+|nan|inf)\b")
_SPEED = re.compile(r"  ([\d,]+) tokens/s\b")


@dataclass(frozen=True)
class Beginning:
    """A pod's word that an attempt begins. ``shared`` when the submitter sees the same run directory."""

    attempt: int
    shared: bool


def beginning_line(attempt: int, *, shared: bool) -> str:
    """What every pod prints once it knows its attempt, before any rank starts."""
    directory = "the submitter's run directory" if shared else "a run directory of the pods' own"
    return f"attempt {attempt} begins in {directory}"


def read_beginning(line: str) -> Beginning | None:
    """The beginning that a line tells of."""
    match = _BEGINS.match(line)
    return Beginning(int(match[1]), match[2] is not None) if match else None


def rank_of(line: str) -> tuple[int | None, str]:
    """The rank whose line it is, None for the agent's own; and the line without that mark."""
    match = _RANK.match(line)
    return (int(match[1]), match[2]) if match else (None, line)


def progress_in(lines: Iterable[str]) -> dict[str, float]:
    """The newest step that rank 0 told of: its number, loss and speed."""
    newest: dict[str, float] = {}
    for line in lines:
        rank, text = rank_of(line)
        match = _STEP.match(text) if rank == 0 else None
        if match is None:
            continue
        newest = {"step": int(match[1]), "loss": float(match[2])}
        if (speed := _SPEED.search(text)) is not None:
            newest["tokens_per_second"] = float(speed[1].replace(",", ""))
    return newest
