"""Chat templates of 13 model families: rendered as by transformers, and only the assistant's tokens are in the loss.

The templates below chat_templates/ write the formats of these families; none has generation blocks.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaletrain_cli.data.tokenizers.chat_templates import CHATML, TemplateFiles
from scaletrain_cli.engine.data.chat_template import SpecialTokens, compile_template
from scaletrain_cli.engine.data.chat_tokenizer import ChatTokenizer, Encoded
from scaletrain_cli.engine.data.row_source import Row
from scaletrain_cli.engine.data.row_writing import RowEncoder
from scaletrain_cli.spec import DataSpec
from scaletrain_cli.spec.data import FieldsSpec
from scaletrain_cli.spec.row_examples import Example, Message, RowError
from scaletrain_cli.spec.row_formats import parse_row
from tests.tokenizer_kinds import tokenizer_json

tokenizers = pytest.importorskip("tokenizers")

FOLDER = Path(__file__).with_name("chat_templates")
DATE = "2025-03-09"


@dataclass(frozen=True)
class Family:
    """Properties of a template. ``rewritten``: conversations whose earlier turns it writes in another way."""

    end: str  # the token that ends the assistant's turn
    tokens: tuple[str, ...]  # the other special tokens
    prompts: tuple[str, ...]  # text that belongs to prompts
    bos: str = "<s>"
    eos: str = "</s>"
    system: bool = True
    tools: bool = True
    describes_tools: bool = True  # the template writes the column tools
    rewritten: tuple[str, ...] = ()
    more: dict[str, str] = field(default_factory=dict)


CHATML_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
HEADER = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
DEEPSEEK = tuple(
    f"<｜{name}｜>"
    for name in (
        *("User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep"),
        *("tool▁outputs▁begin", "tool▁outputs▁end", "tool▁output▁begin", "tool▁output▁end"),
    )
)
HARMONY = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>")
COHERE = ("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>")
FAMILIES = {
    "llama-2": Family("</s>", (), ("[INST]", "[/INST]", "<<SYS>>"), tools=False),
    "llama-3.1": Family("<|eot_id|>", HEADER, HEADER[:2], "<|begin_of_text|>", "<|eot_id|>"),
    "mistral-v3": Family(
        "</s>",
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]"),
        ("[INST]", "[/INST]", "[TOOL_RESULTS]", "[AVAILABLE_TOOLS]"),
        rewritten=("system",),  # which stands in the last message of the user
    ),
    "qwen-2.5": Family("<|im_end|>", CHATML_TOKENS, ("<|im_start|>", "tool_response"), "", "<|im_end|>"),
    "qwen-3": Family(
        "<|im_end|>",
        CHATML_TOKENS,
        ("<|im_start|>", "tool_response"),
        "",
        "<|im_end|>",
        rewritten=("turns", "system", "tools"),  # the empty <think> block of earlier turns is left out
    ),
    "gemma": Family(
        "<end_of_turn>", ("<start_of_turn>",), ("<start_of_turn>", "model"), "<bos>", "<eos>", False, False
    ),
    "phi-3": Family("<|end|>", ("<|user|>", "<|assistant|>", "<|system|>"), ("<|user|>", "<|assistant|>"), tools=False),
    "deepseek-v3": Family(
        "<｜end▁of▁sentence｜>",
        DEEPSEEK,
        ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁output▁end｜>"),
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        describes_tools=False,
    ),
    "gpt-oss": Family(
        "<|return|>",
        HARMONY,
        ("<|start|>",),
        "",
        "<|return|>",
        rewritten=("turns", "system"),  # <|return|> becomes <|end|>
    ),
    "olmo-2": Family("</s>", (), ("<|user|>", "<|assistant|>", "<|system|>"), tools=False),
    "zephyr": Family("</s>", (), ("<|user|>", "<|assistant|>", "<|system|>"), "", tools=False),
    "command-r": Family("<|END_OF_TURN_TOKEN|>", COHERE, COHERE, "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", tools=False),
    "granite-3": Family(
        "<|end_of_text|>",
        ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
        ("<|start_of_role|>", "<|end_of_role|>"),
        "",
        "<|end_of_text|>",
    ),
}


def source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather <of> a city & its 'surroundings'",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = {"type": "function", "id": "abcdef123", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
# The letters q and k: in each text of a prompt, and in no answer.
SYSTEM = {"role": "system", "content": "Be quick, kind."}
ASKED = [{"role": "user", "content": f"qk {text}"} for text in ("Hello!", "How warm is it? 🌡", "And tomorrow?")]
ANSWERED = ["Good day to you.", "Warm: 30° 🌞", "Two\nlines of text"]
ANSWERS = [{"role": "assistant", "content": text} for text in ANSWERED]
CONVERSATIONS: dict[str, list[Message]] = {
    "turns": [message for pair in zip(ASKED, ANSWERS, strict=True) for message in pair],
    "system": [SYSTEM, *(message for pair in zip(ASKED, ANSWERS, strict=True) for message in pair)],
    "tools": [
        ASKED[1],
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "weather", "content": '{"qk": 30}'},
        ANSWERS[1],
    ],
}
CASES = [
    (name, kind)
    for name, family in FAMILIES.items()
    for kind in CONVERSATIONS
    if (kind != "system" or family.system) and (kind != "tools" or family.tools)
]


def special_tokens(name: str) -> dict[str, str]:
    family = FAMILIES[name]
    return {"bos_token": family.bos, "eos_token": family.eos} if family.bos else {"eos_token": family.eos}


def tokenizer(name: str) -> Any:
    return tokenizers.Tokenizer.from_str(tokenizer_text(name))


@cache
def tokenizer_text(name: str) -> str:
    """Return a byte-level tokenizer with merges and the special tokens of the family."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    family = FAMILIES.get(name)
    special = [*CHATML_TOKENS] if family is None else [family.bos or "<pad>", family.eos, family.end, *family.tokens]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(dict.fromkeys(special)),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([*ANSWERED, *(message["content"] for message in ASKED)] * 3, trainer)
    return str(made.to_str())


