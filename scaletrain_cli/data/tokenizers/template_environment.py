"""The environment in which chat templates are rendered: that of transformers, with a fixed date and generation blocks.

It is that of ``apply_chat_template`` (transformers/utils/chat_template_utils.py).
"""

from __future__ import annotations

import functools
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec.row_examples import Message, RowError

_RENDER_SECONDS = 30.0  # of one conversation, which takes milliseconds
_MOST_CHARACTERS = 1 << 28  # of a text that a template makes
# Unicode's noncharacters mark the ends of generation blocks while a template is rendered.
_NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


class Rendered(NamedTuple):
    """A rendered conversation; ``marked``: first and last + 1 character of each generation block."""

    text: str
    marked: list[tuple[int, int]]


def template_environment(date: str) -> TemplateEnvironment:
    """Return the environment, in which today is a fixed date (YYYY-MM-DD)."""
    environment = TemplateEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    now = datetime.fromisoformat(date)
    environment.filters["tojson"] = _to_json
    environment.filters |= {name: _with_small_widths(environment.filters[name]) for name in ("center", "indent")}
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = now.strftime
    # A template is a stranger's code: neither the type dict nor names with an underscore are within its reach.
    environment.globals["dict"] = lambda *given, **named: dict(*given, **named)
    environment.globals["namespace"] = _Namespace
    return environment


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Ends a template that computes for too long, or something that would fill the memory."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    _deadline = math.inf

    def limited(self, source: str) -> jinja2.Template:
        """Return the compiled template, whose loops and texts have limits. Raises UsageError."""
        try:
            tree = _Limited().visit(self.parse(source))
            tree.set_environment(self)
            return self.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            params = {"line": error.lineno, "error": error.message or str(error)}
            raise UsageError(Reason("data.template-invalid", params)) from error
        except (MemoryError, RecursionError, ValueError) as error:
            params = {"line": 1, "error": f"{type(error).__name__}: {error}"}
            raise UsageError(Reason("data.template-invalid", params)) from error

    def render(self, template: jinja2.Template, values: dict[str, Any]) -> str:
        """Return the text. Raises what the template raises, and jinja2.TemplateRuntimeError beyond a limit."""
        self._deadline = time.monotonic() + _RENDER_SECONDS
        pieces, size = [], 0
        for piece in template.generate(values):
            pieces.append(piece)
            size += len(piece)
            _require_small(size)
        return "".join(pieces)

    def go_on(self) -> None:
        """Do nothing until the deadline; each round of a loop calls this."""
        if time.monotonic() > self._deadline:
            raise jinja2.TemplateRuntimeError(f"it takes more than {_RENDER_SECONDS:.0f} s")

    def call(self, context: Any, obj: Any, *arguments: Any, **named: Any) -> Any:
        self.go_on()  # a macro that calls itself twice needs no loop
        text = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)  # the sandbox wraps str.format
        if isinstance(text, str):
            _require_small_widths(text if "format" in obj.__name__ else "", *arguments, *named.values())
        return super().call(context, obj, *arguments, **named)

    def joined(self, parts: Sequence[Any]) -> str:
        """Return what ``~`` between the parts means."""
        text = "".join(map(str, parts))
        _require_small(len(text))
        return text

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        # A sum has at most twice the limit; the others could fill the memory before they can be measured.
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(value, str | list | tuple):
                    _require_small(len(value) * times)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _require_small(left.bit_length() * right)
        elif operator == "%" and isinstance(left, str):
            _require_small_widths(left)
        value = super().call_binop(context, operator, left, right)
        if isinstance(value, str | list | tuple):
            _require_small(len(value))
        return value


def _require_small(size: int) -> None:
    if size > _MOST_CHARACTERS:
        raise jinja2.TemplateRuntimeError(f"it makes more than {_MOST_CHARACTERS:,} characters or elements")


def _require_small_widths(form: str, *values: Any) -> None:
    """Raise TemplateRuntimeError if a width in a text of formats, or a number among the values, is too large."""
    widths = map(int, re.findall(r"[%:][^\s%:{}]{0,3}?(\d{9,18})", form))
    _require_small(max([*widths, *(value for value in values if isinstance(value, int))], default=0))


def _with_small_widths(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter, such as ``center``, that refuses widths that would fill the memory."""

    @functools.wraps(function)
    def limited(*arguments: Any, **named: Any) -> Any:
        _require_small_widths("", *arguments, *named.values())
        return function(*arguments, **named)

    return limited


class _Limited(NodeTransformer):
    """Has loops and ``~`` call the environment, which sets limits."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("go_on"), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return _call("joined", nodes.List(node.nodes))


def _call(name: str, *arguments: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), [*arguments], [], None, None)


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
        return [jinja2.nodes.CallBlock(self.call_method("_between_marks", marks), [], [], body).set_lineno(line)]

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
    parts: list[str] = []
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
            parts.append(part)
            length += len(part)
    if start >= 0:
        raise RowError("template-failed", error="a generation block was cut")
    return Rendered("".join(parts), [span for span in marked if span[0] < span[1]])
