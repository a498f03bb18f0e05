"""Variants of a run spec for a comparison: ``layout.zero_stage=1,2,3`` is three sets of overrides. Reads no spec."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from scaletrain_cli.errors import Problem, UsageError
from scaletrain_cli.spec.source import shown

OPTION = "--vary"
_MOST_VARIANTS = 24  # side by side, nobody compares more


def variants(settings: Sequence[str], option: str = OPTION, most: int = _MOST_VARIANTS) -> list[tuple[str, ...]]:
    """All combinations of ``KEY=A,B,C`` settings, each a tuple of overrides ``KEY=A``; one empty tuple without any.

    Commas inside brackets, braces or quotes belong to the value; ``option`` is who is to blame. Raises UsageError.
    """
    lists = [_one_setting(setting, option) for setting in settings]
    found = list(itertools.islice(itertools.product(*lists), most + 1))
    if len(found) > most:
        raise UsageError(f"{option} makes more than {most} variants. Give fewer values, or fewer keys.")
    return found


def _one_setting(setting: str, option: str) -> list[str]:
    key, equals, text = setting.partition("=")
    values = _split(text)
    if not equals or not key.strip() or not all(value.strip() for value in values):
        message = f"must look like section.key=value,value, as in layout.zero_stage=1,2,3, not {shown(setting)}."
        raise UsageError(f"{option} is not understood", (Problem(option, "", message),))
    return [f"{key.strip()}={value.strip()}" for value in dict.fromkeys(values)]


def _split(text: str) -> list[str]:
    """At commas outside brackets, braces and quotes."""
    pieces, depth, quote = [""], 0, ""
    for char in text:
        if char == "," and depth == 0 and not quote:
            pieces.append("")
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        else:
            depth += (char in "[{") - (char in "]}")
        pieces[-1] += char
    return pieces
