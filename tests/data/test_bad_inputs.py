import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from scaletrain_cli.data.prepared import find_prepared
from scaletrain_cli.data.sources import lines
from scaletrain_cli.engine.commands import main
from scaletrain_cli.spec import load_spec
from tests.cli.command_line import SMALL
from tests.data.texts import jsonl, tokenizer_of_words

GOOD = [f"alpha beta gamma delta {number}" for number in range(40)]


def parquet(path: Path, column: str, values: list[Any]) -> None:
    pq.write_table(pa.table({column: values}), path, use_dictionary=False, compression="NONE", row_group_size=20)


def damaged_parquet(path: Path, group: int = 0) -> None:
    parquet(path, "text", GOOD)
    content = bytearray(path.read_bytes())
    start = pq.read_metadata(path).row_group(group).column(0).data_page_offset
    content[start : start + 20] = b"\xff" * 20
    path.write_bytes(content)


def cut_arrow(path: Path) -> None:
    table = pa.table({"text": GOOD})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    path.write_bytes(path.read_bytes()[:-700])


def after_two(line: bytes) -> Callable[[Path], object]:
    """Return what writes two good lines and a bad one in a jsonl file."""
    return lambda path: path.write_bytes(jsonl(GOOD[:2]) + line + b"\n" + jsonl(GOOD[2:]))


def cut(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content[: len(content) * 2 // 3])


# By the name of a fault: the file, what writes it, its place, its reason, and the documents of the file that are good.
MANY = [f"{number} " + os.urandom(40).hex() for number in range(4000)]
FAULTS: dict[str, tuple[str, Callable[[Path], object], str, str, int | None]] = {
    "not JSON": ("a.jsonl", after_two(b'{"text": "x"'), ":3", "is not JSON", 40),
    "no object": ("a.jsonl", after_two(b'["x"]'), ":3", "must be a JSON object", 40),
    "nested too deeply": ("a.jsonl", after_two(b"[" * 100_000), ":3", "nested too deeply", 40),
    "no field": ("a.jsonl", after_two(b'{"body": "x"}'), ":3", "has no field text; it has body", 40),
    "null": ("a.jsonl", after_two(b'{"text": null}'), ":3", "must be text, not null", 40),
    "a number": ("a.jsonl", after_two(b'{"text": 3}'), ":3", "must be text, not a number", 40),
    "an empty document": ("a.jsonl", after_two(b'{"text": ""}'), ":3", "has no text", 40),
    "a blank document": ("a.jsonl", after_two(b'{"text": " \\n "}'), ":3", "has no text", 40),
    "another encoding": (
        "a.jsonl",
        after_two('{"text": "größer, älter"}'.encode("latin-1") * 3),
        ":3",
        "not UTF-8",
        40,
    ),
    "a line that is too long": ("a.jsonl", after_two(b'{"text": "' + b"x" * 3000 + b'"}'), ":3", "is longer than", 40),
    "rows in UTF-16": (
        "a.jsonl",
        lambda path: path.write_bytes(jsonl(GOOD[:1])[:-1].decode().encode("utf-16")),
        ":1",
        "is UTF-16",
        0,
    ),
    "UTF-16": ("a.txt", lambda path: path.write_bytes("".join(GOOD).encode("utf-16")), ":1", "is UTF-16", 0),
    "NUL bytes": ("a.txt", lambda path: path.write_bytes(b"some\0text"), ":1", "contains NUL bytes", 0),
    "code in another encoding": (
        "a.py",
        lambda path: path.write_bytes("# größer als älter üblich\n".encode("latin-1") * 9),
        ":1",
        "not UTF-8",
        0,
    ),
    "an incomplete gzip file": ("a.jsonl.gz", cut(gzip.compress(jsonl(MANY))), ":", "not a complete gzip", None),
    "no gzip file": ("a.jsonl.gz", lambda path: path.write_bytes(jsonl(GOOD)), ":1", "not a complete gzip", 0),
    "an incomplete zstd file": (
        "a.jsonl.zst",
        cut(zstandard.ZstdCompressor().compress(jsonl(MANY))),
        ":",
        "not a complete zstd",
        None,
    ),
    "no zstd file": ("a.jsonl.zst", lambda path: path.write_bytes(jsonl(GOOD)), ":1", "not a complete zstd", 0),
    "an incomplete parquet file": (
        "a.parquet",
        lambda path: (parquet(path, "text", GOOD), path.write_bytes(path.read_bytes()[:-30])),
        ", row 1",
        "cannot be read as a table",
        0,
    ),
    "a damaged page": ("a.parquet", damaged_parquet, ", row 1", "cannot be read as a table", 0),
    "a damaged page of the second row group": (
        "a.parquet",
        lambda path: damaged_parquet(path, 1),
        ", row 21",
        "cannot be read as a table",
        20,
    ),
    "no column": ("a.parquet", lambda path: parquet(path, "body", GOOD), ", row 1", "has no field text", 0),
    "a column of numbers": ("a.parquet", lambda path: parquet(path, "text", [1, 2]), ", row 1", "not int64", 0),
    "a null in a column": ("a.parquet", lambda path: parquet(path, "text", [*GOOD, None]), ", row 41", "not null", 40),
    "an incomplete Arrow file": ("a.arrow", cut_arrow, ", row ", "cannot be read as a table", None),
}
# Faults of a whole source, whatever data.on_bad is: what makes them, and the message.
SOURCE_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file": (lambda folder: (folder / "good.jsonl").unlink(), r"data\.source = .*/texts: the folder has no .*jsonl"),
    "no text": (lambda folder: (folder / "good.jsonl").write_bytes(b"\n"), "of source source have no document"),
    "a dangling link": (lambda folder: (folder / "a.jsonl").symlink_to("gone"), r"a\.jsonl: is a link to a file that"),
    "a FIFO": (lambda folder: os.mkfifo(folder / "a.jsonl"), r"a\.jsonl: is not a regular file"),
    "a .bin without its index": (
        lambda folder: ((folder / "good.jsonl").unlink(), (folder / "a.bin").write_bytes(bytes(8))),
        r"texts: a\.bin has no a\.idx beside it",
    ),
    "a broken tokenizer": (
        lambda folder: (folder.parent / "tokenizer.json").write_text('{"model": {}}'),
        r"data\.tokenizer\.path = .*cannot be used",
    ),
    "a tokenizer without an end": (
        lambda folder: (folder.parent / "tokenizer.json").write_text(tokenizer("<x>")),
        "has no end-of-text token",
    ),
}


def tokenizer(end: str = "<|endoftext|>") -> str:
    words = sorted({word for text in GOOD for word in text.split()})
    return str(tokenizer_of_words(words, end).to_str())


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "good.jsonl").write_bytes(jsonl(GOOD))
    (tmp_path / "tokenizer.json").write_text(tokenizer())
    return folder


