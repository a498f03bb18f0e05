"""Sources that are already tokenized, through the pipeline: against the tokens that were written."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from scaletrain_cli.data.pipeline.chain import loaded_tokenizer, token_documents
from scaletrain_cli.data.pipeline.prepare import Preparation, prepare
from scaletrain_cli.data.pipeline.shards import split_of
from scaletrain_cli.data.pipeline.tasks import Source, tasks_of
from scaletrain_cli.data.sources import token_formats as reader
from scaletrain_cli.data.sources.records import SourceFile, TokenRecord, local_file
from scaletrain_cli.errors import UsageError
from scaletrain_cli.spec.preparation import DuplicatesSpec, NormalizationSpec
from tests.data.sources.test_formats import megatron as write_megatron

END, SIZE = 3, 500
DRAW = np.random.default_rng(5)
DOCUMENTS = [DRAW.integers(4, SIZE, size).tolist() for size in [1, 2, 900, 0, 17, *DRAW.integers(1, 60, 60).tolist()]]
Tokens = Sequence[Sequence[int]]


@pytest.fixture(scope="module")
def tokenizer() -> str:
    """Return a tokenizer of words t0, t1 and so on, whose id 3 ends documents."""
    words = {f"t{number}": number for number in range(SIZE) if number != END} | {"</s>": END}
    return str(Tokenizer(models.WordLevel(words, unk_token="t0")).to_str())


def source(path: Path, kind: str, name: str = "web") -> Source:
    content = hashlib.sha256(path.read_bytes()).hexdigest()
    return Source(name, (SourceFile(str(path), path.stat().st_size, kind),), content)


def megatron(folder: Path, documents: Tokens) -> Path:
    """Write documents of two sequences each."""
    folder.mkdir(exist_ok=True)
    return write_megatron(folder, [[list(tokens[:5]), list(tokens[5:])] for tokens in documents], 8, "<u2")


def array(folder: Path, documents: Tokens, kind: str, last_end: bool) -> Path:
    folder.mkdir(exist_ok=True)
    tokens = [token for document in documents for token in (*document, END)]
    path = folder / "tokens.npy"
    if kind == "npy":
        np.save(path, np.array(tokens if last_end else tokens[:-1], "int32"))
    else:
        np.array(tokens if last_end else tokens[:-1], kind.removeprefix("raw_")).tofile(path)
    return path


def written(dataset: Path, shards: int) -> dict[str, list[int]]:
    """Return the tokens of each split, and the documents that the positions of their ends say."""
    found = {}
    for split in ("train", "validation"):
        folders = [dataset / f"{number:06d}" for number in range(shards)]
        found[split] = np.concatenate([np.fromfile(folder / f"{split}.bin", "uint16") for folder in folders]).tolist()
        ends = sum(len(np.fromfile(folder / f"{split}.ends.bin", "int64")) for folder in folders)
        assert ends == found[split].count(END)
    return found


def expected(documents: Tokens) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {"train": [], "validation": []}
    for tokens in documents:
        if tokens:
            whole = [*tokens, END]
            found[split_of(struct.pack(f"<{len(whole)}I", *whole), 0.2)] += whole
    return found


def prepared(given: Source, tokenizer: Any, folder: Path, **more: Any) -> tuple[Path, dict[str, Any]]:
    done = prepare(Preparation((given,), (), tokenizer, 0.2, **more), folder, 1, lambda *_: None)[given.name]
    return done, json.loads((done / "dataset.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("with_ends", [True, False])
def test_a_megatron_set_keeps_its_documents(with_ends: bool, tokenizer: str, tmp_path: Path) -> None:
    documents = [[*tokens, END] if with_ends else tokens for tokens in DOCUMENTS]
    given = source(megatron(tmp_path / "set", documents), "megatron")
    done, document = prepared(given, tokenizer, tmp_path / "data", task_bytes=400)
    assert len(document["shards"]) > 3
    assert written(done, len(document["shards"])) == expected(DOCUMENTS)
    assert document["tokenizer"]["vocab_size"] == SIZE
    assert Tokenizer.from_file(str(done / "tokenizer.json")).id_to_token(END) == "</s>"


@pytest.mark.parametrize("kind", ["npy", "raw_uint16", "raw_uint32"])
def test_an_array_is_cut_at_its_end_of_text_tokens_by_tasks_of_any_size(
    kind: str, tokenizer: str, tmp_path: Path
) -> None:
    settings, _ = loaded_tokenizer(tokenizer)
    for task_bytes, last_end in ((4, True), (30, False), (1000, True), (1 << 20, False)):
        given = source(array(tmp_path / "set", DOCUMENTS, kind, last_end), kind)
        parts = [part for task in tasks_of(given, task_bytes) for part in task.parts]
        records = [record for part in parts for record in token_documents(part, settings)]
        found = [record.tokens.tolist() for record in records if isinstance(record, TokenRecord)]
        assert found[:-1] == [[*tokens, END] for tokens in DOCUMENTS if tokens][:-1]
        assert found[-1] == [*DOCUMENTS[-1], END][: len(DOCUMENTS[-1]) + last_end]
    done, document = prepared(given, tokenizer, tmp_path / "data", task_bytes=1000)
    assert len(document["shards"]) > 1
    assert written(done, len(document["shards"])) == expected(DOCUMENTS)


def test_steps_on_text_are_refused_unless_they_leave_the_tokens_out(tokenizer: str, tmp_path: Path) -> None:
    tokens = source(megatron(tmp_path, DOCUMENTS), "megatron")
    (tmp_path / "a.jsonl").write_text('{"text": "t7 t8"}\n', encoding="utf-8")
    text = source(tmp_path / "a.jsonl", "jsonl", "text")
    for section in (NormalizationSpec(step="normalization"), DuplicatesSpec(step="duplicates")):
        with pytest.raises(UsageError, match=f"step {section.step} needs text, and the source web holds tokens"):
            prepare(Preparation((tokens, text), (section,), tokenizer, 0.2), tmp_path / "data", 1, lambda *_: None)
        only = section.model_copy(update={"only": ("text",)})
        done = prepare(Preparation((tokens, text), (only,), tokenizer, 0.2), tmp_path / "data", 1, lambda *_: None)
        assert written(done["web"], 1) == expected(DOCUMENTS)


def test_tokens_that_do_not_fit_the_tokenizer_are_named(tokenizer: str, tmp_path: Path) -> None:
    outside = source(megatron(tmp_path / "a", [[5, 6], [7, SIZE]]), "megatron")
    with pytest.raises(UsageError, match=r"set.idx, document 2: has the token 500, and the tokenizer has 500 tokens"):
        prepared(outside, tokenizer, tmp_path / "data")
    _, document = prepared(outside, tokenizer, tmp_path / "data", skips_bad=True)
    assert document["train_tokens"] + document["validation_tokens"] == 3
    with pytest.raises(UsageError, match="no tokenizer can be trained"):
        prepared(outside, "", tmp_path / "data", vocab_size=300)
    (tmp_path / "b.jsonl").write_text('{"text": "t7"}\n', encoding="utf-8")
    both = Source("web", (*outside.files, *source(tmp_path / "b.jsonl", "jsonl").files), "both")
    with pytest.raises(UsageError, match=r"holds tokens in .*set\.idx and text in .*b\.jsonl"):
        prepared(both, tokenizer, tmp_path / "data")


def test_an_array_whose_documents_do_not_end_is_refused(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scaletrain_cli.data.sources.token_formats._TOKENS_AT_ONCE", 50)
    monkeypatch.setattr("scaletrain_cli.data.pipeline.chain.MAX_DOCUMENT_TOKENS", 500)
    path = array(tmp_path, DOCUMENTS, "raw_uint16", last_end=True)
    with pytest.raises(UsageError, match=r"tokens\.npy, token 6: has no end-of-text token \(3\) within 500 tokens"):
        prepared(source(path, "raw_uint16"), tokenizer, tmp_path / "data")
    done, document = prepared(source(path, "raw_uint16"), tokenizer, tmp_path / "data", skips_bad=True)
    short = [tokens for tokens in DOCUMENTS if len(tokens) < 500]
    assert written(done, len(document["shards"])) == expected(short)


def test_the_index_of_a_large_set_is_read_once_and_again_when_the_set_has_changed(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[SourceFile] = []
    index_of = reader._index_of
    monkeypatch.setattr(reader, "_index_of", lambda file: read.append(file) or index_of(file))
    for number, documents in enumerate((DOCUMENTS, DOCUMENTS[:50]), start=1):
        path = megatron(tmp_path / "set", documents)
        given = Source("web", (local_file(path, "megatron"),), str(number))
        done, document = prepared(given, tokenizer, tmp_path / "data", task_bytes=400)
        assert written(done, len(document["shards"])) == expected(documents)
        assert len(read) == number
