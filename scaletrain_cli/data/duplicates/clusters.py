"""Candidate pairs verified on their shingles, clusters of duplicates by union-find, and the removed documents.

The shingles of the documents that stand in a pair are computed from the texts again, into one file per task. Then the
pairs are verified in parts of a fixed number of pairs. The files of shingles can be removed afterwards.
"""

import contextlib
import json
import mmap
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrain_cli.data.drafts import write_whole
from scaletrain_cli.data.duplicates.candidates import REPRESENTATIVES, SMALL_BUCKET
from scaletrain_cli.data.duplicates.corpus import Corpus, Document, Ids, Numbering, Sections, SectionWriter, Texts
from scaletrain_cli.data.duplicates.signatures import shingles_of, similarity_of, words_hash, words_of
from scaletrain_cli.errors import UsageError

U64 = npt.NDArray[np.uint64]

PAIRS_PER_PART = 1 << 18
_ROWS_AT_ONCE = 1 << 14
_OPEN_FILES = 64


def write_shingles(corpus: Corpus, task: int, texts: Texts) -> None:
    """Write the shingles of a task's documents that stand in a pair. Sections: ``shingles``, ``ends``, ``rows``.

    Raises UsageError if the texts are not those that the signatures were computed from.
    """
    numbering = Numbering(corpus)
    start, stop = int(numbering.starts[task]), int(numbering.starts[task + 1])
    rows = np.flatnonzero(Sections(corpus.pairs).read("compared", start, stop))
    signatures = Sections(corpus.signatures(task))
    indices = signatures.read("index")[rows].tolist()
    hashes = signatures.read("words")[rows]
    ends = np.zeros(len(rows), np.int64)
    with SectionWriter(corpus.shingles(task)) as file:
        file.begin("shingles", "<u8")
        done = end = 0
        if len(rows):
            for index, text in texts(task):
                if index != indices[done]:
                    continue
                words = words_of(text)
                if words_hash(words) != hashes[done].tobytes():
                    raise _changed(corpus, task, index)
                shingles = shingles_of(words, corpus.settings.ngram)
                file.append(shingles)
                end += len(shingles)
                ends[done] = end
                done += 1
                if done == len(rows):
                    break
            else:
                raise _changed(corpus, task, indices[done])
        file.add("ends", "<i8", ends)
        file.add("rows", "<i8", rows)


def _changed(corpus: Corpus, task: int, index: int) -> UsageError:
    return UsageError(
        f"document {index} of part {task} of the source {corpus.sources[task]} is not the one that was read before: "
        "the source changed while duplicates were searched for. Prepare the data again "
        "from a source that does not change"
    )


