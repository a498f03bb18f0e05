"""Objects as YAML that every reader takes alike: kubectl follows YAML 1.1, where `on`, `1_0` and `12:30` are no texts.

Every text that could be anything else is in double quotes, as JSON has them. Knows nothing of Kubernetes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./@=-]*(:[A-Za-z0-9_./@=-]+)*( [A-Za-z0-9_./@=-]+)*")
_OTHERWISE = frozenset("y n yes no on off true false null none nan inf infinity".split())
# What JSON may leave as it is and YAML may not: DEL, C1 controls, line separators, the byte-order mark, surrogates.
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff\ufffe\uffff]")


def to_yaml(objects: Iterable[Mapping[str, Any]]) -> str:
    """One document for each object, with `---` between them."""
    return "---\n".join("".join(f"{line}\n" for line in _lines(one)) for one in objects)


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _entry(f"{_text(str(key))}:", item, "  ")
    else:
        for item in value:
            inner = _lines(item) if _is_nested(item) else iter([_scalar(item)])
            yield f"- {next(inner)}"
            yield from (f"  {line}" for line in inner)


def _entry(head: str, item: Any, indent: str) -> Iterator[str]:
    if not _is_nested(item):
        yield f"{head} {_scalar(item)}"
        return
    yield head
    yield from (f"{indent}{line}" for line in _lines(item))


def _is_nested(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) and len(value) > 0


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return "{}"
    return "[]" if isinstance(value, list | tuple) else json.dumps(value)


def _text(value: str) -> str:
    if _PLAIN.fullmatch(value) and value.lower() not in _OTHERWISE:
        return value
    quoted = json.dumps(value, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", quoted)
