"""Chat templates: rendering conversations as transformers does, and finding the assistant's text in the result.

The environment is that of transformers' ``apply_chat_template`` (utils/chat_template_utils.py), with a fixed date in
``strftime_now``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec.row_formats import ASSISTANT, IMAGE_MARK, Conversation, Message, RowError, is_image_part

# Tokens that end a turn, which a model must learn to write; beside the tokenizer's eos_token.
_ENDS_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "</s>",
)
_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Names under which a message has its reasoning, as in transformers; templates read the first, GPT-OSS the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_PROBE = "9b1c6f"  # a text that no template contains
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


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled chat template. ``tokens``: the tokenizer's special tokens by name, such as ``bos_token``."""

    source: str
    tokens: dict[str, str]
    date: str
    compiled: jinja2.Template

    @property
    def is_marked(self) -> bool:
        """True if the template marks the assistant's text with generation blocks."""
        return _MARKED.search(self.source) is not None

    def render(self, messages: Sequence[Message], tools: list[Any] | None, *, prompt: bool = False) -> Rendered:
        """Return the text of a conversation. ``prompt``: with the beginning of the assistant's next turn.

        Raises RowError.
        """
        given = [_with_reasoning(message) for message in messages]
        opening, closing = _marks(given, tools) if self.is_marked else ("", "")
        try:
            text = self.compiled.render(
                messages=given,
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **self.tokens,
                **{_OPENING: opening, _CLOSING: closing},
            )
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

    def takes_parts(self, image_token: str) -> bool:
        """Return True if contents may be lists of parts, as processors of images have them.

        That is so if the template writes the image token once for a part of type image, and the text of every part.
        """
        text = {"type": "text", "text": _PROBE}
        messages = [{"role": "user", "content": [{"type": "image"}, text]}, {"role": ASSISTANT, "content": [text]}]
        try:
            found = self.render(messages, None).text
        except RowError:
            return False
        return found.count(image_token) == 1 and found.count(_PROBE) == 2 and "'type'" not in found

    def assistant_spans(self, conversation: Conversation, *, last_only: bool) -> tuple[str, list[Span]]:
        """Return the text of a conversation and the spans of its assistant's turns, with the ends of the turns.

        Raises RowError if the template does not separate them from the prompts without doubt.
        """
        messages, _, tools = conversation
        text, marked = self.render(messages, tools)
        turns = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        if not turns:
            return text, []
        chosen = turns[-1:] if last_only else turns
        if self.is_marked:
            spans = self._marked_spans(conversation, turns, chosen, marked)
        else:
            spans = [self._turn(conversation, text, number) for number in chosen]
        return text, [self._with_end(text, span) for span in spans]

    def _marked_spans(
        self, conversation: Conversation, turns: list[int], chosen: list[int], marked: list[tuple[int, int]]
    ) -> list[Span]:
        messages, weights, tools = conversation
        if not marked:
            raise RowError("template-marks-nothing", number=turns[0])
        if len(marked) == len(turns):
            of_turn = dict(zip(turns, ([each] for each in marked), strict=True))
        elif chosen == turns and all(weights[number] == 1 for number in turns):
            return [Span(start, stop, 1.0) for start, stop in marked]
        else:  # several blocks in one turn: those that the turn adds to the conversation
            counts = {number: len(self.render(messages[: number + 1], tools).marked) for number in turns}
            firsts = [0, *(counts[number] for number in turns)]
            if firsts != sorted(firsts) or firsts[-1] != len(marked):
                raise RowError("template-marks-differ", found=len(marked))
            of_turn = {number: marked[firsts[i] : firsts[i + 1]] for i, number in enumerate(turns)}
        return [Span(*each, weights[number] or 0.0) for number in chosen for each in of_turn[number]]

    def _turn(self, conversation: Conversation, text: str, number: int) -> Span:
        """Return the span of one message, from the end of its generation prompt to the end of the message.

        Both ends are those of rendered beginnings of the conversation, which must be beginnings of ``text``.
        """
        messages, weights, tools = conversation
        until = text if number == len(messages) - 1 else self.render(messages[: number + 1], tools).text
        prompt = self.render(messages[:number], tools, prompt=True).text
        end = self.tokens.get("eos_token", "")
        if end and until.endswith(end) and not text.startswith(until):  # written once, after the last message
            until = until.removesuffix(end)
            if self._end_at(text, len(until)):  # another token ends the turn there
                raise RowError("template-rewrites-history", number=number)
        if not text.startswith(until):
            raise RowError("template-rewrites-history", number=number)
        if not until.startswith(prompt):
            plain = self.render(messages[:number], tools).text
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

    def _with_end(self, text: str, span: Span) -> Span:
        """Return the span with the token that ends the turn, where it follows the span directly."""
        return span._replace(stop=span.stop + len(self._end_at(text, span.stop)))

    def _end_at(self, text: str, place: int) -> str:
        """Return the token that ends a turn, if it is at this place of the text; else an empty string."""
        ends = (self.tokens.get("eos_token", ""), *_ENDS_OF_TURN)
        return next((end for end in ends if end and text.startswith(end, place)), "")


def compile_template(source: str, tokens: dict[str, str], date: str) -> ChatTemplate:
    """Return the template with a tokenizer's special tokens and a fixed date (YYYY-MM-DD). Raises UsageError."""
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
    return ChatTemplate(source, tokens, date, compiled)


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
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
