"""The formats of rows for fine-tuning: how the columns of each, and the messages under any names, are read.

Uses the standard library only, because checks before a run read the first rows.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile, zip_longest
from typing import Any, NamedTuple

from scaletrain_cli.spec.data import FORMATS_OF, FieldsSpec
from scaletrain_cli.spec.row_examples import (
    ASSISTANT,
    Answer,
    Conversation,
    Example,
    Message,
    Pair,
    PlainText,
    RowError,
    contents_of,
    image_marks,
    images_of,
    is_image_part,
)

# Names of roles in files of ShareGPT, of OpenAI's first API with functions, and of Gemma; data.fields.roles adds more.
ROLES = {
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model"), "assistant"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "tool"),
    "system": "system",
}
CALL = "function_call"  # the role of a message that is a call, and the key of a call in OpenAI's first API
_ARGUMENTS = ("arguments", "parameters", "input")  # keys of a call's arguments: OpenAI's, Llama's and Anthropic's
# Names under which a message has its reasoning, as in transformers; most templates read the first, GPT-OSS the second.
REASONING = ("reasoning_content", "thinking", "reasoning")
_IS_TRAINED = ("train", "training", "loss")  # keys of Axolotl and ms-swift that are false for a turn of weight 0


def messages_of(value: Any, column: str, fields: FieldsSpec) -> list[Message]:
    """Return messages with the keys role and content, whatever their keys and roles are called. Raises RowError."""
    value = from_json(value)
    listed = [value] if isinstance(value, dict) else value
    if not isinstance(listed, list):
        raise RowError("column-not-messages", column=column)
    if not listed:
        raise RowError("no-messages", column=column)
    messages: list[Message] = []
    for number, entry in enumerate(listed):
        message = _message(entry, number, column, fields)
        is_call, last = message.pop(CALL, False), messages[-1] if messages else {}
        said = {"weight": None, **message}  # beside the call itself
        same_turn = all(last.get(key) == said[key] for key in said.keys() - {"content", "tool_calls"})
        if is_call and same_turn and last.get("tool_calls") and not last["content"]:  # calls that were made at once
            last["tool_calls"] += message["tool_calls"]
        else:
            messages.append(message)
    return messages


def _message(entry: Any, number: int, column: str, fields: FieldsSpec) -> Message:
    """Return one message; that of a call has the key function_call in addition. Raises RowError."""
    if not isinstance(entry, dict):
        raise RowError("message", number=number, column=column)
    # A key that is null says no more than one that is absent, and templates ask whether it is there.
    message = {key: value for key, value in entry.items() if (value is not None and value == value) or key == "content"}
    for name in _IS_TRAINED:
        if isinstance(message.get(name), bool):
            message.setdefault("weight", float(message.pop(name)))
    of_sharegpt = "from" in message and "role" not in message
    role, content = (message.pop(key, None) for key in (("from", "value") if of_sharegpt else ("role", "content")))
    if not isinstance(role, str):
        raise RowError("message", number=number, column=column)
    if not all(isinstance(message.get(name, ""), str) for name in REASONING):
        raise RowError("reasoning", number=number)
    roles = ROLES | dict(fields.roles)
    if of_sharegpt and role not in roles and role != CALL:
        raise RowError("sharegpt-role", number=number, role=role, known=sorted({*roles, CALL}))
    turn: Message = {"role": roles.get(role, role), "content": content, **message}
    if role == CALL:
        calls = [{"type": "function", "function": call} for call in _calls(content, number)]
        return {**message, "role": ASSISTANT, "content": "", "tool_calls": calls, CALL: True}
    # Chat templates ask whether the value is true, or only whether the key is there: an empty value is left out.
    call, calls = (from_json(turn.pop(key, None)) for key in (CALL, "tool_calls"))
    if call:
        turn["tool_calls"] = [{"type": "function", "function": function} for function in _calls(call, number)]
    elif calls:
        turn["tool_calls"] = _calls(calls, number)
    if isinstance(content, list):
        turn["content"] = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
        for part in turn["content"]:
            if not isinstance(part, dict) or not (is_image_part(part) or isinstance(part.get("text"), str)):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise RowError("part", number=number, type=str(kind))
    elif not isinstance(content, str):
        says_more = turn.get("tool_calls") or any(turn.get(name) for name in REASONING)
        if content is not None or not says_more:
            raise RowError("message", number=number, column=column)
    return turn


def _calls(value: Any, number: int) -> list[Any]:
    """Return calls of tools, whose arguments are objects where they are the JSON text of one. Raises RowError.

    ``value``: a list of calls, one call, or the JSON text of either.
    """
    value = from_json(value)
    calls = list(value) if isinstance(value, list) else [value]
    for position, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError("function-call", number=number)
        key = next((name for name in _ARGUMENTS if name in function), _ARGUMENTS[0])
        arguments = function.get(key) or {}
        parsed = from_json(arguments)
        others = {name: value for name, value in function.items() if name != key}
        function = {**others, "arguments": parsed if isinstance(parsed, dict) else arguments}
        calls[position] = {**call, "function": function} if "function" in call else function
    return calls


def from_json(value: Any) -> Any:
    """Return the value of a JSON text, None for a blank one; any other text or value as it is."""
    try:
        return value if not isinstance(value, str) else parsed_json(value) if value.strip() else None
    except (ValueError, RecursionError):
        return value


def parsed_json(text: str) -> Any:
    """Return the value of a JSON text. Lone surrogates, which JSON can contain, become question marks.

    Raises ValueError and RecursionError.
    """
    value = json.loads(text)
    if "\\u" in text:
        plain = json.dumps(value, ensure_ascii=False)
        if (valid := plain.encode("utf-8", "replace").decode()) != plain:
            return json.loads(valid)
    return value


# Columns whose names are fixed: earlier turns of alpaca rows, tools of OpenAI's first API, variables of the template.
_HISTORY, _FUNCTIONS, _VARIABLES = "history", "functions", "chat_template_kwargs"
# Columns of known data sets that no format reads under these names.
_OTHERS = ("question", "answer", "system_prompt", "context", "label", "images", "image")
# Columns that a format must have.
_NEEDED = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
    "preference": ("chosen", "rejected"),
}


class ParsedRow(NamedTuple):
    """A row in its own form. ``weight``: in the loss. ``not_read``: columns with content that its format does not use.

    ``not_read`` names only columns that a format of rows can have; those of the user's own have no effect anywhere.
    """

    example: Example
    weight: float
    not_read: tuple[str, ...]


def format_of(row: Any, objective: str, fields: FieldsSpec) -> str:
    """Return the format that the columns of a row show, those with a value first. Raises RowError if none fits."""
    columns = _columns(row)
    needed = columns_of("auto", objective, fields)
    for present in ({str(name) for name, value in row.items() if value is not None}, {*columns}):
        for name, names in zip(FORMATS_OF[objective], needed, strict=True):
            if present.issuperset(names):
                return name
    raise RowError("format-unknown", columns=columns, needed=[" and ".join(names) for names in needed])


def columns_of(row_format: str, objective: str, fields: FieldsSpec) -> list[list[str]]:
    """Return the columns that a format needs; with ``auto`` those of each format of the objective."""
    formats = FORMATS_OF[objective] if row_format == "auto" else (row_format,)
    return [[str(getattr(fields, column)) for column in _NEEDED[name]] for name in formats]


def parse_row(row: Any, row_format: str, fields: FieldsSpec, *, images: bool = False) -> ParsedRow:
    """Return a row in its own form, with its weight and the columns that were not read. Raises RowError.

    ``images``: messages may have parts of type image, and the row needs as many images as its text has places.
    """
    columns = _columns(row)
    if missing := [name for column in _NEEDED[row_format] if (name := getattr(fields, column)) not in columns]:
        raise RowError("columns-missing", format=row_format, missing=missing, columns=columns)
    read = _RowReader(row, fields)
    weight = read.optional(fields.weight)
    if row_format == "preference" and weight is not None and _weight(weight) != 1:
        raise RowError("weight-of-pair", column=fields.weight)
    example = _PARSERS[row_format](read)
    if images:
        marks, given = image_marks(example), len(images_of(row, fields))
        if marks != given:
            raise RowError("image-marks", marks=marks, images=given)
        read.columns |= {"images", "image", fields.images}
    else:
        for number, content in contents_of(example):
            if isinstance(content, list) and any(map(is_image_part, content)):
                raise RowError("part", number=number, type="image")
    return ParsedRow(example, 1.0 if weight is None else _weight(weight), tuple(read.not_read()))


def _columns(row: Any) -> list[str]:
    if isinstance(row, RowError):  # of a line that is not JSON
        raise row
    if not isinstance(row, dict):
        raise RowError("not-an-object")
    return [str(name) for name in row]


class _RowReader:
    """Reads the columns of a row, and keeps the names of those it has read."""

    def __init__(self, row: Mapping[str, Any], fields: FieldsSpec) -> None:
        self._row, self.fields, self.columns = row, fields, {fields.weight}

    def optional(self, column: str) -> Any:
        """Return the value of a column; None if it is absent or empty. NaN is how pandas writes an absent value."""
        self.columns.add(column)
        value = self._row.get(column)
        return None if value is None or value != value or value in ("", [], {}) else value

    def required_text(self, column: str) -> str:
        """Return the text of a column. Raises RowError."""
        self.columns.add(column)
        if not isinstance(self._row[column], str):
            raise RowError("column-not-text", column=column)
        return str(self._row[column])

    def messages(self, column: str) -> list[Message]:
        """Return the messages of a column, which may be their JSON text, or a single message. Raises RowError."""
        self.columns.add(column)
        return messages_of(self._row[column], column, self.fields)

    def is_text(self, column: str) -> bool:
        """Return whether a column is text, and not the JSON text of messages."""
        text, roles = self._row[column], {*ROLES, *self.fields.roles, CALL}
        listed = from_json(text)
        are_messages = isinstance(listed, list) and all(
            isinstance(entry, dict)
            and not {"content", "value", "tool_calls"}.isdisjoint(entry)
            and (entry.get("role") or entry.get("from")) in roles
            for entry in listed
        )
        return isinstance(text, str) and not (listed and are_messages)

    def not_read(self) -> list[str]:
        """Return the columns with content that a format of rows can have, and that were not read."""
        names = {str(name) for name in self.fields.model_dump(exclude={"roles"}).values()} - {"auto"}
        names |= {_HISTORY, _FUNCTIONS, _VARIABLES, *_OTHERS}
        columns = self.columns.intersection(self._row)
        unread = [name for name in self._row if name in names - columns and self.optional(name) is not None]
        read = [json.dumps(self._row[name], default=str) for name in columns] if unread else []
        # A copy of what was read, such as the prompt beside its conversation, loses nothing.
        return [name for name in unread if not any(json.dumps(self._row[name], default=str) in text for text in read)]

    def system(self, messages: list[Message]) -> list[Message]:
        """Return messages with the text of the column system before them. Raises RowError if they have another one."""
        if self.optional(self.fields.system) is None:
            return messages
        text = self.required_text(self.fields.system)
        if messages[0]["role"] != "system":
            return [{"role": "system", "content": text}, *messages]
        if messages[0].get("content") != text:
            raise RowError("two-system-texts", column=self.fields.system)
        return messages

    def tools(self) -> list[Any] | None:
        """Return the JSON schemas of the tools; None for a row without them. Raises RowError."""
        column = self.fields.tools if self.optional(self.fields.tools) is not None else _FUNCTIONS
        tools = from_json(self.optional(column))
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise RowError("tools", column=column)
        if tools and column == _FUNCTIONS:
            tools = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
        return tools or None

    def variables(self) -> Mapping[str, Any]:
        """Return the variables of the chat template that the row sets. Raises RowError."""
        variables = from_json(self.optional(_VARIABLES)) or {}
        if not isinstance(variables, Mapping) or variables.keys() & {"messages", "tools", "add_generation_prompt"}:
            raise RowError("template-variables", column=_VARIABLES)
        return variables


def _alpaca(row: _RowReader) -> Example:
    answer = {"role": ASSISTANT, "content": row.required_text(row.fields.output)}
    return _conversation(row.system([*_alpaca_prompt(row), answer]), row)


def _alpaca_prompt(row: _RowReader) -> list[Message]:
    """Return the earlier turns and the instruction with its input."""
    messages: list[Message] = []
    history = row.optional(_HISTORY) or []
    for turn in history if isinstance(history, list) else [None]:
        if not (isinstance(turn, list | tuple) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise RowError("history", column=_HISTORY)
        messages += [{"role": "user", "content": turn[0]}, {"role": ASSISTANT, "content": turn[1]}]
    parts = [row.required_text(row.fields.instruction)]
    if row.optional(row.fields.input) is not None:
        parts.append(row.required_text(row.fields.input))
    return [*messages, {"role": "user", "content": "\n\n".join(parts)}]


def _preference(row: _RowReader) -> Example:
    columns = (row.fields.chosen, row.fields.rejected)
    answers = [_text_or_messages(row, column) for column in columns]
    prompt = _prompt_of_pair(row)
    have_prompt = all(not isinstance(answer, str) and answer[0]["role"] != ASSISTANT for answer in answers)
    if prompt is None or (isinstance(prompt, str) and have_prompt):
        beside = prompt  # a copy of the prompt as text, which some data sets have
        prompt, *answers = _without_common_prompt(row, answers)
        if isinstance(prompt, list) and beside not in (None, *(message["content"] for message in prompt)):
            row.columns.discard(row.fields.prompt)
    return Pair(*(_answer(row, prompt, answer, column) for answer, column in zip(answers, columns, strict=True)))


def _prompt_of_pair(row: _RowReader) -> str | list[Message] | None:
    """Return the prompt: its column, that of a conversation, or an instruction; None if there is none."""
    for column in (row.fields.prompt, row.fields.conversations, row.fields.messages):
        if row.optional(column) is not None:
            prompt = _text_or_messages(row, column)
            if isinstance(prompt, str) or prompt[-1]["role"] != ASSISTANT or column == row.fields.prompt:
                return prompt  # other columns may have a copy of an answer with its prompt
            row.columns.discard(column)
    return _alpaca_prompt(row) if row.optional(row.fields.instruction) is not None else None


def _without_common_prompt(
    row: _RowReader, answers: Sequence[str | list[Message]]
) -> tuple[str | list[Message], str | list[Message], str | list[Message]]:
    """Return the common beginning of two answers, and the two rests. Raises RowError."""
    chosen, rejected = answers
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _without_common_text(chosen, rejected)
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise RowError("columns-differ", columns=[row.fields.chosen, row.fields.rejected])
    # without the last messages: equal answers are answers still
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen[:-1], rejected[:-1], strict=False)))
    if not common:
        raise RowError("no-common-prompt")
    return chosen[:common], chosen[common:], rejected[common:]


def _without_common_text(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Return the common beginning, up to white space at which tokens end, and the two rests. Raises RowError."""
    common = chosen[: next((i for i, (a, b) in enumerate(zip_longest(chosen, rejected)) if a != b), None)]
    # White space belongs to the token of the next word; but after a mark, line ends to that of the mark, as of Llama 3.
    borders = [*re.finditer(r"[^\W_]\s|\S[^\S\r\n]", common)] or [*re.finditer(r"\S\s", common)]
    if not borders:
        raise RowError("no-common-prompt")
    end = borders[-1].end() - 1
    return chosen[:end], chosen[end:], rejected[end:]


