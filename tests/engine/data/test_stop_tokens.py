"""Every turn that is trained ends with a token at which the model stops, or the template is refused by name."""

from itertools import pairwise
from typing import Any

import pytest

from scaletrain_cli.data.tokenizers.chat_templates import TemplateFiles
from scaletrain_cli.engine.data.chat_tokenizer import ChatTokenizer
from scaletrain_cli.spec import DataSpec
from scaletrain_cli.spec.data import FieldsSpec
from scaletrain_cli.spec.row_examples import RowError
from scaletrain_cli.spec.row_formats import parse_row
from tests.engine.data.test_chat_masks import encoded, ends_of_turns, tokenizer
from tests.engine.data.test_row_parts import EVERY_TEMPLATE, chat_of

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Bergen"}}}
TURNS = [
    {"role": "user", "content": "Weather in Bergen?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "rain", "name": "weather"},
    {"role": "assistant", "content": "It rains."},
    {"role": "user", "content": "Thanks."},
    {"role": "assistant", "content": "My pleasure."},
]


def conversation(messages: list[dict[str, Any]], **row: Any) -> Any:
    return parse_row({"messages": messages} | row, "messages", FieldsSpec()).example


def test_a_turn_that_ends_with_the_role_of_the_next_one_learns_to_write_it() -> None:
    plain, chat = chat_of("glm-4.5")
    (document,) = encoded(chat, conversation(TURNS))
    assert ends_of_turns(plain, document) == ["<|observation|>", "<|user|>", "<|user|>"]
    text = plain.decode(document.ids.tolist(), skip_special_tokens=False)
    rendered = "[gMASK]<sop><|user|>\nWeather in Bergen?<|assistant|>\n<tool_call>weather\n<arg_key>town</arg_key>"
    assert text.startswith(rendered)
    assert text.endswith("<|assistant|>\nMy pleasure.<|user|>"), "after the last turn comes what would follow it"
    assert document.stops == {plain.token_to_id("<|observation|>"), plain.token_to_id("<|user|>")}


@pytest.mark.parametrize("loss_on", ["assistant", "last_assistant", "all"])
@pytest.mark.parametrize("name", ["glm-4.5", "llama-4"])
def test_an_answer_to_a_prompt_learns_to_stop(name: str, loss_on: str) -> None:
    plain, chat = chat_of(name, loss_on=loss_on)
    row = {"prompt": "Hello", "chosen": [TURNS[3]], "rejected": "No.", "system": "Be brief."}
    pair = parse_row(row, "preference", FieldsSpec()).example
    for document in encoded(chat, pair):
        assert ends_of_turns(plain, document)[-1] in ("<|eot|>", "<|user|>")


_MESSAGE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
BEFORE_EACH_ANSWER = {
    "a part of the prompt": (
        "{% for m in messages %}<|im_start|>{{ m.role }}|{{ '>' if m.role == 'assistant' }}{{ m.content }}<|im_end|>"
        "{% endfor %}<|im_start|>assistant|{% if add_generation_prompt %}>{% endif %}"
    ),
    "the whole prompt": _MESSAGE + "<|im_start|>assistant\n",
    "content in parts": _MESSAGE.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}")
    + "<|im_start|>assistant\n",
    "generation blocks": _MARKED + "<|im_start|>assistant\n",
}


@pytest.mark.parametrize("eos", ["<|im_end|>", "<|endoftext|>"])
@pytest.mark.parametrize("template", BEFORE_EACH_ANSWER.values(), ids=BEFORE_EACH_ANSWER)
def test_the_beginning_of_an_answer_that_ends_every_text_is_no_target(template: str, eos: str) -> None:
    plain = tokenizer("chatml")
    for loss_on in ("assistant", "all"):
        data = DataSpec(source="x", loss_on=loss_on)
        chat = ChatTokenizer(plain, TemplateFiles({"eos_token": eos}, {"default": template}), data)
        (document,) = encoded(chat, conversation([TURNS[0], TURNS[3], TURNS[4], TURNS[5]]))
        text = plain.decode(document.ids.tolist(), skip_special_tokens=False)
        assert text.rstrip().endswith("My pleasure.<|im_end|>")
        assert document.stops == {plain.token_to_id("<|im_end|>")}
        if loss_on == "assistant":
            assert ends_of_turns(plain, document) == ["<|im_end|>"] * 2
            trained = plain.decode(document.ids[document.weights > 0].tolist(), skip_special_tokens=False)
            assert "user" not in trained
            assert "assistant" not in trained


REFUSED = {
    "no end": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        "turn-without-end",
    ),
    "text after each answer": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %} END{% else %}{{ m.content }}{% endif %}\n{% endfor %}",
        "turn-without-end",
    ),
    "an end that also stands within": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | replace(' ', '<|im_start|>') }}<|im_start|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "turn-end-within",
    ),
}


@pytest.mark.parametrize(("template", "code"), REFUSED.values(), ids=REFUSED)
def test_a_template_whose_turns_do_not_end_is_refused(template: str, code: str) -> None:
    chat = ChatTokenizer(
        tokenizer("chatml"), TemplateFiles({"eos_token": "<|endoftext|>"}, {"default": template}), DataSpec(source="x")
    )
    with pytest.raises(RowError) as refused:
        encoded(chat, conversation([TURNS[0], TURNS[3]]))
    assert refused.value.reason.code == f"data.{code}"


def test_a_call_ends_with_the_token_behind_its_generation_block() -> None:
    import tokenizers

    plain = tokenizer("chatml")
    plain.add_tokens([tokenizers.AddedToken("</tool_call>", normalized=False)])  # as Qwen, which is no special token
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    )
    files = TemplateFiles({"eos_token": "<|endoftext|>"}, {"default": template})
    (document,) = encoded(ChatTokenizer(plain, files, DataSpec(source="x")), conversation(TURNS))
    assert ends_of_turns(plain, document) == ["<|im_end|>"] * 3
    assert document.stops == {plain.token_to_id("<|im_end|>")}


def test_the_token_before_an_empty_answer_is_no_end() -> None:
    _, chat = chat_of("gpt-oss")
    with pytest.raises(RowError) as refused:
        encoded(chat, conversation([TURNS[0], {"role": "assistant", "content": ""}, TURNS[4], TURNS[5]]))
    assert refused.value.reason.code == "data.template-rewrites-history", "the last turn alone ends with a stop token"


def test_variables_of_the_template_come_from_the_spec_and_from_the_row() -> None:
    template = EVERY_TEMPLATE["plain content"].replace("{{ m.content }}", "{{ m.content }}{{ mood | default('') }}")
    files = TemplateFiles({"eos_token": "<|im_end|>"}, {"default": template})
    texts = []
    for settings, row in [({}, {}), ({"mood": "calm"}, {}), ({"mood": "calm"}, {"mood": "brisk"})]:
        plain = tokenizer("chatml")
        chat = ChatTokenizer(plain, files, DataSpec(source="x", chat_template_kwargs=settings))
        (document,) = encoded(chat, conversation([TURNS[4], TURNS[5]], chat_template_kwargs=row))
        texts.append(plain.decode(document.ids.tolist()))
    assert ["calm" in text for text in texts] == [False, True, False]
    assert "brisk" in texts[2]
    assert all(one != other for one, other in pairwise(texts))
