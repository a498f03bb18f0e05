import errno
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from scaletrain_cli.data.chunk_hashes import HashedFile
from scaletrain_cli.data.pipeline import contents
from scaletrain_cli.data.pipeline import prepare as pipeline
from scaletrain_cli.data.pipeline.tasks import Task, documents
from scaletrain_cli.data.prepared import find_prepared, prepare_data
from scaletrain_cli.data.sources.listing import source_files
from scaletrain_cli.data.sources.records import Part, local_file
from scaletrain_cli.errors import ScaletrainError, UsageError
from scaletrain_cli.rundir.shared_datasets import place_of, steps_folder
from scaletrain_cli.spec import DataSpec
from scaletrain_cli.spec.corpus_files import find_text
from scaletrain_cli.spec.sources import SourceSpec
from tests.cli.command_line import SMALL
from tests.data.texts import ignore, jsonl, tokenizer_of_words
from tests.waiting import wait_until

WORDS = [f"word{number}" for number in range(300)]
NORMALIZED = [{"step": "normalization"}]
FOLDER = Path(__file__).parents[2]


def text(number: int, words: int = 60) -> str:
    return " ".join(WORDS[(number * 7 + place * place) % 300] for place in range(words))


def texts(count: int, start: int = 0) -> bytes:
    return jsonl(text(number) for number in range(start, start + count))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    tokenizer_of_words(WORDS).save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def data(tokenizer: Path, **settings: Any) -> DataSpec:
    given = {"tokenizer": {"kind": "file", "path": str(tokenizer)}, "validation_split": 0.1}
    return DataSpec.model_validate(given | settings)


def prepare(spec: DataSpec, root: Path) -> dict[str, Path]:
    return prepare_data(spec, root, 1, ignore)


def weighted(folder: Path, *names: str) -> list[dict[str, Any]]:
    return [{"name": name, "path": str(folder / f"{name}.jsonl"), "weight": 1} for name in names]


def hashes_below(folder: Path, *but: str) -> dict[str, str]:
    return {name: digest for name, (_, digest) in files_below(folder).items() if name not in but}


