"""Small JSON documents of a run directory that are replaced as a whole: a reader sees the old one or the new one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from scaletrain_cli.errors import UsageError
from scaletrain_cli.safe_files import open_to_read, replace_file

T = TypeVar("T")


def write_document(path: Path, data: dict[str, Any], *, shared: bool = False) -> None:
    """Replace the file in one step. Raises OSError; the file is as it was then.

    A ``shared`` one is for all who may write to its folder.
    """
    replace_file(path, json.dumps(data, indent=1, allow_nan=False) + "\n", shared=shared)


def read_document(path: Path) -> dict[str, Any] | None:
    """The object in the file; None when there is no such file or it is not a JSON object (a disk that was full)."""
    try:
        with open_to_read(path) as file:
            data = json.load(file)
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def from_document(kind: type[T], data: dict[str, Any], path: Path) -> T:
    """Return the dataclass that a document holds. Raises UsageError where its keys or plain values are others."""
    with damage_told(path):
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
def damage_told(path: Path) -> Iterator[None]:
    """Turn what a document of another shape leads to into a UsageError that names the file."""
    try:
        yield
    except (TypeError, KeyError, ValueError, AttributeError, AssertionError, IndexError) as error:
        raise UsageError(f"{path} is damaged: {error}. Restore it from a copy, or remove it.") from error
