"""A corpus is tokenized completely, once, and always in the same way."""

import gzip
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer

from scaletrain_cli.data.chunk_hashes import CHUNK_BYTES, CheckedFile, CorruptDataError, HashedFile
from scaletrain_cli.engine.data import dataset
from scaletrain_cli.engine.data.corpus import READERS, Tally, documents, source_files
from scaletrain_cli.engine.data.dataset import dataset_folder, open_dataset, prepare_dataset
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import DataSpec
from scaletrain_cli.spec.corpus_files import FORMATS, find_files, problems_of


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02d}.txt").write_text(f"Document {number} tells the story of number {number}. " * 20)
    return folder


def spec(source: Path | str, vocab_size: int = 400, validation_split: float = 0.2) -> DataSpec:
    return DataSpec.model_validate(
        {
            "source": str(source),
            "tokenizer": {"kind": "bpe", "vocab_size": vocab_size},
            "validation_split": validation_split,
        }
    )


def test_the_tokens_decode_to_the_documents(texts: Path, tmp_path: Path) -> None:
    folder = prepare_dataset(spec(texts), tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    decoded = set()
    for split in ("train", "validation"):
        tokens = np.fromfile(folder / f"{split}.bin", dtype="uint16")
        end = tokenizer.token_to_id("<|endoftext|>")
        ends = np.flatnonzero(tokens == end)
        starts = [0, *(ends[:-1] + 1)]
        decoded |= {tokenizer.decode(tokens[a:b].tolist()) for a, b in zip(starts, ends, strict=True)}
    assert decoded == set(documents(str(texts)))


def test_a_second_build_elsewhere_gives_the_same_tokens(texts: Path, tmp_path: Path) -> None:
    first, second = (open_dataset(prepare_dataset(spec(texts), tmp_path / name), 16)[0] for name in "ab")
    assert first == second


def test_a_prepared_dataset_is_used_without_a_copy(texts: Path, tmp_path: Path) -> None:
    folder = prepare_dataset(spec(texts), tmp_path)
    before = (folder / "train.bin").stat().st_mtime_ns
    assert prepare_dataset(spec(texts), tmp_path) == folder
    assert prepare_dataset(spec(folder), tmp_path / "elsewhere") == folder
    assert (folder / "train.bin").stat().st_mtime_ns == before


def test_a_changed_file_or_tokenizer_makes_another_dataset(texts: Path, tmp_path: Path) -> None:
    first = dataset_folder(spec(texts), tmp_path)
    assert dataset_folder(spec(texts, vocab_size=500), tmp_path) != first
    (texts / "00.txt").write_text("something else entirely")
    assert dataset_folder(spec(texts), tmp_path) != first


def test_files_of_a_killed_builder_are_not_used(texts: Path, tmp_path: Path) -> None:
    folder = dataset_folder(spec(texts), tmp_path)
    half_built = folder.with_name(f".{folder.name}.0123.tmp")
    half_built.mkdir(parents=True)
    (half_built / "train.bin").write_bytes(b"half")
    info, *_ = open_dataset(prepare_dataset(spec(texts), tmp_path), 16)
    assert info.documents == 60
    assert not half_built.exists()


def test_sequences_do_not_overlap_and_labels_are_the_next_tokens(texts: Path, tmp_path: Path) -> None:
    folder = prepare_dataset(spec(texts), tmp_path)
    _, train, _ = open_dataset(folder, 16)
    rows = train.rows([0, 1])
    flat = np.fromfile(folder / "train.bin", dtype="uint16")[:33]
    assert rows.shape == (2, 17)
    assert rows[0].tolist() == flat[:17].tolist()
    assert rows[1].tolist() == flat[16:33].tolist()


def test_document_ends_are_where_the_end_tokens_are(texts: Path, tmp_path: Path) -> None:
    folder = prepare_dataset(spec(texts), tmp_path)
    end = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<|endoftext|>")
    _, *splits = open_dataset(folder, 16)
    for split in splits:
        assert split.document_ends.tolist() == np.flatnonzero(split.tokens == end).tolist()
        found = split.document_ends_within(1, 3)
        assert found.tolist() == np.flatnonzero(split.tokens[16:48] == end).tolist()


def test_jsonl_holds_one_document_a_line(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"line {n}"}) for n in range(5)) + "\n\n")
    assert list(documents(str(path))) == [f"line {n}" for n in range(5)]