def files_below(folder: Path) -> dict[str, tuple[int, str]]:
    """Return inode and hash of every file below a folder, without claims."""
    return {
        str(path.relative_to(folder)): (path.stat().st_ino, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".work" not in path.parts
    }


# ---- what is found ---------------------------------------------------------------------------------------------------


def test_prepared_sources_are_found_by_their_content_and_without_reading_it(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("web", "books"):
        (tmp_path / f"{name}.jsonl").write_bytes(texts(40, len(name) * 100))
    sources = weighted(tmp_path, "web", "books")
    spec = data(tokenizer, sources=sources, prepare=[{"step": "duplicates", "near": False}])
    assert find_prepared(spec, tmp_path / "runs") is None
    done = prepare(spec, tmp_path / "runs")
    assert list(done) == ["web", "books"]
    monkeypatch.setattr(contents, "hash_range", lambda each: pytest.fail(f"{each.path} is read again"))
    before = files_below(tmp_path / "runs")
    assert find_prepared(spec, tmp_path / "runs") == prepare(spec, tmp_path / "runs") == done
    assert files_below(tmp_path / "runs") == before
    monkeypatch.undo()
    os.utime(tmp_path / "web.jsonl")
    assert find_prepared(spec, tmp_path / "runs") is None, "its content is not known before it is read"
    assert prepare(spec, tmp_path / "runs") == done
    (tmp_path / "web.jsonl").write_bytes(texts(41))
    assert prepare(spec, tmp_path / "runs")["web"] != done["web"]


def test_a_prepared_dataset_is_used_as_it_is(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "web.jsonl").write_bytes(texts(40))
    done = prepare_data(data(tokenizer, source=str(tmp_path / "web.jsonl")), tmp_path / "runs", 1, ignore)
    again = data(tokenizer, source=str(done["source"]))
    assert prepare_data(again, tmp_path / "elsewhere", 1, ignore) == done
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_that_is_renamed_is_read_as_what_its_name_says(tokenizer: Path, tmp_path: Path) -> None:
    packed, plain, runs = tmp_path / "web.jsonl.gz", tmp_path / "web.jsonl", tmp_path / "runs"
    packed.write_bytes(gzip.compress(texts(40)))
    spec = data(tokenizer, source=str(tmp_path / "web.jsonl*"), on_bad="skip")
    found = prepare_data(spec, runs, 1, ignore)["source"]
    packed.rename(plain)
    with pytest.raises(UsageError, match=r"no document .* of source source can be used"):
        prepare_data(spec, runs, 1, ignore)
    plain.rename(packed)
    assert prepare_data(spec, runs, 1, ignore)["source"] == found


def test_a_changed_mixture_keeps_tokenizer_and_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "MOST_CHARACTERS", 8000)
    for name, start in (("web", 0), ("books", 500)):
        (tmp_path / f"{name}.jsonl").write_bytes(texts(100, start))

    def mixture(*shares: dict[str, float], stages: Sequence[Any] = ()) -> DataSpec:
        names = ("web", "books")
        paths = [{"name": name, "path": str(tmp_path / f"{name}.jsonl")} for name in names]
        sources = [path | share for path, share in zip(paths, shares, strict=True)]
        tokenizer = {"kind": "bpe", "vocab_size": 400}
        return DataSpec.model_validate({"sources": sources, "tokenizer": tokenizer, "stages": stages})

    done = prepare_data(mixture({"weight": 0.9}, {"weight": 0.1}), tmp_path / "runs", 1, ignore)
    changed = [
        mixture({"weight": 0.2}, {"weight": 0.8}),
        mixture({"weight": 1}, {"weight": 0}),
        mixture({"weight": 1}, {"epochs": 2}),
        mixture({"weight": 0.9}, {"weight": 0.1}, stages=[{"start": 0.5, "weights": {"books": 1}}]),
    ]
    assert [find_prepared(spec, tmp_path / "runs") for spec in changed] == [done] * len(changed)


@pytest.mark.parametrize("kind", ["bpe", "file"])
@pytest.mark.parametrize("column", ["score", "mark"])
def test_a_source_of_which_nothing_is_left_is_named_with_what_removed_most(
    kind: str, column: str, tokenizer: Path, tmp_path: Path
) -> None:
    rows = [{"text": text(number), "score": "high" if number else 0, "mark": number} for number in range(40)]
    (tmp_path / "web.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "books.jsonl").write_bytes(texts(40))
    given = {"kind": "bpe", "vocab_size": 400} if kind == "bpe" else {"kind": "file", "path": str(tokenizer)}
    steps = [{"step": "score", "column": column, "min": 40, "only": ["web"]}]
    sources = weighted(tmp_path, "books", "web")
    spec = DataSpec.model_validate({"sources": sources, "prepare": steps, "on_bad": "skip", "tokenizer": given})
    said = {
        "mark": r"source web is left: the rule score\.min of the step score removed 40 of 40",
        "score": r"source web is left: 39 of 40 cannot be used, the first one: .*web\.jsonl:2: the column score",
    }
    with pytest.raises(UsageError, match=said[column]):
        prepare(spec, tmp_path / "runs")
    assert not [*(tmp_path / "runs").rglob("tokenizer.json")]
    assert find_prepared(spec, tmp_path / "runs") is None


def test_relative_paths_are_below_the_given_folder(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "web.jsonl").write_bytes(texts(40))
    (tmp_path / "questions.txt").write_text(text(3, 20))
    steps = [{"step": "contamination", "files": ["questions.txt"], "action": "drop"}]
    spec = data(Path("tokenizer.json"), source="web.jsonl", prepare=steps)
    done = prepare_data(spec, tmp_path / "runs", 1, ignore, tmp_path)
    report = json.loads((done["source"] / "report.json").read_text())
    assert report["steps"][1]["documents_left"] < report["steps"][1]["documents"] == 40
    before, after = (step["estimated_tokens_left"] for step in report["steps"][:2])
    assert before > after == report["tokens"]["train"] + report["tokens"]["validation"]


@pytest.mark.parametrize(
    ("names", "named", "chosen"),
    [
        (["a.jsonl", "b.jsonl.zst", "c.csv", "d.txt.gz"], "auto", ["a.jsonl", "b.jsonl.zst", "d.txt.gz"]),
        (["a.jsonl", "b.txt"], "jsonl", ["a.jsonl"]),
        (["a.idx", "a.bin", "model.bin"], "auto", ["a.idx"]),
        (["a.npy", "b.bin", "c.jsonl"], "raw_uint16", ["a.npy", "b.bin"]),
        (["a.ndjson", "b.text", "README.md"], "auto", ["a.ndjson", "b.text"]),
    ],
)
def test_the_format_chooses_files_of_a_folder(names: list[str], named: str, chosen: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    found = find_text(str(tmp_path), named=named)
    assert [path.name for path in found.files] == chosen
    assert sum(found.not_read.values()) == len([name for name in names if name not in chosen and name[0] not in "aR"])


def test_a_path_with_a_format_is_read_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_bytes(texts(2))
    (file,) = source_files(SourceSpec(name="x", path="rows.json", format="jsonl"), tmp_path)
    assert (file.kind, file.size) == ("jsonl", (tmp_path / "rows.json").stat().st_size)
    with pytest.raises(UsageError, match=r"data\.sources\.1\.path = rows\.json: the source has no txt"):
        source_files(SourceSpec(name="x", path="rows.json"), tmp_path, "data.sources.1.path")


def test_truncation_and_padding_of_a_tokenizer_are_off_and_its_content_counts(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "web.jsonl").write_bytes(texts(40))
    spec = data(tokenizer, source=str(tmp_path / "web.jsonl"))
    whole = prepare(spec, tmp_path / "runs")["source"]
    changed = Tokenizer.from_file(str(tokenizer))
    changed.enable_truncation(4)
    changed.enable_padding(length=8)
    changed.save(str(tokenizer))
    assert prepare(spec, tmp_path / "runs")["source"] == whole
    changed.add_tokens(["word1 word2"])
    changed.save(str(tokenizer))
    assert prepare(spec, tmp_path / "runs")["source"] != whole


def test_descriptions_of_a_corpus_and_byte_order_marks_are_no_text(tmp_path: Path) -> None:
    for name, written in {
        "README.md": b"about the corpus",
        "LICENSE.txt": b"about the rights",
        ".hidden.txt": b"hidden",
        "a.jsonl.gz": gzip.compress(b'{"text": "compressed"}\n'),
        "b.txt": b"\xef\xbb\xbfb\r\nc",
    }.items():
        (tmp_path / name).write_bytes(written)
    files = source_files(SourceSpec(name="x", path=str(tmp_path)))
    assert list(documents(files)) == ["compressed", "b\nc"]
    (readme,) = source_files(SourceSpec(name="x", path=str(tmp_path / "README.md")))
    assert list(documents([readme])) == ["about the corpus"], "by its own name it is taken"


# ---- what is done again ----------------------------------------------------------------------------------------------


def test_a_changed_step_redoes_itself_and_the_later_ones_only(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "web.jsonl").write_bytes(texts(60))
    (tmp_path / "questions.txt").write_text(text(3, 20))
    (tmp_path / "words.txt").write_text("word299 word298 nothing\n")

    def done(**changed: Any) -> set[str]:
        before = files_below(tmp_path / "runs")
        words = {"step": "quality", "rules": "gopher_quality", "min_words": changed.get("min_words", 10)}
        steps = [
            {"step": "normalization"},
            words | {"min_stop_words": 0, "min_mean_word_length": None},
            {"step": "contamination", "files": [changed.get("files", "questions.txt")], "action": "drop"},
            {"step": "identifiers"},
        ]
        spec = data(tokenizer, source="web.jsonl", prepare=steps[: changed.get("steps", 4)])
        found = prepare_data(spec, tmp_path / "runs", 1, ignore, tmp_path)["source"]
        keys = json.loads((found / "dataset.json").read_text())["steps"]
        after = files_below(tmp_path / "runs")
        assert all(after[path] == known for path, known in before.items() if path in after)
        new = {Path(path).parts[2] for path in after if path not in before and ".steps" in path}
        return {f"{number}" for number, key in enumerate(keys) if key in new} | {
            "tokens" for path in after if path not in before and path.endswith("train.bin")
        }

    assert done() == {"0", "1", "2", "3", "4", "tokens"}
    assert done() == set()
    assert done(min_words=5) == {"2", "3", "4", "tokens"}
    (tmp_path / "copy.txt").write_bytes((tmp_path / "questions.txt").read_bytes())
    assert done(files="copy.txt") == set(), "the content of a file counts, not its name"
    (tmp_path / "copy.txt").write_text(text(4, 20))
    assert done(files="copy.txt") == {"3", "4", "tokens"}
    assert done(steps=3) == {"tokens"}


def test_the_progress_names_the_steps_that_a_stage_applies(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "web.jsonl").write_bytes(texts(60))
    (tmp_path / "code.jsonl").write_bytes(texts(60, start=60))
    last = {"step": "identifiers", "only": ["web"]}
    steps = [{"step": "normalization"}, {"step": "duplicates", "near": False}, last]
    both = [{"name": name, "path": f"{name}.jsonl", "weight": 1} for name in ("web", "code")]
    spec = data(tokenizer, sources=both, prepare=steps)
    stages: dict[str, None] = {}
    prepare_data(spec, tmp_path / "runs", 1, lambda stage, *_: stages.setdefault(stage), tmp_path)
    assert "duplicates: signatures (after normalization)" in stages
    assert {"tokenize web (after identifiers)", "tokenize code"} <= stages.keys()


def test_a_renamed_corpus_is_prepared_with_other_settings_at_its_new_place(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for number in range(2):
        rows = texts(20, 20 * number) + b"{\n" + texts(3) + json.dumps({"text": f"short {number}"}).encode()
        (tmp_path / "old" / f"{number}.jsonl").write_bytes(rows)
    steps: list[dict[str, Any]] = [{"step": "quality", "rules": "gopher_quality", "min_words": 5, "min_stop_words": 0}]
    steps.append({"step": "duplicates", "near": False})
    prepare_data(data(tokenizer, source=str(tmp_path / "old"), prepare=steps, on_bad="skip"), tmp_path, 1, ignore)
    (tmp_path / "old").rename(tmp_path / "new")
    spec = data(tokenizer, source=str(tmp_path / "new"), prepare=[*steps, {"step": "identifiers"}], on_bad="skip")
    report = json.loads((prepare(spec, tmp_path)["source"] / "report.json").read_text())
    reading, quality, duplicates, _ = report["steps"]
    assert [each["place"] for each in reading["bad"][0]["places"]] == [f"{tmp_path}/new/{n}.jsonl:21" for n in (0, 1)]
    assert [each["place"] for each in quality["removed"][0]["examples"]] == [
        f"{tmp_path}/new/{number}.jsonl:25" for number in (0, 1)
    ]
    assert duplicates["removed"][0]["documents"] == 6
    assert {each["kept"]["place"] for each in report["duplicates"][0]["largest_clusters"]} == {
        f"{tmp_path}/new/0.jsonl:{line}" for line in (1, 2, 3)
    }


def test_of_two_equal_sources_the_first_keeps_all_documents_the_second_none(tokenizer: Path, tmp_path: Path) -> None:
    for name in ("web", "copy"):
        (tmp_path / f"{name}.jsonl").write_bytes(texts(40))
    sources = weighted(tmp_path, "web", "copy")
    spec = data(tokenizer, sources=sources, prepare=[{"step": "duplicates", "near": False}, {"step": "identifiers"}])
    with pytest.raises(UsageError, match=r"source copy .*duplicates\.exact of the step duplicates removed 40 of 40"):
        prepare(spec, tmp_path)
    decisions = [json.loads(path.read_text()) for path in tmp_path.glob("datasets/.steps/*/000000.json")]
    counts = sorted((each["documents"], each["documents_left"]) for each in decisions)
    assert counts == [(0, 0), (40, 0), (40, 40), (40, 40), (40, 40)], "both read once; deduplication; identifiers"


def test_the_first_bad_document_is_named_if_bad_ones_were_skipped_before(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "web.jsonl").write_bytes(texts(20) + b'{"body": 1}\n' + b"{\n" * 3)
    prepare_data(data(tokenizer, source=str(tmp_path / "web.jsonl"), on_bad="skip"), tmp_path, 1, ignore)
    with pytest.raises(UsageError, match=r"web\.jsonl:21"):
        find_prepared(data(tokenizer, source=str(tmp_path / "web.jsonl")), tmp_path)


@pytest.mark.parametrize("moment", ["between", "in the middle"])
def test_a_file_that_is_replaced_while_it_is_prepared_is_an_error(
    moment: str, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "web.jsonl"
    path.write_bytes(texts(60))

    def replace(*_: object) -> None:
        (tmp_path / "new").write_bytes(texts(60, 1000))
        (tmp_path / "new").rename(path)

    def progress(stage: str, done: int, total: int) -> None:
        if moment == "between" and stage == "read the sources" and done:
            replace()

    if moment == "in the middle":
        read = Task.records

        def records(task: Task) -> Any:
            for number, record in enumerate(read(task)):
                if number == 30:
                    replace()
                yield record

        monkeypatch.setattr(Task, "records", records)
    spec = data(tokenizer, source=str(path))
    with pytest.raises(UsageError, match=r"web\.jsonl has changed while it was prepared"):
        prepare_data(spec, tmp_path / "runs", 1, progress)
    assert not [found for found in (tmp_path / "runs").rglob("*") if found.name == "dataset.json"]
    monkeypatch.undo()
    done = prepare(spec, tmp_path / "runs")["source"]
    path.write_bytes(texts(60, 1000))
    whole = prepare(spec, tmp_path / "whole")["source"]
    assert done.name == whole.name
    assert hashes_below(done, "report.json") == hashes_below(whole, "report.json")


def test_a_file_that_shrinks_is_reported_as_changed_and_not_as_a_bad_document(tmp_path: Path) -> None:
    path = tmp_path / "web.jsonl"
    path.write_bytes(texts(5000))
    file = local_file(path, "jsonl")
    records = Task("web", 0, (Part(file, 0, file.size),)).records()
    next(records)
    os.truncate(path, file.size - 7)
    with pytest.raises(UsageError, match="has changed"):
        list(records)


@pytest.mark.parametrize("file", ["train.bin", "dataset.json", "tokenizer.json"])
def test_a_full_disk_leaves_nothing_that_is_taken_for_whole(
    file: str, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "web.jsonl").write_bytes(texts(60))
    spec = data(tokenizer, source=str(tmp_path / "web.jsonl"), prepare=NORMALIZED)
    write = os.write

    def full(descriptor: int, content: bytes) -> int:
        if f"/.{file}." in os.readlink(f"/proc/self/fd/{descriptor}"):  # its draft
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, content)

    def full_file(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    if file == "train.bin":
        monkeypatch.setattr(HashedFile, "write", full_file)
    with pytest.raises(ScaletrainError, match="No space left on device") as caught:
        prepare(spec, tmp_path / "runs")
    assert "Free some space" in str(caught.value.remedy)
    assert find_prepared(spec, tmp_path / "runs") is None
    assert not [path for path in (tmp_path / "runs").rglob("*") if path.name.endswith((".tmp", ".draft"))]
    monkeypatch.undo()
    found = prepare(spec, tmp_path / "runs")["source"]
    whole = prepare(spec, tmp_path / "whole")["source"]
    assert hashes_below(found) == hashes_below(whole)


def test_damaged_files_of_an_unfinished_dataset_are_written_again(tmp_path: Path) -> None:
    (tmp_path / "web.jsonl").write_bytes(texts(60))
    given = {"source": str(tmp_path / "web.jsonl"), "tokenizer": {"kind": "bpe", "vocab_size": 300}}
    spec = DataSpec.model_validate(given)
    done = prepare(spec, tmp_path / "runs")["source"]
    before = hashes_below(tmp_path / "runs")
    (trained_tokenizer,) = (tmp_path / "runs").rglob(".tokenizers/*/tokenizer.json")
    for damaged in (trained_tokenizer, done / "000000" / "shard.json"):
        damaged.write_text(damaged.read_text()[:30])
    (done / "dataset.json").unlink()
    assert find_prepared(spec, tmp_path / "runs") is None
    assert prepare(spec, tmp_path / "runs") == {"source": done}
    assert hashes_below(tmp_path / "runs") == before


def test_the_unfinished_data_of_root_do_not_block_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("c0ffee", ".steps"):
        (tmp_path / name).mkdir()
    own = (tmp_path / "c0ffee").stat().st_uid
    for uid, suffix in ((own, ""), (own + 1, f"-{own + 1}")):
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        assert place_of(tmp_path, "c0ffee") == tmp_path / f"c0ffee{suffix}"
        assert steps_folder(tmp_path) == tmp_path / f".steps{suffix}"
    (tmp_path / "c0ffee" / "dataset.json").write_text("{}")
    assert place_of(tmp_path, "c0ffee") == tmp_path / "c0ffee", "the whole dataset of another user is used"


def kill_when_written(command: list[str], environment: dict[str, str], folder: Path, more: int) -> None:
    def count() -> int:
        return sum(len(files) for _, _, files in os.walk(folder))

    enough = count() + more
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    wait_until(lambda: process.poll() is not None or count() >= enough, "the files are written")
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.long
def test_a_command_that_is_killed_goes_on_with_the_same_bytes(tokenizer: Path, tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_bytes(texts(1000, number) * 10)  # two tasks each
    command = [sys.executable, "-m", "scaletrain_cli", "data", "prepare", str(SMALL), "--workers", "2"]
    for setting in (f"data.source={tmp_path}/*.jsonl", f"data.tokenizer={{kind: file, path: {tokenizer}}}"):
        command += ["--set", setting]
    command += ["--set", "data.prepare=[{step: quality, rules: gopher_repetition, only: null}]"]
    environment = os.environ | {"PYTHONPATH": str(FOLDER), "SCALETRAIN_RUNS": str(tmp_path / "runs")}
    for more in (1, 5, 10):  # files
        kill_when_written(command, environment, tmp_path / "runs", more)
    subprocess.run(command, env=environment, check=True)
    subprocess.run(command, env=environment | {"SCALETRAIN_RUNS": str(tmp_path / "whole")}, check=True)
    each = (hashes_below(tmp_path / root / "datasets") for root in ("runs", "whole"))
    found, whole = ({name: digest for name, digest in one.items() if "content" not in name} for one in each)
    assert any(name.endswith("train.bin") for name in found)
    assert found == whole


# ---- what earlier versions have left ---------------------------------------------------------------------------------


def corpus(folder: Path) -> None:
    """Write one file of each format that earlier versions have read."""
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(texts(50))
    (folder / "b.txt").write_text("".join(f"{text(number)}.\n\n" for number in range(300)))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(texts(50, 100), mtime=0))
    (folder / "d.py").write_text("".join(f"{text(number)}\n" for number in range(50)))
    pq.write_table(pa.table({"text": [text(number) for number in range(200, 260)]}), folder / "e.parquet")


def test_the_tokens_are_those_of_earlier_versions(tokenizer: Path, tmp_path: Path) -> None:
    corpus(tmp_path / "texts")
    found = prepare_data(data(tokenizer, source=str(tmp_path / "texts")), tmp_path / "runs", 1, ignore)["source"]
    earlier = {  # SHA-256 of train.bin and validation.bin, as version 3 wrote them
        "train": "235583ce5923a56f5c879cbe1a7d6b36dba35461abab27641a173ed622498ab6",
        "validation": "d7a69e9558e16ec01acbbae49f379f86ace2a3e7e3584c6d528dabcc1a866eea",
    }
    shards = sorted(path for path in found.iterdir() if path.is_dir())
    for split, digest in earlier.items():
        tokens = b"".join((shard / f"{split}.bin").read_bytes() for shard in shards)
        assert hashlib.sha256(tokens).hexdigest() == digest


def test_a_bad_first_document_is_found_before_any_file_is_read_whole(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "good.jsonl").write_bytes(texts(10))
    (tmp_path / "bad.jsonl").write_bytes(texts(10) + b"{\n")
    sources = weighted(tmp_path, "good", "bad")
    with pytest.raises(UsageError, match=r"bad\.jsonl:11: is not JSON"):
        prepare_data(data(tokenizer, sources=sources), tmp_path / "runs", 1, lambda *_: None)
    assert not list(tmp_path.glob("runs/datasets/.content-*")), "the content of no file was remembered"
