"""Quantities as the API server writes them (``8``, ``500m``, ``1536Gi``) as numbers. Pure."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:[eE]([+-]?\d+)|([numkMGTPE]|[KMGTPE]i)?)")
_BINARY = {f"{letter}i": Fraction(1024**power) for power, letter in enumerate("KMGTPE", start=1)}
_FACTORS = _BINARY | {
    **{"n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000)},
    **{letter: Fraction(1000**power) for power, letter in enumerate("kMGTPE", start=1)},
}


def as_number(quantity: str | int | float) -> Fraction:
    """The amount. Raises ValueError for what is no quantity."""
    match = _QUANTITY.fullmatch(str(quantity).strip())
    if match is None:
        raise ValueError(f"{quantity!r} is no quantity")
    number, exponent, suffix = match.groups()
    if exponent is not None:
        return Fraction(number) * Fraction(10) ** int(exponent)
    return Fraction(number) * (_FACTORS[suffix] if suffix else 1)


def requested(pod: dict[str, Any], resource: str) -> Fraction:
    """What a pod with this spec holds of a resource that cannot be overcommitted: of GPUs, the limit is the request."""

    def held(key: str) -> list[Fraction]:
        found = [container.get("resources", {}) for container in pod.get(key) or ()]
        return [as_number({**each.get("limits", {}), **each.get("requests", {})}.get(resource, 0)) for each in found]

    return max(sum(held("containers"), Fraction(0)), *held("initContainers"), Fraction(0))


def shown(amount: Fraction) -> str:
    """For people: ``16``, or ``512.0Gi`` of what is counted in bytes."""
    if amount.denominator == 1 and amount < 10**6:
        return str(amount.numerator)
    return f"{float(amount) / 2**30:.1f}Gi" if amount >= 2**30 else f"{float(amount):g}"
