"""Chat templates: rendering conversations as transformers does, and finding the assistant's text in the result."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import jinja2
import jinja2.meta

from scaletrain_cli.data.tokenizers.template_environment import (
    CLOSING,
    OPENING,
    Rendered,
    TemplateEnvironment,
    marks_for,
    template_environment,
    without_marks,
)
from scaletrain_cli.engine.data.missing_parts import Part, in_words
from scaletrain_cli.spec.row_examples import ASSISTANT, IMAGE_MARK, Conversation, Message, RowError, is_image_part
from scaletrain_cli.spec.row_formats import REASONING

_MOST_STRUCTURES = 10_000  # of conversations, whose missing parts are remembered
_RESERVED = {"messages", "tools", "add_generation_prompt"}  # variables that a row does not set by name
_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_PROBE, _OTHER_PROBE = "9b1c6f", "e40a77"  # texts that no template contains


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
    tokenizer, config.json and generation_config.json. ``others``: more that are one token each, special ones first.
    """

    named: Mapping[str, str]
    stops: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled chat template. ``variables``: those of the spec, by name; ``read``: names that the template reads."""

    source: str
    tokens: SpecialTokens
    environment: TemplateEnvironment
    compiled: jinja2.Template
    variables: Mapping[str, Any]
    read: frozenset[str]

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
        rendered = self._rendered([self._adapted(message) for message in messages], tools, variables, prompt=prompt)
        if prompt or not self._constant_prompt:
            return rendered
        if not rendered.text.endswith(self._constant_prompt):
            text = self._constant_prompt
            raise RowError("template-failed", error=f"other conversations end with {text!r}, and this one does not")
        return rendered._replace(text=rendered.text.removesuffix(self._constant_prompt))

    def _rendered(
        self, messages: list[Message], tools: list[Any] | None, variables: Mapping[str, Any], *, prompt: bool = False
    ) -> Rendered:
        messages = [_with_reasoning(message) for message in messages]
        opening, closing = marks_for(messages, tools) if self.is_marked else ("", "")
        values = {"documents": None, **self.tokens.named, **self.variables, **variables}
        values |= {"messages": messages, "tools": tools, "add_generation_prompt": prompt}
        values |= {OPENING: opening, CLOSING: closing}
        try:
            text = self.environment.render(self.compiled, values)
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
        return without_marks(text, opening, closing) if opening else Rendered(text, [])

    # ---- what the template takes and writes, found by rendering short conversations ----------------------------------

    def _probed(self, messages: list[Message]) -> str:
        """Return the text of a conversation without a change of its messages; empty if it cannot be rendered."""
        try:
            return self._rendered(messages, None, {}).text
        except RowError:
            return ""

    def _adapted(self, message: Message) -> Message:
        content, calls, role = message.get("content"), message.get("tool_calls"), message["role"]
        if isinstance(content, list) and not any(map(is_image_part, content)) and role not in self._of_parts:
            message = {**message, "content": "\n".join(part["text"] for part in content)}
        if isinstance(content, str) and role in self._of_parts and not self._takes_text:
            message = {**message, "content": [{"type": "text", "text": content}]}
        if content is None and not self._takes_null:
            message = {**message, "content": ""}
        if calls and not self._takes_objects:
            message = {**message, "tool_calls": [_with_json_arguments(call) for call in calls]}
        return message

    @cached_property
    def _of_parts(self) -> frozenset[str]:
        """The roles whose contents may be lists of parts: the template writes the text of each."""
        parts = [{"type": "text", "text": _PROBE}, {"type": "text", "text": _PROBE}]
        user, assistant = {"role": "user", "content": parts}, {"role": ASSISTANT, "content": parts}
        conversations: dict[str, list[Message]] = {
            "user": [user, assistant],
            "system": [{"role": "system", "content": parts}, user, assistant],
            "tool": [user, _probe_call(None, {}), {"role": "tool", "content": parts}],
        }
        roles = set()
        for role, messages in conversations.items():
            text = self._probed(messages)
            if text.count(_PROBE) == 2 * sum(turn["content"] == parts for turn in messages) and "'type'" not in text:
                roles |= {role, ASSISTANT} if role == "user" else {role}
        return frozenset(roles) if "user" in roles else frozenset()

    @cached_property
    def _takes_text(self) -> bool:
        """True if the content of a message may be text. Templates of vision models often require a list of parts."""
        return self._probed([_PROBE_PROMPT, {"role": ASSISTANT, "content": _PROBE}]).count(_PROBE) == 1

    @cached_property
    def _takes_null(self) -> bool:
        """True if the content of a message with tool calls may be null. It is an empty text otherwise."""
        text = self._probed([_PROBE_PROMPT, _probe_call(None, {"city": _PROBE})])
        return _PROBE in text and "None" not in text

    @cached_property
    def _takes_objects(self) -> bool:
        """True if the arguments of tool calls may be objects. They are JSON text otherwise."""
        arguments = {"city": _PROBE}
        texts = [self._probed([_PROBE_PROMPT, _probe_call(content, arguments)]) for content in (None, "")]
        return any(_PROBE in text and "'city'" not in text for text in texts) or not any(
            _PROBE in self._probed([_PROBE_PROMPT, _probe_call(content, json.dumps(arguments))])
            for content in (None, "")
        )

    @cached_property
    def _own_end(self) -> str:
        """The special token that follows the last answer of a conversation; empty if there is none."""
        answer = {"role": ASSISTANT, "content": _PROBE}
        rest = self._probed(list(map(self._adapted, [_PROBE_PROMPT, answer]))).partition(_PROBE)[2].lstrip()
        return _token_at(rest, 0, (*self.tokens.stops, *self.tokens.others))

    @cached_property
    def _constant_prompt(self) -> str:
        """The beginning of an answer that ends each text, also of conversations that are over; usually empty.

        It stands where a message may follow, and that does not begin with it. A model must not learn to write it.
        """
        user, answer = _PROBE_PROMPT, {"role": ASSISTANT, "content": _PROBE}
        conversations = ([user], [user, answer], [user, answer, user])
        asked, answered, continued = (self._probed(list(map(self._adapted, messages))) for messages in conversations)
        after, then = (text.partition(_PROBE)[2] for text in (answered, continued))
        if not continued or then.startswith(after) or not answered.startswith(asked):
            return ""
        shared = next(after[:length] for length in range(len(after), -1, -1) if then.startswith(after[:length]))
        ends = [shared.rfind(stop) + len(stop) for stop in self.tokens.stops if stop in shared]
        start = max(ends, default=len(self._own_end) if shared.startswith(self._own_end) else 0)
        prompt = after[start:]
        return prompt if prompt.strip() and asked.endswith(prompt) else ""

    def missing(
        self, messages: Sequence[Message], tools: list[Any] | None, variables: Mapping[str, Any]
    ) -> tuple[Part, ...]:
        """Return the parts of a conversation that the template does not write."""
        words = in_words(messages, tools)
        structure = json.dumps([words.messages, words.tools, variables], default=str, sort_keys=True)
        if structure not in self._missing:
            if len(self._missing) >= _MOST_STRUCTURES:
                self._missing.clear()
            try:
                text = self.render(words.messages, words.tools, variables).text
            except RowError:  # it takes only some texts: those of this conversation are searched for
                text = self.render(messages, tools, variables).text
                forms = ((part, part.text.strip(), json.dumps(part.text)[1:-1]) for part in words.parts.values())
                return tuple(part for part, plain, escaped in forms if plain not in text and escaped not in text)
            self._missing[structure] = tuple(word for word in words.parts if word not in text)
        return tuple(words.parts[word] for word in self._missing[structure])

    @cached_property
    def _missing(self) -> dict[str, tuple[str, ...]]:
        return {}

    def takes_parts(self, image_token: str) -> bool:
        """Return True if contents may be lists of parts, as processors of images have them.

        That is so if the template writes the image token once for a part of type image, and the text of every part.
        """
        text = {"type": "text", "text": _PROBE}
        messages = [{"role": "user", "content": [{"type": "image"}, text]}, {"role": ASSISTANT, "content": [text]}]
        rendered = self._probed(messages)
        return rendered.count(image_token) == 1 and rendered.count(_PROBE) == 2 and "'type'" not in rendered

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
        for number, of_turn in spans.items():
            conversation_ends = number == len(messages) - 1
            text, stop, token = self.ended(conversation, text, of_turn, conversation_ends=conversation_ends)
            of_turn[-1] = of_turn[-1]._replace(stop=stop)
            if of_turn[-1].weight:
                stops.add(token)
        return Ended(text, [span for of_turn in spans.values() for span in of_turn], frozenset(stops))

    def ended(
        self, conversation: Conversation, text: str, spans: Sequence[Span], *, conversation_ends: bool
    ) -> tuple[str, int, str]:
        """Return the text, the place after the token that ends a turn of ``spans``, and that token.

        The token is the last of the turn, or comes after it and nothing but white space. One at which the model stops
        comes first; another one may not stand within the turn. A turn that ends only with the role of the next one, as
        with GLM-4.5, must end with a token at which the model stops; if no turn follows, it is added to the text.
        Raises RowError for a turn in the loss without an end.
        """
        *_, last = spans
        inside, after = text[last.start : last.stop].rstrip(), last.stop
        after += len(text[after:]) - len(text[after:].lstrip())
        stops, others = self.tokens.stops, self.tokens.others
        if token := _token_before(inside, stops):
            return text, last.stop, token
        if token := _token_at(text, after, stops):
            return text, after + len(token), token
        token, place = _token_before(inside, others), last.stop
        if self._own_end and text.startswith(self._own_end, after):  # a call may end with a token of its own
            token, place = self._own_end, after + len(self._own_end)
        if token:
            pieces = [text[span.start : span.stop].rstrip().removesuffix(token) for span in spans]
            if last.weight and any(token in piece for piece in pieces):
                raise RowError("turn-end-within", token=token)
            return text, place, token
        if conversation_ends and not text[last.stop :].strip():
            following = self._after(conversation, text[: last.start + len(inside)])
            if token := _token_before(following, stops):
                text = text[: last.start + len(inside)] + following
                return text, len(text), token
        if last.weight:
            raise RowError("turn-without-end", text=inside[-80:])
        return text, last.stop, ""

    def _after(self, conversation: Conversation, text: str) -> str:
        """Return what a template writes after a text if another message follows, up to the first special token."""
        messages, _, tools, variables = conversation
        role = "tool" if messages[-1].get("tool_calls") else "user"
        try:
            longer = self.render([*messages, {"role": role, "content": _PROBE}], tools, variables).text
        except RowError:
            return ""
        rest = longer.removeprefix(text)
        start = len(rest) - len(rest.lstrip())
        token = _token_at(rest, start, self.tokens.stops) if len(rest) < len(longer) else ""
        return rest[: start + len(token)] if token else ""

    def _marked_spans(
        self, conversation: Conversation, turns: list[int], chosen: list[int], marked: list[tuple[int, int]]
    ) -> dict[int, list[Span]]:
        """Return the spans of the generation blocks of each chosen turn.

        Raises RowError if it is not certain to which turn a block belongs.
        """
        messages, weights, tools, variables = conversation
        if not marked:
            raise RowError("template-marks-nothing", number=turns[0])
        of_blocks = list(turns)
        if len(marked) != len(turns):  # the words in a block tell its turn
            words = in_words(messages, tools)
            text, in_text = self.render(words.messages, words.tools, variables)
            by_block = [{part.number for word, part in words.parts.items() if word in text[a:b]} for a, b in in_text]
            if len(by_block) != len(marked) or any(len(numbers) > 1 for numbers in by_block):
                raise RowError("template-marks-differ", found=len(marked))
            # A block that holds no part of a message, such as the end token alone, belongs to the previous turn.
            of_blocks = []
            for numbers in by_block:
                of_blocks.append(min(numbers, default=of_blocks[-1] if of_blocks else turns[0]))
        spans: dict[int, list[Span]] = {}
        for number, block in zip(of_blocks, marked, strict=True):
            if number in chosen:
                spans.setdefault(number, []).append(Span(*block, weights[number] or 0.0))
        return spans

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
            is_ended = _token_before(until.rstrip(), (*self.tokens.stops, self._own_end))
            if not is_ended and _token_at(text, len(until), self.tokens.others):  # another token ends the turn there
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


def _token_at(text: str, place: int, tokens: Iterable[str]) -> str:
    """Return the longest of the tokens at a place of the text; empty if there is none."""
    return max((token for token in tokens if text.startswith(token, place)), key=len, default="")


def _token_before(text: str, tokens: Iterable[str]) -> str:
    """Return the longest of the tokens at the end of the text; empty if there is none."""
    return max((token for token in tokens if text.endswith(token)), key=len, default="")


_PROBE_PROMPT: Message = {"role": "user", "content": _OTHER_PROBE}


def _probe_call(content: str | None, arguments: Any) -> Message:
    calls = [{"type": "function", "id": _OTHER_PROBE, "function": {"name": _OTHER_PROBE, "arguments": arguments}}]
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
    environment = template_environment(date)
    compiled = environment.limited(source)
    read = jinja2.meta.find_undeclared_variables(environment.parse(source))
    return ChatTemplate(source, tokens, environment, compiled, variables, frozenset(read) - _RESERVED)


def with_image_parts(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose contents are lists of parts; text loses the white space around the place of an image."""
    return [{**message, "content": _parts(message.get("content"))} for message in messages]


def with_image_token(messages: Sequence[Message], token: str) -> list[Message]:
    """Return messages whose contents are text with ``token`` in the places of images; parts become lines."""
    text_messages = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            content = content.replace(IMAGE_MARK, token)
        elif isinstance(content, list):
            content = "\n".join(token if is_image_part(part) else part["text"] for part in content)
        text_messages.append({**message, "content": content})
    return text_messages


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