def parts(corpus: Corpus) -> int:
    return -(-Sections(corpus.pairs).rows("pairs") // PAIRS_PER_PART)


def write_verified(corpus: Corpus, part: int) -> None:
    """Write the pairs of a part that are similar.

    Section ``edges``: lower document, higher document, shingles in common, shingles of both together.
    """
    pairs = Sections(corpus.pairs)
    shingles = _Shingles(corpus)
    first, last = part * PAIRS_PER_PART, min((part + 1) * PAIRS_PER_PART, pairs.rows("pairs"))
    with SectionWriter(corpus.verified(part)) as file:
        file.begin("edges", "<i8", 4)
        for start in range(first, last, _ROWS_AT_ONCE):
            rows = pairs.read("pairs", start, min(start + _ROWS_AT_ONCE, last))
            edges = []
            for lower, higher in rows.tolist():
                common, together = similarity_of(shingles.of(lower), shingles.of(higher))
                if common / together >= corpus.settings.similarity:
                    edges.append((lower, higher, common, together))
            file.append(np.array(edges, np.int64).reshape(-1, 4))


class _TaskShingles:
    """The file of shingles of one task."""

    def __init__(self, corpus: Corpus, task: int) -> None:
        self._file = Sections(corpus.shingles(task))
        self._rows: Ids = self._file.mapped("rows")
        self._ends: Ids = self._file.mapped("ends")

    def of(self, row: int) -> U64:
        place = int(np.searchsorted(self._rows, row))
        return self._file.read("shingles", int(self._ends[place - 1]) if place else 0, int(self._ends[place]))


class _Shingles:
    """Shingles by document; keeps the last used ones, within the limit of memory."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._starts = Numbering(corpus).starts
        self._limit = corpus.memory_bytes // 2
        self._held_bytes = 0
        self._held: OrderedDict[int, U64] = OrderedDict()
        self._files: OrderedDict[int, _TaskShingles] = OrderedDict()

    def of(self, document: int) -> U64:
        if document in self._held:
            self._held.move_to_end(document)
            return self._held[document]
        task = int(np.searchsorted(self._starts, document, "right")) - 1
        if task not in self._files:
            self._files[task] = _TaskShingles(self._corpus, task)
            if len(self._files) > _OPEN_FILES:
                self._files.popitem(last=False)
        self._files.move_to_end(task)
        shingles = self._files[task].of(document - int(self._starts[task]))
        self._held[document] = shingles
        self._held_bytes += shingles.nbytes
        while self._held_bytes > self._limit and len(self._held) > 2:
            self._held_bytes -= self._held.popitem(last=False)[1].nbytes
        return shingles


_EDGES_AT_ONCE = 1 << 16
_DOCUMENTS_AT_ONCE = 1 << 20
_EXAMPLES = 5  # pairs in each range of similarity
_LARGEST = 20  # clusters that are named
_RANGES = 20  # of similarity from 0 to 1, for counts and examples


@dataclass(frozen=True)
class RemovedDocument:
    """A removed document, by its ``index`` in its task.

    ``near``: it is a near duplicate and no exact one. ``similarity``: the highest one verified with a document of its
    cluster. ``kept``: the document of the cluster that stays.
    """

    index: int
    near: bool
    similarity: float
    kept: Document


def write_clusters(corpus: Corpus) -> None:
    """Write the removed documents of all tasks and the report; the report is last, and says that all are there."""
    numbering = Numbering(corpus)
    with _Table(corpus.folder, numbering.documents) as table:
        table.join(corpus)
        roots = table.flattened()
        for task in range(corpus.tasks):
            start, stop = int(numbering.starts[task]), int(numbering.starts[task + 1])
            _write_removed(corpus, numbering, task, table, roots[start:stop])
        report = _report(corpus, numbering, table, roots)
    write_whole(corpus.report, json.dumps(report, indent=1, sort_keys=True) + "\n")


def read_removed(corpus: Corpus, task: int) -> Iterator[RemovedDocument]:
    """Yield the removed documents of a task, by ascending index."""
    file = Sections(corpus.removed(task))
    for rows, similarities in zip(
        file.chunks("removed", _EDGES_AT_ONCE), file.chunks("similarity", _EDGES_AT_ONCE), strict=True
    ):
        for (index, near, kept_task, kept_index), similarity in zip(rows.tolist(), similarities.tolist(), strict=True):
            yield RemovedDocument(index, bool(near), similarity, Document(kept_task, kept_index))


class _Table:
    """The state of all documents in temporary files without names, 13 bytes per document; memory can be given back."""

    def __init__(self, folder: Path, documents: int) -> None:
        self._folder, self.documents = folder, documents
        self._files = contextlib.ExitStack()

    def __enter__(self) -> "_Table":
        self.parents: Ids = self._array(np.int64)
        for start in range(0, self.documents, _DOCUMENTS_AT_ONCE):
            stop = min(start + _DOCUMENTS_AT_ONCE, self.documents)
            self.parents[start:stop] = np.arange(start, stop)
        self.similarities: npt.NDArray[np.float32] = self._array(np.float32)
        self.exact: npt.NDArray[np.uint8] = self._array(np.uint8)
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def counts(self) -> Ids:
        """Return one more array of zeros, a number per document."""
        return self._array(np.int64)

    def _array(self, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        if not self.documents:
            return np.empty(0, dtype)
        file = self._files.enter_context(tempfile.TemporaryFile(dir=self._folder))  # noqa: SIM115
        file.truncate(self.documents * np.dtype(dtype).itemsize)
        return np.frombuffer(mmap.mmap(file.fileno(), 0), dtype)

    def join(self, corpus: Corpus) -> None:
        """Join the documents of all pairs of duplicates; the lowest of a cluster is its root."""
        if not self.documents:
            return
        identical = Sections(corpus.identical)
        for rows in identical.chunks("exact", _EDGES_AT_ONCE):
            self.exact[rows[:, 0]] = 1
            self._join(rows)
        for rows in identical.chunks("words", _EDGES_AT_ONCE):
            self._join(rows)
            self.similarities[rows.ravel()] = 1.0
        for edges in _edges(corpus):
            self._join(edges[:, :2])
            shares = (edges[:, 2] / edges[:, 3]).astype(np.float32)
            for column in (0, 1):
                np.maximum.at(self.similarities, edges[:, column], shares)

    def _join(self, pairs: Ids) -> None:
        parents = memoryview(self.parents.data).cast("B").cast("q")
        for first, second in pairs.tolist():
            while parents[first] != first:
                parents[first] = parents[parents[first]]
                first = parents[first]
            while parents[second] != second:
                parents[second] = parents[parents[second]]
                second = parents[second]
            if first < second:
                parents[second] = first
            elif second < first:
                parents[first] = second

    def flattened(self) -> Ids:
        """Return the root of each document."""
        for start in range(0, self.documents, _DOCUMENTS_AT_ONCE):
            roots = self.parents[start : start + _DOCUMENTS_AT_ONCE]
            while True:  # parents come before their children, so earlier pieces hold roots already
                above = self.parents[roots]
                if (above == roots).all():
                    break
                roots[:] = above
        return self.parents


def _edges(corpus: Corpus) -> Iterator[Ids]:
    if corpus.settings.near:
        for part in range(parts(corpus)):
            yield from Sections(corpus.verified(part)).chunks("edges", _EDGES_AT_ONCE)


def _write_removed(corpus: Corpus, numbering: Numbering, task: int, table: _Table, roots: Ids) -> None:
    start = int(numbering.starts[task])
    removed = np.flatnonzero(roots != np.arange(start, start + len(roots)))
    indices = Sections(corpus.signatures(task)).read("index")[removed]
    near = table.exact[start + removed] == 0
    kept = numbering.places_of(roots[removed])
    similarities = np.where(near, table.similarities[start + removed], np.float32(1))
    with SectionWriter(corpus.removed(task)) as file:
        file.add("removed", "<i8", np.column_stack([indices, near.astype(np.int64), kept]))
        file.add("similarity", "<f4", similarities)


def _report(corpus: Corpus, numbering: Numbering, table: _Table, roots: Ids) -> dict[str, Any]:
    names = list(dict.fromkeys(corpus.sources))
    between = np.zeros((2, len(names), len(names)), np.int64)  # exact and near, source of the removed, of the kept
    per_source = np.zeros(len(names), np.int64)
    sizes = table.counts()
    for start in range(0, table.documents, _DOCUMENTS_AT_ONCE):
        part = np.array(roots[start : start + _DOCUMENTS_AT_ONCE])
        ids = np.arange(start, start + len(part))
        np.add.at(sizes, part, 1)
        sources = numbering.sources_of(ids)
        per_source += np.bincount(sources, minlength=len(names))
        removed = part != ids
        near = (table.exact[ids[removed]] == 0).astype(np.int64)
        np.add.at(between, (near, sources[removed], numbering.sources_of(part[removed])), 1)
    by_size: dict[int, int] = {}
    largest: list[tuple[int, int]] = []
    for start in range(0, table.documents, _DOCUMENTS_AT_ONCE):
        counts = np.array(sizes[start : start + _DOCUMENTS_AT_ONCE])
        for size, number in zip(
            *(column.tolist() for column in np.unique(counts[counts > 1], return_counts=True)), strict=True
        ):
            by_size[size] = by_size.get(size, 0) + number
        top = np.argsort(-counts, kind="stable")[:_LARGEST]
        largest += [(int(counts[place]), start + place) for place in top.tolist() if counts[place] > 1]
    largest = sorted(largest, key=lambda pair: (-pair[0], pair[1]))[:_LARGEST]
    settings = corpus.settings
    similar_pairs, examples = _examples(corpus, numbering)
    kept = numbering.documents_at(np.array([root for _, root in largest], np.int64))
    report: dict[str, Any] = {
        "documents": {name: int(count) for name, count in zip(names, per_source.tolist(), strict=True)},
        "removed": {"exact": int(between[0].sum()), "near": int(between[1].sum())},
        "removed_between_sources": [
            {"reason": reason, "removed_from": names[first], "kept_in": names[second], "documents": int(count)}
            for number, reason in enumerate(("exact", "near"))
            for (first, second), count in np.ndenumerate(between[number])
            if count
        ],
        "clusters_by_size": {str(size): by_size[size] for size in sorted(by_size)},
        "largest_clusters": [
            {"documents": size, "kept": asdict(document)} for (size, _), document in zip(largest, kept, strict=True)
        ],
    }
    if settings.near:
        pairs = Sections(corpus.pairs)
        files = (Sections(corpus.signatures(task)) for task in range(corpus.tasks))
        report |= {
            # Documents with fewer words than a shingle, which only exact duplicates are found of.
            "too_short": sum(int(np.count_nonzero(file.read("shingles") == 0)) for file in files),
            "pairs_sharing_a_band": pairs.facts["sharing_a_band"],
            "pairs_compared": pairs.rows("pairs"),
            "similar_pairs": sum(similar_pairs.values()),
            "similar_pairs_by_similarity": similar_pairs,
            "examples": examples,
            "expected_recall": {f"{step / 20:.2f}": settings.recall_at(step / 20) for step in range(10, 21)},
            "large_buckets": {
                "buckets": pairs.facts["large_buckets"],
                "more_documents_than": SMALL_BUCKET,
                "representatives": REPRESENTATIVES,
                "documents_beyond_representatives": pairs.facts["compared_with_some"],
            },
        }
    return report


def _examples(corpus: Corpus, numbering: Numbering) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Return the number of similar pairs in each range of similarity, and the first pairs of each."""
    counts = np.zeros(_RANGES + 1, np.int64)
    pairs: dict[int, list[tuple[int, int, float]]] = {}
    for edges in _edges(corpus):
        shares = edges[:, 2] / edges[:, 3]
        ranges = np.floor(shares * _RANGES + 1e-9).astype(np.int64)
        counts += np.bincount(ranges, minlength=_RANGES + 1)
        for number in np.unique(ranges).tolist():
            missing = _EXAMPLES - len(pairs.setdefault(number, []))
            for place in np.flatnonzero(ranges == number)[:missing].tolist():
                pairs[number].append((int(edges[place, 0]), int(edges[place, 1]), round(float(shares[place]), 6)))
    examples = []
    for number in sorted(pairs):
        for first, second, similarity in pairs[number]:
            kept, other = numbering.documents_at(np.array([first, second]))
            examples.append({"similarity": similarity, "first": asdict(kept), "second": asdict(other)})
    return {f"{number / _RANGES:.2f}": int(count) for number, count in enumerate(counts.tolist()) if count}, examples