def _text_or_messages(row: _RowReader, column: str) -> str | list[Message]:
    """Return a text, or messages. Raises RowError for anything else."""
    if row.is_text(column):
        return row.required_text(column)
    try:
        return row.messages(column)
    except RowError as error:
        if error.reason.code == "data.column-not-messages":
            raise RowError("column-neither", column=column) from error
        raise


def _answer(row: _RowReader, prompt: str | list[Message], answer: str | list[Message], column: str) -> Answer:
    """Return the answer to a prompt, as messages if one of them is, or if the row has what only messages have."""
    tools, variables = row.tools(), row.variables()
    has_more = tools is not None or variables or row.optional(row.fields.system) is not None
    if isinstance(prompt, str) and isinstance(answer, str) and not has_more:
        return Answer(prompt, answer)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(answer, str):
        answer = [{"role": ASSISTANT, "content": answer}]
    before = len(prompt)
    if answer[:before] == prompt and len(answer) > before:  # an answer that repeats its prompt
        answer = answer[before:]
    for number, message in enumerate(answer, start=before):
        if message["role"] != ASSISTANT:
            raise RowError("completion-role", number=number, column=column, role=message["role"])
    prompt = row.system(prompt)
    for number, message in enumerate([*prompt, *answer]):
        if message.pop("weight", None) is not None:
            raise RowError("weight-in-answer", number=number)
    return Answer(prompt, answer, tools, variables)


