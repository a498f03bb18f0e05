"""Prepared text of every version is opened as the same sequences, and every change of its files is found."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from scaletrain_cli.data.chunk_hashes import CHUNK_BYTES, CheckedFile, CorruptDataError, HashedFile
from scaletrain_cli.engine.data.dataset import DatasetInfo, open_dataset, open_source_dataset, seal_of
from scaletrain_cli.errors import UsageError
from scaletrain_cli.rundir.documents import write_document
from scaletrain_cli.spec import DataSpec
from tests.prepared_text import prepared_text

END = 0


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A dataset as version 3 wrote it: documents of chance length, each with the token that ends it."""
    folder, draw = tmp_path / "dataset", np.random.default_rng(1)
    folder.mkdir()
    counts: dict[str, int] = {}
    hashes = []
    for split, documents in (("train", 80), ("validation", 20)):
        lengths = draw.integers(20, 200, documents)
        tokens = [np.append(draw.integers(1, 400, length), END) for length in lengths]
        ends = np.cumsum([len(each) for each in tokens]) - 1
        counts |= {f"{split}_tokens": int(ends[-1]) + 1, f"{split}_documents": documents}
        for name, content in ((split, np.concatenate(tokens).astype("uint16")), (f"{split}.ends", ends)):
            with HashedFile(folder / f"{name}.bin") as file:
                file.write(content.tobytes())
                hashes.append(file.finish())
    info = DatasetInfo("scaletrain.dataset/v3", "f" * 64, "uint16", 400, 100, **counts)
    write_document(folder / "dataset.json", asdict(replace(info, seal=seal_of(info, hashes))))
    return folder


def test_sequences_do_not_overlap_and_labels_are_the_next_tokens(dataset: Path) -> None:
    _, train, _ = open_dataset(dataset, 16)
    rows = train.rows([0, 1])
    flat = np.fromfile(dataset / "train.bin", dtype="uint16")[:33]
    assert rows.shape == (2, 17)
    assert rows[0].tolist() == flat[:17].tolist()
    assert rows[1].tolist() == flat[16:33].tolist()


def test_document_ends_are_where_the_end_tokens_are(dataset: Path) -> None:
    _, *splits = open_dataset(dataset, 16)
    assert len(splits) == 2
    for split in splits:
        assert split.document_ends.tolist() == np.flatnonzero(split.tokens == END).tolist()
        found = split.document_ends_within(1, 3)
        assert found.tolist() == np.flatnonzero(split.tokens[16:48] == END).tolist()


def test_too_little_text_is_an_error(dataset: Path) -> None:
    with pytest.raises(UsageError, match="fewer than one sequence"):
        open_dataset(dataset, 10**6)


