"""The finding of a rule: the path in the object, the given value and what is allowed; and checks that rules share."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

LONGEST_POD_NAME = 63  # a DNS label
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


class RuleFinding(NamedTuple):
    """``path`` is the dotted path in the object; ``given`` is None if the value is missing."""

    path: str
    given: Any
    message: str


def one_of(path: str, value: Any, allowed: Collection[Any], *, needed: bool = False) -> Iterator[RuleFinding]:
    """Check a value of an enumeration, which most schemas type as a string."""
    if value is None and not needed:
        return
    if value not in allowed:
        yield RuleFinding(path, value, f"must be one of {', '.join(map(str, allowed))}.")


def below(path: str, findings: Iterable[RuleFinding]) -> Iterator[RuleFinding]:
    """Return the findings of a part, with ``path`` before the path of each."""
    return (each._replace(path=f"{path}.{each.path}" if each.path else path) for each in findings)


def dns_label(path: str, value: Any) -> Iterator[RuleFinding]:
    if not isinstance(value, str) or not DNS_LABEL.fullmatch(value):
        yield RuleFinding(path, value, "must be at most 63 lower-case letters, digits and dashes.")


def service_name(path: str, value: Any) -> Iterator[RuleFinding]:
    """Check a name that also becomes the name of a Service."""
    if not isinstance(value, str) or not SERVICE_NAME.fullmatch(value):
        yield RuleFinding(path, value, "must be at most 63 lower-case letters, digits and dashes, a letter first.")


def dns_subdomain(path: str, value: Any) -> Iterator[RuleFinding]:
    if not isinstance(value, str) or len(value) > 253 or not DNS_SUBDOMAIN.fullmatch(value):
        yield RuleFinding(path, value, "must be a name of at most 253 lower-case letters, digits, dashes and dots.")


def label_map(path: str, labels: Any, *, values: bool = True) -> Iterator[RuleFinding]:
    """Check labels; without ``values`` annotations, whose values may be any text."""
    for key, value in labels.items() if isinstance(labels, Mapping) else ():
        prefix, slash, name = str(key).rpartition("/")
        if not QUALIFIED.fullmatch(name) or (slash and not DNS_SUBDOMAIN.fullmatch(prefix)):
            yield RuleFinding(f"{path}.{key}", key, "is no valid key of a label or annotation.")
        if not isinstance(value, str):
            yield RuleFinding(f"{path}.{key}", value, "must be text.")
        elif values and value and not QUALIFIED.fullmatch(value):
            yield RuleFinding(f"{path}.{key}", value, "must be at most 63 letters, digits, dashes, dots and _.")


def twice(path: str, values: Iterable[Any], what: str) -> Iterator[RuleFinding]:
    """Yield each value that occurs more than once."""
    seen: set[Any] = set()
    for value in values:
        if value in seen:
            yield RuleFinding(path, value, f"is the {what} of two entries.")
        seen.add(value)