@cache
def chat(name: str, template: str | None = None, **settings: Any) -> tuple[Any, ChatTokenizer]:
    """Return the plain tokenizer and the one that knows templates and weights."""
    tokens = special_tokens(name) if name in FAMILIES else {"eos_token": "<|im_end|>"}
    files = TemplateFiles(tokens, {"default": template or source(name)})
    plain = tokenizer(name)
    return plain, ChatTokenizer(plain, files, DataSpec(source="x", chat_template_date=DATE, **settings))


def example(kind: str, family: Family) -> Example:
    row = {"messages": CONVERSATIONS[kind]} | ({"tools": TOOLS} if kind == "tools" and family.describes_tools else {})
    return parse_row(row, "messages", FieldsSpec())[0]


def encoded(chosen: ChatTokenizer, given: Example) -> list[Encoded]:
    (found,) = chosen.encode([(given, 1.0)])
    if isinstance(found, RowError):
        raise found
    return found


def spans_in_the_loss(plain: Any, document: Encoded) -> tuple[list[str], str]:
    """Return the decoded text of each run of tokens in the loss, and the rest."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], document.weights > 0, [0]]).astype(int)))
    runs = [document.ids[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
    rest = plain.decode(document.ids[document.weights == 0].tolist(), skip_special_tokens=False)
    return [plain.decode(run.tolist(), skip_special_tokens=False) for run in runs], rest


def ends_of_turns(plain: Any, document: Encoded) -> list[str]:
    """Return the last token, without white space, of each run of tokens in the loss."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], document.weights > 0, [0]]).astype(int)))
    runs = [document.ids[start:stop].tolist() for start, stop in zip(edges[::2], edges[1::2], strict=True)]
    words = [[plain.decode([token], skip_special_tokens=False) for token in run] for run in runs]
    return [next(word for word in reversed(run) if word.strip()) for run in words]


