"""The messages of rows for fine-tuning, whatever their keys, roles and calls of tools are called in the file."""

import json
from typing import Any

from scaletrain_cli.spec.data import FieldsSpec
from scaletrain_cli.spec.row_examples import ASSISTANT, Message, RowError
from scaletrain_cli.spec.row_images import is_image_part

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
        is_call = message.pop(CALL, False)
        if is_call and messages and messages[-1].get("tool_calls") and not messages[-1]["content"]:
            messages[-1]["tool_calls"] += message["tool_calls"]  # calls that were made at once
        else:
            messages.append(message)
    return messages


def _message(entry: Any, number: int, column: str, fields: FieldsSpec) -> Message:
    """Return one message; that of a call has the key function_call in addition. Raises RowError."""
    if not isinstance(entry, dict):
        raise RowError("message", number=number, column=column)
    # A key that is null says no more than one that is absent, and templates ask whether it is there.
    message = {key: value for key, value in entry.items() if (value is not None and value == value) or key == "content"}
    of_sharegpt = "from" in message and "role" not in message
    role = message.pop("from", None) if of_sharegpt else message.pop("role", None)
    content = message.pop("value", None) if of_sharegpt else message.pop("content", None)
    if not isinstance(role, str):
        raise RowError("message", number=number, column=column)
    if not all(isinstance(message.get(name, ""), str) for name in REASONING):
        raise RowError("reasoning", number=number)
    roles = ROLES | dict(fields.roles)
    if of_sharegpt and role not in roles and role != CALL:
        raise RowError("sharegpt-role", number=number, role=role, known=sorted({*roles, CALL}))
    found: Message = {"role": roles.get(role, role), "content": content, **message}
    if role == CALL:
        calls = [{"type": "function", "function": call} for call in _calls(content, number)]
        return {"role": ASSISTANT, "content": "", "tool_calls": calls, CALL: True}
    if CALL in message:
        found["tool_calls"] = [{"type": "function", "function": call} for call in _calls(found.pop(CALL), number)]
    elif "tool_calls" in message:
        found["tool_calls"] = _calls(message["tool_calls"], number)
        if not found["tool_calls"]:
            del found["tool_calls"]
    if isinstance(content, list):
        found["content"] = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
        for part in found["content"]:
            if not isinstance(part, dict) or not (is_image_part(part) or isinstance(part.get("text"), str)):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise RowError("part", number=number, type=str(kind))
    elif not isinstance(content, str):
        says_more = found.get("tool_calls") or any(found.get(name) for name in REASONING)
        if content is not None or not says_more:
            raise RowError("message", number=number, column=column)
    return found


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
        return value if not isinstance(value, str) else json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        return value
