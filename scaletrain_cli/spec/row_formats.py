"""Rows for fine-tuning: their formats, and the one form that each is brought into.

Uses the standard library only, because checks before a run read the first rows; the engine uses it too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec.data import FORMATS_OF, FORMATS_WITH_IMAGES, FieldsSpec

Message = dict[str, Any]
# Names of the roles in ShareGPT files.
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
ASSISTANT = "assistant"
# The place of an image in a text, as in the files of LLaVA and of the datasets library.
IMAGE_MARK = "<image>"
TRAINED_IMAGE_TOKEN = 3  # id of IMAGE_MARK in a tokenizer that is trained on the rows
# Columns that a format must have.
_NEEDED = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
    "preference": ("chosen", "rejected"),
}


class RowError(Exception):
    """A row cannot be used; ``reason`` says why, without the file and the number of the row."""

    def __init__(self, code: str, **params: Any) -> None:
        super().__init__(code)
        self.reason = Reason(f"data.{code}", params)


class PlainText(NamedTuple):
    """A row whose tokens are all in the loss."""

    text: str


class Answer(NamedTuple):
    """A prompt and its answer, both text or both messages."""

    prompt: str | list[Message]
    completion: str | list[Message]
    tools: list[Any] | None = None


class GivenImage(NamedTuple):
    """An image of a row: its path as the row names it, or the bytes of its file, or both."""

    path: str
    content: bytes | None = None


class Conversation(NamedTuple):
    """Messages, and the weight of each in the loss; None for messages that are not of the assistant."""

    messages: list[Message]
    weights: list[float | None]
    tools: list[Any] | None = None


class Pair(NamedTuple):
    """Two answers to the same prompt."""

    chosen: Answer
    rejected: Answer


Example = PlainText | Answer | Conversation | Pair


def format_of(row: Any, objective: str, fields: FieldsSpec) -> str:
    """Return the format that the columns of a row show. Raises RowError if none fits."""
    columns = _columns(row)
    needed = columns_of("auto", objective, fields)
    for name, names in zip(FORMATS_OF[objective], needed, strict=True):
        if all(column in row for column in names):
            return name
    raise RowError("format-unknown", columns=columns, needed=[" and ".join(names) for names in needed])


def columns_of(row_format: str, objective: str, fields: FieldsSpec) -> list[list[str]]:
    """Return the columns that a format needs; with ``auto`` those of each format of the objective."""
    formats = FORMATS_OF[objective] if row_format == "auto" else (row_format,)
    return [[str(getattr(fields, column)) for column in _NEEDED[name]] for name in formats]


def missing_columns(names: Sequence[str], row_format: str, fields: FieldsSpec) -> list[str]:
    """Return the columns that a format needs and that are not among ``names``."""
    return [name for column in _NEEDED[row_format] if (name := getattr(fields, column)) not in names]


def parse_row(row: Any, row_format: str, fields: FieldsSpec, *, images: bool = False) -> tuple[Example, float]:
    """Return a row in its own form, and its weight in the loss. Raises RowError.

    ``images``: messages may have parts of type image, and the row needs as many images as its text has places.
    """
    columns = _columns(row)
    if missing := missing_columns(columns, row_format, fields):
        raise RowError("columns-missing", format=row_format, missing=missing, columns=columns)
    weight = row.get(fields.weight)
    if row_format == "preference" and weight is not None and _weight(weight) != 1:
        raise RowError("weight-of-pair", column=fields.weight)
    example = _PARSERS[row_format](row, fields)
    if images:
        marks, given = image_marks(example), len(images_of(row, fields))
        if marks != given:
            raise RowError("image-marks", marks=marks, images=given)
    else:
        _refuse_images(row, fields)
    return example, 1.0 if weight is None else _weight(weight)


def images_of(row: Mapping[str, Any], fields: FieldsSpec) -> tuple[GivenImage, ...]:
    """Return the images of a row, in order; of a row without the column none. Raises RowError."""
    columns = ("images", "image") if fields.images == "auto" else (fields.images,)
    column = next((name for name in columns if row.get(name) not in (None, "")), None)
    if column is None:
        return ()
    found = row[column]
    return tuple(_given_image(each, column) for each in (found if isinstance(found, list | tuple) else [found]))


def _given_image(given: Any, column: str) -> GivenImage:
    """Return an image given as a path, as bytes, or as {bytes, path}, which the datasets library writes."""
    path, content = given, None
    if isinstance(given, Mapping):
        path, content = given.get("path") or "", given.get("bytes")
    elif isinstance(given, bytes):
        path, content = "", given
    if not isinstance(path, str) or not isinstance(content, bytes | None) or not (path or content):
        raise RowError("image-column", column=column)
    return GivenImage(path, content)


def require_format_with_images(row_format: str) -> None:
    """Raise RowError for a format without a place for an image."""
    if row_format not in FORMATS_WITH_IMAGES:
        raise RowError("format-without-images", format=row_format, known=list(FORMATS_WITH_IMAGES))


def image_marks(example: Example) -> int:
    """Return the number of places of images in the text of an example."""
    if isinstance(example, PlainText):
        return example.text.count(IMAGE_MARK)
    if isinstance(example, Pair):
        return image_marks(example.chosen)
    parts = [example.messages] if isinstance(example, Conversation) else [example.prompt, example.completion]
    contents = [
        content
        for part in parts
        for content in ([part] if isinstance(part, str) else (message.get("content") for message in part))
    ]
    return sum(
        content.count(IMAGE_MARK)
        if isinstance(content, str)
        else sum(is_image_part(each) for each in content)
        if isinstance(content, list)
        else 0
        for content in contents
    )


def is_image_part(part: Mapping[str, Any]) -> bool:
    """Return True if a part of a message's content is the place of an image."""
    return part.get("type") == "image"