@pytest.fixture
def fixed_date(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_date(monkeypatch, DATE)


def fix_date(monkeypatch: pytest.MonkeyPatch, date: str) -> None:
    """Make transformers write the date that ours writes."""

    class Fixed(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.datetime.fromisoformat(date)

    module = pytest.importorskip("transformers.utils.chat_template_utils")
    monkeypatch.setattr(module, "datetime", Fixed)


@pytest.mark.usefixtures("fixed_date")
@pytest.mark.parametrize("name", [*FAMILIES, "chatml"])
def test_a_conversation_is_rendered_as_by_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    template = CHATML if name == "chatml" else source(name)
    tokens = special_tokens(name) if name in FAMILIES else {"eos_token": "<|im_end|>"}
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer(name), chat_template=template, **tokens)
    ours = compile_template(template, SpecialTokens(tokens), DATE)
    kinds = [kind for case, kind in CASES if case == name] or [*CONVERSATIONS]
    for kind in kinds:
        messages, tools = CONVERSATIONS[kind], TOOLS if kind == "tools" else None
        for cut in range(1, len(messages) + 1):
            for prompt in (False, True):
                expected = theirs.apply_chat_template(
                    messages[:cut], tools=tools, tokenize=False, add_generation_prompt=prompt
                )
                assert ours.render(messages[:cut], tools, prompt=prompt).text == expected


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_every_token_of_the_assistant_is_in_the_loss_and_no_token_of_a_prompt(name: str, kind: str) -> None:
    family, messages = FAMILIES[name], CONVERSATIONS[kind]
    turns = [message for message in messages if message["role"] == "assistant"]
    if kind in family.rewritten:
        with pytest.raises(RowError) as refused:
            encoded(chat(name)[1], example(kind, family))
        assert refused.value.reason.code == "data.template-rewrites-history"
        turns = turns[-1:]
    plain, chosen = chat(name, loss_on="last_assistant" if kind in family.rewritten else "assistant")
    (document,) = encoded(chosen, example(kind, family))
    spans, rest = spans_in_the_loss(plain, document)
    assert len(spans) == len(turns)
    for span, turn in zip(spans, turns, strict=True):
        answer = span.strip().removesuffix(family.eos).strip()
        assert answer.endswith((family.end, "<|call|>")) or span.strip().endswith(family.end)
        assert turn["content"] in span
        assert not turn.get("tool_calls") or "Zürich" in span
        assert not [text for text in (*family.prompts, "qk", SYSTEM["content"]) if text in span]
    assert not [turn["content"] for turn in turns if turn["content"] and turn["content"] in rest]
    everything = plain.decode(document.ids.tolist(), skip_special_tokens=False)
    assert sum(map(len, spans)) + len(rest) == len(everything), "no character is lost at a border"
    # Only eos_token of the tokenizer is known: what else ends turns is found, and recorded for the export.
    assert {plain.token_to_id(end) for end in ends_of_turns(plain, document)} == document.stops


@pytest.mark.usefixtures("fixed_date")
@pytest.mark.parametrize(
    ("name", "file"),
    [
        *(("llama-3.1", "llama3_training"), ("qwen-2.5", "qwen2_5_training"), ("qwen-3", "qwen3_training")),
        *(("gemma", "gemma_training"), ("phi-3", "phi3_training"), ("deepseek-v3", "deepseekv3_training")),
        *(("gpt-oss", "gptoss_training"), ("command-r", "cohere_training")),
    ],
)
def test_marked_templates_of_trl_give_the_masks_of_transformers(name: str, file: str) -> None:
    trl, transformers = pytest.importorskip("trl"), pytest.importorskip("transformers")
    template = (Path(trl.__file__).parent / "chat_templates" / f"{file}.jinja").read_text(encoding="utf-8")
    plain, chosen = chat(name, template)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, chat_template=template, **special_tokens(name)
    )
    # transformers leaves out all but the first of the tokens of a character at the end of a block
    messages = [{**message, "content": message["content"].replace("🌞", "!")} for message in CONVERSATIONS["turns"]]
    expected = theirs.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=False
    )
    (document,) = encoded(chosen, parse_row({"messages": messages}, "messages", FieldsSpec())[0])
    assert document.ids.tolist() == expected["input_ids"]
    assert (document.weights > 0).astype(int).tolist() == expected["assistant_masks"]
    assert document.weights.any()


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_truncation_keeps_the_mask_of_the_tokens_that_remain(name: str, kind: str) -> None:
    last = "last_assistant" if kind in FAMILIES[name].rewritten else "assistant"
    _, chosen = chat(name, loss_on=last)
    given = example(kind, FAMILIES[name])
    (whole,) = encoded(chosen, given)
    for length in (len(whole.ids) - 1, len(whole.ids) // 2, 12):
        for rule, part in (("keep_start", slice(length)), ("keep_end", slice(-length, None))):
            data = DataSpec(source="x", loss_on=last, truncation=rule)
            encoder = RowEncoder(chosen, data, length)
            kept = [documents for _, documents in encoder.encode([Row("x:1", given, 1.0, "")])]
            expected = whole.weights[part].copy()
            expected[0] = 0  # the first token is no label
            assert bool(kept) == expected.any()
            assert encoder.counts.without_target == (not kept)
            for (document,) in kept:
                assert document.ids.tolist() == whole.ids[part].tolist()
                assert document.weights.tolist() == expected.tolist()


def changed(*changes: tuple[int, float]) -> Example:
    messages = [dict(message) for message in CONVERSATIONS["turns"]]
    for number, weight in changes:
        messages[number]["weight"] = weight
    return parse_row({"messages": messages}, "messages", FieldsSpec())[0]


@pytest.mark.parametrize("name", ["llama-3.1", "chatml"])
def test_a_message_with_a_weight_has_it_on_each_of_its_tokens(name: str) -> None:
    plain, chosen = chat(name, CHATML if name == "chatml" else None)
    (document,) = encoded(chosen, changed((1, 0), (3, 0.25)))
    found = {
        weight: plain.decode(document.ids[document.weights == weight].tolist(), skip_special_tokens=False)
        for weight in np.unique(document.weights).tolist()
    }
    assert sorted(found) == [0, 0.25, 1]
    assert ANSWERED[0] in found[0]
    assert found[0.25].startswith(ANSWERED[1])
    assert found[1].startswith(ANSWERED[2])


def test_the_loss_on_everything_has_prompts_and_the_weights_of_messages() -> None:
    plain, chosen = chat("llama-3.1", loss_on="all")
    (document,) = encoded(chosen, changed())
    assert (document.weights == 1).all()
    (document,) = encoded(chosen, changed((3, 0)))
    left_out = plain.decode(document.ids[document.weights == 0].tolist(), skip_special_tokens=False)
    assert left_out == ANSWERED[1] + "<|eot_id|>"


@pytest.mark.parametrize("name", ["llama-3.1", "qwen-2.5", "gemma", "zephyr"])
def test_the_end_of_a_turn_behind_a_generation_block_is_in_the_loss(name: str) -> None:
    end = FAMILIES[name].end
    template = "{% for message in messages %}{{ message.role + ': ' }}{% if message.role == 'assistant' %}"
    template += "{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}"
    plain, chosen = chat(name, template + "{{ '" + end + "' }}{% endfor %}")
    (document,) = encoded(chosen, changed())
    assert spans_in_the_loss(plain, document)[0] == [text + end for text in ANSWERED]


REFUSED: list[tuple[str, str]] = [
    ("{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}", "data.template-without-prompt"),
    (
        "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}bot: {% endif %}",
        "data.template-prompt-differs",
    ),
    ("{{ messages[-1].content }}{% for m in messages %}{{ m.content }}{% endfor %}", "data.template-rewrites-history"),
    ("{{ raise_exception('no') }}", "data.template-failed"),
    ("{{ messages[0].content.__class__.__mro__ }}", "data.template-failed"),
    ("{% if false %}{% generation %}a{% endgeneration %}{% endif %}b", "data.template-marks-nothing"),
    ("{{ messages[0].nothing.more }}", "data.template-failed"),
]


@pytest.mark.parametrize(("template", "code"), REFUSED)
def test_a_mask_that_is_not_certain_is_refused(template: str, code: str) -> None:
    with pytest.raises(RowError) as refused:
        encoded(chat("llama-2", template)[1], changed())
    assert refused.value.reason.code == code
    assert str(refused.value.reason) != code


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if "turns" not in family.rewritten])
def test_a_prompt_and_its_completion_have_the_mask_of_the_last_turn(name: str) -> None:
    messages = CONVERSATIONS["turns"]
    answer = parse_row({"prompt": messages[:-1], "completion": messages[-1:]}, "prompt_completion", FieldsSpec())[0]
    (ours,) = encoded(chat(name)[1], answer)
    (last,) = encoded(chat(name, loss_on="last_assistant")[1], example("turns", FAMILIES[name]))
    assert ours.ids.tolist() == last.ids.tolist()
    assert ours.weights.tolist() == last.weights.tolist()


