"""Each part of a row is in the text that is trained on, or the row is refused, or the part is counted by name.

Rows of every format are made of words that occur nowhere else, so that a missing part is a missing word.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaletrain_cli.data.tokenizers.chat_templates import CHATML, TemplateFiles, template_files
from scaletrain_cli.engine.data.chat_tokenizer import ChatTokenizer
from scaletrain_cli.engine.data.row_source import Row
from scaletrain_cli.engine.data.row_writing import RowEncoder
from scaletrain_cli.spec import DataSpec
from scaletrain_cli.spec.data import FieldsSpec
from scaletrain_cli.spec.row_examples import RowError
from scaletrain_cli.spec.row_formats import messages_of, parse_row
from tests.engine.data.test_chat_masks import DATE, FAMILIES, source, special_tokens, tokenizer
from tests.spec.samples import SPEC, load
from tests.tokenizer_kinds import write_tokenizer

TEMPLATES = {"chatml": CHATML, "glm-4.5": source("glm-4.5"), "llama-4": source("llama-4")} | {
    name: source(name) for name in FAMILIES
}
SAMPLES = {
    # The forms of one template that others found: each writes content in another way.
    "plain content": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "trimmed": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "arguments as text": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments }}){% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "arguments as json": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "last reasoning": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content and loop.last %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
}
SAMPLES |= {
    "without system": "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
    "\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "only parts": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{{ p.text }}{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "block of last thought": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if loop.last and m.reasoning_content %}{% generation %}<think>{{ m.reasoning_content }}</think>"
    "{% endgeneration %}{% endif %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}"
    "{% endif %}<|im_end|>{% endfor %}",
}
WRITES_EVERYTHING = {"chatml", "glm-4.5", "qwen-2.5", "qwen-3", "granite-3"}
EVERY_TEMPLATE = TEMPLATES | SAMPLES
STOPS = {"glm-4.5": ("<|user|>", "<|observation|>", "<|endoftext|>"), "llama-4": ("<|eot|>", "<|eom|>")}
MARKS = {
    "glm-4.5": ("<|user|>", "<|observation|>", "<|assistant|>", "<|system|>", "<|endoftext|>", "[gMASK]", "<sop>"),
    "llama-4": ("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>", "<|eom|>"),
}


def chat_of(name: str, **settings: Any) -> tuple[Any, ChatTokenizer]:
    """Return a tokenizer with the special tokens of a template, and the one that renders with it."""
    plain = tokenizer(name)
    if name in MARKS:
        import tokenizers

        plain.add_special_tokens([tokenizers.AddedToken(mark, normalized=False) for mark in MARKS[name]])
    tokens = special_tokens(name) if name in FAMILIES else {"eos_token": STOPS.get(name, ("<|im_end|>",))[-1]}
    tokens |= {"bos_token": "<|begin_of_text|>"} if name == "llama-4" else {}
    ids = tuple(plain.token_to_id(mark) for mark in STOPS.get(name, ()))
    data = DataSpec(source="x", chat_template_date=DATE, **settings)
    return plain, ChatTokenizer(plain, TemplateFiles(tokens, {"default": EVERY_TEMPLATE[name]}, ids), data)


def words() -> Iterator[str]:
    return (f"wo{number}rd" for number in itertools.count(100))


def conversation(draw: Any, word: Iterator[str]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return messages and tools with all that a conversation may have."""
    messages: list[dict[str, Any]] = []
    tools: list[Any] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": next(word)})
    for _ in range(draw(st.integers(1, 2))):
        text: Any = next(word)
        messages.append({"role": "user", "content": [{"type": "text", "text": text}] if draw(st.booleans()) else text})
        if draw(st.booleans()):
            name = next(word)
            tools.append({"type": "function", "function": {"name": name, "description": next(word), "parameters": {}}})
            arguments = {next(word): next(word), "depth": {"list": [next(word), 7]}}
            calls = [
                {"type": "function", "id": "abcdefghi", "function": {"name": name, "arguments": given_arguments}}
                for given_arguments in (arguments, json.dumps({"more": next(word)}))[: draw(st.integers(1, 2))]
            ]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            messages += [
                {"role": "tool", "name": name, "tool_call_id": "abcdefghi", "content": next(word)} for _ in calls
            ]
        answer = {"role": "assistant", "content": next(word)}
        if draw(st.integers(0, 3)) == 3:
            answer["reasoning_content"] = next(word)
        messages.append(answer)
    return messages, tools