def test_an_invalid_jsonl_line_is_reported_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "good"}\n{"body": "bad"}\n')
    with pytest.raises(UsageError, match=r"corpus\.jsonl:2"):
        list(documents(str(path)))


def test_a_corpus_without_files_is_an_error_that_names_the_accepted_kinds(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="python-stdlib"):
        source_files(str(tmp_path / "nothing"))


def test_too_little_text_is_an_error(texts: Path, tmp_path: Path) -> None:
    folder = prepare_dataset(spec(texts), tmp_path)
    with pytest.raises(UsageError, match="fewer than one sequence"):
        open_dataset(folder, 10**6)


def test_the_standard_library_is_there_and_has_no_installed_packages() -> None:
    files = source_files("python-stdlib")
    assert len(files) > 300
    assert not [path for path in files if "site-packages" in path.parts]


def test_an_empty_validation_split_is_an_error_only_with_evaluation(texts: Path, tmp_path: Path) -> None:
    info, _, validation = open_dataset(prepare_dataset(spec(texts, validation_split=0.0), tmp_path), 16)
    assert info.validation_tokens == 0
    assert len(validation) == 0


def test_a_truncated_or_missing_file_is_reported_with_its_path(texts: Path, tmp_path: Path) -> None:
    folder = prepare_dataset(spec(texts), tmp_path)
    content = (folder / "train.bin").read_bytes()
    (folder / "train.bin").write_bytes(content[: len(content) // 2])
    with pytest.raises(CorruptDataError, match=r"train\.bin: \d+ bytes instead of"):
        open_dataset(folder, 16)
    (folder / "train.bin").write_bytes(content)
    (folder / "train.ends.bin").unlink()
    with pytest.raises(CorruptDataError, match=r"train\.ends\.bin: No such file"):
        open_dataset(folder, 16)


def tokenizer_file(path: Path, texts: Path, end: str) -> Path:
    """Return a tokenizer that truncates and pads, and may have no end-of-text token."""
    tokenizer = Tokenizer.from_file(str(prepare_dataset(spec(texts), path.parent / "first") / "tokenizer.json"))
    described = json.loads(tokenizer.to_str().replace("<|endoftext|>", end))
    path.write_text(json.dumps(described))
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(path))
    return path


def with_tokenizer(texts: Path, path: Path) -> DataSpec:
    return DataSpec.model_validate({"source": str(texts), "tokenizer": {"kind": "file", "path": str(path)}})


def test_truncation_and_padding_of_a_tokenizer_are_turned_off(texts: Path, tmp_path: Path) -> None:
    path = tokenizer_file(tmp_path / "tokenizer.json", texts, end="</s>")
    cut = open_dataset(prepare_dataset(with_tokenizer(texts, path), tmp_path), 16)[0]
    whole = open_dataset(prepare_dataset(spec(texts), tmp_path), 16)[0]
    assert cut.train_tokens + cut.validation_tokens == whole.train_tokens + whole.validation_tokens


def test_a_changed_tokenizer_file_makes_another_dataset(texts: Path, tmp_path: Path) -> None:
    path = tokenizer_file(tmp_path / "tokenizer.json", texts, end="</s>")
    before = dataset_folder(with_tokenizer(texts, path), tmp_path)
    path.write_text(path.read_text() + " ")
    assert dataset_folder(with_tokenizer(texts, path), tmp_path) != before


def test_a_tokenizer_without_an_end_of_text_token_is_rejected(texts: Path, tmp_path: Path) -> None:
    path = tokenizer_file(tmp_path / "tokenizer.json", texts, end="<|nothing|>")
    with pytest.raises(UsageError, match="no end-of-text token"):
        prepare_dataset(with_tokenizer(texts, path), tmp_path)


@pytest.mark.parametrize("line", ['{"text": null}', '{"text": ["a"]}', "[]", "{"])
def test_a_text_field_that_is_no_string_is_rejected(line: str, tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UsageError, match=r"corpus\.jsonl:1"):
        list(documents(str(path)))


def test_a_large_text_file_is_many_documents_and_loses_no_character(tmp_path: Path) -> None:
    path = tmp_path / "a [name] that a glob would read.txt"
    path.write_text("".join(f"line {n} of a long file\n" for n in range(120_000)))
    pieces = list(documents(str(path)))
    assert len(pieces) > 2
    assert "".join(pieces) == path.read_text()


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
    harm: Callable[[Path], object], texts: Path, tmp_path: Path
) -> None:
    folder = prepare_dataset(spec(texts), tmp_path)
    read_all(folder)
    harm(folder)
    with pytest.raises(CorruptDataError, match=r"train|validation|dataset\.json") as caught:
        read_all(folder)
    assert caught.value.exit_code == 93
    assert str(caught.value.evidence["file"]).startswith(str(folder))


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