def _refuse_images(row: Mapping[str, Any], fields: FieldsSpec) -> None:
    """Raise RowError for a message with a part of type image."""
    for column in (fields.messages, fields.prompt, fields.completion, fields.chosen, fields.rejected):
        found = row.get(column)
        for number, message in enumerate(found if isinstance(found, list) else []):
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, list) and any(is_image_part(part) for part in content):
                raise RowError("part", number=number, column=column, type="image")


def _columns(row: Any) -> list[str]:
    if not isinstance(row, dict):
        raise RowError("not-an-object")
    return [str(name) for name in row]


def _plain_text(row: Mapping[str, Any], fields: FieldsSpec) -> Example:
    return PlainText(_text(row, fields.text))


def _messages(row: Mapping[str, Any], fields: FieldsSpec) -> Example:
    messages = _message_list(row[fields.messages], fields.messages)
    return _conversation(messages, _tools(row, fields))


def _sharegpt(row: Mapping[str, Any], fields: FieldsSpec) -> Example:
    column = fields.conversations
    found = row[column]
    if not isinstance(found, list) or not found:
        raise RowError("column-not-messages", column=column)
    messages = [] if row.get(fields.system) in (None, "") else [_system(row, fields)]
    for number, given in enumerate(found):
        if not isinstance(given, dict) or not all(isinstance(given.get(key), str) for key in ("from", "value")):
            raise RowError("sharegpt-message", number=number, column=column)
        role = _SHAREGPT_ROLES.get(given["from"])
        if role is None:
            raise RowError("sharegpt-role", number=number, role=given["from"], known=sorted(_SHAREGPT_ROLES))
        message: Message = {"role": role, "content": given["value"]}
        if given["from"] == "function_call":
            message = {"role": role, "content": "", "tool_calls": [_function_call(number, given["value"])]}
        if given.get("weight") is not None:
            message["weight"] = given["weight"]
        messages.append(message)
    return _conversation(messages, _tools(row, fields))