def in_sharegpt(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = {"user": "human", "assistant": "gpt", "tool": "observation", "system": "system"}
    turns = []
    for message in messages:
        content = message["content"]
        text = content if isinstance(content, str) else "".join(part["text"] for part in content or [])
        for call in message.get("tool_calls", []):
            arguments = call["function"]["arguments"]
            given_arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            called = {"name": call["function"]["name"], "arguments": given_arguments}
            turns.append({"from": "function_call", "value": json.dumps(called)})
        if text:
            turns.append({"from": names[message["role"]], "value": text})
        if "reasoning_content" in message:
            turns[-1]["reasoning_content"] = message["reasoning_content"]
    return turns


@st.composite
def rows(draw: Any) -> tuple[dict[str, Any], str]:
    """Return a row and its format."""
    word = words()
    messages, tools = conversation(draw, word)
    row: dict[str, Any] = {"tools": tools} if tools else {}
    kind = draw(st.sampled_from(["messages", "json", "system", "sharegpt", "answer", "pair", "alpaca", "legacy"]))
    if kind in ("messages", "json", "system"):
        row |= {"messages": json.dumps(messages) if kind == "json" else messages}
        if kind == "system" and messages[0]["role"] != "system":
            row["system"] = next(word)
        return row, "messages"
    if kind == "sharegpt":
        return row | {"conversations": in_sharegpt(messages)}, "sharegpt"
    if kind == "answer":
        return row | {"prompt": messages[:-1], "completion": messages[-1]["content"]}, "prompt_completion"
    if kind == "pair":
        one, other = ({"role": "assistant", "content": next(word)} for _ in range(2))
        return row | {"conversations": messages[:-1], "chosen": one, "rejected": other}, "preference"
    if kind == "alpaca":
        row |= {"instruction": next(word), "input": next(word), "output": next(word), "system": next(word)}
        return row | {"history": [[next(word), next(word)]], "prompt": next(word)}, "alpaca"
    functions = [tool["function"] for tool in row.pop("tools", [])]
    call = {"name": functions[0]["name"] if functions else "f", "arguments": json.dumps({"a": next(word)})}
    turns = [{"role": "user", "content": next(word)}, {"role": "assistant", "content": None, "function_call": call}]
    turns += [{"role": "function", "name": call["name"], "content": next(word)}]
    return {"functions": functions, "messages": [*turns, {"role": "assistant", "content": next(word)}]}, "messages"


def words_of(value: Any) -> set[str]:
    text = json.dumps(value)
    return {
        piece for piece in text.replace('"', " ").replace("\\", " ").split() if piece.startswith("wo") and "rd" in piece
    }


@pytest.mark.parametrize("name", EVERY_TEMPLATE)
@given(made=rows())
def test_every_part_of_a_row_is_in_the_text_or_named(name: str, made: tuple[dict[str, Any], str]) -> None:
    row, row_format = made
    plain, chat = chat_of(name, loss_on="all")
    encoder = RowEncoder(chat, DataSpec(source="x", on_bad="skip"), 1 << 16)
    parsed = parse_row(row, row_format, FieldsSpec())
    kept = list(encoder.encode([Row("rows:1", parsed.example, parsed.weight, "", (), parsed.not_read)]))
    if not kept:
        assert name not in WRITES_EVERYTHING
        assert encoder.tally.unusable == 1
        assert encoder.tally.problems[0].startswith("rows:1: ")
        return
    (_, documents), text = kept[0], ""
    for document in documents:
        text += plain.decode(document.ids.tolist(), skip_special_tokens=False)
    unread = words_of({name: row[name] for name in parsed.not_read})
    listed = [json.loads(row["messages"]) if isinstance(row.get("messages"), str) else row.get("messages")]
    listed += [row.get("conversations"), row.get("prompt")]
    messages = [message for each in listed if isinstance(each, list) for message in each]
    thoughts = words_of([message.get("reasoning_content") for message in messages])
    missing = {each for each in words_of(row) if each not in text}
    assert missing <= unread | thoughts
    assert bool(missing & unread) <= any(each.startswith("column ") for each in encoder.lost)
    assert bool(missing & thoughts) <= ("reasoning" in encoder.lost)
    assert "None" not in text
    assert "'type'" not in text
    assert "\\\\" not in text, "no JSON within the JSON of arguments"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def called(arguments: Any, key: str = "arguments") -> dict[str, Any]:
    return assistant("", tool_calls=[{"type": "function", "function": {"name": "time", key: arguments}}])


@pytest.mark.parametrize("key", ["tool_calls", "function_call"])
@pytest.mark.parametrize("empty", ["", " ", None, [], {}, "[]", "{}", "null"])
def test_an_empty_value_of_calls_means_none(key: str, empty: Any) -> None:
    """Chat templates ask whether the value is true; columns of data sets have "" or [] in turns without calls."""
    (message,) = messages_of([assistant("It is 12:30.", **{key: empty})], "messages", FieldsSpec())
    assert message == {"role": "assistant", "content": "It is 12:30."}


CLOCK = [user("What time is it?"), called({}), {"role": "tool", "content": "12:30"}, assistant("It is 12:30.")]
TIME = [{"type": "function", "function": {"name": "time", "description": "time?"}}]
# Templates that drop a part whose text also stands elsewhere, and what the refusal names.
DROPPED = {
    "a call without arguments": ("phi-3", {"messages": CLOCK}, "the call of message 1: 'time'"),
    "a call with a truth value": ("olmo-2", {"messages": [user("time on"), called({"on": True})]}, "'time'"),
    "a short system text": (
        "without system",
        {"messages": [{"role": "system", "content": "Be brief"}, user("Be briefer."), assistant("b")]},
        "the text of message 0: 'Be brief'",
    ),
    "tools named in the question": ("llama-4", {"messages": [user("time?"), assistant("b")], "tools": TIME}, "'time'"),
}


@pytest.mark.parametrize(("name", "row", "said"), DROPPED.values(), ids=DROPPED)
def test_a_part_is_missed_although_its_text_stands_elsewhere(name: str, row: dict[str, Any], said: str) -> None:
    _, chat = chat_of(name)
    (refused,) = chat.encode([(parse_row(row, "messages", FieldsSpec()).example, 1.0)])
    assert isinstance(refused, RowError)
    assert said in str(refused.reason)


def shown(name: str, row: dict[str, Any], row_format: str = "messages", **settings: Any) -> tuple[list[str], list[str]]:
    """Return what is in the loss of each document, and what is missing."""
    plain, chat = chat_of(name, **settings)
    encoder, parsed = RowEncoder(chat, DataSpec(source="x"), 1 << 14), parse_row(row, row_format, FieldsSpec())
    ((_, documents),) = encoder.encode([Row("1", parsed.example, 1.0, "", (), parsed.not_read)])
    in_loss = [plain.decode(each.ids[each.weights > 0].tolist(), skip_special_tokens=False) for each in documents]
    return in_loss, sorted(encoder.lost)


THINKING = assistant("<think>\nhm\n</think>\n\nb")
READ: dict[str, tuple[str, dict[str, Any], str, list[str], list[str]]] = {
    "no tools as text": (
        "qwen-2.5",
        {"messages": [user("a"), assistant("b")], "tools": "[]"},
        "messages",
        ["b<|im_end|>\n"],
        [],
    ),
    "arguments under another key": (
        *("qwen-2.5", {"messages": [user("a"), called({"x": 1}, "parameters")]}, "messages"),
        *(['<tool_call>\n{"name": "time", "arguments": {"x": 1}}\n</tool_call><|im_end|>\n'], []),
    ),
    "no arguments": (
        *("chatml", {"messages": [user("a"), called("")]}, "messages"),
        *(['<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call><|im_end|>\n'], []),
    ),
    "calls with weights and a thought of their own": (
        "chatml",
        {
            "conversations": [
                {"from": "human", "value": "a"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {}}', "weight": 0},
                {"from": "function_call", "value": '{"name": "g", "arguments": {}}', "thinking": "hm"},
                {"from": "function_call", "value": '{"name": "h", "arguments": {}}'},
                {"from": "observation", "value": "b"},
            ]
        },
        "sharegpt",
        [
            '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\n'
            '<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call><|im_end|>\n'
        ],
        [],
    ),
    "turns that Axolotl and ms-swift do not train": (
        "qwen-2.5",
        {"messages": [user("a"), assistant("b", train=False), user("c"), assistant("d", loss=False), assistant("e")]},
        *("messages", ["e<|im_end|>\n"], []),
    ),
    "half an emoji in JSON text": (
        *("qwen-2.5", {"messages": '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\\ud83d"}]'}),
        *("messages", ["b?<|im_end|>\n"], []),
    ),
    "a row that ends with a call": (
        *("glm-4.5", {"messages": [user("a"), called({"x": 1})]}, "messages"),
        *(["\n<tool_call>time\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call><|observation|>"], []),
    ),
    "answers beside a copy of one": (
        "qwen-2.5",
        {
            "chosen": [user("q"), assistant("x")],
            "rejected": [user("q"), assistant("y")],
            "messages": [user("q"), assistant("x")],
        },
        *("preference", ["x<|im_end|>\n", "y<|im_end|>\n"], []),
    ),
    "an answer that is JSON": (
        *("qwen-2.5", {"prompt": "Who?", "completion": '[{"role": "CEO", "name": "X"}]'}, "prompt_completion"),
        *(['[{"role": "CEO", "name": "X"}]<|im_end|>'], []),
    ),
    "a prompt that is a copy": (
        "qwen-2.5",
        {"prompt": "a", "messages": [user("a"), assistant("b")]},
        "messages",
        ["b<|im_end|>\n"],
        [],
    ),
    "a refusal": (
        "qwen-2.5",
        {"messages": [user("a"), assistant("b", refusal="no")]},
        "messages",
        ["b<|im_end|>\n"],
        ["refusal"],
    ),
    "a column of another format": (
        *("qwen-2.5", {"chosen": "It is so", "rejected": "It is not", "question": "?"}, "preference"),
        *([" so<|im_end|>", " not<|im_end|>"], ["column question"]),
    ),
    "variables": (
        *(
            "qwen-3",
            {"messages": [user("a"), assistant("b")], "chat_template_kwargs": {"enable_thinking": False, "o": 1}},
        ),
        *("messages", ["b<|im_end|>\n"], ["variable o"]),
    ),
    "text for a template of parts": (
        *("only parts", {"messages": [user("a"), assistant("b")]}, "messages"),
        *(["b<|im_end|>"], []),
    ),
}


@pytest.mark.parametrize(("name", "row", "row_format", "in_loss", "lost"), READ.values(), ids=READ)
def test_a_row_is_read_as_it_is_meant(
    name: str, row: dict[str, Any], row_format: str, in_loss: list[str], lost: list[str]
) -> None:
    assert shown(name, row, row_format) == (in_loss, lost)


def test_a_thought_in_an_earlier_answer_is_counted() -> None:
    row = {"messages": [user("a"), THINKING, user("c"), THINKING]}
    assert shown("qwen-3", row, loss_on="last_assistant") == (["<think>\nhm\n</think>\n\nb<|im_end|>\n"], ["reasoning"])


def test_a_part_is_missed_by_a_template_that_takes_only_some_texts() -> None:
    template = (
        "{% for m in messages %}{% if m.content not in ['yes', 'no', 'Sure?'] %}{{ raise_exception('yes or no') }}"
        "{% endif %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' or loop.first %}{{ m.content }}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    files = TemplateFiles({"eos_token": "<|im_end|>"}, {"default": template})
    chat = ChatTokenizer(tokenizer("chatml"), files, DataSpec(source="x"))
    turns = [{"role": role, "content": text} for role, text in (("user", "Sure?"), ("assistant", "yes"))]
    for rows, refused in ((turns, False), ([*turns, {"role": "user", "content": "no"}, turns[1]], True)):
        (found,) = chat.encode([(parse_row({"messages": rows}, "messages", FieldsSpec()).example, 1.0)])
        assert isinstance(found, RowError) is refused
        assert not refused or found.reason.code == "data.template-lacks-content"  # type: ignore[union-attr]


def test_the_blocks_of_a_turn_are_told_by_what_they_hold() -> None:
    """A block for the last thought, and one for each answer: there are more blocks than turns."""
    thoughts = [assistant(f"a{number}", reasoning_content=f"r{number}") for number in (1, 2, 3)]
    row = {"messages": [user("q1"), thoughts[0], user("q2"), {**thoughts[1], "weight": 0}, user("q3"), thoughts[2]]}
    (in_loss,), lost = shown("block of last thought", row)
    assert in_loss == "a1<|im_end|><think>r3</think>a3<|im_end|>"
    assert lost == ["reasoning"]
    (last,), _ = shown("block of last thought", {"messages": row["messages"][:2]}, loss_on="last_assistant")
    assert last == "<think>r1</think>a1<|im_end|>"


def test_a_row_with_hundreds_of_tools_is_compared_once() -> None:
    """Rows of the same structure are rendered in words once."""
    _, chat = chat_of("qwen-2.5")
    names = [{"type": "function", "function": {"name": f"f{n}", "parameters": {}}} for n in range(300)]
    rows = [
        parse_row({"messages": [user(f"a{n}"), assistant("b")], "tools": names}, "messages", FieldsSpec())
        for n in (1, 2)
    ]
    chat.encode([(row.example, 1.0) for row in rows])
    (template,) = chat._templates.values()
    assert len(template._missing) == 1


def test_template_files_replace_the_templates_of_the_config_as_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    listed = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "old tools"}]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": listed}
    path = write_tokenizer(tmp_path, tokenizer("chatml").to_str(), settings)
    given = load(
        SPEC, "training.objective=sft", "data.source=python-docstrings", f"data.tokenizer={{kind: file, path: {path}}}"
    )
    assert template_files(given).templates == AutoTokenizer.from_pretrained(tmp_path).chat_template
    (tmp_path / "chat_template.jinja").write_text("new")
    assert template_files(given).templates == {"default": AutoTokenizer.from_pretrained(tmp_path).chat_template}
