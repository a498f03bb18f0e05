"""Chat templates: rendering conversations as transformers does, and finding the assistant's text in the result.

The environment is that of transformers' ``apply_chat_template`` (utils/chat_template_utils.py), with a fixed date in
``strftime_now``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec.row_formats import (
    ASSISTANT,
    IMAGE_MARK,
    REASONING,
    Conversation,
    Message,
    RowError,
    is_image_part,
)

_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_PROBE, _OTHER_PROBE = "9b1c6f", "e40a77"  # texts that no template contains
# Unicode's noncharacters mark the ends of generation blocks while a template is rendered.
_NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))

# ChatML (github.com/openai/openai-python, chatml.md) with tools in the form of Qwen2.5 and Hermes.
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'Tools, as JSON schemas:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools>\\nCall a tool with <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' if message.reasoning_content }}
            {{- message.content or '' }}
            {%- for call in message.tool_calls or [] %}
                {%- set function = call.function or call %}
                {{- '\\n' if message.content or not loop.first }}
                {{- '<tool_call>\\n{"name": ' + (function.name | tojson) + ', "arguments": ' }}
                {{- function.arguments if function.arguments is string else function.arguments | tojson }}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- elif message.role != 'system' or not (tools and loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


class Rendered(NamedTuple):
    """A rendered conversation; ``marked``: first and last + 1 character of each generation block."""

    text: str
    marked: list[tuple[int, int]]


class Span(NamedTuple):
    """Characters ``start`` to ``stop - 1`` of a text, with their weight in the loss."""

    start: int
    stop: int
    weight: float


class Ended(NamedTuple):
    """A text with spans that include the ends of turns; ``stops``: the tokens at which these turns end."""

    text: str
    spans: list[Span]
    stops: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a tokenizer.

    ``named``: by their names for templates, such as ``bos_token``. ``stops``: those at which the model stops, by
    tokenizer, config.json and generation_config.json. ``every``: all of them.
    """

    named: Mapping[str, str]
    stops: tuple[str, ...] = ()
    every: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled chat template. ``variables``: those of the spec, by name."""

    source: str
    tokens: SpecialTokens
    compiled: jinja2.Template
    variables: Mapping[str, Any]

    @property
    def is_marked(self) -> bool:
        """True if the template marks the assistant's text with generation blocks."""
        return _MARKED.search(self.source) is not None

    def render(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None,
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        prompt: bool = False,
    ) -> Rendered:
        """Return the text of a conversation. ``prompt``: with the beginning of the assistant's next turn.

        Messages reach the template in the forms that it takes: contents as text or as parts, null or empty, arguments
        of calls as objects or as JSON text. Raises RowError.
        """
        return self._rendered([self._adapted(message) for message in messages], tools, variables, prompt=prompt)

    def _rendered(
        self, messages: list[Message], tools: list[Any] | None, variables: Mapping[str, Any], *, prompt: bool = False
    ) -> Rendered:
        messages = [_with_reasoning(message) for message in messages]
        opening, closing = _marks(messages, tools) if self.is_marked else ("", "")
        values = {**self.variables, **variables, **self.tokens.named, _OPENING: opening, _CLOSING: closing}
        values |= {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
        try:
            text = self.compiled.render(values)
        except jinja2.TemplateError as error:
            raise RowError("template-failed", error=error.message or str(error)) from error
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            MemoryError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise RowError("template-failed", error=f"{type(error).__name__}: {error}") from error
        return _without_marks(text, opening, closing) if opening else Rendered(text, [])

    # ---- what the template takes and writes, found by rendering short conversations ----------------------------------

    def _probed(self, messages: list[Message]) -> str:
        """Return the text of a conversation without a change of its messages; empty if it cannot be rendered."""
        try:
            return self._rendered(messages, None, {}).text
        except RowError:
            return ""

    def _adapted(self, message: Message) -> Message:
        content, calls = message.get("content"), message.get("tool_calls")
        if isinstance(content, list) and not any(map(is_image_part, content)) and message["role"] not in self._of_parts:
            message = {**message, "content": "\n".join(part["text"] for part in content)}
        if content is None and not self._takes_null:
            message = {**message, "content": ""}
        if calls and not self._takes_objects:
            message = {**message, "tool_calls": [_with_json_arguments(call) for call in calls]}
        return message

    @cached_property
    def _of_parts(self) -> frozenset[str]:
        """The roles whose contents may be lists of parts: the template writes the text of each."""
        parts = [{"type": "text", "text": _PROBE}]
        user, assistant = {"role": "user", "content": parts}, {"role": ASSISTANT, "content": parts}
        conversations: dict[str, list[Message]] = {
            "user": [user, assistant],
            "system": [{"role": "system", "content": parts}, user, assistant],
            "tool": [user, _probe_call(None, {}), {"role": "tool", "content": parts}],
        }
        found = set()
        for role, messages in conversations.items():
            text = self._probed(messages)
            if text.count(_PROBE) == sum(each["content"] == parts for each in messages) and "'type'" not in text:
                found |= {role, ASSISTANT} if role == "user" else {role}
        return frozenset(found) if "user" in found else frozenset()

    @cached_property
    def _takes_null(self) -> bool:
        """Whether the content of a message with calls may be null; otherwise it is an empty text."""
        text = self._probed([_PROBE_PROMPT, _probe_call(None, {"city": _PROBE})])
        return _PROBE in text and "None" not in text

    @cached_property
    def _takes_objects(self) -> bool:
        """Whether the arguments of calls may be objects; otherwise they are the JSON text of one."""
        arguments = {"city": _PROBE}
        texts = [self._probed([_PROBE_PROMPT, _probe_call(content, arguments)]) for content in (None, "")]
        return any(_PROBE in text and "'city'" not in text for text in texts) or not any(
            _PROBE in self._probed([_PROBE_PROMPT, _probe_call(content, json.dumps(arguments))])
            for content in (None, "")
        )

    @cached_property
    def _end_of_turn(self) -> str:
        """The text from the end of an answer to the first special token after it; empty if another text comes first."""
        conversation = [_PROBE_PROMPT, {"role": ASSISTANT, "content": _PROBE}, _PROBE_PROMPT]
        rest = self._probed(conversation).partition(_PROBE)[2]
        start = len(rest) - len(rest.lstrip())
        token = self._token_at(rest, start, self.tokens.every)
        return rest[: start + len(token)] if token else ""

    def takes_parts(self, image_token: str) -> bool:
        """Return True if contents may be lists of parts, as processors of images have them.

        That is so if the template writes the image token once for a part of type image, and the text of every part.
        """
        text = {"type": "text", "text": _PROBE}
        messages = [{"role": "user", "content": [{"type": "image"}, text]}, {"role": ASSISTANT, "content": [text]}]
        found = self._probed(messages)
        return found.count(image_token) == 1 and found.count(_PROBE) == 2 and "'type'" not in found

    # ---- the turns of the assistant ----------------------------------------------------------------------------------

    def assistant_spans(self, conversation: Conversation, *, last_only: bool) -> Ended:
        """Return the text of a conversation and the spans of its assistant's turns, with the ends of the turns.

        Raises RowError if the template does not separate them from the prompts without doubt, or does not end them.
        """
        messages, _, tools, variables = conversation
        text, marked = self.render(messages, tools, variables)
        turns = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        if not turns:
            return Ended(text, [])
        chosen = turns[-1:] if last_only else turns
        if self.is_marked:
            spans = self._marked_spans(conversation, turns, chosen, marked)
        else:
            spans = {number: [self._turn(conversation, text, number)] for number in chosen}
        stops = set[str]()
        for number, (*_, last) in spans.items():
            is_end = number == len(messages) - 1
            text, stop, token = self.ended(text, last.start, last.stop, is_end=is_end)
            spans[number][-1] = last._replace(stop=stop)
            if last.weight:
                stops |= {token}
                self._require_end(token, number, (text[span.start : span.stop] for span in spans[number]))
        return Ended(text, [span for number in spans for span in spans[number]], frozenset(stops))

    def _require_end(self, token: str, number: int, texts: Iterable[str]) -> None:
        """Raise RowError if a turn ends with no token, or with one at which the model must not stop everywhere."""
        if not token:
            raise RowError("turn-without-end", number=number)
        if token not in self.tokens.stops and any(token in text.rstrip().removesuffix(token) for text in texts):
            raise RowError("turn-end-within", number=number, token=token)

    def ended(self, text: str, start: int, stop: int, *, is_end: bool) -> tuple[str, int, str]:
        """Return the text, the place after the token that ends the turn from ``start`` to ``stop``, and that token.

        The token is the last of the turn, or comes after it and nothing but white space; one at which the model stops
        is preferred to any other special token. ``is_end``: the turn is the last; if the template ends a turn only with
        the beginning of the next one, as GLM-4.5's does, this token is added to the text.
        """
        inside = text[start:stop].rstrip()
        after = stop + len(text[stop:]) - len(text[stop:].lstrip())
        for tokens in (self.tokens.stops, self.tokens.every):
            if token := next((token for token in tokens if inside.endswith(token)), ""):
                return text, stop, token
            if token := self._token_at(text, after, tokens):
                return text, after + len(token), token
        if is_end and self._end_of_turn and text[stop:].strip() == "":
            text = f"{text[: start + len(inside)]}{self._end_of_turn}"
            return text, len(text), self._end_of_turn.lstrip()
        return text, stop, ""

    @staticmethod
    def _token_at(text: str, place: int, tokens: Iterable[str]) -> str:
        return max((token for token in tokens if token and text.startswith(token, place)), key=len, default="")

    def _marked_spans(
        self, conversation: Conversation, turns: list[int], chosen: list[int], marked: list[tuple[int, int]]
    ) -> dict[int, list[Span]]:
        """Return the spans of each chosen turn; those of turns that cannot be told apart are of the last one."""
        messages, weights, tools, variables = conversation
        if not marked:
            raise RowError("template-marks-nothing", number=turns[0])
        if len(marked) == len(turns):
            of_turn = dict(zip(turns, ([each] for each in marked), strict=True))
        else:  # several blocks in one turn: those that the turn adds to the conversation
            counts = [0, *(len(self.render(messages[: number + 1], tools, variables).marked) for number in turns)]
            if counts == sorted(counts) and counts[-1] == len(marked):
                of_turn = {number: marked[counts[i] : counts[i + 1]] for i, number in enumerate(turns)}
            elif chosen == turns and all(weights[number] == 1 for number in turns):
                of_turn = {turns[-1]: marked}
            else:
                raise RowError("template-marks-differ", found=len(marked))
        return {
            number: [Span(*each, weights[number] or 0.0) for each in of_turn[number]]
            for number in chosen
            if of_turn.get(number)
        }

    def _turn(self, conversation: Conversation, text: str, number: int) -> Span:
        """Return the span of one message, from the end of its generation prompt to the end of the message.

        Both ends are those of rendered beginnings of the conversation, which must be beginnings of ``text``.
        """
        messages, weights, tools, variables = conversation

        def rendered(count: int, *, prompt: bool = False) -> str:
            return self.render(messages[:count], tools, variables, prompt=prompt).text

        until = text if number == len(messages) - 1 else rendered(number + 1)
        prompt = rendered(number, prompt=True)
        end = self.tokens.named.get("eos_token", "")
        if end and until.endswith(end) and not text.startswith(until):  # written once, after the last message
            until = until.removesuffix(end)
            token = self._token_at(text, len(until), self.tokens.every)
            is_ended = until.rstrip().endswith(self.tokens.every)
            if token and token not in self.tokens.stops and not is_ended:  # another token ends the turn there
                raise RowError("template-rewrites-history", number=number)
        if not text.startswith(until):
            raise RowError("template-rewrites-history", number=number)
        if not until.startswith(prompt):
            plain = rendered(number)
            if not text.startswith(plain):
                raise RowError("template-rewrites-history", number=number - 1)
            raise RowError("template-prompt-differs", number=number, prompt=prompt[len(plain) :])
        if "add_generation_prompt" not in self.source:
            content = messages[number].get("content")
            answer = content.strip() if isinstance(content, str) else ""
            before = until[len(prompt) : max(until.find(answer, len(prompt)), len(prompt))] if answer else ""
            if before.strip():
                raise RowError("template-without-prompt", number=number, before=before)
        return Span(len(prompt), len(until), weights[number] or 0.0)


_PROBE_PROMPT: Message = {"role": "user", "content": _OTHER_PROBE}


def _probe_call(content: str | None, arguments: Any) -> Message:
    function = {"name": _OTHER_PROBE, "arguments": arguments}
    calls = [{"type": "function", "id": _OTHER_PROBE, "function": function}]
    return {"role": ASSISTANT, "content": content, "tool_calls": calls}


def _with_json_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    if not isinstance(function.get("arguments"), dict):
        return call
    function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return {**call, "function": function} if "function" in call else function


def compile_template(
    source: str, tokens: SpecialTokens, date: str, variables: Mapping[str, Any] = MappingProxyType({})
) -> ChatTemplate:
    """Return the template with a tokenizer's special tokens and a fixed date (YYYY-MM-DD). Raises UsageError.

    ``variables``: values for all conversations, by name.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    now = datetime.fromisoformat(date)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = now.strftime
    # A template is a stranger's code: neither the type dict nor names with an underscore are within its reach.
    environment.globals["dict"] = _new_dict
    environment.globals["namespace"] = _Namespace
    try:
        compiled = environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        params = {"line": error.lineno, "error": error.message or str(error)}
        raise UsageError(Reason("data.template-invalid", params)) from error
    except (MemoryError, RecursionError, ValueError) as error:
        params = {"line": 1, "error": f"{type(error).__name__}: {error}"}
        raise UsageError(Reason("data.template-invalid", params)) from error
    return ChatTemplate(source, tokens, compiled, variables)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _new_dict(*given: Any, **named: Any) -> dict[Any, Any]:
    return dict(*given, **named)


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
_OPENING, _CLOSING = "__generation_opening", "__generation_closing"


class _Generation(Extension):
    """``{% generation %}`` ... ``{% endgeneration %}``: writes a mark before and after its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = jinja2.nodes.CallBlock(self.call_method("_between_marks", self._mark_names()), [], [], body)
        return [block.set_lineno(line)]

    def _mark_names(self) -> list[Any]:
        return [jinja2.nodes.Name(name, "load") for name in (_OPENING, _CLOSING)]

    def _between_marks(self, opening: str, closing: str, caller: Callable[[], str]) -> str:
        return f"{opening}{caller()}{closing}"


def _marks(messages: list[Message], tools: list[Any] | None) -> tuple[str, str]:
    """Return two characters that the conversation does not contain. Raises RowError."""
    given = json.dumps([messages, tools], ensure_ascii=False, default=str)
    free = [mark for mark in _NONCHARACTERS if mark not in given]
    if len(free) < 2:
        raise RowError("template-failed", error="the row has every one of Unicode's noncharacters U+FDD0 to U+FDEF")
    return free[0], free[1]


def _without_marks(text: str, opening: str, closing: str) -> Rendered:
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


def with_image_parts(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose contents are lists of parts; text loses the white space around the place of an image."""
    return [{**message, "content": _parts(message.get("content"))} for message in messages]


def with_image_token(messages: Sequence[Message], token: str) -> list[Message]:
    """Return messages whose contents are text with ``token`` in the places of images; parts become lines."""
    found = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            content = content.replace(IMAGE_MARK, token)
        elif isinstance(content, list):
            content = "\n".join(token if is_image_part(part) else part["text"] for part in content)
        found.append({**message, "content": content})
    return found


def _parts(content: str | list[Any] | None) -> list[dict[str, str]]:
    if isinstance(content, list):
        return [{"type": "image"} if is_image_part(part) else {"type": "text", **part} for part in content]
    first, *others = (
        [text.strip() for text in content.split(IMAGE_MARK)] if content and IMAGE_MARK in content else [content]
    )
    parts = [{"type": "text", "text": first}] if first else []
    for text in others:
        parts += [{"type": "image"}, *([{"type": "text", "text": text}] if text else [])]
    return parts


def _with_reasoning(message: Message) -> Message:
    """Return the message with its reasoning under each name that templates read."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
