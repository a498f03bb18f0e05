"""Whole preparations: against a plain loop, by any number of workers, after kills and after changes."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from scaletrain_cli.data.pipeline.prepare import Preparation, prepare
from scaletrain_cli.data.pipeline.shards import split_of
from scaletrain_cli.data.pipeline.tasks import Source
from scaletrain_cli.data.sources.records import SourceFile
from scaletrain_cli.spec.preparation import DuplicatesSpec, GopherQualitySpec, IdentifiersSpec, NormalizationSpec
from tests.data.texts import ignore, jsonl, trained_tokenizer

STEPS = (
    NormalizationSpec(step="normalization"),
    GopherQualitySpec(step="quality", rules="gopher_quality", min_words=6, min_stop_words=0),
    DuplicatesSpec(step="duplicates", similarity=0.7),
    IdentifiersSpec(step="identifiers", only=("web",)),
)
WORDS = [f"word{n}" for n in range(400)]


def texts(seed: int, count: int) -> list[str]:
    """Return texts, some of them short, some twice, some twice with one word changed, some with a mail address."""
    draw = random.Random(seed)
    found: list[str] = []
    for _ in range(count):
        kind = draw.random()
        if found and kind < 0.1:
            found.append(draw.choice(found))
        elif found and kind < 0.2:
            words = draw.choice(found).split()
            words[draw.randrange(len(words))] = "changed"
            found.append(" ".join(words))
        elif kind < 0.3:
            found.append("too short")
        else:
            found.append(" ".join(draw.choices(WORDS, k=draw.randint(40, 80))) + f" a{draw.randint(0, 9)}@example.org")
    return found


@pytest.fixture(scope="module")
def tokenizer() -> str:
    return str(trained_tokenizer(texts(0, 200), 500).to_str())


def source(folder: Path, name: str, rows: Sequence[str], files: int = 3) -> Source:
    found = []
    for number in range(files):
        path = folder / f"{name}-{number}.jsonl"
        if not path.exists():  # else another process may be reading it
            path.write_bytes(jsonl(rows[number::files]))
        found.append(SourceFile(str(path), path.stat().st_size, "jsonl"))
    content = hashlib.sha256(json.dumps(list(rows)).encode()).hexdigest()
    return Source(name, tuple(found), content)


def preparation(folder: Path, tokenizer: str, count: int) -> Preparation:
    sources = (source(folder, "web", texts(1, count)), source(folder, "books", texts(1, count // 3) + texts(2, count)))
    return Preparation(sources, STEPS, tokenizer, 0.1, task_bytes=10_000)


def files_below(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".lock")
    }


def test_the_tokens_are_those_of_a_plain_loop(tokenizer: str, tmp_path: Path) -> None:
    rows = {"web": texts(1, 100), "books": texts(2, 100)}
    sources = tuple(source(tmp_path, *each) for each in rows.items())
    steps = (STEPS[0], STEPS[1], DuplicatesSpec(step="duplicates", near=False), STEPS[3])
    done = prepare(Preparation(sources, steps, tokenizer, 0.1, task_bytes=10_000), tmp_path / "data", 1, ignore)
    loaded, seen = Tokenizer.from_str(tokenizer), set[str]()
    for name, given in rows.items():
        expected: dict[str, list[int]] = {"train": [], "validation": []}
        for row in (row for number in range(3) for row in given[number::3]):
            if len(row.split()) >= 6 and row not in seen:
                seen.add(row)
                words = row.split()
                text = " ".join([*words[:-1], "<EMAIL>"]) if name == "web" and "@" in words[-1] else row
                expected[split_of(text.encode(), 0.1)] += [*loaded.encode(text).ids, 0]
        document = json.loads((done[name] / "dataset.json").read_text(encoding="utf-8"))
        for split, tokens in expected.items():
            folders = [done[name] / f"{number:06d}" for number in range(len(document["shards"]))]
            found = np.concatenate([np.fromfile(folder / f"{split}.bin", "uint16") for folder in folders])
            assert found.tolist() == tokens
            assert document[f"{split}_tokens"] == len(tokens)


def test_near_duplicates_are_removed_and_any_number_of_workers_prepares_the_same_bytes(
    tokenizer: str, tmp_path: Path
) -> None:
    given = preparation(tmp_path, tokenizer, 120)
    for workers in (1, 2):
        prepare(given, tmp_path / str(workers), workers, ignore)
    found = files_below(tmp_path / "1")
    assert found == files_below(tmp_path / "2")
    assert sum(path.endswith("/report.json") for path in found) == 3  # of the duplicates and of two datasets
    decisions = [path for path in (tmp_path / "1" / ".steps").rglob("*.json") if path.name != "report.json"]
    removed = {rule for path in decisions for rule in json.loads(path.read_text(encoding="utf-8"))["removed"]}
    assert removed == {"duplicates.exact", "duplicates.near", "gopher_quality.min_words"}


def test_another_tokenizer_keeps_the_decisions_and_a_second_source_keeps_the_first(
    tokenizer: str, tmp_path: Path
) -> None:
    web = source(tmp_path, "web", texts(1, 200))
    steps = (STEPS[0], STEPS[1], DuplicatesSpec(step="duplicates", across_sources=False, only=("web",)))
    first = prepare(Preparation((web,), steps, tokenizer, 0.1), tmp_path / "data", 1, ignore)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*") if path.is_file()}
    smaller = json.loads(tokenizer)
    smaller["added_tokens"][0]["normalized"] = True
    other = prepare(Preparation((web,), steps, json.dumps(smaller), 0.1), tmp_path / "data", 1, ignore)
    assert other["web"] != first["web"]
    books = source(tmp_path, "books", texts(2, 200))
    both = prepare(Preparation((web, books), steps, tokenizer, 0.1), tmp_path / "data", 1, ignore)
    assert both["web"] == first["web"]
    assert {path: path.stat().st_mtime_ns for path in before} == before
