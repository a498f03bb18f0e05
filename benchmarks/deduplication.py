"""Measure deduplication: recall and precision on planted duplicates, documents per second, and memory.

Of every ten documents three are copies of the first with a new end, at Jaccard similarities near 0.7, 0.8 and 0.9; all
similarities are computed by plain Python over sets of words. A size runs in a process of its own, whose peak memory is
compared with that of the other size. Fails if recall at 0.8 and above is below 0.95, precision below 0.99, or memory
grows with the number of documents.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[1]
sys.path.insert(0, str(PROJECT))

from scaletrain_cli.data.duplicates import PHASES, Corpus, read_removed, run_job  # noqa: E402
from scaletrain_cli.data.duplicates.clusters import parts  # noqa: E402
from scaletrain_cli.data.duplicates.corpus import Sections  # noqa: E402
from scaletrain_cli.spec.preparation import DuplicatesSpec  # noqa: E402
from tests.data.duplicates.planted import PlantedTexts, plain_similarity  # noqa: E402

PER_TASK = 5000
WORDS = 300
GROUP = 10
SIZES = (20_000, 100_000)
MEMORY_BYTES = 4 << 20  # so little that the sorts of the larger size go through files
LEAST_RECALL, LEAST_PRECISION = 0.95, 0.99
MOST_BYTES_PER_DOCUMENT = 128  # of memory; a document of a phase needs about 30, allocators round up


class JsonLines:
    """The texts of one file of JSON lines per task."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, task: int) -> Iterator[tuple[int, str]]:
        with (self.folder / f"{task}.jsonl").open(encoding="utf-8") as lines:
            for index, line in enumerate(lines):
                yield index, json.loads(line)["text"]


