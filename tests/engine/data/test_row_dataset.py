"""Rows on disk: every rule of truncation and packing, what changes the folder, and what damage is found."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaletrain_cli.data.chunk_hashes import CorruptDataError
from scaletrain_cli.data.sources.rows import Tally, rows_in
from scaletrain_cli.engine.data import prepared, row_source, show
from scaletrain_cli.engine.data.prepared import open_data_of, prepare_rows
from scaletrain_cli.engine.data.row_dataset import RowsInfo, left_out, rows_folder
from scaletrain_cli.engine.data.row_source import docstring_rows
from scaletrain_cli.engine.data.rows import NOT_COUNTED, RowSequences
from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan.data_size import prepared_size
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.corpus_files import PYTHON_STDLIB, CorpusFiles, find_files
from scaletrain_cli.spec.data import FieldsSpec
from scaletrain_cli.spec.row_examples import Conversation
from scaletrain_cli.spec.row_formats import format_of, parse_row
from tests.prepared_text import prepared_text
from tests.spec.samples import SPEC, load

tokenizers = pytest.importorskip("tokenizers")

LENGTH = 24


def conversation(number: int, turns: int = 1) -> dict[str, Any]:
    messages = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"ask {number}"})
        messages.append({"role": "assistant", "content": f"answer {number} {turn}" + " again" * (number % 3)})
    return {"messages": messages}


ROWS = [conversation(number, 1 + number % 4) for number in range(60)]
PAIRS = [{"prompt": f"ask {n}:", "chosen": f" yes {n}", "rejected": " no" * (1 + n % 5)} for n in range(40)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    return tmp_path


def spec(folder: Path, *settings: str, objective: str = "sft") -> RunSpec:
    name = "pairs" if objective == "dpo" else "rows"
    return load(
        SPEC,
        f"training.objective={objective}",
        f"data.source={folder}/{name}.jsonl",
        "data.tokenizer.vocab_size=300",
        "data.validation_split=0.1",
        f"model.seq_len={LENGTH}",
        *settings,
    )


def opened(given: RunSpec, root: Path) -> tuple[RowsInfo, RowSequences, RowSequences]:
    info, train, validation = open_data_of(given, prepare_rows(given, root))
    assert isinstance(info, RowsInfo)
    assert isinstance(train, RowSequences)
    assert isinstance(validation, RowSequences)
    return info, train, validation


def documents(*splits: RowSequences) -> Counter[tuple[int, ...]]:
    """Return the tokens of every document, as those with a label and the first one show them."""
    found: list[tuple[int, ...]] = []
    for split in splits:
        ends = [0, *split.document_ends.tolist()]
        found += [tuple(split.tokens[a:b].tolist()) for a, b in pairwise(ends)]
    return Counter(found)


def test_packed_rows_hold_the_documents_of_unpacked_ones_and_fewer_sequences(folder: Path) -> None:
    plain, *unpacked = opened(spec(folder, "model.seq_len=100"), folder / "runs")
    info, *packed = opened(spec(folder, "model.seq_len=100", "data.packing=best_fit"), folder / "runs")
    assert documents(*packed) == documents(*unpacked)
    assert info.targets == plain.targets == sum(int((split.weights > 0).sum()) for split in packed)
    assert len(packed[0]) < len(unpacked[0]) == plain.train_documents
    read = packed[0].read(range(len(packed[0])))
    assert read.documents is not None
    assert read.positions is not None
    assert read.documents.max() > 0
    starts = (read.positions == 0) & (read.documents >= 0)
    assert starts.sum() == info.train_documents
    assert float(packed[0].totals.sum()) == (read.labels != NOT_COUNTED).sum()


@pytest.mark.parametrize(("rule", "state"), [("drop", "too_long"), ("keep_start", "truncated")])
def test_what_becomes_of_a_row_over_the_length_is_shown_beside_it(folder: Path, rule: str, state: str) -> None:
    lines = [json.dumps(conversation(0, turns)) for turns in (1, 4, 1)]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    shown = spec(folder, f"data.truncation={rule}", "data.packing=none", "model.seq_len=64")
    (folder / "spec.json").write_text(shown.model_dump_json(by_alias=True))
    answer = show.run_command([str(folder / "spec.json"), str(folder / "runs"), "1", "3", ""])
    assert [row["state"] for row in answer["rows"]] == ["whole", state, "whole"]
    assert answer["counted"][state] == 1


def test_best_fit_split_keeps_tokens_that_truncation_loses(folder: Path) -> None:
    info, *packed = opened(spec(folder, "data.packing=best_fit_split"), folder / "runs")
    cut, *unpacked = opened(spec(folder), folder / "runs")
    assert info.rows_truncated == 0
    assert cut.rows_truncated > 0
    assert sum(len(split.tokens) for split in packed) > sum(len(split.tokens) for split in unpacked)
    for split in packed:
        assert np.diff([0, *split.document_ends[split.row_ends - 1]]).max() <= LENGTH


def row_lengths(split: RowSequences) -> list[int]:
    return np.diff([0, *split.document_ends[split.row_ends - 1].tolist()]).tolist()


def test_rows_are_truncated_at_their_end_or_beginning_or_left_out(folder: Path) -> None:
    whole, train, _ = opened(spec(folder, "model.seq_len=200", "data.validation_split=0"), folder / "runs")
    long = sum(length > LENGTH for length in row_lengths(train))
    assert 0 < long < len(train)
    assert whole.rows_truncated == 0
    found = {}
    for rule in ("keep_start", "keep_end", "drop"):
        info, short, _ = opened(spec(folder, "data.validation_split=0", f"data.truncation={rule}"), folder / "runs")
        found[rule] = short
        assert max(row_lengths(short)) <= LENGTH
        assert info.rows_read == len(ROWS) == len(short) + info.rows_without_target + info.rows_too_long
        assert (info.rows_truncated, info.rows_too_long)[rule == "drop"] == long - info.rows_without_target
    for row in range(len(train)):
        tokens = train.tokens[train._start(row) : train.document_ends[row]].tolist()
        for rule, part in (("keep_start", slice(LENGTH)), ("keep_end", slice(-LENGTH, None))):
            assert tuple(tokens[part]) in documents(found[rule])
    with pytest.raises(UsageError, match=r"rows.jsonl:\d+: the row has \d+ tokens and model.seq_len is 24"):
        prepare_rows(spec(folder, "data.truncation=refuse"), folder / "runs")


def test_rows_without_a_token_in_the_loss_are_left_out_and_counted(folder: Path) -> None:
    rows = [conversation(1), {"messages": [{"role": "user", "content": "ask"}]}, conversation(2)]
    rows.append({"messages": [{"role": "user", "content": "ask " * 40}, {"role": "assistant", "content": "answer"}]})
    rows.append({**conversation(3), "weight": 0})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    info, train, validation = opened(spec(folder), folder / "runs")
    assert (info.rows_read, info.rows_without_target, len(train) + len(validation)) == (5, 3, 2)
    (folder / "rows.jsonl").write_text(json.dumps(rows[1]) + "\n")
    with pytest.raises(UsageError, match=r"no row of .* has a token in the loss: 1 rows, 1 of them"):
        prepare_rows(spec(folder), folder / "runs")


def test_rows_that_cannot_be_used_are_among_those_read_and_not_among_those_of_a_plan(folder: Path) -> None:
    lines = [json.dumps(conversation(number)) for number in range(4)]
    (folder / "rows.jsonl").write_text("\n".join([*lines, "no JSON", json.dumps({"messages": []})]))
    skips = spec(folder, "data.on_bad=skip", "data.packing=best_fit")
    info, *_ = opened(skips, folder / "runs")
    assert (info.rows_read, info.rows_unusable) == (6, 2)
    assert left_out(info)[0].startswith("of 6 rows ")
    assert prepared_size(asdict(info), "sft", LENGTH).rows == 4
    (folder / "spec.json").write_text(skips.model_dump_json(by_alias=True))
    answer = show.run_command([str(folder / "spec.json"), str(folder / "runs"), "1", "3", ""])
    assert (answer["counted"]["rows"], answer["counted"]["unusable"]) == (6, 2)


def test_weights_of_rows_and_messages_multiply(folder: Path) -> None:
    row = conversation(0, 2)
    row["messages"][1]["weight"] = 0.5
    (folder / "rows.jsonl").write_text(json.dumps({**row, "weight": 3}) + "\n")
    info, train, _ = opened(spec(folder, "data.validation_split=0", "model.seq_len=200"), folder / "runs")
    read = train.read([0])
    assert info.weighted
    assert read.weights is not None
    assert sorted(set(read.weights[0].tolist())) == [0, 1.5, 3]
    assert train.total_weight([0]) == read.weights.sum()


def test_pairs_keep_both_answers_side_by_side(folder: Path) -> None:
    given = spec(folder, objective="dpo")
    info, train, validation = opened(given, folder / "runs")
    assert len(train) + len(validation) == len(PAIRS) == (info.train_rows + info.validation_rows) // 2
    plain = tokenizers.Tokenizer.from_file(str(rows_folder(given, folder / "runs") / "tokenizer.json"))
    asked = {row["prompt"]: (row["chosen"], row["rejected"]) for row in PAIRS}
    for number in range(len(train)):
        labels = train.read([number]).labels
        texts = [plain.decode([t for t in row if t >= 0], skip_special_tokens=False) for row in labels.tolist()]
        tokens = train.read([number]).tokens
        prompt = plain.decode(tokens[0].tolist()).partition(":")[0] + ":"
        assert tuple(text.removesuffix("<|im_end|>") for text in texts) == asked[prompt]


SETTINGS = {
    "model.seq_len=25": True,
    "data.format=messages": True,
    "data.fields.tools=functions": True,
    "data.chat_template_date=2025-01-01": True,
    "data.loss_on=last_assistant": True,
    "data.truncation=keep_end": True,
    "data.packing=best_fit": True,
    "data.validation_split=0.2": True,
    "data.tokenizer.vocab_size=301": True,
    "training.seed=7": False,
    "training.global_batch_size=2": False,
    "data.skip=[[1, 2]]": False,
}


def test_the_folder_depends_on_what_changes_the_rows_and_on_nothing_else(folder: Path) -> None:
    usual = rows_folder(spec(folder), folder / "runs")
    for setting, changes in SETTINGS.items():
        assert (rows_folder(spec(folder, setting), folder / "runs") != usual) is changes, setting
    template = folder / "chat.jinja"
    with_template = spec(folder, f"data.chat_template={template}")
    seen = set()
    for text in ("{{ messages[0].content }}", "{{ messages[-1].content }}"):
        template.write_text(text)
        seen.add(rows_folder(with_template, folder / "runs"))
    assert len(seen | {usual}) == 3
    (folder / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    assert rows_folder(spec(folder), folder / "runs") != usual


def test_jsonl_json_and_parquet_give_the_same_rows(folder: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (folder / "rows.json").write_text(json.dumps(ROWS))
    parquet.write_table(arrow.Table.from_pylist(ROWS), folder / "rows.parquet")
    prints = {
        opened(spec(folder, f"data.source={folder}/rows.{kind}"), folder / kind)[0].fingerprint
        for kind in ("jsonl", "json", "parquet")
    }
    assert len(prints) == 1


def test_rows_that_change_while_they_are_prepared_are_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def append_a_row(*_: object) -> None:
        with (folder / "rows.jsonl").open("a") as file:
            file.write(json.dumps(conversation(99)))

    before = rows_folder(spec(folder), folder / "runs")
    monkeypatch.setattr(prepared, "build_rows", append_a_row)
    with pytest.raises(UsageError, match=r"rows\.jsonl has changed while it was prepared"):
        prepare_rows(spec(folder), folder / "runs")
    assert not before.exists()


def test_json_text_and_maps_of_parquet_are_read_as_objects(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    chats = [row["messages"] for row in ROWS]
    texts = arrow.array([[json.dumps(message) for message in chat] for chat in chats])
    as_map = arrow.map_(arrow.string(), arrow.string())
    columns = {
        "structs": chats,
        "json": texts.cast(arrow.list_(arrow.json_())),  # as datasets 5 stores values of different forms
        "maps": arrow.array([[[*message.items()] for message in chat] for chat in chats], arrow.list_(as_map)),
    }
    parquet.write_table(arrow.table(columns), tmp_path / "rows.parquet")
    read = [row.content for row in rows_in(tmp_path / "rows.parquet", Tally())]
    assert read == [dict.fromkeys(columns, chat) for chat in chats]


def test_a_row_that_cannot_be_used_is_named_with_its_file_and_line(folder: Path) -> None:
    with (folder / "rows.jsonl").open("a") as file:
        file.write('\n{"messages": [{"role": "user", "content": 7}]}\n')
    with pytest.raises(UsageError, match=r"rows.jsonl:62: message 0 of the column messages must have a role"):
        prepare_rows(spec(folder), folder / "runs")


def test_rows_without_turns_have_no_last_one(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"prompt": "a b", "completion": " c"}\n' * 20)
    with pytest.raises(UsageError, match=r"the rows have the format prompt_completion, which has no turns"):
        prepare_rows(spec(folder, "data.loss_on=last_assistant"), folder / "runs")


def test_prepared_rows_are_a_source_for_the_same_length_and_objective_only(folder: Path) -> None:
    first = prepare_rows(spec(folder), folder / "runs")
    again = spec(folder, f"data.source={first}")
    assert prepare_rows(again, folder / "other") == first
    assert open_data_of(again, first)[0].fingerprint == open_data_of(spec(folder), first)[0].fingerprint
    with pytest.raises(UsageError, match=r"holds rows of 24 tokens and model.seq_len is 32"):
        open_data_of(spec(folder, f"data.source={first}", "model.seq_len=32"), first)
    with pytest.raises(UsageError, match=r"holds prepared rows, on which data.loss_on = all has no effect"):
        open_data_of(spec(folder, f"data.source={first}", "data.loss_on=all"), first)
    begun = spec(folder, f"data.source={first}", "data.loss_on=all")
    assert open_data_of(begun, first, begun=True), "a run that has trained keeps its rows"
    (folder / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    template = f"data.chat_template={folder}/chat.jinja"
    with pytest.raises(UsageError, match=r"holds prepared rows, on which data.chat_template = .* has no effect"):
        open_data_of(spec(folder, f"data.source={first}", template), first)
    settings = (template, "data.loss_on=all", "data.fields.weight=importance")
    made = prepare_rows(spec(folder, *settings), folder / "runs")
    assert open_data_of(spec(folder, f"data.source={made}", *settings), made)
    drops = prepare_rows(spec(folder, "data.truncation=drop"), folder / "runs")
    assert open_data_of(spec(folder, f"data.source={drops}", "data.truncation=drop"), drops)
    with pytest.raises(UsageError, match=r"holds rows for sft and training.objective is dpo"):
        open_data_of(spec(folder, objective="dpo"), first)
    with pytest.raises(UsageError, match=r"holds rows for sft and training.objective is causal_lm"):
        open_data_of(load(SPEC), first)
    (folder / "a.jsonl").write_text('{"text": "once upon a time"}\n' * 50)
    text = load(SPEC, f"data.source={folder}/a.jsonl", "data.tokenizer.vocab_size=300")
    with pytest.raises(UsageError, match=r"holds text and training.objective is sft"):
        open_data_of(spec(folder), prepared_text(text.data, folder / "runs"))


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "train.bin": lambda content: bytes([content[0] ^ 1]) + content[1:],
    "train.weights.bin": lambda content: bytes([content[-1] ^ 1]) + content[1:],
    "train.ends.bin": lambda content: bytes([content[0] ^ 1]) + content[1:],
    "train.rows.bin": lambda content: content[:-8],
    "train.totals.bin": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "validation.weights.bin.blake2b": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "dataset.json": lambda content: content.replace(b'"packing": "none"', b'"packing": "best_fit"'),
}


def read_all(given: RunSpec, folder: Path) -> None:
    train = open_data_of(given, folder)[1]
    assert isinstance(train, RowSequences)
    train.read(range(len(train)))


def test_any_change_of_a_file_is_found_before_a_token_of_it_is_used(folder: Path) -> None:
    given = spec(folder)
    whole = prepare_rows(given, folder / "runs")
    for number, (name, change) in enumerate(DAMAGES.items()):
        damaged = folder / str(number)
        shutil.copytree(whole, damaged)
        content = (damaged / name).read_bytes()
        assert change(content) != content
        (damaged / name).write_bytes(change(content))
        with pytest.raises(CorruptDataError):
            read_all(given, damaged)


@pytest.mark.parametrize("step", [20, pytest.param(1, marks=pytest.mark.long)])
def test_the_embedded_questions_and_answers_are_the_same_each_time(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``step``: the test reads one of so many files of the standard library."""
    files = CorpusFiles(find_files(PYTHON_STDLIB).files[::step], {})
    monkeypatch.setattr(row_source, "find_files", lambda _: files)
    read = row_source._documented.__wrapped__
    monkeypatch.setattr(row_source, "_documented", read)  # not the cached answer
    rows = [*docstring_rows(pairs=False)]
    assert len(rows) > 1000 / step
    assert rows == [*docstring_rows(pairs=False)]
    parsed = [parse_row(row, format_of(row, "sft", FieldsSpec()), FieldsSpec()) for _, row in rows]
    assert all(isinstance(row.example, Conversation) for row in parsed)
    pairs = [row for _, row in docstring_rows(pairs=True)]
    assert len(pairs) > 200 / step
    assert all(row["chosen"] != row["rejected"] for row in pairs)
    assert {format_of(row, "dpo", FieldsSpec()) for row in pairs} == {"preference"}


