"""The environment in which chat templates are rendered: that of transformers, with a fixed date and generation blocks.

It is that of ``apply_chat_template`` (transformers/utils/chat_template_utils.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from scaletrain_cli.spec.row_formats import Message, RowError

# Unicode's noncharacters mark the ends of generation blocks while a template is rendered.
_NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


class Rendered(NamedTuple):
    """A rendered conversation; ``marked``: first and last + 1 character of each generation block."""

    text: str
    marked: list[tuple[int, int]]


def template_environment(date: str) -> jinja2.Environment:
    """Return the environment, in which today is a fixed date (YYYY-MM-DD)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    now = datetime.fromisoformat(date)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = now.strftime
    # A template is a stranger's code: neither the type dict nor names with an underscore are within its reach.
    environment.globals["dict"] = lambda *given, **named: dict(*given, **named)
    environment.globals["namespace"] = _Namespace
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without private attributes."""

    def __init__(*given: Any, **named: Any) -> None:
        values = dict(*given[1:], **named)
        for name in values:
            _require_public(name)
        jinja2.utils.Namespace.__init__(given[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace must not have the attribute {name!r}")


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


# Variables of a template that hold the marks of this rendering.
OPENING, CLOSING = "__generation_opening", "__generation_closing"


class _Generation(Extension):
    """``{% generation %}`` ... ``{% endgeneration %}``: writes a mark before and after its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks: list[Any] = [jinja2.nodes.Name(name, "load") for name in (OPENING, CLOSING)]
        block = jinja2.nodes.CallBlock(self.call_method("_between_marks", marks), [], [], body)
        return [block.set_lineno(line)]

    def _between_marks(self, opening: str, closing: str, caller: Callable[[], str]) -> str:
        return f"{opening}{caller()}{closing}"


def marks_for(messages: list[Message], tools: list[Any] | None) -> tuple[str, str]:
    """Return two characters that the conversation does not contain. Raises RowError."""
    given = json.dumps([messages, tools], ensure_ascii=False, default=str)
    free = [mark for mark in _NONCHARACTERS if mark not in given]
    if len(free) < 2:
        raise RowError("template-failed", error="the row has every one of Unicode's noncharacters U+FDD0 to U+FDEF")
    return free[0], free[1]


def without_marks(text: str, opening: str, closing: str) -> Rendered:
    """Return the text without marks, and the spans between them."""
    found: list[str] = []
    marked: list[tuple[int, int]] = []
    length, start = 0, -1
    for part in re.split(f"([{opening}{closing}])", text):
        if part == opening:
            if start >= 0:
                raise RowError("template-failed", error="generation blocks are nested")
            start = length
        elif part == closing:
            if start < 0:
                raise RowError("template-failed", error="a generation block was cut")
            marked.append((start, length))
            start = -1
        else:
            found.append(part)
            length += len(part)
    if start >= 0:
        raise RowError("template-failed", error="a generation block was cut")
    return Rendered("".join(found), [each for each in marked if each[0] < each[1]])
