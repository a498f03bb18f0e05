"""Find what a chat template does not write of a conversation: a model must not be trained on less than the row has.

Each part of a conversation is replaced by a word of its own; the words that the rendered text lacks are the parts that
the template drops. Comparing the texts themselves would not do: a short answer occurs in many places.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from scaletrain_cli.spec.row_examples import Message
from scaletrain_cli.spec.row_formats import REASONING

THOUGHT_ENDS = "</think>"
COUNTED = ("reasoning", "refusal", "descriptions of parameters")  # what templates drop on purpose


class Part(NamedTuple):
    """One part: what it is, the number of its message, and its text."""

    kind: str
    number: int
    text: str


class Words(NamedTuple):
    """A conversation with words in place of its parts, and the part of each word."""

    messages: list[Message]
    tools: list[Any] | None
    parts: dict[str, Part]


def in_words(messages: Sequence[Message], tools: Sequence[Any] | None) -> Words:
    """Return a conversation in words; the same ones for each conversation of the same structure."""
    parts: dict[str, Part] = {}

    def word(kind: str, number: int, text: object) -> str:
        parts[name := f"zq{len(parts):05d}qz"] = Part(kind, number, str(text))
        return name

    copies = [_message(message, number, word) for number, message in enumerate(messages)]
    return Words(copies, None if tools is None else [_tool(tool, word) for tool in tools], parts)


_Word = Callable[[str, int, object], str]


def _message(message: Message, number: int, word: _Word) -> Message:
    copy = dict(message)
    content = message.get("content")
    if isinstance(content, str):
        copy["content"] = _content(content, number, word)
    elif isinstance(content, list):
        copy["content"] = [
            {**part, "text": _content(part["text"], number, word)} if isinstance(part.get("text"), str) else part
            for part in content
        ]
    texts = {message[name] for name in REASONING if isinstance(message.get(name), str) and message[name].strip()}
    words = {text: word("reasoning", number, text) for text in sorted(texts)}
    copy |= {name: words[message[name]] for name in REASONING if message.get(name) in words}
    if isinstance(message.get("refusal"), str) and message["refusal"].strip():
        copy["refusal"] = word("refusal", number, message["refusal"])
    if message.get("tool_calls"):
        copy["tool_calls"] = [_call(call, number, word) for call in message["tool_calls"]]
    return copy


def _content(text: str, number: int, word: _Word) -> str:
    """Return the words of a text; templates split those with a thought."""
    if THOUGHT_ENDS not in text:
        return word("content", number, text) if text.strip() else text
    thought, _, answer = text.rpartition(THOUGHT_ENDS)
    begins = "<think>" if "<think>" in thought else ""
    inner = thought.replace("<think>", "")
    inner = word("reasoning", number, inner) if inner.strip() else inner
    return f"{begins}\n{inner}\n{THOUGHT_ENDS}\n\n{word('content', number, answer) if answer.strip() else answer}"


def _call(call: dict[str, Any], number: int, word: _Word) -> dict[str, Any]:
    function = dict(call.get("function", call))
    function["name"] = word("call", number, function["name"])
    if "arguments" in function:
        function["arguments"] = _arguments(function["arguments"], number, word)
    return {**call, "function": function} if "function" in call else function


def _arguments(value: Any, number: int, word: _Word) -> Any:
    if isinstance(value, dict):
        return {word("call", number, name): _arguments(inner, number, word) for name, inner in value.items()}
    if isinstance(value, list):
        return [_arguments(inner, number, word) for inner in value]
    if value is None or isinstance(value, bool) or value == "":
        return value
    return word("call", number, value)


def _tool(tool: Any, word: _Word) -> Any:
    function = dict(tool.get("function", tool))
    for key in ("name", "description"):
        if isinstance(function.get(key), str) and function[key].strip():
            function[key] = word("tool", 0, function[key])
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    if isinstance(parameters, dict) and isinstance(properties, dict):
        schemas = {}
        for name, schema in properties.items():
            about = schema.get("description") if isinstance(schema, dict) else None
            if isinstance(about, str) and about.strip():
                schema = {**schema, "description": word("descriptions of parameters", 0, about)}
            schemas[word("tool", 0, name)] = schema
        function["parameters"] = {**parameters, "properties": schemas, "required": []}
    return {**tool, "function": function} if "function" in tool else function
