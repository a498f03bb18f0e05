"""Every reader against files that other code has written, whole and in parts, and against files that are damaged."""

import gzip
import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from scaletrain_cli.data.sources import lines
from scaletrain_cli.data.sources.formats import reader_of
from scaletrain_cli.data.sources.records import BadRecord, Columns, Part, Record, SourceFile
from scaletrain_cli.spec.corpus_files import format_by_name
from tests.data.texts import jsonl

_TEXT = Columns()
TEXTS = [f"document {number}: " + "word " * (number % 40) + "é\u2028" for number in range(300)]


def source(path: Path, kind: str = "auto") -> SourceFile:
    found, compression = format_by_name(path.name, kind)
    assert found
    return SourceFile(str(path), path.stat().st_size, found, compression)


def read(path: Path, kind: str = "auto", columns: Columns = _TEXT, part_bytes: int = 1 << 30) -> list[Any]:
    file = source(path, kind)
    reader = reader_of(file)
    parts = list(reader.parts(file, part_bytes))
    return [record for start, stop in parts for record in reader.records(Part(file, start, stop, columns))]


def parquet(path: Path, rows: dict[str, Any], **options: Any) -> None:
    pq.write_table(pa.table(rows), path, **options)


def arrow_stream(path: Path) -> None:
    table = pa.table({"text": TEXTS})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=70)


def arrow_file(path: Path) -> None:
    table = pa.table({"text": TEXTS})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=70)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "a.jsonl": lambda path: path.write_bytes(jsonl(TEXTS)),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(jsonl(TEXTS[:100])) + gzip.compress(jsonl(TEXTS[100:]))),
    "a.jsonl.zst": lambda path: path.write_bytes(
        zstandard.compress(jsonl(TEXTS[:100])) + zstandard.compress(jsonl(TEXTS[100:]))
    ),
    "a.parquet": lambda path: parquet(path, {"n": list(range(300)), "text": TEXTS}, row_group_size=37),
    "categories.parquet": lambda path: parquet(path, {"text": pa.array(TEXTS).dictionary_encode()}),
    "stream.arrow": arrow_stream,
    "file.arrow": arrow_file,
}


@pytest.mark.parametrize("part_bytes", [1 << 30, 2000, 1])
@pytest.mark.parametrize("name", WRITERS)
def test_each_format_gives_every_document_once_in_parts_of_any_size(name: str, part_bytes: int, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    assert [record.text for record in read(tmp_path / name, part_bytes=part_bytes)] == TEXTS


@example(["one", "", "one"], 1, "txt")
@given(
    st.lists(st.sampled_from(["one", "", " ", "two words", "x" * 50, "\t", "end."]), max_size=60),
    st.integers(1, 120),
    st.sampled_from(["txt", "jsonl"]),
)
def test_parts_of_a_text_file_have_the_text_of_the_whole_once(
    tmp_path_factory: pytest.TempPathFactory, rows: list[str], part_bytes: int, kind: str
) -> None:
    path = tmp_path_factory.mktemp("text") / f"a.{kind}"
    content = jsonl([row for row in rows if row.strip()]) if kind == "jsonl" else "\n".join(rows).encode()
    path.write_bytes(content)
    found = read(path, part_bytes=part_bytes)
    whole = read(path)
    if kind == "jsonl":
        assert found == whole
    assert "".join("".join(record.text for record in found).split()) == "".join(
        "".join(record.text for record in whole).split()
    )
    assert sorted({record.place for record in found}) == [record.place for record in found]


def test_prose_is_split_at_blank_lines_and_code_is_not(tmp_path: Path) -> None:
    paragraphs = "".join(f"{'word ' * 999}{number}.\n\n" for number in range(12))
    for name, documents in (("a.txt", 3), ("a.py", 1)):
        (tmp_path / name).write_text(paragraphs, encoding="utf-8")
        found = read(tmp_path / name)
        assert "".join(record.text for record in found) == paragraphs
        assert len(found) == documents
    assert all(record.text.endswith(".\n\n") for record in found)


def test_other_columns_are_read_beside_the_text(tmp_path: Path) -> None:
    columns = Columns("body", ("score",))
    parquet(tmp_path / "a.parquet", {"body": ["x"], "score": [2.5], "unused": [1]})
    (tmp_path / "a.jsonl").write_text('{"score": 2.5, "body": "x", "unused": 1}\n', encoding="utf-8")
    for name in ("a.parquet", "a.jsonl"):
        assert read(tmp_path / name, columns=columns) == [Record(0, "x", {"score": 2.5})]


def megatron(folder: Path, documents: list[list[list[int]]], code: int, dtype: str) -> Path:
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    size = np.dtype(dtype).itemsize
    starts = [size * sum(lengths[:number]) for number in range(len(lengths))]
    ends = [0]
    for document in documents:
        ends.append(ends[-1] + len(document))
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(ends))
    arrays = struct.pack(f"<{len(lengths)}i{len(lengths)}q{len(ends)}q", *lengths, *starts, *ends)
    (folder / "set.idx").write_bytes(header + arrays)
    (folder / "set.bin").write_bytes(b"".join(np.array(each, dtype).tobytes() for each in sequences))
    return folder / "set.idx"


