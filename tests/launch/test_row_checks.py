"""The first rows of the data for fine-tuning are checked before a run, with the file and the line of a problem."""

import gzip
import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.data.sources.rows import Tally
from scaletrain_cli.engine.data.row_source import rows_of
from scaletrain_cli.errors import UsageError, sentences
from scaletrain_cli.launch.resource_checks.files import (
    image_folder_problems,
    not_recorded,
    row_problems,
    template_problems,
    tokenizer_problem,
    tokenizer_problems,
)
from scaletrain_cli.launch.resource_checks.view import View
from tests.spec.samples import SPEC, load

ANSWERED = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


def view(folder: Path, *settings: str, objective: str = "sft") -> View:
    return View(load(SPEC, f"training.objective={objective}", "data.source=rows.jsonl", *settings), folder, {})


def problems(folder: Path, rows: list[Any], *settings: str, objective: str = "sft") -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return " ".join(
        f"{each.message} {each.hint}" for each in row_problems(view(folder, *settings, objective=objective))
    )


TOKENIZER_FILE = ("data.tokenizer={kind: file, path: tokenizer.json}",)
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]
BING = ("data.fields.roles={bing: assistant}",)
GOOD: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    ({"messages": ANSWERED}, "sft", ()),
    ({"chat": ANSWERED, "other": 1}, "sft", ("data.fields.messages=chat",)),
    ({"prompt": "One, two,", "completion": " three"}, "sft", ()),
    ({"prompt": ANSWERED[:1], "completion": ANSWERED[1:]}, "sft", ()),
    ({"instruction": "Count.", "input": "", "output": "One, two."}, "sft", ()),
    ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}, "sft", ()),
    ({"text": "Once upon a time"}, "sft", ()),
    ({"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"}, "dpo", ()),
    ({"chosen": ANSWERED, "rejected": [ANSWERED[0], {"role": "assistant", "content": "No."}]}, "dpo", ()),
    ({"messages": json.dumps(ANSWERED)}, "sft", ()),
    ({"messages": [ANSWERED[0], {"role": "model", "content": "Hello."}]}, "sft", ()),
    ({"messages": [ANSWERED[0], {"role": "bing", "content": "Hello."}]}, "sft", BING),
    ({"conversations": ANSWERED}, "sft", ()),
    ({"conversations": [{"from": "user", "value": "Hi"}, {"from": "bing", "value": "Hello."}]}, "sft", BING),
    ({"conversations": [{**SHAREGPT[0], "weight": 0}, {**SHAREGPT[1], "weight": 1}]}, "sft", ()),
    ({"conversations": [{**SHAREGPT[0], "weight": None}, SHAREGPT[1]], "weight": math.nan}, "sft", ()),
    ({"instruction": "Count.", "input": math.nan, "output": "One.", "history": [["a", "b"]]}, "sft", ()),
    ({"prompt": ANSWERED[:1], "chosen": "yes", "rejected": "no"}, "dpo", ()),
    ({"prompt": ANSWERED[:1], "chosen": ANSWERED, "rejected": [*ANSWERED[:1], ANSWERED[1]]}, "dpo", ()),
    ({"conversations": SHAREGPT[:1], "chosen": SHAREGPT[1], "rejected": SHAREGPT[1]}, "dpo", ()),
    ({"instruction": "Count.", "chosen": "One.", "rejected": "Two."}, "dpo", ()),
    ({"prompt": "Hi", "chosen": ANSWERED[1:], "rejected": ANSWERED[1:], "system": "Be brief."}, "dpo", ()),
]