def write_texts(folder: Path, documents: int) -> int:
    """Write the planted documents and return the bytes of their texts."""
    texts, size = PlantedTexts(PER_TASK, WORDS), 0
    for task in range(documents // PER_TASK):
        with (folder / f"{task}.jsonl").open("w", encoding="utf-8") as file:
            for _, text in texts(task):
                size += len(text)
                file.write(json.dumps({"text": text}) + "\n")
    return size


def deduplicate_one(texts: Path, work: Path, documents: int) -> None:
    """Deduplicate and print the seconds of each phase and the peak memory; the process of a size runs this."""
    from rensa import RMinHash  # noqa: F401  (before memory is measured)

    corpus, source = corpus_at(work, documents), JsonLines(texts)
    before = peak_memory()
    seconds = {}
    for number, phase in enumerate(PHASES):
        start = time.process_time()
        for job in range(phase.jobs(corpus)):
            run_job(corpus, number, job, source)
        seconds[phase.name] = time.process_time() - start
    print(json.dumps({"seconds": seconds, "peak_bytes": peak_memory(), "before_bytes": before}))


def peak_memory() -> int:
    """Return the largest resident memory of this program in bytes; getrusage counts that of its parent before exec."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:"))


def corpus_at(work: Path, documents: int) -> Corpus:
    return Corpus(work, ("web",) * (documents // PER_TASK), DuplicatesSpec(step="duplicates"), MEMORY_BYTES)


def accuracy(corpus: Corpus, documents: int) -> dict[str, Any]:
    """Return recall by planted similarity, and precision of pairs and of removed documents."""
    texts = PlantedTexts(PER_TASK, WORDS)
    edges = {
        (lower, higher)
        for part in range(parts(corpus))
        for lower, higher, _, _ in Sections(corpus.verified(part)).read("edges").tolist()
    }
    found: dict[float, list[int]] = {0.7: [0, 0], 0.8: [0, 0], 0.9: [0, 0]}
    checked, true_edges = 0, 0
    similar_documents: set[int] = set()
    for base in range(0, documents, GROUP):
        # 4 is an exact copy and 5 has the same words: they are removed before pairs are looked for.
        group = {number: texts.text(number) for number in range(base, base + 4)}
        for lower, higher in itertools.combinations(group, 2):
            similarity = plain_similarity(group[lower], group[higher])
            if lower == base:
                count = found[round(similarity, 1)]
                count[0] += (lower, higher) in edges
                count[1] += 1
            if (lower, higher) in edges:
                checked += 1
                true_edges += similarity >= corpus.settings.similarity
            if similarity >= corpus.settings.similarity:
                similar_documents.add(higher)
        similar_documents |= {base + 4, base + 5}
    for lower, higher in sorted(edges):
        if lower // GROUP != higher // GROUP:
            checked += 1
            true_edges += plain_similarity(texts.text(lower), texts.text(higher)) >= corpus.settings.similarity
    removed = {task * PER_TASK + gone.index for task in range(corpus.tasks) for gone in read_removed(corpus, task)}
    return {
        "recall": {similarity: count[0] / count[1] for similarity, count in found.items()},
        "pairs": {similarity: count[1] for similarity, count in found.items()},
        "precision_of_pairs": true_edges / max(1, checked),
        "all_pairs_checked": checked == len(edges),
        "precision_of_removed": len(removed & similar_documents) / max(1, len(removed)),
        "recall_of_removed": len(removed & similar_documents) / len(similar_documents),
        "removed": len(removed),
    }


def without_verification(texts: Path, work: Path, documents: int) -> str:
    """Return the accuracy of taking all pairs of a band for duplicates, with 14 bands, as datatrove does by default."""
    settings = DuplicatesSpec(step="duplicates", bands=14, rows=8)
    corpus = Corpus(work, ("web",) * (documents // PER_TASK), settings, MEMORY_BYTES)
    for number in range([phase.name for phase in PHASES].index("pairs")):
        for job in range(PHASES[number].jobs(corpus)):
            run_job(corpus, number, job, JsonLines(texts))
    pairs = {
        (lower, higher)
        for band in range(corpus.settings.bands)
        for lower, higher in Sections(corpus.band(band)).read("pairs").tolist()
    }
    planted = PlantedTexts(PER_TASK, WORDS)
    similar = sum(plain_similarity(planted.text(lower), planted.text(higher)) >= 0.8 for lower, higher in sorted(pairs))
    found = sum((base, base + 2) in pairs for base in range(0, documents, GROUP)) / (documents // GROUP)
    return f"14 x 8 without verification: recall at 0.8 {found:.4f}, precision of pairs {similar / len(pairs):.4f}"


def datasketch_row(texts: Path, documents: int, settings: DuplicatesSpec) -> str:
    """Return the speed and recall of datasketch's MinHashLSH with the same bands, or why it was not measured."""
    try:
        datasketch: Any = importlib.import_module("datasketch")
    except ImportError:
        return "datasketch: not measured, as it is not installed"
    from tests.data.duplicates.planted import plain_shingles

    documents = min(documents, 10_000)
    index = datasketch.MinHashLSH(num_perm=settings.bands * settings.rows, params=(settings.bands, settings.rows))
    start, pairs = time.process_time(), set()
    for task in range(documents // PER_TASK):
        for place, text in JsonLines(texts)(task):
            sketch = datasketch.MinHash(num_perm=settings.bands * settings.rows)
            sketch.update_batch([" ".join(shingle).encode() for shingle in plain_shingles(text)])
            number = task * PER_TASK + place
            pairs |= {(other, number) for other in index.query(sketch)}
            index.insert(number, sketch)
    seconds = time.process_time() - start
    compared = sum((base, base + 2) in pairs for base in range(0, documents, GROUP)) / (documents / GROUP)
    return f"datasketch: {documents / seconds:,.0f} documents/s, {compared:.3f} of the pairs at 0.8 share a band"


def measure(documents: int, with_accuracy: bool) -> tuple[int, bool]:
    """Measure one size, print the figures, and return the peak memory and if the targets were met."""
    with tempfile.TemporaryDirectory() as name:
        texts, work = Path(name) / "texts", Path(name) / "work"
        texts.mkdir()
        size = write_texts(texts, documents)
        arguments = [sys.executable, __file__, "--one", str(texts), str(work), str(documents)]
        environment = os.environ | {"RAYON_NUM_THREADS": "1"}  # the speed of one core
        done = subprocess.run(arguments, check=True, capture_output=True, text=True, env=environment)
        result = json.loads(done.stdout)
        seconds = sum(result["seconds"].values())
        disk = sum(path.stat().st_size for path in work.rglob("*") if path.is_file())
        print(
            f"{documents:,} documents, {size / 1e6:,.0f} MB: {documents / seconds:,.0f} documents/s of CPU, "
            f"peak RSS {result['peak_bytes'] / 1e6:,.0f} MB ({result['before_bytes'] / 1e6:,.0f} MB before), "
            f"files {disk / documents:,.0f} bytes per document"
        )
        print("  CPU seconds: " + ", ".join(f"{name} {spent:.2f}" for name, spent in result["seconds"].items()))
        if not with_accuracy:
            return result["peak_bytes"], True
        corpus = corpus_at(work, documents)
        figures = accuracy(corpus, documents)
        for similarity, recall in figures["recall"].items():
            print(
                f"  pairs at Jaccard {similarity}: {figures['pairs'][similarity]:,}, taken for duplicates {recall:.4f}"
                + (f" (expected {corpus.settings.recall_at(similarity):.4f})" if similarity >= 0.8 else "")
            )
        print(
            f"  precision of pairs {figures['precision_of_pairs']:.4f}; of {figures['removed']:,} removed documents "
            f"{figures['precision_of_removed']:.4f} have a duplicate; recall of documents "
            f"{figures['recall_of_removed']:.4f}"
        )
        print(f"  {without_verification(texts, Path(name) / 'unverified', min(documents, 20_000))}")
        print(f"  {datasketch_row(texts, documents, corpus.settings)}")
        passed = (
            min(figures["recall"][0.8], figures["recall"][0.9]) >= LEAST_RECALL
            and min(figures["precision_of_pairs"], figures["precision_of_removed"]) >= LEAST_PRECISION
            and figures["all_pairs_checked"]
        )
        return result["peak_bytes"], passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--documents", type=int, nargs="+", default=SIZES, help=f"multiples of {PER_TASK}")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        deduplicate_one(Path(options.one[0]), Path(options.one[1]), int(options.one[2]))
        return 0
    peaks, passed = [], True
    for documents in options.documents:
        peak, met = measure(documents, with_accuracy=documents == options.documents[-1])
        peaks.append(peak)
        passed = passed and met
    if len(peaks) > 1:
        more = options.documents[-1] - options.documents[0]
        growth = (peaks[-1] - peaks[0]) / more
        print(f"peak RSS grows by {growth:.1f} bytes per document")
        passed = passed and growth <= MOST_BYTES_PER_DOCUMENT
    print("targets met" if passed else "TARGETS MISSED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