def test_a_prompt_whose_last_token_spans_the_border_is_refused() -> None:
    _, chosen = chat("llama-2")
    good = parse_row({"prompt": "Good day to", "completion": " you."}, "prompt_completion", FieldsSpec())[0]
    (document,) = encoded(chosen, good)
    assert document.weights.any()
    bad = parse_row({"prompt": "Good d", "completion": "ay to you."}, "prompt_completion", FieldsSpec())[0]
    with pytest.raises(RowError) as refused:
        encoded(chosen, bad)
    assert refused.value.reason.code == "data.prompt-not-a-prefix"


def test_the_common_beginning_of_two_texts_ends_where_a_token_of_both_ends() -> None:
    begins = "\n\nHuman: Which fruit?\n\nAssistant: Some"
    texts = {"chosen": f"{begins} fruits:\n\nApples", "rejected": f"{begins} fruits:\n\nPears"}
    trained = tokenizers.Tokenizer.from_str(tokenizer_json("split"))
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=["</s>"], show_progress=False)
    trained.train_from_iterator([*texts.values()] * 3, trainer)
    assert trained.token_to_id(":ĊĊ"), "a mark and the line ends after it are one token, as of Llama 3"
    chosen = ChatTokenizer(trained, TemplateFiles({"eos_token": "</s>"}, {}), DataSpec(source="x"))
    for document, name in zip(encoded(chosen, parse_row(texts, "preference", FieldsSpec())[0]), texts, strict=True):
        in_loss = trained.decode(document.ids[document.weights > 0].tolist(), skip_special_tokens=False)
        assert begins + in_loss == texts[name] + "</s>"


