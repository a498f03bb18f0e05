"""Find what a chat template does not write of a conversation: a model must not be trained on less than the row has."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from scaletrain_cli.spec.row_formats import ASSISTANT, IMAGE_MARK, REASONING, Message, RowError

LOST_REASONING = "reasoning"
_NOT_LETTERS = re.compile(r"\W+")


class _Part(NamedTuple):
    kind: str
    text: str
    number: int = 0  # of the message


def missing_parts(text: str, messages: Sequence[Message], tools: list[Any] | None) -> tuple[str, ...]:
    """Return the kinds of what a rendered text may lack and does: the reasoning, which templates drop on purpose.

    Compares letters and digits alone where a part does not occur as it is, because templates trim, indent and escape.
    Raises RowError if any other part is missing: a message's text, a call, or the description of a tool.
    """
    letters = ""
    uses, lacks = Counter[str](), dict[str, None]()
    for part in (*_parts_of(messages), *_parts_of_tools(tools or [])):
        content = part.text.strip()
        uses[content] += 1
        if text.count(content) >= uses[content]:
            continue
        letters = letters or _letters(text)
        forms = {_letters(form) for form in (content, json.dumps(content, ensure_ascii=False), json.dumps(content))}
        if any(form and letters.count(form) >= uses[content] for form in forms):
            continue
        thought = part.kind == "content" and "</think>" in content  # which templates drop from earlier turns
        if part.kind != LOST_REASONING and not (thought and _letters(content.rpartition("</think>")[2]) in letters):
            raise RowError(f"template-lacks-{part.kind}", number=part.number, text=content[:80])
        lacks[LOST_REASONING] = None
    return tuple(lacks)


def _letters(text: str) -> str:
    return _NOT_LETTERS.sub("", text)


def _parts_of(messages: Sequence[Message]) -> Iterator[_Part]:
    for number, message in enumerate(messages):
        content = message.get("content")
        texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content or []]
        yield from (
            _Part("content", piece, number) for text in texts for piece in text.split(IMAGE_MARK) if piece.strip()
        )
        reasoning = next((message[name] for name in REASONING if message.get(name)), None)
        if isinstance(reasoning, str):
            yield _Part(LOST_REASONING, reasoning, number)
        for call in message.get("tool_calls") or [] if message["role"] == ASSISTANT else []:
            function = call.get("function", call)
            yield _Part("call", function["name"], number)
            yield from (_Part("call", text, number) for text in _leaves(function.get("arguments")))


def _leaves(value: Any) -> Iterator[str]:
    """Yield the texts and numbers of the arguments of a call."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield str(name)
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, str):
        yield from [value] if value.strip() else []
    elif value is not None and not isinstance(value, bool):  # true and null are True and None in some templates
        yield json.dumps(value)


def _parts_of_tools(tools: Sequence[Any]) -> Iterator[_Part]:
    """Yield names and descriptions of tools and of their parameters; templates may write types in another notation."""
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        texts = [function.get("name"), function.get("description"), *(properties or {})]
        yield from (_Part("tool", text) for text in texts if isinstance(text, str) and text.strip())
