"""Verification of candidate pairs on their shingles.

The shingles of the documents that stand in a pair are computed from the texts again, into one file per task. Then the
pairs are verified in parts of a fixed number of pairs. The files of shingles can be removed afterwards.
"""

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from scaletrain_cli.data.duplicates.corpus import Corpus, Ids, Numbering, Sections, SectionWriter, Texts
from scaletrain_cli.data.duplicates.shingles import shingles_of, similarity_of, words_hash, words_of
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
        start = int(self._ends[place - 1]) if place else 0
        return self._file.read("shingles", start, int(self._ends[place]))


class _Shingles:
    """Shingles by document; keeps the last used ones, within the limit of memory."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._numbering = Numbering(corpus)
        self._starts = self._numbering.starts
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