def test_text_ends_with_the_end_token_once() -> None:
    plain, chosen = chat("llama-2")
    for text in ("Good day", "Good day</s>"):
        (document,) = encoded(chosen, parse_row({"text": text}, "text", FieldsSpec())[0])
        assert plain.decode(document.ids.tolist(), skip_special_tokens=False) == "Good day</s>"
        assert (document.weights == 1).all()


@pytest.mark.parametrize("around", ["<s> $A", "<s> $A </s>"])
@pytest.mark.parametrize("start", ["", "<s>"])
def test_text_has_each_special_token_of_the_tokenizer_once(start: str, around: str) -> None:
    from tokenizers import processors

    plain = tokenizer("llama-2")
    special = [(mark, plain.token_to_id(mark)) for mark in ("<s>", "</s>")]
    plain.post_processor = processors.TemplateProcessing(single=around, special_tokens=special)
    chosen = ChatTokenizer(plain, TemplateFiles(special_tokens("llama-2"), {}), DataSpec(source="x"))
    (text,) = encoded(chosen, parse_row({"text": f"{start}Good day"}, "text", FieldsSpec())[0])
    row = {"prompt": f"{start}Good", "completion": " day</s>"}
    (answer,) = encoded(chosen, parse_row(row, "prompt_completion", FieldsSpec())[0])
    for document in (text, answer):
        assert plain.decode(document.ids.tolist(), skip_special_tokens=False) == "<s>Good day</s>"
    assert plain.decode(answer.ids[answer.weights > 0].tolist(), skip_special_tokens=False) == " day</s>"


def test_both_answers_of_a_pair_have_the_mask_of_their_completion() -> None:
    plain, chosen = chat("chatml", CHATML)
    rows: list[Callable[[], dict[str, Any]]] = [
        lambda: {"prompt": ASKED[:1], "chosen": ANSWERS[:1], "rejected": ANSWERS[1:2]},
        lambda: {"chosen": [ASKED[0], ANSWERS[0]], "rejected": [ASKED[0], ANSWERS[1]]},
    ]
    for row in rows:
        pair = parse_row(row(), "preference", FieldsSpec())[0]
        found = [spans_in_the_loss(plain, document)[0] for document in encoded(chosen, pair)]
        assert found == [[f"{ANSWERED[0]}<|im_end|>\n"], [f"{ANSWERED[1]}<|im_end|>\n"]]