@pytest.mark.parametrize(("code", "dtype"), [(8, "<u2"), (4, "<i4"), (5, "<i8"), (1, "u1")])
@pytest.mark.parametrize("part_bytes", [1 << 30, 8])
def test_megatron_sets_give_the_written_tokens(code: int, dtype: str, part_bytes: int, tmp_path: Path) -> None:
    documents = [[[1, 2, 3]], [[4], [5, 6]], [], [[7, 8, 9, 10, 11]], [[12]]]
    index = megatron(tmp_path, documents, code, dtype)
    for path in (index, index.with_suffix(".bin")):
        found = read(path, part_bytes=part_bytes)
        assert [record.tokens.tolist() for record in found] == [
            [token for part in document for token in part] for document in documents
        ]
        assert all(record.ends_document for record in found)


@pytest.mark.parametrize("part_bytes", [1 << 30, 64])
def test_arrays_of_tokens_are_read_with_and_without_a_header(part_bytes: int, tmp_path: Path) -> None:
    tokens = np.arange(1000, dtype="uint16")
    np.save(tmp_path / "a.npy", tokens)
    tokens.tofile(tmp_path / "b.npy")
    for name, kind in (("a.npy", "auto"), ("b.npy", "raw_uint16")):
        found = read(tmp_path / name, kind, part_bytes=part_bytes)
        assert np.concatenate([record.tokens for record in found]).tolist() == tokens.tolist()
        assert not any(record.ends_document for record in found)


