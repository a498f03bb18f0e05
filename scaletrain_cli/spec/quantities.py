"""Numbers with units as people write them: ``80GB``, ``30m``, ``300B``. Knows nothing of the spec that uses them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-z/]*)\s*")

_BYTE_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _BYTE_UNITS |= {f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}
_SECOND_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
# Case decides between million and a metre-like "m" nowhere here, so both cases are taken.
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_RATE_UNITS = {f"{unit}/s": factor for unit, factor in _BYTE_UNITS.items() if unit}

LARGEST = 10**18  # above every real byte, token and second count; keeps float arithmetic finite


def _parse(value: Any, units: dict[str, int], what: str, example: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise PydanticCustomError("quantity", f"must be {what}, such as {example}")
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value)
        if match is None or match[2].lower() not in units:
            known = ", ".join(unit for unit in units if unit)
            raise PydanticCustomError("quantity", f"must be {what}, such as {example} (units: {known})")
        value = float(match[1]) * units[match[2].lower()]
    if not 0 <= value <= LARGEST:
        raise PydanticCustomError("quantity", f"must be {what} between 0 and 1e18, such as {example}")
    return value


def parse_bytes(value: Any) -> int:
    """Bytes from ``80GB`` (10^9) or ``80GiB`` (2^30) or a plain number. Raises PydanticCustomError."""
    return round(_parse(value, _BYTE_UNITS, "a size in bytes", "80GB or 80GiB"))


def parse_seconds(value: Any) -> float:
    """Seconds from ``90``, ``30m``, ``24h``, ``7d``. Raises PydanticCustomError."""
    return float(_parse(value, _SECOND_UNITS, "a duration", "90s, 30m or 24h"))


def parse_count(value: Any) -> int:
    """A count from ``1000`` or ``300B`` (10^9). Raises PydanticCustomError."""
    return round(_parse(value, _COUNT_UNITS, "a count", "1000 or 300B"))


def parse_bandwidth(value: Any) -> float:
    """Bytes per second from ``50GB/s`` or a plain number. Raises PydanticCustomError."""
    return float(_parse(value, {"": 1, **_RATE_UNITS}, "a bandwidth in bytes per second", "50GB/s"))


def _or_auto(value: Any, parse: Any) -> Any:
    return "auto" if value == "auto" else parse(value)


def _whole_or_auto(value: Any) -> Any:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 10**9):
        return value
    raise PydanticCustomError("whole_or_auto", "must be a whole number of at least 1, or auto")


_QUANTITY_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "number", "minimum": 0}, {"type": "string"}]}

Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(json_schema_extra=_QUANTITY_SCHEMA)]
Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(json_schema_extra=_QUANTITY_SCHEMA)]
Count = Annotated[int, BeforeValidator(parse_count), Field(ge=1, json_schema_extra=_QUANTITY_SCHEMA)]
BytesPerSecond = Annotated[float, BeforeValidator(parse_bandwidth), Field(gt=0, json_schema_extra=_QUANTITY_SCHEMA)]

AutoBytesPerSecond = Annotated[
    float | Literal["auto"],
    BeforeValidator(lambda value: _or_auto(value, parse_bandwidth)),
    Field(json_schema_extra=_QUANTITY_SCHEMA),
]
AutoSeconds = Annotated[
    float | Literal["auto"],
    BeforeValidator(lambda value: _or_auto(value, parse_seconds)),
    Field(json_schema_extra=_QUANTITY_SCHEMA),
]
AutoWhole = Annotated[int | Literal["auto"], BeforeValidator(_whole_or_auto)]

# Strict, so that YAML's `true` is not 1; bounded, so that arithmetic on a typing slip ends in a message.
Whole = Annotated[int, Field(strict=True, ge=1, le=10**9)]
WholeOrZero = Annotated[int, Field(strict=True, ge=0, le=10**9)]
Positive = Annotated[float, Field(gt=0, le=1e12)]
NonNegative = Annotated[float, Field(ge=0, le=1e12)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
