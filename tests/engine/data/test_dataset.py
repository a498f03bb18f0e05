"""Prepared text is opened as sequences, and a change of its description is found."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from scaletrain_cli.data.chunk_hashes import CHUNK_BYTES, CheckedFile, CorruptDataError, HashedFile
from scaletrain_cli.engine.data.dataset import open_source_dataset
from scaletrain_cli.errors import UsageError
from scaletrain_cli.rundir.documents import write_document
from scaletrain_cli.spec import DataSpec
from tests.prepared_text import prepared_text


def edit(folder: Path, name: str, value: object) -> None:
    path = folder / "dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))


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


def test_a_dataset_of_another_schema_is_refused(tmp_path: Path) -> None:
    write_document(tmp_path / "dataset.json", {"schema": "scaletrain.dataset/v3"})
    with pytest.raises(UsageError, match="v3"):
        open_source_dataset(tmp_path, 16)


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