def test_a_dataset_without_hashes_is_opened_as_unverified(texts: Path, tmp_path: Path) -> None:
    folder = prepare_dataset(spec(texts), tmp_path)
    for path in folder.glob("*.blake2b"):
        path.unlink()
    edit(folder, "schema", "scaletrain.dataset/v2")
    edit(folder, "seal", "")
    info, train, _ = open_dataset(folder, 16)
    assert not info.is_verified
    assert len(train.rows([0, 1])) == 2
    edit(folder, "schema", "scaletrain.dataset/v9")
    with pytest.raises(UsageError, match="v9"):
        open_dataset(folder, 16)


def test_a_long_text_becomes_documents_at_blank_lines(tmp_path: Path) -> None:
    paragraphs = [f"Paragraph {number}. " + "It goes on and on. " * 100 + "\n\n" for number in range(60)]
    (tmp_path / "book.txt").write_text("".join(paragraphs))
    found = list(documents(str(tmp_path / "book.txt")))
    assert "".join(found) == "".join(paragraphs)
    assert len(found) > 5
    assert all(text.endswith("\n\n") for text in found)
    (tmp_path / "code.py").write_text("".join(paragraphs))
    assert len(list(documents(str(tmp_path / "code.py")))) == 1, "a file of code is one document"


def test_readme_and_license_files_of_a_folder_are_not_trained_on(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("about the corpus")
    (tmp_path / "LICENSE.txt").write_text("about the rights")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "description.txt").write_text("hidden")
    (tmp_path / "a.jsonl.zst").write_bytes(b"not read")
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write('{"text": "compressed"}\n')
    (tmp_path / "b.txt").write_text("plain")
    assert list(documents(str(tmp_path))) == ["compressed", "plain"]
    assert find_files(str(tmp_path)).not_read == {".zst": 1}
    assert list(documents(str(tmp_path / "README.md"))) == ["about the corpus"], "by its own name it is taken"


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfb\r\nc")
    assert list(documents(str(tmp_path))) == ["a", "b\nc"]
    assert list(problems_of(find_files(str(tmp_path)).files)) == []


def test_single_invalid_bytes_are_counted_and_another_encoding_is_rejected(tmp_path: Path) -> None:
    good = "Straße für Straße, größer. " * 400
    (tmp_path / "a.txt").write_bytes(good.encode() + b"\xff\xfe" + good.encode() + "\ufffd".encode())
    tally = Tally()
    (text,) = documents(str(tmp_path / "a.txt"), tally)
    assert (tally.replaced, text.count("\ufffd")) == (2, 3)
    info, *_ = open_dataset(prepare_dataset(spec(tmp_path / "a.txt"), tmp_path / "runs"), 16)
    assert info.replaced == 2
    late = good.encode() * 200 + good.encode("latin-1") * 40  # its beginning is well
    (tmp_path / "b.txt").write_bytes(late)
    with pytest.raises(UsageError, match=r"b\.txt is not UTF-8 text: \d+ of \d+ characters"):
        list(documents(str(tmp_path / "b.txt")))