@pytest.mark.parametrize(("row", "objective", "settings"), GOOD)
def test_rows_of_every_format_are_accepted(
    row: dict[str, Any], objective: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    assert problems(tmp_path, [row] * 3, *settings, objective=objective) == ""


BAD: list[tuple[Any, str, str]] = [
    ("a", "sft", "each row must be a JSON object"),
    ({"question": "a", "answer": "b"}, "sft", "the columns question, answer fit no format of rows"),
    ({"messages": ANSWERED}, "dpo", "the columns messages fit no format of rows; it needs chosen and rejected"),
    ({"messages": []}, "sft", "the column messages has no message"),
    ({"messages": [{"role": "user"}]}, "sft", "message 0 of the column messages must have a role and content"),
    ({"messages": [{"role": "user", "content": "a", "weight": 1}]}, "sft", "only messages of the assistant have one"),
    ({"messages": [{**ANSWERED[1], "weight": -1}]}, "sft", "the weight -1 must be 0, or a number from 1e-6 to 1e6"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "sft", "a part of type image"),
    ({"messages": ANSWERED, "tools": "["}, "sft", "the column tools must be a list of JSON schemas"),
    ({"messages": ANSWERED, "tools": [1]}, "sft", "the column tools must be a list of JSON schemas"),
    ({"messages": ANSWERED, "chat_template_kwargs": "a"}, "sft", "chat_template_kwargs must be an object"),
    ({"messages": [{"role": "system", "content": "a"}, *ANSWERED], "system": "b"}, "sft", "has another system text"),
    (
        {"messages": [ANSWERED[0], {"role": "bing", "content": "a"}]},
        "sft",
        "Set data.fields.roles, as in {bing: assist",
    ),
    (
        {"messages": [ANSWERED[0], {"role": "assistant", "content": None}]},
        "sft",
        "message 1 of the column messages must",
    ),
    ({"messages": [ANSWERED[0], {"role": "assistant", "tool_calls": [{}]}]}, "sft", "message 1: a call must be JSON"),
    ({"conversations": [{"from": "function_call", "value": "f()"}]}, "sft", "message 0: a call must be JSON with name"),
    ({"instruction": "a", "output": "b", "history": ["c"]}, "sft", "history must be a list of pairs of texts"),
    ({"conversations": [{"from": "alien", "value": "Hi"}]}, "sft", "message 0 has from: alien"),
    ({"prompt": "a", "completion": 3}, "sft", "the column completion must be text or a list of messages"),
    ({"prompt": "a", "completion": ANSWERED}, "sft", "message 1 of the column completion has the role user"),
    ({"prompt": ANSWERED[1:], "completion": ANSWERED}, "sft", "message 1 of the column completion has the role user"),
    ({"chosen": "yes", "rejected": "no"}, "dpo", "chosen and rejected have no common prompt"),
]


@pytest.mark.parametrize(("row", "objective", "said"), BAD)
def test_an_unusable_row_is_named_with_its_line(row: Any, objective: str, said: str, tmp_path: Path) -> None:
    found = problems(tmp_path, [row], objective=objective)
    assert said in found
    assert "rows.jsonl:1: " in found


ROW = json.dumps({"messages": ANSWERED})
BROKEN = {
    "cut": (ROW[:-9].encode(), "the JSON ends too early"),
    "over lines": (json.dumps(json.loads(ROW), indent=1).encode(), "Write one object per line, as jq -c does"),
    "single quotes": (str(json.loads(ROW)).encode(), "Write it with json.dumps"),
    "trailing comma": (ROW[:-1].encode() + b",}", "a comma follows the last value"),
    "comma between rows": (f"{ROW},\n{ROW}".encode(), "a comma follows the last value"),
    "NUL at the end of a file": (b"\0" * 99, "the line has NUL bytes"),
    "NUL": (ROW.encode().replace(b"Hi", b"\0"), "the line has NUL bytes"),
    "UTF-16": (ROW.encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
    "gzip": (gzip.compress(ROW.encode()), "Add .gz to its name"),
    "Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "Run git lfs pull"),
    "words": (b"{hello}", "it is not JSON: Expecting property name"),
}


@pytest.mark.parametrize(("content", "said"), BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_not_json_is_told_apart_from_other_faults(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    (problem,) = row_problems(view(tmp_path))
    assert said in f"{problem.message} {problem.hint}"
    assert "rows.jsonl:1: " in problem.message


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_rows_are_lines_or_an_array_whatever_the_file_is_called(name: str, tmp_path: Path) -> None:
    for content in (f"\n{ROW}\n\n{ROW}\n", f" \n[{ROW},\n{ROW}]\n"):
        (tmp_path / name).write_text(content)
        assert not [*row_problems(view(tmp_path, f"data.source={name}"))]
        data = view(tmp_path, f"data.source={tmp_path / name}").spec.data
        assert [row.example.messages for row in rows_of(data, "sft")[1]] == [ANSWERED] * 2  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.zst", "a.ndjson", "stream.arrow", "file.arrow", "a.parquet"])
def test_rows_are_read_from_compressed_files_and_tables(name: str, tmp_path: Path) -> None:
    path, content = tmp_path / name, f"{ROW}\n{ROW}\n".encode()
    if name.endswith((".arrow", ".parquet")):
        arrow = pytest.importorskip("pyarrow")
        table = arrow.Table.from_pylist([json.loads(ROW)] * 2)
        if name == "a.parquet":
            pytest.importorskip("pyarrow.parquet").write_table(table, path)
        else:
            with {"stream": arrow.ipc.new_stream, "file": arrow.ipc.new_file}[path.stem](path, table.schema) as writer:
                writer.write_table(table)
    else:
        by_suffix = {".gz": gzip.compress, ".zst": pytest.importorskip("zstandard").compress}
        path.write_bytes(by_suffix.get(path.suffix, bytes)(content))
    (tmp_path / "dataset_info.json").write_text("{}")
    for source in (
        path,
        *([] if "json." in name else [tmp_path]),
    ):  # as the datasets library saves a set: a folder with descriptions
        given = view(tmp_path, f"data.source={source}")
        assert not [*row_problems(given)]
        read = [*rows_of(given.spec.data, "sft")[1]]
        assert [row.example.messages for row in read] == [ANSWERED] * 2  # type: ignore[union-attr]
    if path.suffix in (".gz", ".zst"):
        path.write_bytes(path.read_bytes()[:-9])
        (problem,) = row_problems(view(tmp_path, f"data.source={path}"))
        assert problem.message.startswith(f"{path}: ")
        assert "complete" in problem.message


def test_rows_that_cannot_be_used_are_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{{"a": 1}}\n{ROW}\n{ROW[:9]}\n{{"messages": []}}\n{ROW}\n')
    settings = (f"data.source={tmp_path}/rows.jsonl", "data.on_bad=skip")
    tally = Tally()
    assert len([*rows_of(view(tmp_path, *settings).spec.data, "sft", tally)[1]]) == 2
    assert tally.unusable == 3
    assert [problem.partition(": ")[0][-1] for problem in tally.problems] == ["1", "3", "4"]
    with pytest.raises(UsageError, match=r"rows.jsonl:1: the columns a fit no format"):
        rows_of(view(tmp_path, settings[0]).spec.data, "sft")
    assert not [*row_problems(view(tmp_path, *settings))], "what is left out stops no submission"


def test_a_row_unlike_the_first_one_is_named_with_its_line(tmp_path: Path) -> None:
    found = problems(tmp_path, [{"messages": ANSWERED}] * 2 + [{"text": "a"}])
    assert "rows.jsonl:3: format messages needs the columns messages; the row has text" in found


def test_files_of_text_are_not_rows(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Once upon a time\n" * 50)
    (found,) = row_problems(view(tmp_path, "data.source=a.txt"))
    assert "the source has no jsonl, json, parquet, arrow, jsonl.gz, jsonl.zst, json.gz, json.zst file" in found.message


PLAIN = "{{ messages[0].content }}"
NAMED = [{"name": "rag", "template": PLAIN}, {"name": "tool_use", "template": PLAIN}]
TEXT_PROMPT = {"prompt": "One, two,", "completion": " three"}
WITH_TOOLS = {"messages": ANSWERED, "tools": [{"type": "function", "function": {"name": "add"}}]}
OF_PAIR = {"chosen": ANSWERED, "rejected": ANSWERED}
NO_TEMPLATE = "has no chat template, which conversations need. Set data.chat_template"
INVALID = "the chat template is not valid: line 1: "
UNREADABLE = "tokenizer_config.json cannot be read: "


@pytest.mark.parametrize(
    ("chat_template", "row", "said"),
    [
        (None, {"messages": ANSWERED}, f"rows.jsonl:1: the tokenizer tokenizer.json {NO_TEMPLATE}"),
        (None, {"instruction": "a", "output": "b"}, NO_TEMPLATE),
        (None, OF_PAIR, NO_TEMPLATE),
        (None, TEXT_PROMPT, ""),
        (NAMED, {"messages": ANSWERED}, "has the chat templates rag, tool_use and none with the name default"),
        (NAMED, WITH_TOOLS, ""),
        ([*NAMED, {"name": "default", "template": PLAIN}], {"messages": ANSWERED}, ""),
        ({"default": PLAIN}, {"messages": ANSWERED}, ""),
        (PLAIN, {"messages": ANSWERED}, ""),
        ("{% for a in b %}", {"messages": ANSWERED}, f"{INVALID}Unexpected end of template"),
        ([*NAMED, {"name": "default", "template": "{{"}], {"messages": ANSWERED}, INVALID),
        ([{"name": "default"}], {"messages": ANSWERED}, f"{UNREADABLE}KeyError: 'template'"),
        ({"default": 1}, {"messages": ANSWERED}, f"{UNREADABLE}TypeError: a template, or its name, is no text"),
    ],
)
def test_rows_with_messages_need_a_chat_template_that_is_valid(
    chat_template: Any, row: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": chat_template}))
    for settings in (TOKENIZER_FILE, (*TOKENIZER_FILE, "data.on_bad=skip")):
        objective = "dpo" if "chosen" in row else "sft"
        found = problems(tmp_path, [row] * 2, *settings, objective=objective)
        found += " ".join(map(str, template_problems(view(tmp_path, *settings, objective=objective))))
        assert said in found
        assert bool(said) == bool(found)


def test_templates_in_files_are_checked_in_place_of_those_in_the_config(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": PLAIN}))
    others = tmp_path / "additional_chat_templates"
    others.mkdir()
    (others / "tool_use.jinja").write_text(PLAIN)
    assert "has the chat templates tool_use and none" in problems(tmp_path, [{"messages": ANSWERED}], *TOKENIZER_FILE)
    (tmp_path / "chat_template.jinja").write_text(PLAIN)
    assert problems(tmp_path, [{"messages": ANSWERED}], *TOKENIZER_FILE) == ""
    (others / "rag.jinja").write_text("{{")
    (found,) = template_problems(view(tmp_path, *TOKENIZER_FILE))
    assert (found.key, INVALID in str(found)) == ("data.tokenizer.path", True)
    prepared(tmp_path)  # rows that are prepared need no template
    assert not list(template_problems(view(tmp_path, *TOKENIZER_FILE, "data.source=.")))
    (tmp_path / "own.jinja").write_text(PLAIN)  # in place of all of these
    assert not list(template_problems(view(tmp_path, *TOKENIZER_FILE, "data.chat_template=own.jinja")))


def test_a_table_of_conversations_needs_a_chat_template(tmp_path: Path) -> None:
    tables = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    for row, said in (({"messages": ANSWERED}, NO_TEMPLATE), (TEXT_PROMPT, "")):
        tables.write_table(arrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
        settings = (*TOKENIZER_FILE, "data.source=rows.parquet")
        found = " ".join(map(str, row_problems(view(tmp_path, *settings))))
        assert said in found
        assert bool(said) == bool(found)


def test_a_chat_template_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    (found,) = template_problems(view(tmp_path, "data.chat_template=chat.jinja"))
    assert (found.key, found.given) == ("data.chat_template", "chat.jinja")
    assert "No such file" in found.message
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    assert not [*template_problems(view(tmp_path, "data.chat_template=chat.jinja"))]


def prepared(folder: Path, **info: Any) -> None:
    """Write what the checks read of prepared rows of 8 tokens."""
    (folder / "train.bin").write_bytes(b"\0" * 8)
    (folder / "validation.bin").write_bytes(b"")
    known = {"dtype": "uint16", "train_tokens": 4, "validation_tokens": 0, "vocab_size": 9}
    (folder / "dataset.json").write_text(json.dumps(known | info))


@pytest.mark.parametrize(
    ("info", "setting", "said"),
    [
        ({"loss_on": "all"}, "loss_on=all", ""),
        ({"loss_on": "assistant"}, "loss_on=all", "was prepared with loss_on assistant, and data.loss_on is all"),
        ({"loss_on": "all", "truncation": "drop"}, "truncation=keep_start", ""),
        ({"truncation": "keep_start"}, "truncation=drop", "was prepared with truncation keep_start"),
        ({"format": "messages"}, "format=messages", ""),
        ({"format": "messages"}, "format=alpaca", "was prepared with format messages, and data.format is alpaca"),
        ({"chat_template": f"SHA-256 {hashlib.sha256(b'{{ messages }}').hexdigest()}"}, "chat_template=chat.jinja", ""),
        ({"chat_template": "null"}, "chat_template=chat.jinja", "was prepared with chat_template null"),
        ({"fields": '{"messages": "chat"}'}, "fields.messages=chat", ""),
        ({"fields": "{}"}, "fields.messages=chat", 'with fields {}, and data.fields is {"messages": "chat"}'),
        ({"template_date": "2024-07-26"}, "chat_template_date=2026-01-01", "chat_template_date is 2026-01-01"),
    ],
)
def test_settings_against_rows_are_refused(info: dict[str, str], setting: str, said: str, tmp_path: Path) -> None:
    prepared(tmp_path, objective="sft", seq_len=8, **info)
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    given = view(tmp_path, f"data.source={tmp_path}", "model.seq_len=8", f"data.{setting}")
    found = [problem.message for problem in row_problems(given)]
    assert len(found) == bool(said)
    assert said in "".join(found)
    assert not [*not_recorded(given)]
    assert not [*row_problems(replace(given, begun=True))], "a run that has trained keeps its rows"


def test_settings_that_prepared_rows_do_not_record_are_a_note_for_a_new_run(tmp_path: Path) -> None:
    prepared(tmp_path, objective="sft", seq_len=8)
    settings = ("data.loss_on=all", "data.chat_template=chat.jinja", "data.fields.messages=chat")
    given = view(tmp_path, f"data.source={tmp_path}", "model.seq_len=8", *settings)
    assert not [*row_problems(given)]
    (note,) = not_recorded(given)
    named = "data.loss_on = all, data.chat_template = chat.jinja, data.fields"
    assert f"do not record with which settings they were made: {named}" in sentences(note)
    assert not [*not_recorded(replace(given, begun=True))]


def test_prepared_rows_are_checked_for_their_length_objective_and_packing(tmp_path: Path) -> None:
    source = f"data.source={tmp_path}"
    prepared(tmp_path, objective="sft", seq_len=8)
    assert not [*row_problems(view(tmp_path, source, "model.seq_len=8"))]
    (longer,) = row_problems(view(tmp_path, source, "model.seq_len=16"))
    assert "holds rows of 8 tokens, and model.seq_len is 16" in longer.message
    (pairs,) = row_problems(view(tmp_path, source, "model.seq_len=8", objective="dpo"))
    assert "was prepared for objective sft, and training.objective is dpo" in pairs.message
    (packed,) = row_problems(view(tmp_path, source, "model.seq_len=8", "data.packing=best_fit"))
    assert "was prepared with packing none, and data.packing is best_fit" in packed.message
    prepared(tmp_path)
    (text,) = row_problems(view(tmp_path, source, "model.seq_len=2"))
    assert "was prepared for objective causal_lm" in text.message


def test_the_folder_of_images_must_exist(tmp_path: Path) -> None:
    given = view(tmp_path, "model={preset: llava-tiny}", "data.images.folder=pictures")
    (found,) = image_folder_problems(given)
    assert str(found).startswith("--set data.images.folder = pictures: there is no such folder")
    (tmp_path / "pictures").mkdir()
    assert list(image_folder_problems(given)) == []


def about(*images: str, **changed: Any) -> dict[str, Any]:
    turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cat."}]
    return {"image": list(images), "conversations": turns * len(images)} | changed


def test_the_first_rows_with_images_are_checked(tmp_path: Path) -> None:
    llava = "model={preset: llava-tiny}"
    (tmp_path / "a.jpg").touch()
    assert problems(tmp_path, [about("a.jpg"), {"conversations": about("a")["conversations"][1:]}], llava) == ""
    for row, said in (
        (about("a.jpg", "b.jpg"), f"rows.jsonl:2: there is no image {tmp_path}/b.jpg. Set data.images.folder to the"),
        (about("a.jpg", image=None), "it has 1 places of images in its text and 0 images."),
        ({"text": "Once"}, "format sharegpt needs the columns conversations"),
    ):
        assert said in problems(tmp_path, [about("a.jpg"), row], llava)
    assert "rows of the format text have no place for an image" in problems(tmp_path, [{"text": "Once"}], llava)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "a.jpg").rename(tmp_path / "pictures" / "a.jpg")
    assert problems(tmp_path, [about("a.jpg")], llava, "data.images.folder=pictures") == ""


def test_the_tokenizer_must_have_the_image_token(tmp_path: Path) -> None:
    words = {"model": {"vocab": {"</s>": 0, "a": 1}}, "added_tokens": [{"content": "<image>", "id": 5}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))

    def found(token: int, *settings: str) -> str:
        model = f"model={{preset: llava-tiny, image_token_index: {token}}}"
        return str(tokenizer_problem(tmp_path / "tokenizer.json", view(tmp_path, model, *settings).spec))

    assert found(5) == "None"
    assert found(5, "model.text_config.vocab_size=2") == "None"  # no row of the embedding
    assert found(4).startswith("data.tokenizer: the id 4 of model.image_token_index is not one token of the tokenizer;")
    assert "has token ids up to 5, and model.vocab_size is 2" in found(1, "model.text_config.vocab_size=2")


def test_rows_may_end_with_the_end_token_that_the_tokenizer_states(tmp_path: Path) -> None:
    words = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": "<|end_of_sentence|>", "id": 1}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    assert "has no end-of-text token" in str(tokenizer_problem(tmp_path / "tokenizer.json", view(tmp_path).spec))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end_of_sentence|>"}))
    spec = view(tmp_path, f"data.tokenizer={{kind: file, path: {tmp_path}/tokenizer.json}}").spec
    assert tokenizer_problem(tmp_path / "tokenizer.json", spec) is None


def test_a_trained_tokenizer_has_the_image_token_at_one_id(tmp_path: Path) -> None:
    """Found before the queue, as the size of its vocabulary is."""
    (tmp_path / "rows.jsonl").write_text("{}\n")

    def found(token: int) -> list[str]:
        model = f"model={{preset: llava-tiny, image_token_index: {token}}}"
        given = view(tmp_path, model, "data.tokenizer.vocab_size=300")
        return [f"{each.key}: {each.message} {each.hint}" for each in tokenizer_problems(given)]

    assert found(3) == []
    (told,) = found(32000)
    assert told.startswith("model.image_token_index: must be 3")
    assert "data.tokenizer.path" in told


def test_rows_for_validation_are_checked_as_those_for_training(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": ANSWERED}) + "\n")
    (tmp_path / "other.jsonl").write_text('{"question": "a"}\n')
    source = f"{{name: a, path: {tmp_path}/rows.jsonl, validation_path: {tmp_path}/other.jsonl}}"
    for settings, key in (
        (("data.validation_source=gone.jsonl",), "data.validation_source"),
        (("data.source=null", f"data.sources=[{source}]"), "data.sources.0.validation_path"),
    ):
        (problem,) = row_problems(view(tmp_path, *settings))
        assert problem.key == key
        assert ("no such file" in problem.message) != ("fit no format" in problem.message), problem