def test_a_truncated_or_missing_file_is_reported_with_its_path(dataset: Path) -> None:
    content = (dataset / "train.bin").read_bytes()
    (dataset / "train.bin").write_bytes(content[: len(content) // 2])
    with pytest.raises(CorruptDataError, match=r"train\.bin: \d+ bytes instead of"):
        open_dataset(dataset, 16)
    (dataset / "train.bin").write_bytes(content)
    (dataset / "train.ends.bin").unlink()
    with pytest.raises(CorruptDataError, match=r"train\.ends\.bin: No such file"):
        open_dataset(dataset, 16)


def change(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def swap(folder: Path, first: str, second: str) -> None:
    contents = (folder / first).read_bytes(), (folder / second).read_bytes()
    (folder / first).write_bytes(contents[1])
    (folder / second).write_bytes(contents[0])


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def edit(folder: Path, name: str, value: object) -> None:
    path = folder / "dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))


def read_all(folder: Path) -> None:
    _, *splits = open_dataset(folder, 16)
    for split in splits:
        split.rows(list(range(len(split))))


ENDINGS = ("bin", "bin.blake2b", "ends.bin", "ends.bin.blake2b")
HARM: dict[str, Callable[[Path], object]] = {
    "a byte of the tokens": lambda folder: change(folder / "train.bin", 70),
    "a byte of the validation tokens": lambda folder: change(folder / "validation.bin", 5),
    "a byte of the document ends": lambda folder: change(folder / "train.ends.bin", 9),
    "all tokens": lambda folder: (folder / "train.bin").write_bytes(bytes((folder / "train.bin").stat().st_size)),
    "a byte more": lambda folder: (folder / "train.bin").write_bytes((folder / "train.bin").read_bytes() + b"x"),
    "fewer tokens": lambda folder: cut(folder / "train.bin", 1000),
    "the files of two splits": lambda folder: swap(folder, "train.bin", "validation.bin"),
    "the files and hashes of two splits": lambda folder: [
        swap(folder, f"train.{ending}", f"validation.{ending}") for ending in ENDINGS
    ],
    "the hashes": lambda folder: change(folder / "train.bin.blake2b", 3),
    "no hashes": lambda folder: (folder / "train.bin.blake2b").unlink(),
    "fewer hashes": lambda folder: cut(folder / "train.bin.blake2b", 0),
    "the fingerprint": lambda folder: edit(folder, "fingerprint", "0" * 64),
    "the vocabulary": lambda folder: edit(folder, "vocab_size", 401),
    "the type of a number": lambda folder: edit(folder, "train_tokens", "many"),
    "the type of the tokens": lambda folder: edit(folder, "dtype", "float64"),
    "the seal": lambda folder: edit(folder, "seal", ""),
}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM.keys())
def test_every_change_of_a_prepared_dataset_is_found_before_it_is_used(
    harm: Callable[[Path], object], dataset: Path
) -> None:
    read_all(dataset)
    harm(dataset)
    with pytest.raises(CorruptDataError, match=r"train|validation|dataset\.json") as caught:
        read_all(dataset)
    assert caught.value.exit_code == 93
    assert str(caught.value.evidence["file"]).startswith(str(dataset))


def test_only_the_chunks_that_are_read_are_compared_and_each_once(tmp_path: Path) -> None:
    size = 5 * CHUNK_BYTES + 77
    content = np.frombuffer(random.Random(1).randbytes(size), dtype=np.uint8).copy()
    with HashedFile(tmp_path / "data") as file:
        for start in range(0, size, 99_991):
            file.write(content[start : start + 99_991].tobytes())
        file.finish()
    assert (tmp_path / "data").read_bytes() == content.tobytes()
    assert len((tmp_path / "data.blake2b").read_bytes()) == 6 * 16
    checked = CheckedFile(tmp_path / "data", content)
    for share in range(3):
        checked.check_share(share, 3)
    checked = CheckedFile(tmp_path / "data", content)
    checked.check(CHUNK_BYTES, 2 * CHUNK_BYTES)
    content[CHUNK_BYTES] ^= 1
    content[5 * CHUNK_BYTES] ^= 1
    checked.check(CHUNK_BYTES, 3 * CHUNK_BYTES - 1)  # the second chunk was compared before
    with pytest.raises(CorruptDataError, match=r"chunk 5 \(bytes 655360 to 655437\)"):
        checked.check(4 * CHUNK_BYTES, size)
    with pytest.raises(CorruptDataError, match="chunk 1 "):
        CheckedFile(tmp_path / "data", content).check(CHUNK_BYTES - 1, CHUNK_BYTES + 1)


def test_a_dataset_without_hashes_is_opened_as_unverified(dataset: Path) -> None:
    for path in dataset.glob("*.blake2b"):
        path.unlink()
    edit(dataset, "schema", "scaletrain.dataset/v2")
    edit(dataset, "seal", "")
    info, train, _ = open_dataset(dataset, 16)
    assert not info.is_verified
    assert len(train.rows([0, 1])) == 2
    edit(dataset, "schema", "scaletrain.dataset/v9")
    with pytest.raises(UsageError, match="v9"):
        open_dataset(dataset, 16)


def test_a_part_of_the_sequences_is_read_as_they_are(dataset: Path) -> None:
    _, train, _ = open_dataset(dataset, 16)
    rest, held_back = train.part(0, len(train) - 3), train.part(len(train) - 3, 3)
    assert (len(rest), len(held_back)) == (len(train) - 3, 3)
    assert held_back.rows([0, 2]).tolist() == train.rows([len(train) - 3, len(train) - 1]).tolist()
    assert held_back.document_ends_within(1, 3).tolist() == (
        train.document_ends_within(len(train) - 2, len(train)).tolist()
    )


def test_values_of_dataset_json_that_were_edited_are_found_in_shards_too(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "one two {number}"}}\n' for number in range(300)))
    data = {"source": str(tmp_path / "a.jsonl"), "tokenizer": {"kind": "bpe", "vocab_size": 300}}
    folder = prepared_text(DataSpec.model_validate(data), tmp_path / "runs")
    info, train, _ = open_source_dataset(folder, 16)
    assert (info.documents, len(train) > 10, len(info.seal)) == (300, True, 64)
    edit(folder, "fingerprint", "0" * 64)
    with pytest.raises(CorruptDataError, match=r"dataset\.json") as caught:
        open_source_dataset(folder, 16)
    assert caught.value.exit_code == 93