def test_a_column_of_nulls_does_not_decide_the_format() -> None:
    """As in a table that unites two data sets: each has the columns of the other, without values."""
    row = {"messages": None, "prompt": "2 + 2", "completion": "4"}
    assert format_of(row, "sft", FieldsSpec()) == "prompt_completion"
    assert format_of(dict.fromkeys(row), "sft", FieldsSpec()) == "messages"


def test_the_trained_tokenizer_is_written_with_its_chat_template(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    given = spec(folder, "data.validation_split=0", "model.seq_len=200")
    made = prepare_rows(given, folder / "runs")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(made)
    train = open_data_of(given, made)[1]
    assert isinstance(train, RowSequences)
    expected = Counter(
        tuple(theirs.apply_chat_template(row["messages"], tokenize=True, return_dict=False)) for row in ROWS
    )
    assert documents(train) == expected
    assert theirs.eos_token == "<|im_end|>"


DAMAGED_BY_OTHERS: dict[str, Callable[[Path], object]] = {
    "junk in dataset.json": lambda folder: (folder / "dataset.json").write_text("{junk"),
    "an unknown key": lambda folder: (folder / "dataset.json").write_text('{"schema": "x"}'),
    "hashes of another size": lambda folder: os.truncate(folder / "train.bin.blake2b", 1 << 40),
    "a file that was cut": lambda folder: os.truncate(folder / "train.bin", 2),
}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
@pytest.mark.parametrize("damage", DAMAGED_BY_OTHERS)
def test_damaged_rows_of_another_user_are_prepared_again(folder: Path, damage: str) -> None:
    given = spec(folder)
    theirs = prepare_rows(given, folder)
    for path in (theirs, *theirs.iterdir()):
        os.chown(path, 61_002, 61_002)
    assert rows_folder(given, folder) == theirs
    DAMAGED_BY_OTHERS[damage](theirs)
    own = prepare_rows(given, folder)
    assert own == theirs.with_name(f"{theirs.name}-0")
    open_data_of(given, own)
