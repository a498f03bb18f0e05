"""Sources of text that a run could not use are refused before it is queued, with the line of the key."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.data.sources.formats import FIRST_BYTES, read_beginning
from scaletrain_cli.data.sources.records import Columns, local_file
from scaletrain_cli.errors import ExitCode
from scaletrain_cli.rundir.paths import runs_root
from tests.cli.command_line import SMALL, Ended, scaletrain

DOCUMENTS = "".join(
    json.dumps({"text": f"Document {number} has some words.", "score": 1}) + "\n" for number in range(99)
)
STEP = [{"step": "normalization", "only": ["good"]}]
Make = Callable[[Path], object]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_text(DOCUMENTS)
    return tmp_path


def spec(source: dict[str, Any], data: dict[str, Any] | None = None, scheduler: str = "local") -> Path:
    """Write run.yaml with two sources, the second one as given; its path is in line 18."""
    sources = [{"path": "good.jsonl", "name": "good", "weight": 1}, {"name": "web", "weight": 2, **source}]
    text = "\n".join(
        [
            "  sources:",
            f"    - {json.dumps(sources[0])}",
            f"    - name: web\n      path: {json.dumps(source['path'])}",
            *(f"      {key}: {json.dumps(value)}" for key, value in sources[1].items() if key not in ("name", "path")),
            *(f"  {key}: {json.dumps(value)}" for key, value in (data or {}).items()),
        ]
    )
    written = SMALL.read_text().replace("  source: python-stdlib", text)
    path = Path("run.yaml")
    path.write_text(written.replace("scheduler: local", f"scheduler: {scheduler}"))
    return path


def submit(source: dict[str, Any], data: dict[str, Any] | None = None, scheduler: str = "local") -> Ended:
    return scaletrain("submit", spec(source, data, scheduler), "--dry-run")


def write(name: str, content: bytes | str) -> Make:
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def table(name: str, column: str, *, cut: bool = False, arrow: bool = False) -> Make:
    def make(folder: Path) -> None:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        made = pyarrow.table({column: [f"Document {number}" for number in range(99)]})
        path = folder / name
        if arrow:
            with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, made.schema) as writer:
                writer.write_table(made)
        else:
            parquet.write_table(made, path)
        if cut:
            path.write_bytes(path.read_bytes()[:-9])

    return make


def zstd(content: str) -> bytes:
    return bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(content.encode()))


def megatron(name: str, tokens: int) -> Make:
    """Write an .idx file of one document, and a .bin file of ``tokens`` 16-bit tokens instead of 4."""

    def make(folder: Path) -> None:
        import struct

        header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 1, 2)
        (folder / f"{name}.idx").write_bytes(header + struct.pack("<iqqq", 4, 0, 0, 1))
        (folder / f"{name}.bin").write_bytes(bytes(2 * tokens))

    return make


def lone_bin(folder: Path) -> None:
    (folder / "corpus").mkdir()
    (folder / "corpus" / "a.bin").write_bytes(bytes(64))


BAD: tuple[tuple[str, Make, dict[str, Any], str], ...] = (
    ("nowhere", lambda _: None, {}, "no such file or folder"),
    ("nowhere/*.jsonl", lambda _: None, {}, "no file matches"),
    ("a.pdf", write("a.pdf", "%PDF"), {}, "has no txt, text, md"),
    ("a.jsonl", write("a.jsonl", DOCUMENTS + "{"), {}, "a.jsonl:100: is not JSON"),
    (
        "a.jsonl",
        write("a.jsonl", DOCUMENTS + '{"text": 7}\n'),
        {},
        "a.jsonl:100: the field text must be text, not a number",
    ),
    ("a.jsonl", write("a.jsonl", b"\x89PNG" * FIRST_BYTES), {}, "a.jsonl:1: is not UTF-8 text"),
    ("a.jsonl", write("a.jsonl", ""), {}, "holds no text"),
    ("a.txt", write("a.txt", "größer als übergroß ".encode("latin-1") * 99), {}, "is not UTF-8 text"),
    ("a.txt", write("a.txt", b"text\0" * 99), {}, "contains NUL bytes"),
    ("a.jsonl.gz", write("a.jsonl.gz", gzip.compress(DOCUMENTS.encode())[:-20]), {}, "is not a complete gzip file"),
    ("a.jsonl.gz", write("a.jsonl.gz", DOCUMENTS), {}, "is not a complete gzip file: Not a gzipped file"),
    ("a.jsonl.zst", lambda f: (f / "a.jsonl.zst").write_bytes(zstd(DOCUMENTS)[:-9]), {}, "is not a complete zstd file"),
    ("a.parquet", table("a.parquet", "text", cut=True), {}, "cannot be read as a table"),
    ("a.arrow", table("a.arrow", "text", cut=True, arrow=True), {}, "cannot be read as a table"),
    ("a.bin", megatron("a", 3), {}, "has 6 bytes instead of 8"),
    ("a.idx", write("a.idx", b"TNTIDX\0\0" + bytes(50)), {}, "a.bin: does not exist"),
    ("a.npy", write("a.npy", bytes(64)), {}, "has no NumPy header"),
    ("a.npy", write("a.npy", bytes(65)), {"format": "raw_uint16"}, "has 65 bytes instead of 64"),
    ("corpus", lone_bin, {}, "a.bin has no a.idx beside it, the index of a Megatron-LM set. Set it to"),
    (
        "a.jsonl",
        write("a.jsonl", DOCUMENTS.encode("utf-16")),
        {},
        "a.jsonl:1: is UTF-16 text, and must be UTF-8, as iconv",
    ),
)
# The key that is wrong, beside the path: its line and what is advised.
OTHER_KEYS: tuple[tuple[str, Make, dict[str, Any], str], ...] = (
    (
        "a.jsonl",
        write("a.jsonl", DOCUMENTS),
        {"field": "content"},
        "20 data.sources.1.field = content: /a.jsonl:1: has no field content; it has text, score. Set it to the column",
    ),
    ("a.jsonl", write("a.jsonl", '{"body": 1}'), {}, "17 data.sources.1.field = text: /a.jsonl:1: has no field text"),
    ("a.parquet", table("a.parquet", "content"), {}, "17 data.sources.1.field = text: /a.parquet, row 1: has no field"),
    (
        "a",
        lambda folder: pytest.importorskip("pyarrow") and write("a", DOCUMENTS)(folder),
        {"format": "parquet"},
        "20 data.sources.1.format = parquet: /a, row 1: cannot be read as a table",
    ),
    (
        ".",
        lambda _: None,
        {"format": "parquet"},
        "20 data.sources.1.format = parquet: the folder has no parquet file. Set it to the format of the files",
    ),
)


@pytest.mark.parametrize("number", range(len(BAD)), ids=[f"{i}-{case[0]}" for i, case in enumerate(BAD)])
def test_a_source_that_cannot_be_read_is_refused_with_its_line(folder: Path, number: int) -> None:
    path, make, settings, said = BAD[number]
    make(folder)
    refused = submit({"path": path, **settings}, scheduler=("local", "slurm")[number % 2])
    assert refused.code == ExitCode.USAGE, refused
    shown = " ".join(refused.err.split())
    assert f"run.yaml:18 data.sources.1.path = {path}: " in shown
    assert said in shown
    assert not runs_root().exists()


@pytest.mark.parametrize("number", range(len(OTHER_KEYS)), ids=[case[3][:30] for case in OTHER_KEYS])
def test_a_source_is_refused_with_the_line_of_the_key_that_is_wrong(folder: Path, number: int) -> None:
    path, make, settings, said = OTHER_KEYS[number]
    make(folder)
    refused = submit({"path": path, **settings})
    assert refused.code == ExitCode.USAGE, refused
    assert f"run.yaml:{said}" in " ".join(refused.err.replace(str(folder), "").split())


def test_the_advice_on_a_bad_document_is_one_that_helps(folder: Path) -> None:
    def said(content: bytes, *options: str, name: str = "a.jsonl") -> str:
        (folder / name).write_bytes(content)
        refused = scaletrain("validate", SMALL, "--set", f"data.source={name}", *options, code=ExitCode.USAGE)
        return " ".join(refused.err.replace(f"{folder}/", "").split())

    assert "the data.sources: [{name: NAME, path: a.jsonl, field: COLUMN}]" in said(b'{"body": "x"}').replace(
        "with the text: ", "the "
    )
    some = DOCUMENTS.encode()
    bad = said(some + b'{"text": "x"')
    assert "a.jsonl:100: is not JSON: Expecting ',' delimiter (character 13 of the line). Repair the file, or" in bad
    assert "set data.on_bad: skip" in bad
    cut = said(gzip.compress(some)[:300], name="a.jsonl.gz")
    assert "is not a complete gzip file" in cut
    assert "field" not in cut
    empty = said(b'{"text": ""}', "--set", "data.on_bad=skip")
    assert "has no text. No document that was looked at can be read" in empty
    assert "on_bad: skip" not in empty
    both = said(b"no index", "--set", "data.on_bad=skip", name="a.npy")
    assert "a.npy, token 1: has no NumPy header" in both
    assert "data.source = a.npy: the source holds tokens, so no tokenizer can be trained" in both


def test_sources_that_can_be_read_are_accepted_in_every_format(folder: Path) -> None:
    corpus = folder / "corpus"
    corpus.mkdir()
    for make in (
        write("corpus/a.txt", "Some words.\n\n" * 99),
        write("corpus/b.jsonl.gz", gzip.compress(DOCUMENTS.encode())),
        write("corpus/c.jsonl.zst", zstd(DOCUMENTS)),
        table("corpus/d.parquet", "text"),
        table("corpus/e.arrow", "text", arrow=True),
    ):
        make(folder)
    accepted = submit({"path": "corpus"})
    assert accepted.code == 0, accepted.err


def test_the_summary_has_the_stages_and_the_steps(folder: Path) -> None:
    (folder / "a.jsonl").write_text(DOCUMENTS)
    prepare = [{"step": "normalization"}, {"step": "quality", "rules": "c4", "only": ["web"]}, {"step": "duplicates"}]
    data = {"stages": [{"start": 0.5, "weights": {"web": 0.25, "good": 1}}], "prepare": prepare}
    shown = scaletrain("validate", spec({"path": "a.jsonl"}, data), "--set", "training.steps=4000").out
    squeezed = " ".join(shown.split())  # the column of values is further right if a library of a step is missing
    assert " stages from step 2,001 on: web 0.25, good 1 prepare normalization, c4 (web), duplicates " in squeezed


def test_sources_of_tokens_need_their_tokenizer_and_no_step_on_text(folder: Path) -> None:
    megatron("f", 4)(folder)
    words = {"</s>": 0, "<unk>": 1}
    (folder / "t.json").write_text(
        json.dumps({"model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}, "added_tokens": []})
    )
    given = ("--set", "data.tokenizer={kind: file, path: t.json}")
    scaletrain("submit", spec({"path": "f.bin"}), "--dry-run", *given, code=0)
    assert scaletrain("submit", spec({"path": "f.bin"}, {"prepare": STEP}), "--dry-run", *given).code == 0
    (folder / "f.bin").write_bytes(bytes([0, 0, 1, 0, 2, 0, 0, 0]))
    for data, options, said in (
        ({}, (), "the source web holds tokens, so no tokenizer can be trained for it"),
        ({"prepare": [{"step": "normalization"}]}, given, "the step normalization needs text"),
        ({}, given, "has the token 2, and the tokenizer has 2 tokens"),
    ):
        refused = scaletrain("submit", spec({"path": "f.bin"}, data), "--dry-run", *options, code=ExitCode.USAGE)
        assert f"run.yaml:18 data.sources.1.path = f.bin: {said}" in " ".join(refused.err.split())


def test_a_bad_document_is_accepted_if_bad_documents_are_skipped_and_others_are_good(folder: Path) -> None:
    (folder / "a.jsonl").write_text(DOCUMENTS + "{\n")
    assert submit({"path": "a.jsonl"}, {"on_bad": "skip"}).code == 0
    refused = submit({"path": "a.jsonl", "field": "content"}, {"on_bad": "skip"})
    assert refused.code == ExitCode.USAGE, "every document lacks the field"


def test_no_more_than_the_beginning_of_a_large_file_is_read(folder: Path) -> None:
    """A line of 1 GB and a file whose damage is far from its beginning are left to the preparation."""
    path = folder / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "' + bytes([97]) * FIRST_BYTES)
        file.truncate(1 << 30)
    found = read_beginning(local_file(path, "jsonl"), Columns())
    assert (found.documents, found.bad, found.share) == ((), (), 0.0)
    path.write_text(DOCUMENTS * 100 + "{")
    found = read_beginning(local_file(path, "jsonl"), Columns())
    assert not found.bad
    assert found.share == pytest.approx(len(found.documents) / (99 * 100), rel=0.01)
    packed = folder / "a.jsonl.gz"
    packed.write_bytes(gzip.compress((DOCUMENTS * 400).encode(), 1))
    assert packed.stat().st_size > 1 << 15
    found = read_beginning(local_file(packed, "jsonl", "gz"), Columns(), 1 << 15)
    assert not found.bad
    assert found.share == pytest.approx(len(found.documents) / (99 * 400), rel=0.05)


STEPS: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"step": "contamination", "files": ["nowhere/*.jsonl"]}, "files", "nowhere/*.jsonl matches no file"),
    ({"step": "contamination", "files": ["eval.jsonl"], "fields": ["q"]}, "files", "eval.jsonl"),
    ({"step": "quality", "rules": "c4", "bad_words": "nowhere.txt"}, "bad_words", "cannot be read"),
    ({"step": "quality", "rules": "c4", "bad_words": "empty.txt"}, "bad_words", "has no words"),
)


@pytest.mark.parametrize(("step", "key", "said"), STEPS, ids=[said for *_, said in STEPS])
def test_files_of_steps_must_be_readable(folder: Path, step: dict[str, Any], key: str, said: str) -> None:
    (folder / "eval.jsonl").write_text('{"question": "a"}\n')
    (folder / "empty.txt").write_text("\n")
    refused = submit({"path": "good.jsonl"}, {"prepare": [{"step": "normalization"}, step]})
    assert refused.code == ExitCode.USAGE, refused
    shown = " ".join(refused.err.split())
    assert f"run.yaml:20 data.prepare.1.{key} = " in shown
    assert said in shown


@pytest.mark.parametrize("on_bad", ["stop", "skip"])
def test_the_columns_that_steps_read_must_be_there(folder: Path, on_bad: str) -> None:
    table("a.parquet", "text")(folder)
    (folder / "a.jsonl").write_text('{"text": "A row.", "quality": "3", "id": 7}\n')
    step = {"step": "score", "column": "score", "min": 1, "only": ["web"]}
    for name, column, said in (
        ("a.parquet", "score", "has no column score; it has text. Set it to a column of the source"),
        ("a.jsonl", "score", "a.jsonl:1: has no column score; it has text, quality, id"),
        ("a.jsonl", "quality", "the column quality must be a number, and is a value of type str"),
    ):
        refused = submit({"path": name}, {"prepare": [{**step, "column": column}], "on_bad": on_bad})
        assert refused.code == ExitCode.USAGE
        shown = " ".join(refused.err.split())
        assert f"run.yaml:20 data.prepare.0.column = {column}: " in shown
        assert said in shown
    (folder / "a.jsonl").write_text('{"text": "A row."}\n{"text": "A row.", "score": 3}\n')
    assert (submit({"path": "a.jsonl"}, {"prepare": [step], "on_bad": on_bad}).code == 0) is (on_bad == "skip")
    assert submit({"path": "a.parquet"}, {"prepare": [{**step, "only": ["good"]}]}).code == 0


def test_each_source_that_only_the_nodes_see_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))  # a machine without Slurm's commands
    taken = submit({"path": "/scratch-of-nodes/*.jsonl"}, scheduler="slurm")
    assert taken.code == 0, taken.err
    assert "not checked here: data.sources.1.path = /scratch-of-nodes/*.jsonl;" in " ".join(taken.err.split())
