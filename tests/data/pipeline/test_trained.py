"""The tokenizer that is trained on the documents that are left: against the library, and in any number of workers."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from scaletrain_cli.data.pipeline import prepare as pipeline
from scaletrain_cli.data.pipeline.chain import Work, chain_of
from scaletrain_cli.data.pipeline.prepare import Preparation, prepare, prepared, sample, spread
from scaletrain_cli.data.pipeline.tasks import Source, tasks_of
from scaletrain_cli.data.sources.records import SourceFile
from scaletrain_cli.spec.preparation import GopherQualitySpec
from tests.data.texts import jsonl

WEB = [f"The web has document {number}, {'very ' * (number % 7)}long." for number in range(400)]
BOOKS = [f"Book {number} begins with {'dark ' * (number % 5)}night." for number in range(400)]
SHORT = GopherQualitySpec(step="quality", rules="gopher_quality", min_words=8, min_stop_words=0)


def source(folder: Path, name: str, rows: list[str]) -> Source:
    path = folder / f"{name}.jsonl"
    path.write_bytes(jsonl(rows))
    return Source(name, (SourceFile(str(path), path.stat().st_size, "jsonl"),), name)


def test_one_source_without_steps_trains_on_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "MOST_CHARACTERS", sum(map(len, WEB[:100])) - 1)
    given = Preparation((source(tmp_path, "web", WEB),), (), "", 0.1, task_bytes=500, vocab_size=300)
    done = prepare(given, tmp_path / "data", 1, lambda *_: None)["web"]
    expected = Tokenizer(models.BPE())
    expected.pre_tokenizer, expected.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    expected.train_from_iterator(WEB[:100], trainer)
    assert (done / "tokenizer.json").read_text(encoding="utf-8") == expected.to_str(pretty=True)


def test_sources_are_sampled_by_size_evenly_and_after_all_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "MOST_CHARACTERS", 3000)
    sources = source(tmp_path, "web", WEB), source(tmp_path, "books", BOOKS)
    chains = [chain_of(tmp_path / "steps", each, (SHORT,), skips_bad=False) for each in sources]
    sampled = [
        Work(replace(each, files=(replace(each.files[0], size=size),)), tasks_of(each, 1000), chain)
        for each, chain, size in zip(sources, chains, (3000, 1000), strict=True)
    ]
    texts = list(sample(sampled))
    characters = {text: sum(len(each) for each in texts if each.startswith(text)) for text in ("The", "Book")}
    assert 2250 < characters["The"] < 2350
    assert 750 < characters["Book"] < 850
    assert min(len(text.split()) for text in texts) == 8
    numbers = [int(text.split()[4].strip(",")) for text in texts if text.startswith("The")]
    assert min(numbers) < 40
    assert max(numbers) > 200


def test_every_beginning_of_the_order_of_tasks_is_spread(tmp_path: Path) -> None:
    tasks = tasks_of(source(tmp_path, "web", WEB), 1000)
    found = [task.number for task in spread(tasks)]
    assert sorted(found) == [task.number for task in tasks]
    for count in (2, 4, 8):
        ordered = sorted(found[:count])
        gaps = [after - before for before, after in zip(ordered, [*ordered[1:], len(tasks)], strict=True)]
        assert max(gaps) <= 2 * len(tasks) / count


def test_any_number_of_workers_trains_the_same_tokenizer_once(tmp_path: Path) -> None:
    sources = source(tmp_path, "web", WEB), source(tmp_path, "books", BOOKS)
    given = Preparation(sources, (SHORT,), "", 0.1, task_bytes=4000, vocab_size=320)
    found = []
    for workers in (1, 2):
        done = prepare(given, tmp_path / str(workers), workers, lambda *_: None)
        found.append((done["web"] / "tokenizer.json").read_bytes())
        assert (done["books"] / "tokenizer.json").read_bytes() == found[-1]
    assert found[0] == found[1]
    (kept,) = (tmp_path / "1" / ".tokenizers").rglob("tokenizer.json")
    shutil.rmtree(tmp_path / "1" / ".steps")
    assert prepared(given, tmp_path / "1") is not None, "datasets are found without the decisions"
    before = kept.stat().st_mtime_ns
    prepare(Preparation(sources, (SHORT,), "", 0.2, vocab_size=320), tmp_path / "1", 1, lambda *_: None)
    assert kept.stat().st_mtime_ns == before
