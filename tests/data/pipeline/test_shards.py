"""Shards of tokens, and the processes that write them."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from scaletrain_cli.data.chunk_hashes import CheckedFile
from scaletrain_cli.data.pipeline.schedule import Workers
from scaletrain_cli.data.pipeline.shards import encoded, read_shard_info, split_of, write_shard
from scaletrain_cli.data.pipeline.tasks import Source, tasks_of
from scaletrain_cli.data.sources.records import SourceFile
from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.rundir.paths import find_run
from tests.data.texts import trained_tokenizer
from tests.data.worker_jobs import run_jobs

TEXTS = [f"The {n}th document has {n * n} words, äöü \N{SNOWMAN}. " * (1 + n % 9) for n in range(700)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return trained_tokenizer(TEXTS, 400)


def test_a_shard_has_the_tokens_of_a_plain_loop(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_shard(tmp_path / "0", encoded(tokenizer, TEXTS, 7, "uint16"), 0.2)
    expected: dict[str, list[int]] = {"train": [], "validation": []}
    ends: dict[str, list[int]] = {"train": [], "validation": []}
    for text in TEXTS:
        split = split_of(text.encode(), 0.2)
        expected[split] += [*tokenizer.encode(text).ids, 7]
        ends[split].append(len(expected[split]) - 1)
    info = read_shard_info(tmp_path / "0")
    assert info is not None
    for split in ("train", "validation"):
        tokens = np.fromfile(tmp_path / "0" / f"{split}.bin", "uint16")
        assert tokens.tolist() == expected[split]
        assert np.fromfile(tmp_path / "0" / f"{split}.ends.bin", "int64").tolist() == ends[split]
        CheckedFile(tmp_path / "0" / f"{split}.bin", tokens.view(np.uint8)).check_share(0, 1)
        assert getattr(info, f"{split}_tokens") == len(expected[split])
        assert getattr(info, f"{split}_documents") == len(ends[split])
    assert info.bytes == sum(len(text.encode()) for text in TEXTS)
    assert 0.1 < info.validation_documents / len(TEXTS) < 0.3


@pytest.mark.parametrize("around", ["$A", "$A <eos>", "<bos> $A", "<bos> $A <eos>", "<bos> $A <sep>"])
@pytest.mark.parametrize(("start", "end"), [("", ""), ("<bos>", "<eos>")])
def test_a_document_has_the_start_of_its_tokenizer_and_the_end_of_text_once(start: str, end: str, around: str) -> None:
    tokenizer = trained_tokenizer(TEXTS, 400)
    marks = ["<bos>", "<eos>", "<sep>"]
    tokenizer.add_special_tokens(marks)
    ids = [(mark, tokenizer.token_to_id(mark)) for mark in marks]
    tokenizer.post_processor = processors.TemplateProcessing(single=around, special_tokens=ids)
    (document,) = encoded(tokenizer, [f"{start}The 7th document.{end}"], tokenizer.token_to_id("<eos>"), "uint16")
    begins = "<bos>" if start or around.startswith("<bos>") else ""
    expected = tokenizer.encode(f"{begins}The 7th document.<eos>", add_special_tokens=False)
    assert document.tokens.tolist() == expected.ids


def test_a_killed_worker_is_an_error_that_says_so() -> None:
    """The work is a function of a library, so that the processes import no test."""
    jobs = iter([signal.SIGKILL if number == 3 else signal.SIGCHLD for number in range(1000)])
    with pytest.raises(ScaletrainError, match="killed"), Workers(2) as pool:
        list(run_jobs(pool, signal.raise_signal, jobs))
    assert next(jobs, None) is not None


def test_the_error_of_a_job_ends_the_others(tmp_path: Path) -> None:
    """The work is a function of the package, so that the processes import no test."""
    (tmp_path / "run.json").touch()
    jobs = iter([f"{tmp_path}/3" if number == 3 else str(tmp_path) for number in range(100_000)])
    with pytest.raises(ScaletrainError, match=f"no run '{tmp_path}/3'") as raised, Workers(2) as pool:
        list(run_jobs(pool, find_run, jobs))
    with pytest.raises(ScaletrainError) as here:
        find_run(f"{tmp_path}/3")
    assert raised.value.to_json() == here.value.to_json()
    assert next(jobs, None) is not None


def test_a_small_source_has_tasks_for_many_workers_and_a_large_one_large_tasks(tmp_path: Path) -> None:
    for size, count, most in ((64 << 20, 32, 2 << 20), (4 << 30, 256, 16 << 20), (1 << 40, 1 << 15, 32 << 20)):
        path = tmp_path / "a.jsonl"
        with path.open("wb") as file:
            file.truncate(size)
        tasks = tasks_of(Source("web", (SourceFile(str(path), size, "jsonl"),), "a"))
        assert len(tasks) == count
        assert max(task.parts[0].stop - task.parts[0].start for task in tasks) == most