def _conversation(messages: list[Message], row: _RowReader) -> Conversation:
    """Return the conversation with the weights of its messages apart, which no template reads. Raises RowError."""
    weights: list[float | None] = []
    for number, message in enumerate(messages):
        weight = message.pop("weight", None)
        is_assistant = message["role"] == ASSISTANT
        if weight and not is_assistant:  # 0 says what holds in any case
            raise RowError("weight-role", number=number, role=message["role"])
        weights.append(None if not is_assistant else 1.0 if weight is None else _weight(weight))
    others = {message["role"] for message in messages} - {*ROLES.values(), "developer"}
    if others and not any(weight is not None for weight in weights):
        raise RowError("no-assistant", roles=sorted(others))
    return Conversation(messages, weights, row.tools(), row.variables())


# Beyond this range a weight is 0 or infinite in fp32, or its token decides the loss alone.
_LEAST_WEIGHT = 1e-6


def _weight(given: Any) -> float:
    valid = isinstance(given, int | float) and (given == 0 or _LEAST_WEIGHT <= given <= 1 / _LEAST_WEIGHT)
    if not valid:
        raise RowError("weight", weight=str(given))
    return float(given)


_PARSERS: dict[str, Callable[[_RowReader], Example]] = {
    "text": lambda row: PlainText(row.required_text(row.fields.text)),
    "messages": lambda row: _conversation(row.system(row.messages(row.fields.messages)), row),
    "sharegpt": lambda row: _conversation(row.system(row.messages(row.fields.conversations)), row),
    "alpaca": _alpaca,
    "prompt_completion": lambda row: _answer(
        row,
        _text_or_messages(row, row.fields.prompt),
        _text_or_messages(row, row.fields.completion),
        row.fields.completion,
    ),
    "preference": _preference,
}
