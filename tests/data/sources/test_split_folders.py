"""A folder in the layout of a data set on the hub is read as by the datasets library: only its train split."""

import json
from collections import Counter
from pathlib import Path

import pytest

from scaletrain_cli.data.sources import listing
from scaletrain_cli.data.sources.listing import source_files
from scaletrain_cli.data.sources.places import RemoteFile
from scaletrain_cli.hub.cache import HubFile, Listing
from scaletrain_cli.hub.reference import parse_reference
from scaletrain_cli.launch.resource_checks.checks import check_files
from scaletrain_cli.spec.corpus_files import ROW_FORMATS, find_files, find_text
from scaletrain_cli.spec.hub_files import HubUse, source_files_of
from scaletrain_cli.spec.sources import SourceSpec
from tests.spec.samples import load

# Files of a folder, and those that are read.
LAYOUTS = {
    "shards": (
        ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet"],
        2,
    ),
    "files": (["train.jsonl", "validation.jsonl", "test.jsonl"], 1),
    "folders": (["train/a.jsonl", "train/test-set.jsonl", "test/a.jsonl", "valid/b.jsonl"], 2),
    "words in names": (["chat-train.jsonl", "chat.dev.jsonl", "chat_eval.jsonl"], 1),
    "configurations": (["en/train.jsonl", "de/train.jsonl", "de/test.jsonl"], 2),
    "files of no split": (["train.jsonl", "test.jsonl", "labels.jsonl"], 1),
    "other words": (["trainable.jsonl", "contest.jsonl", "devices.jsonl"], 3),
    "no split": (["a.jsonl", "b.jsonl"], 2),
    "one split": (["train-1.jsonl", "train-2.jsonl"], 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_files_of_the_train_split_are_read_wherever_they_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets.data_files import DataFilesDict, get_data_patterns

    names, count = LAYOUTS[name]
    for file in names:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(json.dumps({"text": "a"}))
    patterns = get_data_patterns(str(tmp_path))
    theirs = {
        Path(path).relative_to(tmp_path).as_posix()
        for path in DataFilesDict.from_patterns(patterns, str(tmp_path))["train"]
    }
    assert len(theirs) == count

    def below(paths: object) -> set[str]:
        return {str(path).partition(f"{tmp_path}/")[2] for path in paths}  # type: ignore[attr-defined]

    section, left_out = SourceSpec(name="a", path=str(tmp_path)), Counter[str]()
    assert below(find_files(str(tmp_path), kinds=ROW_FORMATS).files) == theirs
    assert below(find_text(str(tmp_path)).files) == theirs
    assert below(file.path for file in source_files(section, left_out=left_out)) == theirs
    assert left_out.total() == len(names) - count

    store = [RemoteFile(f"s3://bucket/x/{file}", 1, "") for file in names]
    monkeypatch.setattr(listing, "list_files", lambda path, seconds: store)
    remote = source_files(SourceSpec(name="a", path="s3://bucket/x"), left_out=(there := Counter[str]()))
    assert {file.path.removeprefix("s3://bucket/x/") for file in remote} == theirs
    assert there == left_out

    for folder in ("", "folder"):
        text = "hf://datasets/org/name" + (f"@main/{folder}" if folder else "")
        files = tuple(HubFile(f"{folder}/{file}".lstrip("/"), 1) for file in (*names, ".gitattributes"))
        hub = Listing(parse_reference(text), "0" * 40, files)
        for kind in (None, "auto"):
            use = HubUse("data.source", text, "source", ROW_FORMATS, kind, one_split=True)
            found = source_files_of(use, hub, there := Counter())
            assert {file.path.removeprefix(folder).lstrip("/") for file in found} == theirs
            assert there == left_out
            assert len(
                source_files_of(HubUse("data.source", text, "source", ROW_FORMATS, kind), hub, Counter())
            ) == len(names)


def test_a_file_or_a_glob_that_is_named_is_read_whatever_its_split(tmp_path: Path) -> None:
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": "a"}))
    assert len(find_text("*.jsonl", tmp_path).files) == 2
    assert [path.name for path in find_text("test.jsonl", tmp_path).files] == ["test.jsonl"]
    assert [path.name for path in find_text(".", tmp_path, evaluation=True).files] == ["test.jsonl"], "of an evaluation"


def test_programs_and_prose_are_no_splits(tmp_path: Path) -> None:
    for name in ("train.py", "test.py", "model.py"):
        (tmp_path / name).write_text("a")
    assert len(find_text(str(tmp_path)).files) == 3


@pytest.mark.parametrize("objective", ["sft", "causal_lm"])
def test_what_is_left_out_is_said(objective: str, tmp_path: Path) -> None:
    row = {"text": "a" * 100} if objective == "causal_lm" else {"prompt": "a", "completion": "b"}
    for name in ("train.jsonl", "validation.jsonl", "test.jsonl"):
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    text = "schema: scaletrain/v1\nname: a\nmodel: {preset: gpt2, seq_len: 16}\n"
    text += f"data: {{source: {tmp_path}, tokenizer: {{vocab_size: 512}}}}\n"
    spec = load(f"{text}training: {{global_batch_size: 8, steps: 10, objective: {objective}}}\n")
    (note,) = [note for note in check_files(spec).warnings if note.code == "checks.files-not-read"]
    assert "1 of the test split, 1 of the validation split" in str(note)