def _function_call(number: int, text: str) -> dict[str, Any]:
    try:
        call = json.loads(text)
        return {"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
    except (ValueError, KeyError, TypeError):
        raise RowError("function-call", number=number) from None


def _alpaca(row: Mapping[str, Any], fields: FieldsSpec) -> Example:
    parts = [_text(row, fields.instruction)]
    if row.get(fields.input) not in (None, ""):
        parts.append(_text(row, fields.input))
    messages = [] if row.get(fields.system) in (None, "") else [_system(row, fields)]
    messages.append({"role": "user", "content": "\n\n".join(parts)})
    messages.append({"role": ASSISTANT, "content": _text(row, fields.output)})
    return _conversation(messages, None)


def _prompt_completion(row: Mapping[str, Any], fields: FieldsSpec) -> Example:
    return _answer(row, fields.prompt, fields.completion, _tools(row, fields))


def _preference(row: Mapping[str, Any], fields: FieldsSpec) -> Example:
    chosen, rejected, tools = row[fields.chosen], row[fields.rejected], _tools(row, fields)
    # Some data sets with implicit prompts also have the prompt as text, beside conversations.
    if row.get(fields.prompt) is not None and isinstance(row[fields.prompt], str) == isinstance(chosen, str):
        return Pair(*(_answer(row, fields.prompt, column, tools) for column in (fields.chosen, fields.rejected)))
    if isinstance(chosen, str) and isinstance(rejected, str):
        prompt, *answers = _without_common_text(chosen, rejected)
        return Pair(*(Answer(prompt, answer, tools) for answer in answers))
    parsed = [_unweighted(_message_list(row[column], column)) for column in (fields.chosen, fields.rejected)]
    common = 0
    while all(common < len(messages) for messages in parsed) and parsed[0][common] == parsed[1][common]:
        common += 1
    if not common:
        raise RowError("no-common-prompt")
    common = min(common, *(len(messages) - 1 for messages in parsed))  # equal answers are answers still
    prompts = parsed[0][:common]
    for messages, column in zip(parsed, (fields.chosen, fields.rejected), strict=True):
        _require_assistant(messages[common:], column, common)
    return Pair(*(Answer(prompts, messages[common:], tools) for messages in parsed))


def _without_common_text(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Return the common beginning, up to the last space, and the two rests."""
    common = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    if common is None:
        common = min(len(chosen), len(rejected))
    while common and not chosen[common - 1].isspace():  # whole words, so that tokens end there
        common -= 1
    while common and chosen[common - 1].isspace():  # a space belongs to the token of the next word
        common -= 1
    if not common:
        raise RowError("no-common-prompt")
    return chosen[:common], chosen[common:], rejected[common:]


def _answer(row: Mapping[str, Any], prompt: str, completion: str, tools: list[Any] | None) -> Answer:
    for column in (prompt, completion):
        if not isinstance(row[column], str | list):
            raise RowError("column-neither", column=column)
    given = row[prompt], row[completion]
    if isinstance(given[0], str) and isinstance(given[1], str):
        return Answer(given[0], given[1], tools)
    if isinstance(given[0], str) or isinstance(given[1], str):
        raise RowError("columns-differ", columns=[prompt, completion])
    answer = _unweighted(_message_list(given[1], completion))
    _require_assistant(answer, completion, 0)
    return Answer(_unweighted(_message_list(given[0], prompt)), answer, tools)


def _unweighted(messages: list[Message]) -> list[Message]:
    for number, message in enumerate(messages):
        if message.pop("weight", None) is not None:
            raise RowError("weight-in-answer", number=number)
    return messages


def _require_assistant(messages: list[Message], column: str, before: int) -> None:
    for number, message in enumerate(messages, start=before):
        if message["role"] != ASSISTANT:
            raise RowError("completion-role", number=number, column=column, role=message["role"])


def _conversation(messages: list[Message], tools: list[Any] | None) -> Conversation:
    """Return the conversation with the weights of its messages apart, which no template reads."""
    weights: list[float | None] = []
    for number, message in enumerate(messages):
        weight = message.pop("weight", None)
        is_assistant = message["role"] == ASSISTANT
        if weight is not None and not is_assistant:
            raise RowError("weight-role", number=number, role=message["role"])
        weights.append(None if not is_assistant else 1.0 if weight is None else _weight(weight))
    return Conversation(messages, weights, tools)


def _message_list(given: Any, column: str) -> list[Message]:
    if not isinstance(given, list) or not given:
        raise RowError("column-not-messages", column=column)
    for number, message in enumerate(given):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError("message", number=number, column=column)
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if not isinstance(part, dict) or not (is_image_part(part) or isinstance(part.get("text"), str)):
                    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                    raise RowError("part", number=number, column=column, type=str(kind))
        elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise RowError("message", number=number, column=column)
    return [dict(message) for message in given]


def _tools(row: Mapping[str, Any], fields: FieldsSpec) -> list[Any] | None:
    given = row.get(fields.tools)
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.strip() else None
        except ValueError:
            raise RowError("tools", column=fields.tools) from None
    if given is not None and not (isinstance(given, list) and all(isinstance(tool, dict) for tool in given)):
        raise RowError("tools", column=fields.tools)
    return given or None


def _system(row: Mapping[str, Any], fields: FieldsSpec) -> Message:
    return {"role": "system", "content": _text(row, fields.system)}


def _text(row: Mapping[str, Any], column: str) -> str:
    if not isinstance(row[column], str):
        raise RowError("column-not-text", column=column)
    return str(row[column])


# Beyond this range a weight is 0 or infinite in fp32, or its token decides the loss alone.
_LEAST_WEIGHT = 1e-6


def _weight(given: Any) -> float:
    valid = isinstance(given, int | float) and (given == 0 or _LEAST_WEIGHT <= given <= 1 / _LEAST_WEIGHT)
    if not valid:
        raise RowError("weight", weight=str(given))
    return float(given)


_PARSERS = {
    "text": _plain_text,
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt_completion": _prompt_completion,
    "preference": _preference,
}
