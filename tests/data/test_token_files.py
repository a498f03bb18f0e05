"""Tokens of many shards against their plain concatenation, and every kind of damage to them."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from scaletrain_cli.data import token_files
from scaletrain_cli.data.chunk_hashes import CorruptDataError, HashedFile
from scaletrain_cli.data.pipeline.prepare import Preparation, prepare
from scaletrain_cli.data.token_files import NumberFiles, open_source
from scaletrain_cli.errors import UsageError
from tests.data.pipeline.test_prepare import ignore, source, texts
from tests.data.pipeline.test_prepare import tokenizer as tokenizer


def files(folder: Path, sizes: list[int]) -> tuple[NumberFiles, np.ndarray]:
    draw = np.random.default_rng(1)
    parts = [draw.integers(0, 60_000, size).astype("uint16") for size in sizes]
    for number, part in enumerate(parts):
        with HashedFile(folder / str(number)) as file:
            file.write(part.tobytes())
            file.finish()
    return NumberFiles([folder / str(n) for n in range(len(sizes))], sizes, "uint16"), np.concatenate(parts)


@pytest.mark.parametrize("most_open", [64, 1])
def test_any_range_over_several_files_is_that_of_their_concatenation(
    most_open: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_files, "_MOST_OPEN_FILES", most_open)
    found, expected = files(tmp_path, [70_000, 0, 5, 200_000, 1])
    assert len(found) == len(expected)
    draw = random.Random(2)
    for _ in range(200):
        start = draw.randrange(len(expected))
        stop = min(len(expected), start + draw.choice([0, 1, 6, 4097, 150_000]))
        assert (found.read(start, stop) == expected[start:stop]).all()
    with pytest.raises(IndexError):
        found.read(0, len(expected) + 1)


def test_a_changed_byte_is_found_when_its_chunk_is_read_and_not_before(tmp_path: Path) -> None:
    found, expected = files(tmp_path, [10, 200_000])
    path = tmp_path / "1"
    content = bytearray(path.read_bytes())
    content[300_000] ^= 1
    path.write_bytes(content)
    assert (found.read(0, 1000) == expected[:1000]).all()
    with pytest.raises(CorruptDataError, match="chunk 2"):
        found.read(150_000, 150_010)


@pytest.fixture
def dataset(tokenizer: str, tmp_path: Path) -> Path:
    given = source(tmp_path, "web", texts(1, 200))
    return prepare(Preparation((given,), (), tokenizer, 0.2, task_bytes=10_000), tmp_path / "data", 1, ignore)["web"]


def test_a_prepared_source_opens_with_all_documents_of_all_shards(dataset: Path) -> None:
    document, splits = open_source(dataset)
    assert len(document["shards"]) > 3
    for split, found in splits.items():
        assert len(found.tokens) == document[f"{split}_tokens"]
        tokens = found.tokens.read(0, len(found.tokens))
        assert int((tokens == document["tokenizer"]["end_of_text"]).sum()) == len(found.ends)
    assert sum(len(found.ends) for found in splits.values()) == 200


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def _other_hashes(path: Path) -> None:
    path.write_bytes(bytes(len(path.read_bytes())))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("000001/train.bin", _cut),
        ("000001/train.bin", Path.unlink),
        ("000002/validation.ends.bin", _cut),
        ("000000/train.bin.blake2b", _other_hashes),
        ("000000/train.bin.blake2b", _cut),
        ("000000/train.bin.blake2b", Path.unlink),
    ],
)
def test_a_damaged_shard_is_named_at_opening(dataset: Path, name: str, damage: Callable[[Path], object]) -> None:
    damage(dataset / name)
    with pytest.raises(CorruptDataError, match=name.split("/")[0]):
        open_source(dataset)


@pytest.mark.parametrize("change", [{"schema": "other"}, {"shards": None}, {"tokenizer": {}}])
def test_another_description_is_refused(dataset: Path, change: dict[str, object]) -> None:
    path = dataset / "dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | change), encoding="utf-8")
    with pytest.raises((UsageError, CorruptDataError), match="dataset"):
        open_source(dataset)