def prepare(texts: Path, capsys: pytest.CaptureFixture[str], on_bad: str, *more: str) -> tuple[int, dict[str, Any]]:
    root = texts.parent
    settings = [
        f"data.source={texts}",
        f"data.tokenizer={{kind: file, path: {root / 'tokenizer.json'}}}",
        f"data.on_bad={on_bad}",
        "data.validation_split=0",
        "model.seq_len=8",
        *more,
    ]
    spec = load_spec(SMALL, settings)
    (root / "spec.json").write_text(json.dumps(spec.model_dump(mode="json", by_alias=True)))
    code = main(["prepare", str(root / "spec.json"), str(root / "runs"), "1"])
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    if code == 0:
        assert find_prepared(spec.data, root / "runs") == {"source": Path(answer["path"])}
    return code, answer


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_document_is_named_with_its_place_or_left_out_and_counted(
    fault: str, texts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, write, place, reason, good = FAULTS[fault]
    if fault == "a line that is too long":
        monkeypatch.setattr(lines, "MAX_DOCUMENT_BYTES", 2000)
    write(texts / name)
    code, answer = prepare(texts, capsys, "stop")
    assert code == 2
    message = answer["error"]["message"]
    assert f"{texts / name}{place}" in message
    assert reason in message
    assert not [path for path in (texts.parent / "runs").rglob("*") if path.name == "dataset.json"]
    assert not [path for path in (texts.parent / "runs").rglob("*") if path.name.endswith((".tmp", ".draft"))]
    code, answer = prepare(texts, capsys, "skip")
    assert code == 0, answer
    report = json.loads((Path(answer["path"]) / "report.json").read_text())
    (bad,) = report["steps"][0]["bad"]
    assert bad["documents"] == 1
    assert reason in bad["places"][0]["problem"]
    if good is not None:
        assert answer["documents"] == len(GOOD) + good
        assert np.fromfile(Path(answer["path"]) / "000000" / "train.ends.bin", "int64").size == len(GOOD) + good
    code, answer = prepare(texts, capsys, "stop")
    assert code == 2, "documents that were left out before are still an error"
    assert reason in answer["error"]["message"]


@pytest.mark.parametrize("fault", SOURCE_FAULTS)
def test_a_fault_of_a_whole_source_ends_with_2(fault: str, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    harm, message = SOURCE_FAULTS[fault]
    harm(texts)
    code, answer = prepare(texts, capsys, "skip")
    assert code == 2
    assert re.search(message, answer["error"]["message"]), answer
