"""Reasons as data: a stable code with its parameters; the English of every code stands once, in a table of its package.

Code decides by ``Reason.code`` and ``Reason.params`` alone, and never by a sentence. A sentence is made at the border:
in a screen of ``ui``, in an error, or in a log line.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from string import Formatter
from typing import Any

from scaletrain_cli.text import (
    binary_bytes_text,
    bytes_text,
    count_text,
    counted,
    dollars_text,
    either,
    listed,
    number_text,
    percent_text,
    seconds_text,
    source_text,
    whole_text,
)

# What may follow the colon of a parameter in a text, beside Python's own format specifications.
_FORMATS: dict[str, Callable[[Any], str]] = {
    "bytes": bytes_text,
    "gib": binary_bytes_text,
    "count": count_text,
    "whole": whole_text,
    "number": number_text,
    "seconds": seconds_text,
    "source": source_text,
    "usd": dollars_text,
    "percent": percent_text,
    "list": listed,
    "every": ", ".join,
    "or": either,
}


# Where the table of texts stands: in reason_texts/, except those that stand beside the code that makes the reasons.
_TEXTS = "scaletrain_cli.reason_texts"
BESIDE_CODE = {"diagnosis": "scaletrain_cli.diagnosis.checks"}
_DEEPEST = 20  # causes of causes; a record that a fault or another user wrote may nest without end
# Raised by a template whose parameters are absent or of another type, as in a record of another version.
_UNFIT = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True)
class Reason:
    """The reason of a state, a decision or an error. ``code``: ``<table>.<words-with-hyphens>``.

    ``params``: JSON values in SI units; a parameter may be a Reason itself, as the cause of a consequence.
    """

    code: str
    params: Mapping[str, Any] = field(default_factory=dict, hash=False)  # which may hold lists

    def __str__(self) -> str:
        """Return the English sentence, without a full stop."""
        return text_of(self)

    @property
    def remedies(self) -> tuple[str, ...]:
        """Return remedies as sentences or commands; empty if there are none."""
        try:
            return tuple(formatted(remedy, self.params) for remedy in entry_of(self.code).remedies)
        except _UNFIT:
            return ()

    def contains(self, code: str) -> bool:
        """Return whether this reason, or one that is nested in its parameters, has the code."""
        nested = (value for value in self.params.values() if isinstance(value, Reason))
        return self.code == code or any(value.contains(code) for value in nested)

    def to_json(self) -> dict[str, Any]:
        """Return ``{"code", "params", "text", "remedies"}``."""
        return self.to_document() | {"text": str(self), "remedies": list(self.remedies)}

    def to_document(self) -> dict[str, Any]:
        """Return ``{"code", "params"}``, which is what files keep; a reason among the parameters becomes one too."""
        params = {
            name: value.to_document() if isinstance(value, Reason) else value for name, value in self.params.items()
        }
        return {"code": self.code, "params": params}


def reason_from(document: object) -> Reason:
    """Return the reason that ``to_json`` wrote; a document without a code is a sentence of another program.

    Any other value, as in a damaged record, becomes a reason too: showing it must not fail.
    """
    return _reason_from(document, _DEEPEST)


def _reason_from(document: object, depth: int) -> Reason:
    if not isinstance(document, Mapping):
        return recorded(str(document))
    if not document.get("code"):
        return recorded(str(document.get("text", "")))
    given = document.get("params")
    params = {str(name): value for name, value in given.items()} if isinstance(given, Mapping) else {}
    inner = {
        name: _reason_from(value, depth - 1) if depth else "..."
        for name, value in params.items()
        if isinstance(value, dict) and value.keys() == {"code", "params"}
    }
    return Reason(str(document["code"]), params | inner)


def recorded(text: str) -> Reason:
    """Return a sentence that was written down without a code, as by another program, as a reason."""
    return Reason("recorded.text", {"text": text})


def as_reason(value: Reason | str) -> Reason:
    """Return a reason as it is, and a text as a reason without a code of its own."""
    return value if isinstance(value, Reason) else recorded(value)


@dataclass(frozen=True)
class Text:
    """The English of one code. Both are ``str.format`` templates over the parameters of the reason.

    ``{peak:bytes}``, ``{wait:seconds}``, ``{nodes:list}``, ``{price:usd}``, ``{n:of step}`` ("1 step", "3 steps") and
    the other names of ``_FORMATS`` write a number as people read it.
    """

    text: str
    remedies: tuple[str, ...] = ()


Texts = dict[str, str | tuple[str, ...]]  # a table of reason_texts: by key the text, or the text and its remedies
_TABLES: dict[str, Mapping[str, Text | str | tuple[str, ...]]] = {"recorded": {"text": "{text}"}}


def register_texts(table: str, texts: Mapping[str, Text]) -> None:
    """Add the texts of another package, for the codes ``<table>.<key>``. Raises ValueError for a table of this one."""
    from importlib.util import find_spec

    if table in ("recorded", *BESIDE_CODE) or find_spec(f"{_TEXTS}.{table}") is not None:
        raise ValueError(f"the table {table!r} of reasons belongs to ScaleTrain; use the name of your package")
    _TABLES[table] = texts


def text_of(reason: Reason) -> str:
    """Return the English sentence of a reason, without a full stop.

    A code without a text, or without the parameters of its text, as in a record of another version, is shown with the
    parameters that it has.
    """
    table, _, key = reason.code.partition(".")
    if key not in _table(table):
        return _unknown(reason)
    try:
        return formatted(entry_of(reason.code).text, reason.params)
    except _UNFIT:
        return _unknown(reason)


def entry_of(code: str) -> Text:
    """Return text and remedies of a code; the code itself as the text of an unknown one."""
    table, _, key = code.partition(".")
    entry = _table(table).get(key, code)
    if isinstance(entry, Text):
        return entry
    return Text(entry) if isinstance(entry, str) else Text(entry[0], entry[1:])


def _table(name: str) -> Mapping[str, Text | str | tuple[str, ...]]:
    if name not in _TABLES:
        if not name.isidentifier() or name.startswith("_"):  # the code is that of a record, and may be any text
            return {}
        try:
            module = importlib.import_module(BESIDE_CODE.get(name, f"{_TEXTS}.{name}"))
        except ModuleNotFoundError:
            return {}
        _TABLES[name] = module.TEXTS
    return _TABLES[name]


def _unknown(reason: Reason) -> str:
    return " ".join([reason.code, *(f"{key}={value}" for key, value in reason.params.items())])


class _Units(Formatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        if format_spec.startswith("of "):
            return counted(value, *format_spec.removeprefix("of ").split("/"))
        return _FORMATS[format_spec](value) if format_spec in _FORMATS else super().format_field(value, format_spec)


_UNITS = _Units()


def formatted(template: str, params: Mapping[str, Any]) -> str:
    """Return the text of a template such as those of Text. Raises what a missing or unfit parameter raises."""
    return _UNITS.vformat(template, (), params)
