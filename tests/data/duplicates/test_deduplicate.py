"""Deduplication of planted duplicates, against similarities that plain Python computes."""

import itertools
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.data.duplicates import PHASES, Corpus, Texts, candidates, clusters, read_removed
from scaletrain_cli.data.duplicates.clusters import parts
from scaletrain_cli.data.duplicates.corpus import Sections, settings_key
from scaletrain_cli.errors import MissingPackageError, UsageError
from scaletrain_cli.spec.preparation import DuplicatesSpec
from tests.data.duplicates.planted import ListedTexts, PlantedTexts, content, deduplicate, plain_similarity

PER_TASK = 200
TASKS = 4
SOURCES = ("web", "web", "code", "code")
settings = partial(DuplicatesSpec, step="duplicates")
SMALL_MEMORY = 1  # byte: the least that the sort can do with


def run(
    folder: Path,
    texts: Texts,
    *,
    sources: tuple[str, ...] = SOURCES,
    memory_bytes: int = 1 << 26,
    workers: int = 1,
    **keys: Any,
) -> Corpus:
    corpus = Corpus(folder, sources, settings(**keys), memory_bytes)
    deduplicate(corpus, texts, workers, keep_phases=True)
    return corpus


def removed(corpus: Corpus) -> dict[tuple[int, int], tuple[int, int]]:
    """Return the kept document of each removed one, both as (task, index)."""
    return {
        (task, found.index): (found.kept.task, found.kept.index)
        for task in range(corpus.tasks)
        for found in read_removed(corpus, task)
    }


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return run(tmp_path_factory.mktemp("reference"), PlantedTexts(PER_TASK, words=60))


def test_planted_duplicates_are_found_and_nothing_else(reference: Corpus) -> None:
    texts = PlantedTexts(PER_TASK, words=60)
    edges = {
        (int(lower), int(higher)): (int(common), int(together))
        for part in range(parts(reference))
        for lower, higher, common, together in Sections(reference.verified(part)).read("edges").tolist()
    }
    for (lower, higher), (common, together) in edges.items():
        assert common / together == plain_similarity(texts.text(lower), texts.text(higher)) >= 0.8
    # All pairs of a group of ten documents; documents of different groups have random words.
    similar = {}
    for base in range(0, PER_TASK * TASKS, 10):
        group = {number: texts.text(number) for number in range(base, base + 10) if number % 10 not in (4, 5)}
        for (lower, first), (higher, second) in itertools.combinations(group.items(), 2):
            similar[lower, higher] = plain_similarity(first, second)
    expected = {pair for pair, similarity in similar.items() if similarity >= 0.8}
    assert len(edges.keys() & expected) >= 0.95 * len(expected)
    assert edges.keys() <= expected
    assert Counter(round(similarity, 1) for pair, similarity in similar.items() if pair[0] % 10 == 0) >= Counter(
        {0.7: 80, 0.8: 80, 0.9: 80}
    )
    gone = removed(reference)
    for task, index in gone:
        number = task * PER_TASK + index
        assert number % 10 in (2, 3, 4, 5)
        assert gone[task, index] == (task, index - index % 10)
    assert sum(1 for _, index in gone if index % 10 in (4, 5)) == 2 * PER_TASK * TASKS // 10


