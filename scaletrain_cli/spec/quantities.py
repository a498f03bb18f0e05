"""Numbers with units: ``80GB``, ``30m``, ``300B``.

Each type validates its input itself, so that a wrong value is one problem and not one per branch of a union. Its JSON
Schema describes the values allowed in a file.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    StringConstraints,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema

_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-z/]*)\s*")
_SPAN = re.compile(r"(?:\d+(?:\.\d+)?[A-Za-z]+\s*){2,}")
_SPAN_PART = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]+)")
_CLOCK = re.compile(r"(?:(\d{1,4})-)?(\d{1,4}):([0-5]\d):([0-5]\d)|(\d{1,4})-(\d{1,2})(?::([0-5]\d))?")

_BYTE_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _BYTE_UNITS |= {f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}
_SECOND_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
# No quantity has thousandths, so that m means million, as M does.
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_RATE_UNITS = {"": 1} | {f"{unit}/s": factor for unit, factor in _BYTE_UNITS.items() if unit}
_FLOPS_UNITS = {"": 1, "tflops": 10**12, "pflops": 10**15}

LARGEST = 10**18  # above every realistic number of bytes, tokens and seconds; keeps float arithmetic finite
LARGEST_WHOLE = 10**9


def _parse(value: Any, units: dict[str, int], what: str, example: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise PydanticCustomError("quantity", f"must be {what}, such as {example}")
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value)
        if match is None or match[2].lower() not in units:
            raise PydanticCustomError("quantity", f"must be {what}, such as {example}")
        number: float = float(match[1]) * units[match[2].lower()]
    else:
        number = value
    if not 0 <= number <= LARGEST:
        raise PydanticCustomError("quantity", f"must be {what} between 0 and 1e18, such as {example}")
    return number


def parse_bytes(value: Any) -> int:
    """Return the bytes in ``80GB`` (10^9), ``80GiB`` (2^30) or a plain number. Raises PydanticCustomError."""
    return round(_parse(value, _BYTE_UNITS, "a size in bytes", "80GB or 80GiB"))


def parse_seconds(value: Any) -> float:
    """Return the seconds in ``90``, ``30m``, ``1h30m`` or Slurm's ``24:00:00``, ``2-12:00:00``, ``2-12:00``, ``2-12``.

    Raises PydanticCustomError.
    """
    example = "90s, 30m, 24h or 24:00:00"
    if isinstance(value, str) and (clock := _CLOCK.fullmatch(value.strip())):
        days, hours, minutes, seconds, *short = (int(part or 0) for part in clock.groups())
        days, hours, minutes = days + short[0], hours + short[1], minutes + short[2]
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    if isinstance(value, str) and _SPAN.fullmatch(value.strip()):
        parts = _SPAN_PART.findall(value)
        return math.fsum(float(_parse(f"{n}{unit}", _SECOND_UNITS, "a duration", example)) for n, unit in parts)
    return float(_parse(value, _SECOND_UNITS, "a duration", example))


def parse_count(value: Any) -> int:
    """Return a count from ``1000`` or ``300B`` (300e9). Raises PydanticCustomError."""
    return round(_parse(value, _COUNT_UNITS, "a count", "1000 or 300B"))


def parse_bandwidth(value: Any) -> float:
    """Return the bytes per second in ``50GB/s`` or a plain number. Raises PydanticCustomError."""
    return float(_parse(value, _RATE_UNITS, "a bandwidth in bytes per second", "50GB/s"))


def parse_flops(value: Any) -> float:
    """Return the operations per second in ``989TFLOPS`` or a plain number. Raises PydanticCustomError."""
    return float(_parse(value, _FLOPS_UNITS, "a rate of floating-point operations", "989TFLOPS or 989e12"))


def parse_whole(value: Any, minimum: int = 1) -> int:
    """Return an integer; ``true`` is rejected, although Python treats it as 1. Raises PydanticCustomError."""
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= LARGEST_WHOLE:
        raise PydanticCustomError("whole", f"must be a whole number of at least {minimum}")
    return value


def valid_if(is_valid: Callable[[Any], bool], message: str) -> Callable[[Any], Any]:
    """Return a function that returns values that are valid, and raises PydanticCustomError for others."""

    def checked(value: Any) -> Any:
        if not is_valid(value):
            raise PydanticCustomError("value", message)
        return value

    return checked


def _above_zero(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        parsed = parse(value)
        if parsed <= 0:
            raise PydanticCustomError("above_zero", "must be above 0")
        return parsed

    return checked


def or_word(words: str, parse: Callable[[Any], Any]) -> PlainValidator:
    """Return a validator that accepts ``words``, separated by " or ", and passes anything else to ``parse``.

    One error names both.
    """

    def checked(value: Any) -> Any:
        if isinstance(value, str) and value in words.split(" or "):
            return value
        try:
            return parse(value)
        except PydanticCustomError as error:
            raise PydanticCustomError("or_word", f"{error.message_template}, or {words}") from error

    return PlainValidator(checked)


def not_a_switch(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("number", "must be a number, not true or false")
    if isinstance(value, str):
        raise PydanticCustomError("number", "must be a number, without quotes or units")
    return value


_QUANTITY = {"anyOf": [{"type": "number", "minimum": 0}, {"type": "string"}]}
_WHOLE = {"type": "integer", "minimum": 1, "maximum": LARGEST_WHOLE}

Bytes = Annotated[int, PlainValidator(parse_bytes), WithJsonSchema(_QUANTITY)]
PositiveBytes = Annotated[int, PlainValidator(_above_zero(parse_bytes)), WithJsonSchema(_QUANTITY)]
Seconds = Annotated[float, PlainValidator(parse_seconds), WithJsonSchema(_QUANTITY)]
PositiveSeconds = Annotated[float, PlainValidator(_above_zero(parse_seconds)), WithJsonSchema(_QUANTITY)]
Count = Annotated[int, PlainValidator(_above_zero(parse_count)), WithJsonSchema(_QUANTITY)]
BytesPerSecond = Annotated[float, PlainValidator(_above_zero(parse_bandwidth)), WithJsonSchema(_QUANTITY)]
FlopsPerSecond = Annotated[float, PlainValidator(_above_zero(parse_flops)), WithJsonSchema(_QUANTITY)]

AutoBytesPerSecond = Annotated[
    float | Literal["auto"], or_word("auto", _above_zero(parse_bandwidth)), WithJsonSchema(_QUANTITY)
]
AutoBytes = Annotated[int | Literal["auto"], or_word("auto", _above_zero(parse_bytes)), WithJsonSchema(_QUANTITY)]
AutoSeconds = Annotated[float | Literal["auto"], or_word("auto", _above_zero(parse_seconds)), WithJsonSchema(_QUANTITY)]
AutoWhole = Annotated[
    int | Literal["auto"], or_word("auto", parse_whole), WithJsonSchema({"anyOf": [_WHOLE, {"const": "auto"}]})
]
AutoWholeOrOff = Annotated[
    int | Literal["auto", "off"],
    or_word("auto or off", parse_whole),
    WithJsonSchema({"anyOf": [_WHOLE, {"enum": ["auto", "off"]}]}),
]
AutoWholeOrZero = Annotated[
    int | Literal["auto"],
    or_word("auto", partial(parse_whole, minimum=0)),
    WithJsonSchema({"anyOf": [{**_WHOLE, "minimum": 0}, {"const": "auto"}]}),
]

# Strict, so that YAML's `true` is not 1; bounded, so that arithmetic on a typing error ends in a message.
Whole = Annotated[int, Field(strict=True, ge=1, le=LARGEST_WHOLE)]
WholeOrZero = Annotated[int, Field(strict=True, ge=0, le=LARGEST_WHOLE)]
Positive = Annotated[float, BeforeValidator(not_a_switch), Field(gt=0, le=1e12)]
NonNegative = Annotated[float, BeforeValidator(not_a_switch), Field(ge=0, le=1e12)]
Fraction = Annotated[float, BeforeValidator(not_a_switch), Field(ge=0, lt=1)]
Share = Annotated[float, BeforeValidator(not_a_switch), Field(ge=0, le=1)]
SomeShare = Annotated[float, BeforeValidator(not_a_switch), Field(gt=0, le=1)]
MOST_EPOCHS = 1e6
Epochs = Annotated[float, BeforeValidator(not_a_switch), Field(gt=0, le=MOST_EPOCHS)]


@dataclass(frozen=True)
class Matching:
    """Metadata of a text, or of the key of a mapping, that must match ``pattern`` completely.

    ``message`` describes valid values.
    """

    pattern: str
    longest: int
    message: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema by which pydantic checks the text."""
        return core_schema.no_info_plain_validator_function(self._checked)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON Schema of the text."""
        return {"type": "string", "pattern": f"^({self.pattern})$", "maxLength": self.longest}

    def _checked(self, value: Any) -> str:
        if not isinstance(value, str):
            raise PydanticKnownError("string_type")
        if value == "" and not re.fullmatch(self.pattern, ""):
            raise PydanticKnownError("string_too_short", {"min_length": 1})
        if len(value) > self.longest:
            raise PydanticCustomError("pattern", f"{self.message}, at most {self.longest} characters long")
        if not re.fullmatch(self.pattern, value):
            raise PydanticCustomError("pattern", self.message)
        return value


# No NUL, which is invalid in paths, arguments and environment values.
Text = Annotated[str, StringConstraints(pattern=r"^[^\x00]+$", max_length=4096)]
EnvName = Annotated[
    str,
    Matching(
        r"[A-Za-z_][A-Za-z0-9_]*",
        256,
        "must be the name of an environment variable: letters, digits and _, not starting with a digit",
    ),
]
# The dynamic linker expands these itself, and Kubernetes $(NAME).
_EXPANDED_ELSEWHERE = ("ORIGIN", "LIB", "PLATFORM")
_REFERENCE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")


def _literal_value(value: str) -> str:
    names = [first or second for first, second in _REFERENCE.findall(value)]
    if name := next((name for name in names if name not in _EXPANDED_ELSEWHERE), None):
        raise PydanticCustomError(
            "literal", f"is not expanded: programs would get the text ${name}. Write the whole value"
        )
    return value


def _not_blank(value: str) -> str:
    if not value.strip():
        raise PydanticCustomError("blank", "must not be blank")
    return value


AnyText = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$", max_length=100_000)]
EnvValue = Annotated[AnyText, AfterValidator(_literal_value)]
Title = Annotated[Text, StringConstraints(max_length=200), AfterValidator(_not_blank)]
