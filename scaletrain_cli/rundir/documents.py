"""The documents of a run directory: every reader of one goes through this module.

A fault, a full disk or another user may have left anything under the name of a document. A reader is therefore bounded
in size, checks types, and has one error, DamagedError, which names the file and costs the row of its run alone.
Documents are replaced atomically: a reader sees the old or the new one.
"""

import contextlib
import dataclasses
import errno
import functools
import json
import math
import os
import re
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from scaletrain_cli.errors import ExitCode, UsageError
from scaletrain_cli.reasons import Reason, reason_from
from scaletrain_cli.safe_files import open_to_read, replace_file, user_name
from scaletrain_cli.sent_run import sent_document

T = TypeVar("T")
LARGEST_BYTES = 64 << 20  # a thousand times a usual document
_LARGEST_INTEGER = 1 << 63  # float(), time and format codes of larger ones raise
_TIMES = ("time", "started", "ended", "created", "updated", "began", "expires")
_YEAR_10000 = 253_402_300_800  # Unix seconds: time.localtime() fails for later years
_hints = functools.cache(get_type_hints)
_LISTS = (list, tuple, Sequence, Collection)
_OF_THIS_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
# What a later try finds as well.
_LASTING = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


# What code raises that reads values of another form than those that were written.
_MISFITS = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class DamagedError(UsageError):
    """A document or a folder of a run cannot be used: not readable, too large, or not of the form that was written."""


class UnreadableError(DamagedError):
    """The file system has failed, such as by EIO or ESTALE: another node, or a later try, may read it (exit 1)."""

    failure_reason = "unreadable"
    exit_code = ExitCode.CRASHED
    code = "io"


def write_document(path: Path, data: dict[str, Any], *, shared: bool = False) -> None:
    """Replace the file atomically. Raises OSError, with the file unchanged.

    With ``shared``, every user with write access to its folder may replace it.
    """
    replace_file(path, json.dumps(data, indent=1, allow_nan=False) + "\n", shared=shared)


def read_content(path: Path) -> bytes | None:
    """Return the content of a file; None if it is missing. Raises DamagedError, also for a very large file."""
    with reporting_damage(path):
        try:
            try:
                return _whole(path)
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
                return _whole(path)  # over NFS: another host has replaced it between the open and the read
        except (FileNotFoundError, NotADirectoryError):
            if os.path.lexists(path) and not path.is_file():  # a file that is there now was written after the attempt
                raise ValueError("it is not a regular file") from None
            return None


def _whole(path: Path) -> bytes:
    with open_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size  # also of a sparse file, whose zeros would fill the memory
        if size > LARGEST_BYTES:
            raise ValueError(f"it has {size:,} bytes, more than {LARGEST_BYTES:,}")
        return file.read(LARGEST_BYTES)


def read_document(path: Path, schema: str = "") -> dict[str, Any] | None:
    """Return the JSON object in the file; None if it is missing. Raises DamagedError.

    ``schema``: that the object must have. In a view for another machine, a file that is missing here may be one of that
    machine (sent_run.py).
    """
    if (content := read_content(path)) is None:
        return sent_document(path)
    with reporting_damage(path):
        data = parse_json(content)
        if not isinstance(data, dict):
            raise TypeError("it is not a JSON object")
        if schema and data.get("schema") != schema:
            raise ValueError(f"it has schema {data.get('schema')!r}; this version reads {schema}")
        return data


def undamaged_document(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file that the run can do without; None if it is missing or damaged."""
    with contextlib.suppress(DamagedError):
        return read_document(path)
    return None


def read_as(kind: type[T], path: Path) -> T | None:
    """Return the dataclass that a document holds; None if it is missing. Raises DamagedError."""
    data = read_document(path)
    return None if data is None else from_document(kind, data, path)


def undamaged_as(kind: type[T], path: Path) -> T | None:
    """Return the dataclass of a document that the run can do without; None if it is missing or damaged."""
    with contextlib.suppress(DamagedError):
        return read_as(kind, path)
    return None


def undamaged_in(kind: type[T], folder: Path, name: re.Pattern[str]) -> list[T]:
    """Return the dataclasses of the documents with such a name, by the number in it, without damaged documents."""
    numbered = sorted((int(match[1]), path) for path in entries(folder) if (match := name.fullmatch(path.name)))
    return [document for _, path in numbered if (document := undamaged_as(kind, path)) is not None]


def from_document(kind: type[T], data: Mapping[str, Any], path: Path) -> T:
    """Return the dataclass that the data of a document hold. Raises DamagedError if keys or types do not match."""
    with reporting_damage(path):
        if not isinstance(data, Mapping):
            raise TypeError("it is not a JSON object")
        return _dataclass(kind, data)


def json_number(value: float) -> float | None:
    """Return the value, or None for NaN and infinity, for which JSON has no number."""
    return value if math.isfinite(value) else None


def json_value(value: Any) -> Any:
    """Return a value of numbers, texts, dicts and sequences with null for NaN and infinity."""
    if isinstance(value, float):
        return json_number(value)
    if isinstance(value, dict):
        return {key: json_value(inner) for key, inner in value.items()}
    return [json_value(element) for element in value] if isinstance(value, list | tuple) else value


def parse_json(data: bytes) -> Any:
    """Return the JSON value.

    Raises ValueError for invalid JSON, other encodings, NaN, infinity, excessive nesting, and integers of more than 64
    bits, with which arithmetic would fail later.
    """
    try:
        decoder = _STRICT if _LONG_NUMBER.search(data) else _FAST
        return decoder.decode(data.decode())
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def parse_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object; empty for anything else."""
    try:
        parsed = parse_json(data)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits} is not a finite number")
    return number