@pytest.mark.long
@pytest.mark.process
def test_a_hundred_thousand_documents_reach_recall_precision_and_memory() -> None:
    benchmark = Path(__file__).parents[3] / "benchmarks" / "deduplication.py"
    result = subprocess.run([sys.executable, str(benchmark)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "targets met" in result.stdout


def test_the_report_counts_what_was_removed(reference: Corpus) -> None:
    report = reference.read_report()
    everything = [found for task in range(TASKS) for found in read_removed(reference, task)]
    assert report["documents"] == {"web": 400, "code": 400}
    assert report["removed"] == {
        "exact": sum(not found.near for found in everything),
        "near": sum(found.near for found in everything),
    }
    assert report["removed"]["exact"] == 80  # kind 4 of each group
    sizes = Counter((found.kept.task, found.kept.index) for found in everything)
    assert report["clusters_by_size"] == {
        str(size): count for size, count in sorted(Counter(count + 1 for count in sizes.values()).items())
    }
    assert sum(pair["documents"] for pair in report["removed_between_sources"]) == len(everything)
    assert {pair["removed_from"] == pair["kept_in"] for pair in report["removed_between_sources"]} == {True}
    texts = PlantedTexts(PER_TASK, words=60)
    assert len(report["examples"]) >= 10
    for example in report["examples"]:
        first, second = (
            texts.text(place["task"] * PER_TASK + place["index"]) for place in (example["first"], example["second"])
        )
        assert example["similarity"] == round(plain_similarity(first, second), 6)
    assert report["expected_recall"]["0.80"] == pytest.approx(0.975, abs=0.001)  # data of the formula at 20 x 8
    assert report["expected_recall"]["0.70"] == pytest.approx(0.695, abs=0.001)
    similarities = {round(found.similarity, 1) for found in everything}
    assert similarities <= {0.8, 0.9, 1.0}


def test_jobs_and_memory_change_no_byte(reference: Corpus, tmp_path: Path) -> None:
    corpus = Corpus(tmp_path, SOURCES, settings(), SMALL_MEMORY)
    generator = random.Random(0)
    for phase in PHASES:
        jobs = list(range(phase.jobs(corpus)))
        generator.shuffle(jobs)
        for job in jobs:
            phase.write(corpus, job, PlantedTexts(PER_TASK, words=60))
    assert content(tmp_path) == content(reference.folder)


@pytest.mark.process
def test_workers_and_kills_in_every_phase_do_not_change_a_byte(reference: Corpus, tmp_path: Path) -> None:
    """Each process kills itself after it has written a part of a file of a phase. One process forks all of them."""
    program = """
import os, signal, sys
from pathlib import Path
from typing import Any
from scaletrain_cli.data import duplicates
from scaletrain_cli.data.duplicates.corpus import SectionWriter
from scaletrain_cli.spec.preparation import DuplicatesSpec
from tests.data.duplicates.planted import PlantedTexts, deduplicate

folder = Path(sys.argv[1])
write, count = SectionWriter.append, 0

def append(self, rows):
    global count
    write(self, rows)
    if self._path.relative_to(folder).parts[0] == phase:
        count += 1
        if count == fatal:
            self._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)

SectionWriter.append = append
list(map(PlantedTexts(200, words=60).text, range(800)))  # which keeps the words
for line in sys.stdin:
    phase, fatal = line.split()[0], int(line.split()[1])
    if (pid := os.fork()) == 0:
        corpus = duplicates.Corpus(folder, ("web", "web", "code", "code"), DuplicatesSpec(step="duplicates"))
        deduplicate(corpus, PlantedTexts(200, words=60))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
    expected = content(reference.folder)
    folder = tmp_path / "work"
    killed = (
        *(("signatures", 60), ("identical", 2), ("bands", 9), ("pairs", 1), ("shingles", 200), ("verified", 1)),
        ("removed", 4),
    )
    command = [sys.executable, "-c", program, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        for phase, fatal in killed:
            print(phase, fatal, file=server.stdin, flush=True)
            assert int(server.stdout.readline()) == -signal.SIGKILL, phase
            left = content(folder)
            drafts = [name for name in left if name.endswith(".draft")]
            assert len(drafts) == 1
            assert {name: left[name] for name in left if name not in drafts}.items() <= expected.items()
    corpus = Corpus(folder, SOURCES, settings())
    assert not corpus.report.exists()
    deduplicate(corpus, PlantedTexts(PER_TASK, words=60), workers=2, keep_phases=True)
    assert content(folder) == expected
    deduplicate(corpus, PlantedTexts(PER_TASK, words=60))
    results = {name: data for name, data in expected.items() if name.startswith("removed/") or name == "report.json"}
    assert content(folder) == results
    assert removed(corpus) == removed(reference)
    assert [phase.jobs(corpus) for phase in PHASES] == [0] * len(PHASES)


def test_duplicates_across_sources_are_kept_if_so_wished(tmp_path: Path) -> None:
    text = " ".join(f"word{'abcdefghij'[number % 10]}{'klmnopqrst'[number // 10]}" for number in range(50))
    near = text + " end"
    texts = ListedTexts([text, near], [near, text, text + " other"])
    across = run(tmp_path / "across", texts, sources=("a", "b"))
    assert removed(across) == dict.fromkeys([(0, 1), (1, 0), (1, 1), (1, 2)], (0, 0))
    counts = across.read_report()["removed_between_sources"]
    assert {(pair["reason"], pair["removed_from"], pair["kept_in"]): pair["documents"] for pair in counts} == {
        ("near", "a", "a"): 1,
        ("exact", "b", "a"): 2,
        ("near", "b", "a"): 1,
    }
    within = run(tmp_path / "within", texts, sources=("a", "b"), across_sources=False)
    assert removed(within) == {(0, 1): (0, 0), (1, 1): (1, 0), (1, 2): (1, 0)}
    assert removed(run(tmp_path / "same", texts, sources=("a", "a"), across_sources=False)) == removed(across)


def test_short_documents_are_compared_exactly(tmp_path: Path) -> None:
    texts = ListedTexts(
        ["1 + 1 = 2", "3 + 4 = 7", "1  +  1 = 2", "", "a b c d", "A b c d", "a b c d e", "A, b c d e", ""]
    )
    corpus = run(tmp_path / "both", texts, sources=("a",))
    assert removed(corpus) == {(0, 2): (0, 0), (0, 7): (0, 6), (0, 8): (0, 3)}
    assert corpus.read_report()["too_short"] == 7
    assert removed(run(tmp_path / "exact", texts, sources=("a",), near=False)) == {(0, 2): (0, 0), (0, 8): (0, 3)}
    assert removed(run(tmp_path / "near", texts, sources=("a",), exact=False)) == {(0, 7): (0, 6)}


def test_no_documents_are_no_duplicates(tmp_path: Path) -> None:
    corpus = run(tmp_path, ListedTexts([], []), sources=("a", "b"))
    assert removed(corpus) == {}
    assert corpus.read_report()["documents"] == {"a": 0, "b": 0}


def template(number: int, own_words: int) -> str:
    """Return a page of one template: each has words of its own in some places."""
    generator = random.Random(number)
    words = [f"word{chr(97 + place % 26)}{chr(97 + place // 26)}" for place in range(200)]
    for _ in range(own_words):
        words[generator.randrange(200)] = "".join(generator.choices("bcdfg", k=8))
    return " ".join(words)


def test_pairs_are_found_among_many_documents_just_not_similar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "SMALL_BUCKET", 4)
    documents = 100
    pages = [template(number, 4) for number in range(documents)]
    similar = [
        (lower, higher)
        for lower, higher in itertools.combinations(range(documents), 2)
        if plain_similarity(pages[lower], pages[higher]) >= 0.75
    ]
    groups = {number: {number} for number in range(documents)}
    for lower, higher in similar:
        groups[lower] |= groups[higher]
        for member in groups[lower]:
            groups[member] = groups[lower]
    expected = {number for number in range(documents) if number != min(groups[number])}
    assert 10 < len(expected) < documents - 20
    texts = ListedTexts(pages)
    corpus = run(tmp_path / "few pairs", texts, sources=("a",), similarity=0.75)
    found = {index for _, index in removed(corpus)}
    assert corpus.read_report()["large_buckets"]["buckets"] > 20
    assert found <= expected
    monkeypatch.setattr(candidates, "SMALL_BUCKET", documents)
    all_pairs = {index for _, index in removed(run(tmp_path / "all pairs", texts, sources=("a",), similarity=0.75))}
    assert len(found & all_pairs) >= 0.95 * len(all_pairs)


def test_a_template_needs_work_in_proportion_to_its_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its documents are compared with representatives; without those 200 would be 19,900 pairs."""
    documents = 200
    texts = ListedTexts([template(number, 1) for number in range(documents)])
    assert plain_similarity(texts.tasks[0][0], texts.tasks[0][1]) > 0.9
    whole = run(tmp_path / "whole", texts, sources=("a",))
    assert removed(whole) == {(0, number): (0, 0) for number in range(1, documents)}
    report = whole.read_report()
    assert report["pairs_sharing_a_band"] < 30 * documents
    assert report["large_buckets"]["buckets"] > 0
    assert report["large_buckets"]["documents_beyond_representatives"] == 0
    # The same where the bucket comes in many blocks.
    blocks = run(tmp_path / "blocks", texts, sources=("a",), memory_bytes=SMALL_MEMORY)
    assert content(blocks.folder) == content(whole.folder)
    # And where the representatives are used up by documents that resemble nothing.
    monkeypatch.setattr(candidates, "REPRESENTATIVES", 1)
    monkeypatch.setattr(candidates, "_estimate_limits", lambda _corpus: (1.1, 1.2))
    corpus = run(tmp_path / "few", texts, sources=("a",))
    assert corpus.read_report()["large_buckets"]["documents_beyond_representatives"] > documents


def test_a_changed_source_is_refused(tmp_path: Path) -> None:
    texts = PlantedTexts(20, words=60)
    corpus = Corpus(tmp_path, ("web",), settings())
    names = [phase.name for phase in PHASES]
    for phase in PHASES[: names.index("shingles")]:
        for job in range(phase.jobs(corpus)):
            phase.write(corpus, job, texts)
    for changed in (PlantedTexts(20, words=60, seed=1), ListedTexts([texts.text(0)])):
        with pytest.raises(UsageError, match=r"source web .* changed while duplicates"):
            clusters.write_shingles(corpus, 0, changed)
    assert not corpus.shingles(0).exists()


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"exact": False, "near": False}, "exact"),
        ({"near": False, "ngram": 3}, "ngram"),
        ({"bands": 9, "rows": 13}, "bands"),  # finds 40 % of the pairs at 0.8
    ],
)
def test_settings_that_contradict_each_other_are_named(keys: dict[str, Any], key: str) -> None:
    assert [found for found, _ in DuplicatesSpec(step="duplicates", **keys).inconsistencies()] == [key]
    assert list(DuplicatesSpec(step="duplicates").inconsistencies()) == []


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(MissingPackageError, match="needs rensa"):
        settings_key(settings())
    assert settings_key(settings(near=False))


def test_the_key_names_all_that_results_depend_on() -> None:
    keys = [
        settings(exact=False),
        settings(similarity=0.7),
        settings(ngram=4),
        settings(bands=10),
        settings(rows=4),
        settings(across_sources=False),
        settings(),
    ]
    assert len({str(settings_key(each)) for each in keys}) == len(keys)
    assert settings_key(settings()).keys() > {"rensa", "unicode", "version"}
    assert "rensa" not in settings_key(settings(near=False))
    assert os.fspath(Corpus(Path("a"), ("web",), settings()).signatures(3)) == "a/signatures/000003"