@pytest.mark.parametrize(
    ("column", "code", "params"),
    [
        (["good", None], "engine.parquet-text-null", {"row": 1}),
        ([1, 2], "engine.parquet-text-not-strings", {"type": "int64"}),
    ],
    ids=["null", "numbers"],
)
def test_a_parquet_column_without_text_is_an_error_with_a_code(
    column: list[object], code: str, params: dict[str, object], tmp_path: Path
) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": column}), path)
    with pytest.raises(UsageError, match=r"a\.parquet") as caught:
        list(documents(str(path)))
    assert caught.value.reason == Reason(code, {"path": str(path), **params})


def test_an_invalid_parquet_file_is_reported_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"body": ["a"]}), path)
    with pytest.raises(UsageError, match="has no column text"):
        list(documents(str(path)))
    parquet.write_table(pyarrow.table({"text": ["a"] * 5, "context": ["b"] * 5}), path)
    assert list(documents(str(path))) == ["a"] * 5
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UsageError, match=r"a\.parquet cannot be read as parquet"):
        list(documents(str(path)))
    parquet.write_table(pyarrow.table({"text": ["a" * 100] * 500}), path, use_dictionary=False, compression="NONE")
    content = bytearray(path.read_bytes())
    content[20:30] = b"\xff" * 10  # of a page header
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"a\.parquet cannot be read"):
        list(documents(str(path)))


def test_a_broken_tokenizer_a_dangling_link_and_a_truncated_archive_are_reported(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(UsageError, match=r"tokenizer\.json: cannot be used"):
        prepare_dataset(with_tokenizer(texts, tmp_path / "tokenizer.json"), tmp_path / "runs")
    (texts / "a.txt").symlink_to("gone.txt")
    with pytest.raises(UsageError, match=r"a\.txt: is a link to a file that does not exist"):
        prepare_dataset(spec(texts), tmp_path / "runs")
    (texts / "a.txt").unlink()
    whole = gzip.compress(random.Random(0).randbytes(300_000).hex().encode())
    (texts / "a.txt.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match=r"a\.txt\.gz is not a complete gzip file"):
        prepare_dataset(spec(texts), tmp_path / "runs")


def test_the_dataset_depends_on_the_content_of_the_corpus_and_not_on_times_or_paths(
    texts: Path, tmp_path: Path
) -> None:
    folder = prepare_dataset(spec(texts), tmp_path)
    os.utime(texts / "00.txt", (1, 1))
    assert dataset_folder(spec(texts), tmp_path) == folder
    shutil.copytree(texts, tmp_path / "copy")
    assert dataset_folder(spec(tmp_path / "copy"), tmp_path) == folder
    before = (texts / "00.txt").stat()
    (texts / "00.txt").write_text((texts / "00.txt").read_text().replace("story", "STORY"))
    os.utime(texts / "00.txt", ns=(before.st_atime_ns, before.st_mtime_ns))  # as `cp -p` and rsync leave it
    assert (texts / "00.txt").stat().st_size == before.st_size
    assert dataset_folder(spec(texts), tmp_path) != folder


def test_an_unchanged_corpus_is_not_read_again(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = prepare_dataset(spec(texts), tmp_path)
    assert dataset_folder(spec(texts), tmp_path) == folder  # remembers
    monkeypatch.setattr(dataset, "corpus_identity", lambda source: pytest.fail("read again"))
    assert dataset_folder(spec(texts), tmp_path) == folder


def test_a_part_of_the_sequences_is_read_as_they_are(texts: Path, tmp_path: Path) -> None:
    _, train, _ = open_dataset(prepare_dataset(spec(texts), tmp_path), 16)
    rest, held_back = train.part(0, len(train) - 3), train.part(len(train) - 3, 3)
    assert (len(rest), len(held_back)) == (len(train) - 3, 3)
    assert held_back.rows([0, 2]).tolist() == train.rows([len(train) - 3, len(train) - 1]).tolist()
    assert held_back.document_ends_within(1, 3).tolist() == (
        train.document_ends_within(len(train) - 2, len(train)).tolist()
    )


def test_every_format_that_the_spec_accepts_has_a_reader() -> None:
    assert set(READERS) == set(FORMATS)