def _integer(digits: str) -> int:
    if len(digits) > 20 or abs(number := int(digits)) >= _LARGEST_INTEGER:
        raise ValueError(f"{digits[:20]}... is too large an integer")
    return number


# Only these can be too large. A call of Python for each number would take most of the time of a long file.
_LONG_NUMBER = re.compile(rb"\d{18}|[eE][+-]?\d{3}")
_FAST = json.JSONDecoder(parse_constant=_finite)
_STRICT = json.JSONDecoder(parse_float=_finite, parse_constant=_finite, parse_int=_integer)


def typed(hint: Any, value: Any) -> Any:
    """Return a JSON value as ``hint`` says: a dataclass, tuple, Reason, or the value itself. Raises TypeError.

    The key ``schema`` of a dataclass's object is left out.
    """
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if hint is Any or (kind is Literal and value in parts) or (kind in (str, int, bool) and type(value) is kind):
        return value
    if kind is float and type(value) in (int, float):
        return value
    if kind in (Union, UnionType):
        if value is None and type(None) in parts:
            return None
        return typed(next(part for part in parts if part is not type(None)), value)
    if kind is Reason and isinstance(value, dict):
        return reason_from(value)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _dataclass(kind, value)
    if kind in (dict, Mapping) and isinstance(value, dict):
        return {typed(parts[0], key): typed(parts[1], one) for key, one in value.items()}
    if kind in _LISTS and isinstance(value, list):
        items = [typed(parts[0], one) for one in value]
        return tuple(items) if kind is tuple else items
    raise TypeError(f"{value!r:.100} is not {getattr(hint, '__name__', hint)}")


def _dataclass(kind: type[T], data: Mapping[str, Any]) -> T:
    hints, fields = _hints(cast(Hashable, kind)), {}
    for name, value in data.items():
        if name == "schema":
            continue
        try:
            fields[name] = typed(hints[name], value)
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from error
        if name in _TIMES and not is_time(value):
            raise ValueError(f"{name}: {value!r} is not a time")
    return kind(**fields)


def is_time(value: float | None) -> bool:
    """Return False for Unix seconds that cannot be a date."""
    return value is None or 0 <= value < _YEAR_10000


def entries(folder: Path) -> list[Path]:
    """Return all entries of a folder of a run, sorted; none if it is missing. Raises DamagedError."""
    with reporting_damage(folder), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted(folder / name for name in os.listdir(folder))
    return []


def documents_in(folder: Path) -> list[Path]:
    """Return the paths of the documents in a folder of a run, sorted, without drafts. Raises DamagedError."""
    return [path for path in entries(folder) if path.suffix == ".json" and not path.name.startswith(".")]


@contextlib.contextmanager
def reporting_damage(path: Path) -> Iterator[None]:
    """Turn errors from a file or folder that cannot be read or has another form into a DamagedError that names it."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in _OF_THIS_PROCESS:
            raise
        remedy = ""
        with contextlib.suppress(OSError):
            if error.errno == errno.EACCES:
                remedy = f" Ask {user_name(path.lstat().st_uid)} to run `chmod -R u+rX,g+rX {path}`."
        kind = DamagedError if error.errno in _LASTING else UnreadableError
        raise kind(f"{path} cannot be read: {error.strerror or error}.{remedy}") from error
    except _MISFITS as error:
        said = f"{error.args[0]!r} is missing" if type(error) is KeyError and error.args else str(error)
        raise DamagedError(f"{path} is damaged: {said}. Restore it from a copy, or remove it.") from error
