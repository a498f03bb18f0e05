"""Values that ranks send each other, as JSON: torch's own object collectives unpickle what arrives, which can run code.

Plain values, paths, containers, and the dataclasses and named tuples of this package.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PACKAGE = __name__.partition(".")[0]


def encode(item: object) -> bytes:
    """Return the value as UTF-8 JSON. Raises TypeError for what decode() could not restore."""
    return json.dumps(_plain(item), separators=(",", ":")).encode()


def decode(data: bytes) -> Any:
    """Return the value that was encoded. Raises ValueError for anything that encode() would not have made."""
    return _restored(json.loads(data))


def _plain(item: object) -> object:
    kind = type(item)
    if item is None or kind in (bool, int, float, str):
        return item
    if isinstance(item, Path):
        return {"path": str(item)}
    if kind in (list, tuple, set, frozenset):
        return {kind.__name__: [_plain(each) for each in item]}  # type: ignore[attr-defined]
    if isinstance(item, Mapping):
        return {"dict": [[_plain(key), _plain(value)] for key, value in item.items()]}
    if kind.__module__.partition(".")[0] == _PACKAGE and "<locals>" not in kind.__qualname__:
        name = f"{kind.__module__}:{kind.__qualname__}"
        if dataclasses.is_dataclass(item):
            fields = [getattr(item, field.name) for field in dataclasses.fields(item)]
            return {name: [_plain(value) for value in fields]}
        if isinstance(item, tuple):
            return {name: [_plain(value) for value in item]}
    raise TypeError(f"ranks do not send each other values of {kind}")


def _restored(data: object) -> Any:
    if not isinstance(data, dict):
        return data
    ((name, content),) = data.items()
    match name:
        case "path":
            return Path(content)
        case "list" | "tuple" | "set" | "frozenset":
            return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[name](map(_restored, content))
        case "dict":
            return {_restored(key): _restored(value) for key, value in content}
    return _known_type(name)(*map(_restored, content))


def _known_type(name: str) -> type:
    """Return a dataclass or named tuple of this package that is loaded already; nothing is imported for a message."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module) if module.partition(".")[0] == _PACKAGE else None
    for part in path.split("."):
        found = getattr(found, part, None)
    named_tuple = isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")
    if (
        not isinstance(found, type)
        or found.__module__ != module
        or not (dataclasses.is_dataclass(found) or named_tuple)
    ):
        raise ValueError(f"no value that ranks send each other: {name}")
    kind: type = found
    return kind
