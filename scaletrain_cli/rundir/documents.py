"""Small JSON documents of a run directory that are replaced atomically: a reader sees the old or the new one."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from scaletrain_cli.errors import UsageError
from scaletrain_cli.safe_files import open_to_read, replace_file
from scaletrain_cli.sent_run import sent_document

T = TypeVar("T")


def write_document(path: Path, data: dict[str, Any], *, shared: bool = False) -> None:
    """Replace the file atomically. Raises OSError, with the file unchanged.

    With ``shared``, every user with write access to its folder may replace it.
    """
    replace_file(path, json.dumps(data, indent=1, allow_nan=False) + "\n", shared=shared)


def read_document(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in the file; None if the file is missing or is not a JSON object (full disk).

    In a view for another machine, a file that is missing here may be one of that machine (sent_run.py).
    """
    try:
        with open_to_read(path) as file:
            data = parse_json(file.read())
    except FileNotFoundError:
        return sent_document(path)
    except (NotADirectoryError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def json_number(value: float) -> float | None:
    """Return the value, or None for NaN and infinity, for which JSON has no number."""
    return value if math.isfinite(value) else None


def parse_json(data: bytes) -> Any:
    """Return the JSON value. Raises ValueError for invalid JSON, other encodings, NaN, infinity, and excessive nesting.

    A damaged or hostile file in a shared runs root therefore cannot end a verb that reads all runs.
    """
    try:
        return _DECODER.decode(data.decode())
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def parse_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object; empty for anything else."""
    try:
        found = parse_json(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits} is not a finite number")
    return number


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def from_document(kind: type[T], data: dict[str, Any], path: Path) -> T:
    """Return the dataclass stored in a document. Raises UsageError if keys or types of values do not match."""
    with reporting_damage(path):
        hints = get_type_hints(kind)
        for name, value in data.items():
            hint = hints[name]
            allowed = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
            plain = allowed and all(one in (str, int, float, bool, type(None)) for one in allowed)
            number = type(value) is int and float in allowed
            if plain and type(value) not in allowed and not number:
                raise TypeError(f"{name} = {value!r}")
        return kind(**data)


@contextlib.contextmanager
def reporting_damage(path: Path) -> Iterator[None]:
    """Turn errors from a document with an unexpected structure into a UsageError that names the file."""
    try:
        yield
    except (TypeError, KeyError, ValueError, AttributeError, AssertionError, IndexError) as error:
        raise UsageError(f"{path} is damaged: {error}. Restore it from a copy, or remove it.") from error
