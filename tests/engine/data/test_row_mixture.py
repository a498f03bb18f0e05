"""Rows of several sources in one run, and rows that are for validation alone."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaletrain_cli.data.mixture import Stage
from scaletrain_cli.engine.data.batches import BatchReader, MicroBatch
from scaletrain_cli.engine.data.prepared import open_data_of, prepare_rows, run_command
from scaletrain_cli.engine.data.row_dataset import find_datasets, rows_folder
from scaletrain_cli.engine.data.rows import JoinedRows, RowSequences
from scaletrain_cli.engine.data.sample_order import SampleOrder
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.errors import SpecError, UsageError
from scaletrain_cli.plan import make_plan
from scaletrain_cli.spec import RunSpec
from tests.engine.data.test_row_dataset import conversation
from tests.spec.samples import SPEC, load
from tests.tokenizer_kinds import CHATML, tokenizer_json, write_tokenizer

FILES = {"chats": 40, "code": 12, "held": 9}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, (name, count) in enumerate(FILES.items()):
        rows: list[dict[str, Any]] = [conversation(100 * number + n, 1 + n % 2) for n in range(count)]
        if name == "code":
            rows = [row | {"weight": 0.5} for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    of_tokenizer = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    write_tokenizer(tmp_path, tokenizer_json("bytes", ("<|endoftext|>", "<|im_start|>", "<|im_end|>")), of_tokenizer)
    return tmp_path


def spec(folder: Path, *settings: str) -> RunSpec:
    tokenizer = f"data.tokenizer={{kind: file, path: {folder}/tokenizer.json}}"
    return load(SPEC, "training.objective=sft", "model.seq_len=64", tokenizer, *settings)


def mixed(folder: Path, *settings: str) -> RunSpec:
    sources = ", ".join(f"{{name: {name}, path: {folder}/{name}.jsonl, weight: 1}}" for name in ("chats", "code"))
    return spec(folder, "data.source=null", f"data.sources=[{sources}]", *settings)


def texts(rows: RowSequences) -> list[tuple[int, ...]]:
    return [tuple(rows.read([number]).tokens[0].tolist()) for number in range(len(rows))]


def test_rows_for_validation_are_validated_on_and_no_others(folder: Path) -> None:
    source = f"data.source={folder}/chats.jsonl"
    given = spec(folder, source, f"data.validation_source={folder}/held.jsonl")
    assert given.data.validation_split == 0
    _, train, validation = open_data_of(given, prepare_rows(given, folder / "runs"))
    assert (len(train), len(validation)) == (FILES["chats"], FILES["held"])
    held = spec(folder, f"data.source={folder}/held.jsonl", "data.validation_split=0.0")
    assert isinstance(validation, RowSequences)
    assert texts(validation) == texts(open_data_of(held, prepare_rows(held, folder / "runs"))[1])  # type: ignore[arg-type]
    assert rows_folder(given, folder / "runs") != rows_folder(spec(folder, source), folder / "runs")
    several = mixed(folder, f"data.sources.0.validation_path={folder}/held.jsonl", "data.validation_split=0.5")
    assert rows_folder(several.of_sources()["chats"], folder / "runs") == rows_folder(given, folder / "runs")
    assert several.of_sources()["code"].data.validation_split == 0.5


def test_a_folder_with_splits_may_be_both_the_source_and_the_rows_for_validation(folder: Path) -> None:
    splits = folder / "splits"
    splits.mkdir()
    for name, split in (("chats", "train"), ("held", "validation"), ("code", "test")):
        (splits / f"{split}.jsonl").write_bytes((folder / f"{name}.jsonl").read_bytes())
    given = spec(folder, f"data.source={splits}", f"data.validation_source={splits}")
    for _ in range(2):  # the second time with what is remembered of the files
        _, train, validation = open_data_of(given, prepare_rows(given, folder / "runs"))
        assert (len(train), len(validation)) == (FILES["chats"], FILES["held"])
    notes = {path.name: json.loads(path.read_text()) for path in (folder / "runs" / "datasets").glob(".content-*")}
    assert sorted(Path(name).name for note in notes.values() for name in note) == ["train.jsonl", "validation.jsonl"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("data.validation_source=v.jsonl", "data.validation_split=0.1"), "has no effect with validation_source"),
        (("data.sources.0.validation_path=v.jsonl", "training.objective=causal_lm"), "is for rows. For text set"),
        (("data.sources.1.format=jsonl",), "must be auto for rows"),
        (("data.sources.1.field=body",), "For rows set data.fields"),
        (("data.tokenizer={kind: bpe, vocab_size: 300}",), "is required with several sources of rows"),
        (("data.validation_source=v.jsonl",), "For data.sources set validation_path of each"),
    ],
)
def test_settings_of_sources_that_rows_do_not_have_are_refused(
    folder: Path, settings: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        mixed(folder, *settings)


def test_a_prepared_dataset_takes_no_other_rows_for_validation(folder: Path) -> None:
    made = prepare_rows(spec(folder, f"data.source={folder}/chats.jsonl"), folder / "runs")
    given = spec(folder, f"data.source={made}", f"data.validation_source={folder}/held.jsonl")
    with pytest.raises(UsageError, match="is a prepared dataset"):
        rows_folder(given, folder / "runs")


def test_each_source_of_rows_is_prepared_as_it_would_be_alone(folder: Path) -> None:
    given, runs = mixed(folder), folder / "runs"
    assert find_datasets(given, runs, {}) is None
    (folder / "spec.json").write_text(given.model_dump_json())
    prepared = run_command([str(folder / "spec.json"), str(runs)])
    assert prepared["documents"] == FILES["chats"] + FILES["code"]
    alone = {name: rows_folder(spec(folder, f"data.source={folder}/{name}.jsonl"), runs) for name in ("chats", "code")}
    assert find_datasets(given, runs, {}) == alone
    assert {each["name"]: Path(each["path"]) for each in prepared["sources"]} == alone


def test_a_batch_has_the_rows_of_its_sources_in_the_order_and_the_shares_of_the_mixture(folder: Path) -> None:
    given = mixed(folder, "training.global_batch_size=8", "data.validation_split=0.0")
    train: list[RowSequences] = []
    for alone in given.of_sources().values():
        rows = open_data_of(alone, prepare_rows(alone, folder / "runs"))[1]
        assert isinstance(rows, RowSequences)
        train.append(rows)
    joined, layout = JoinedRows.of(train), make_plan(given).layout
    order = SampleOrder(42, tuple(map(len, train)), (Stage(0, (0.75, 0.25)),))
    reader = BatchReader(joined, layout, Mesh(), 42, mask_document_starts=False, order=order)
    every = [row for rows in train for row in texts(rows)]
    counts, read = Counter[int](), Counter[tuple[int, ...]]()
    for number in range(1, 9):
        micro_batches: list[MicroBatch] = reader.batch(number).micro_batches()
        total = 0.0
        for micro in micro_batches:
            assert micro.sources is not None
            assert micro.weights is not None, "the rows of one source have a weight"
            for sample, source, tokens, labels, weights in zip(
                micro.samples.tolist(), micro.sources.tolist(), micro.tokens, micro.labels, micro.weights, strict=True
            ):
                assert tuple(tokens.tolist()) == every[order(sample)]
                assert set(weights[labels != -100].tolist()) == {0.5 if source else 1.0}
                assert not weights[labels == -100].any()
                total += float(weights.sum())
                counts[source] += 1
                read[tuple(tokens.tolist())] += 1
        assert micro_batches[0].divisor is not None
        assert float(micro_batches[0].divisor) == pytest.approx(total / len(micro_batches))
    assert counts == {0: 48, 1: 16}
    assert all(read[row] >= 1 for row in every), "each row is read before one is read twice more often"
    part = joined.part(30, 15)
    numbers = np.arange(30, 45)
    assert np.array_equal(part.read(range(15)).tokens, joined.read(numbers.tolist()).tokens)