def _cut(content: bytes) -> bytes:
    return content[: len(content) * 2 // 3]


def _megatron_bytes(tmp_path: Path, change: Callable[[bytes], bytes], suffix: str = ".idx") -> Path:
    path = megatron(tmp_path, [[[1, 2, 3]], [[4]]], 8, "<u2")
    path.with_suffix(suffix).write_bytes(change(path.with_suffix(suffix).read_bytes()))
    return path


def _npy_bytes(change: Callable[[bytes], bytes], array: Any = None) -> Callable[[Path], bytes]:
    def content(folder: Path) -> bytes:
        np.save(folder / "whole.npy", np.arange(100) if array is None else array, allow_pickle=True)
        return change((folder / "whole.npy").read_bytes())

    return content


def _arrow_bytes(write: Callable[[Path], None]) -> Callable[[Path], bytes]:
    def content(folder: Path) -> bytes:
        write(folder / "whole.arrow")
        return _cut((folder / "whole.arrow").read_bytes())

    return content


# name: content, documents that are read, the code of the fault, its place for people. test_bad_inputs.py has more.
BAD: dict[str, tuple[str, bytes | Callable[[Path], bytes], int, str, str]] = {
    "invalid JSON": ("a.jsonl", b'{"text": "a"}\n{"text": \n{"text": "b"}\n', 2, "not-json", ":2"),
    "Latin-1 prose": ("a.txt", "Größe und Maß für später; schön".encode("latin-1"), 0, "not-utf-8", ":1"),
    "changed gzip": ("a.txt.gz", gzip.compress(b"a" * 5000)[:-8] + b"\0" * 8, 0, "damaged", ":1"),
    "truncated zstd": ("a.jsonl.zst", _cut(zstandard.compress(jsonl(TEXTS))), 0, "damaged", ":1"),
    "half a second frame": (
        "a.jsonl.zst",
        zstandard.compress(jsonl(["a", "b"])) + _cut(zstandard.compress(jsonl(["c"]))),
        2,
        "damaged",
        ":2",
    ),
    "truncated Arrow stream": ("a.arrow", _arrow_bytes(arrow_stream), 140, "table-damaged", ", row 141"),
    "truncated Arrow file": ("a.arrow", _arrow_bytes(arrow_file), 0, "table-damaged", ", row 1"),
    "truncated NumPy file": ("a.npy", _npy_bytes(_cut), 0, "size-differs", ", token 1"),
    "table of tokens": ("a.npy", _npy_bytes(bytes, np.zeros((2, 2), "int64")), 0, "npy-shape", ", token 1"),
    "NumPy objects": ("a.npy", _npy_bytes(bytes, np.array([{}])), 0, "npy-shape", ", token 1"),
    "bare numbers": ("a.npy", np.arange(100, dtype="uint16").tobytes(), 0, "npy-without-header", ", token 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_with_its_place_and_the_documents_around_it_are_read(case: str, tmp_path: Path) -> None:
    name, content, documents, code, place = BAD[case]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content(tmp_path))
    found = read(path)
    bad = [record for record in found if isinstance(record, BadRecord)]
    assert [record.reason.code for record in bad] == [f"sources.{code}"]
    assert str(bad[0].reason)
    assert len(found) - 1 == documents
    file = source(path)
    assert reader_of(file).place_text(file, bad[0].place) == f"{path}{place}"


@pytest.mark.parametrize(
    ("suffix", "change", "code"),
    [
        (".idx", lambda content: b"TNTIDX\x00\x00" + content, "megatron-old"),
        (".idx", lambda content: b"something else" * 9, "megatron-not-an-index"),
        (".idx", lambda content: content[:9] + struct.pack("<Q", 2) + content[17:], "megatron-unknown"),
        (".idx", lambda content: content[:17] + b"\x07" + content[18:], "megatron-unknown"),
        (".idx", _cut, "size-differs"),
        (".idx", lambda content: content[:-8] + struct.pack("<q", 1), "megatron-inconsistent"),
        (".bin", _cut, "size-differs"),
    ],
)
def test_bad_megatron_sets_are_named(suffix: str, change: Callable[[bytes], bytes], code: str, tmp_path: Path) -> None:
    (bad,) = read(_megatron_bytes(tmp_path, change, suffix))
    assert bad.reason.code == f"sources.{code}"
    assert str(bad.reason)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.py"])
def test_a_very_long_line_is_skipped_and_never_held(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_DOCUMENT_BYTES", 1000)
    rows = ["before", "x" * 5_000_000, "after"]
    (tmp_path / name).write_bytes(jsonl(rows) if name == "a.jsonl" else "\n".join(rows).encode())
    first, bad, last = read(tmp_path / name)
    assert (first.text.strip(), bad.reason.code, last.text) == ("before", "sources.too-long", "after")


class Counted(io.BufferedReader):
    """A file that counts the bytes that are read from it."""

    count = 0

    def readline(self, size: int | None = -1) -> bytes:
        line = super().readline(size)
        self.count += len(line)
        return line


@pytest.mark.parametrize("rows", [["x" * 300_000], ["before", "x" * 300_000, "after"], ["y" * 30] * 10_000])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_parts_read_a_file_without_borders_at_most_twice(
    name: str, rows: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MAX_DOCUMENT_BYTES", 1000)
    path = tmp_path / name
    path.write_bytes(jsonl(rows) if name == "a.jsonl" else "\n".join(rows).encode())
    file, count, found = source(path), 0, []
    reader = reader_of(file)
    assert isinstance(reader, lines.TextReader)
    for start, stop in reader.parts(file, 3000):
        with path.open("rb") as raw, Counted(raw.raw) as opened:
            found += list(reader.records_in(opened, Part(file, start, stop)))
            count += opened.count
    assert found == read(path)
    assert count < 2.1 * file.size


def test_a_few_invalid_bytes_in_a_long_document_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "' + b"word " * 2000 + b'\xff and"}\n')
    (record,) = read(tmp_path / "a.jsonl")
    assert record.text.endswith("\ufffd and")


def test_lone_surrogates_of_json_become_replacement_characters(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n', encoding="ascii")
    assert [record.text for record in read(tmp_path / "a.jsonl")] == ["a\ufffdb"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(("a.jsonl.gz", ("jsonl", "gz")), ("A.JSONL.ZST", ("jsonl", "zst")), ("a.py", ("code", ""))),
        *(("a.parquet.gz", ("", "gz")), ("v1.2.csv", ("", "")), ("README", ("", ""))),
    ],
)
def test_formats_are_known_by_the_suffix(name: str, expected: tuple[str, str]) -> None:
    assert format_by_name(name) == expected
