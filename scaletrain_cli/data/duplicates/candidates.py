"""Documents that are identical, and pairs of documents that may be near duplicates, by external sort.

Documents of the same words are found first; one of them goes on for all. Of the others, those that share the key of a
band stand in one bucket. All pairs of a small bucket are candidates. In a large bucket, as of a template, each document
is a candidate with a few representatives that resemble it by their sketches, so the work grows with the size of the
bucket and not with its square.

External sort: rows of unsigned 64-bit numbers in lexicographic order, within a limit of memory.

Rows beyond the limit go to sorted runs in one temporary file, which has no name, so a killed process leaves nothing.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from scaletrain_cli.data.duplicates.corpus import Corpus, Ids, Numbering, Sections, SectionWriter, source_salts
from scaletrain_cli.data.duplicates.signatures import band_section, sketch_similarity

U64 = npt.NDArray[np.uint64]

# Arrays of the size of a chunk that exist at once: the rows, as they came and joined, their order, and the sorted copy.
_COPIES = 4
_MOST_ROWS = 1 << 17  # of a block that is yielded
_LEAST_BLOCK = 1024  # rows of one run in memory while runs are merged


class _Run(NamedTuple):
    offset: int  # in rows of the temporary file
    rows: int


class Sorter:
    """Takes rows of ``columns`` numbers and returns them sorted; uses about ``memory_bytes``."""

    def __init__(self, folder: Path, columns: int, memory_bytes: int) -> None:
        self._folder, self._columns = folder, columns
        self._chunk_rows = max(4 * _LEAST_BLOCK, memory_bytes // (columns * 8 * _COPIES))
        self._parts: list[U64] = []
        self._held = 0
        self._runs: list[_Run] = []
        self._written = 0
        self._file: BinaryIO | None = None
        self._open = contextlib.ExitStack()

    def add(self, rows: U64) -> None:
        """Take rows, an array of shape (n, columns)."""
        for start in range(0, len(rows), self._chunk_rows):
            part = rows[start : start + self._chunk_rows]
            if self._held + len(part) > self._chunk_rows:
                self._runs.append(self._write_run([self._sorted_parts()]))
            self._parts.append(part)
            self._held += len(part)

    def blocks(self) -> Iterator[U64]:
        """Yield all rows in order, in blocks of limited length. To be called once."""
        for block in self._long_blocks():
            for start in range(0, len(block), _MOST_ROWS):
                yield block[start : start + _MOST_ROWS]

    def _long_blocks(self) -> Iterator[U64]:
        try:
            if not self._runs:
                if self._held:
                    yield self._sorted_parts()
                return
            if self._held:
                self._runs.append(self._write_run([self._sorted_parts()]))
            most = max(2, self._chunk_rows // _LEAST_BLOCK)
            while len(self._runs) > most:
                merged, self._runs = self._runs[:most], self._runs[most:]
                self._runs.append(self._write_run(self._merge(merged)))
            yield from self._merge(self._runs)
        finally:
            self._open.close()

    def _sorted_parts(self) -> U64:
        rows = np.concatenate(self._parts)
        self._parts, self._held = [], 0
        return _sorted(rows)

    def _write_run(self, blocks: Iterator[U64] | list[U64]) -> _Run:
        if self._file is None:
            self._file = self._open.enter_context(tempfile.TemporaryFile(dir=self._folder))  # noqa: SIM115
        start = self._written
        for block in blocks:
            self._file.seek(self._written * self._columns * 8)
            self._file.write(np.ascontiguousarray(block).data.cast("B"))
            self._written += len(block)
        return _Run(start, self._written - start)

    def _merge(self, runs: list[_Run]) -> Iterator[U64]:
        block_rows = max(_LEAST_BLOCK, self._chunk_rows // len(runs))
        unread = list(runs)
        heads: list[U64] = [np.empty((0, self._columns), np.uint64)] * len(runs)
        while True:
            for number, (offset, rows) in enumerate(unread):
                if rows and not len(heads[number]):
                    count = min(rows, block_rows)
                    assert self._file is not None
                    self._file.seek(offset * self._columns * 8)
                    data = self._file.read(count * self._columns * 8)
                    heads[number] = np.frombuffer(data, np.uint64).reshape(-1, self._columns)
                    unread[number] = _Run(offset + count, rows - count)
            # Rows up to the lowest end of a block whose run goes on come before all that is unread.
            ends = [tuple(heads[number][-1].tolist()) for number, run in enumerate(unread) if run.rows]
            if not ends:
                rest = [head for head in heads if len(head)]
                if rest:
                    yield _sorted(np.concatenate(rest))
                return
            bound = min(ends)
            taken = []
            for number, head in enumerate(heads):
                start, stop = 0, len(head)  # of the rows that equal ``bound`` in the columns so far
                for column, value in enumerate(bound):
                    part = np.ascontiguousarray(head[start:stop, column])
                    lower, upper = (np.searchsorted(part, np.uint64(value), side) for side in ("left", "right"))
                    start, stop = start + int(lower), start + int(upper)
                taken.append(head[:stop])
                heads[number] = head[stop:]
            yield _sorted(np.concatenate(taken))


def _sorted(rows: U64) -> U64:
    in_order: U64 = rows[np.lexsort(rows.T[::-1])]
    return in_order


SMALL_BUCKET = 16  # documents, all pairs of which are candidates
REPRESENTATIVES = 256  # at most, of a large bucket
PAIRS_PER_DOCUMENT = 16  # at most, of a document with the representatives of one bucket
_PAIRS_IF_SIMILAR = 3  # of one that is well above the limit
_BATCH = 64  # documents that are compared with the representatives at once
# Standard deviations of the estimate from the sketches: 1 pair at the limit in 700 is further below it than this.
_DEVIATIONS_BELOW = 3.0
_DEVIATIONS_ABOVE = 2.0  # a document this far above the limit needs no representative of its own

_PAIRS_AT_ONCE = 1 << 16
_PAIRS_IN_MEMORY = 1 << 12  # whose sketches are compared at once


def write_identical(corpus: Corpus) -> None:
    """Write the identical documents: pairs (document, lowest one that is the same), and who goes on to the bands.

    Sections: ``starts`` (the number of each task's first document), ``index`` (of each document in its task),
    ``exact``, ``words`` (pairs), ``goes on`` (a byte per document).
    """
    settings = corpus.settings
    counts = [Sections(corpus.signatures(task)).rows("index") for task in range(corpus.tasks)]
    numbering = Numbering(corpus, np.cumsum([0, *counts], dtype=np.int64))
    salts = source_salts(corpus)
    with SectionWriter(corpus.identical) as file:
        file.add("starts", "<i8", numbering.starts)
        file.begin("index", "<i8")
        for task in range(corpus.tasks):
            file.append(Sections(corpus.signatures(task)).read("index"))
        file.begin("exact", "<i8", 2)
        if settings.exact:
            for pairs in _same(corpus, numbering, salts, "exact"):
                file.append(pairs)
        file.begin("words", "<i8", 2)
        goes_on = np.zeros(numbering.documents if settings.near else 0, np.uint8)
        if settings.near:
            for task in range(corpus.tasks):
                shingles = Sections(corpus.signatures(task)).read("shingles")
                goes_on[numbering.starts[task] : numbering.starts[task + 1]] = shingles > 0
            for pairs in _same(corpus, numbering, salts, "words"):
                goes_on[pairs[:, 0]] = 0
                file.append(pairs)
        file.add("goes on", "u1", goes_on)


def _same(corpus: Corpus, numbering: Numbering, salts: U64, section: str) -> Iterator[Ids]:
    """Yield (document, lowest document of the same hash) for all but the lowest of each hash."""
    sorter = Sorter(corpus.folder, 3, corpus.memory_bytes)
    for task, start in enumerate(numbering.starts[:-1].tolist()):
        file = Sections(corpus.signatures(task))
        hashes = file.read(section).astype(np.uint64) ^ salts[task]
        ids = np.arange(start, start + len(hashes), dtype=np.uint64)
        rows = np.column_stack([hashes, ids])
        sorter.add(rows[file.read("shingles") > 0] if section == "words" else rows)
    last_key: tuple[int, ...] | None = None
    lowest = 0
    for block in sorter.blocks():
        first = np.ones(len(block), bool)
        first[1:] = (block[1:, :2] != block[:-1, :2]).any(axis=1)
        first[0] = tuple(block[0, :2].tolist()) != last_key
        ids = block[:, 2].astype(np.int64)
        places = np.maximum.accumulate(np.where(first, np.arange(len(block)), -1))
        leads = np.where(places >= 0, ids[places], lowest)
        yield np.column_stack([ids, leads])[~first]
        last_key, lowest = tuple(block[-1, :2].tolist()), int(leads[-1])


def write_band(corpus: Corpus, band: int) -> None:
    """Write the candidate pairs of one band, the lower document first. Section: ``pairs``."""
    numbering = Numbering(corpus)
    salts = source_salts(corpus)
    identical = Sections(corpus.identical)
    sorter = Sorter(corpus.folder, 2, corpus.memory_bytes)
    for task in range(corpus.tasks):
        start, stop = int(numbering.starts[task]), int(numbering.starts[task + 1])
        keys = Sections(corpus.signatures(task)).read(band_section(band)).astype(np.uint64) ^ salts[task]
        ids = np.arange(start, stop, dtype=np.uint64)
        sorter.add(np.column_stack([keys, ids])[identical.read("goes on", start, stop) != 0])
    buckets = _Buckets(corpus, numbering)
    with SectionWriter(corpus.band(band)) as file:
        file.begin("pairs", "<i8", 2)
        for block in sorter.blocks():
            for pairs in buckets.pairs(block):
                file.append(pairs)
        for pairs in buckets.end():
            file.append(pairs)
        file.facts = {"large_buckets": buckets.large, "compared_with_some": buckets.compared_with_some}


class _Buckets:
    """Makes pairs of the rows (key, document) of one band, which come in order."""

    def __init__(self, corpus: Corpus, numbering: Numbering) -> None:
        self._corpus, self._numbering = corpus, numbering
        self._rest: U64 = np.empty((0, 2), np.uint64)  # the last bucket so far, whose end is not known
        self._large: _LargeBucket | None = None  # the same, if it is large
        self.large = 0
        self.compared_with_some = 0

    def pairs(self, block: U64) -> Iterator[Ids]:
        """Yield the pairs of the buckets that end in the block, and of large ones as far as they go."""
        rows = np.concatenate([self._rest, block])
        ends = np.append(np.flatnonzero(rows[1:, 0] != rows[:-1, 0]) + 1, len(rows))
        starts = np.append(0, ends[:-1])
        sizes = ends - starts
        ids = rows[:, 1].astype(np.int64)
        if self._large is not None:
            if int(rows[0, 0]) == self._large.key:
                yield from self._large.pairs(ids[: ends[0]])
                starts, sizes = starts[1:], sizes[1:]
            if len(starts):
                self._close()
        if not len(starts):
            self._rest = rows[:0]
            return
        complete = sizes[:-1]
        for size in range(2, SMALL_BUCKET + 1):
            of_size = starts[:-1][complete == size]
            if len(of_size):
                yield _all_pairs(ids[of_size[:, None] + np.arange(size)])
        for place in np.flatnonzero(complete > SMALL_BUCKET).tolist():
            yield from self._open(int(rows[starts[place], 0]), ids[starts[place] : starts[place] + sizes[place]])
            self._close()
        if sizes[-1] > SMALL_BUCKET:
            yield from self._open(int(rows[-1, 0]), ids[starts[-1] :])
            self._rest = rows[:0]
        else:
            self._rest = rows[starts[-1] :].copy()

    def end(self) -> Iterator[Ids]:
        if len(self._rest) > 1:
            yield _all_pairs(self._rest[None, :, 1].astype(np.int64))
        self._close()

    def _open(self, key: int, ids: Ids) -> Iterator[Ids]:
        self._large = _LargeBucket(key, self._corpus, self._numbering)
        self.large += 1
        yield from self._large.pairs(ids)

    def _close(self) -> None:
        if self._large is not None:
            self.compared_with_some += self._large.compared_with_some
            self._large = None


def _all_pairs(buckets: Ids) -> Ids:
    """Return all pairs within each row of ids in ascending order; shape (pairs, 2)."""
    first, second = np.triu_indices(buckets.shape[1], 1)
    return np.stack([buckets[:, first].ravel(), buckets[:, second].ravel()], axis=1)


class _LargeBucket:
    """Pairs each document with representatives of the bucket, which come from the lowest documents on."""

    def __init__(self, key: int, corpus: Corpus, numbering: Numbering) -> None:
        self.key = key
        self.compared_with_some = 0  # documents that would have become representatives, were there not enough
        self._numbering = numbering
        self._least, self._enough = _estimate_limits(corpus)
        self._ids: Ids = np.empty(0, np.int64)
        self._sketches: npt.NDArray[np.uint8] | None = None

    def pairs(self, ids: Ids) -> Iterator[Ids]:
        """Yield the pairs (representative, document) of the next documents of the bucket."""
        for start in range(0, len(ids), _BATCH):
            batch = ids[start : start + _BATCH]
            sketches = self._numbering.take("sketch", batch)
            known = sketches[:0] if self._sketches is None else self._sketches
            # A document may become a representative for the later ones of the batch.
            estimates = np.full((len(batch), REPRESENTATIVES), -1.0)
            if len(known):
                estimates[:, : len(known)] = sketch_similarity(sketches[:, None], known[None])
            pairs: list[Ids] = []
            for place, document in enumerate(batch.tolist()):
                row = estimates[place]
                best = np.argsort(-row, kind="stable")[:PAIRS_PER_DOCUMENT]
                best = best[row[best] >= self._least]
                similar = len(best) > 0 and row[best[0]] >= self._enough
                best = best[:_PAIRS_IF_SIMILAR] if similar else best
                if len(best):
                    pairs.append(np.column_stack([self._ids[best], np.full(len(best), document)]))
                if similar:
                    continue
                number = len(self._ids)
                if number == REPRESENTATIVES:
                    self.compared_with_some += 1
                    continue
                self._ids = np.append(self._ids, document)
                known = np.concatenate([known, sketches[place : place + 1]])
                estimates[place + 1 :, number] = sketch_similarity(sketches[place + 1 :], sketches[place])
            self._sketches = known
            if pairs:
                yield np.concatenate(pairs)


def write_pairs(corpus: Corpus) -> None:
    """Write the candidate pairs of all bands, each once and in order, without those that the sketches exclude.

    Sections: ``pairs``, ``compared`` (a byte per document: it stands in a pair).
    """
    numbering = Numbering(corpus)
    least, _ = _estimate_limits(corpus)
    sorter = Sorter(corpus.folder, 2, corpus.memory_bytes)
    facts = {"large_buckets": 0, "compared_with_some": 0, "sharing_a_band": 0}
    for band in range(corpus.settings.bands):
        file = Sections(corpus.band(band))
        for name in ("large_buckets", "compared_with_some"):
            facts[name] += file.facts[name]
        for pairs in file.chunks("pairs", _PAIRS_AT_ONCE):
            sorter.add(pairs.astype(np.uint64))
    compared = np.zeros(numbering.documents, np.uint8)
    last: tuple[int, ...] | None = None
    with SectionWriter(corpus.pairs) as out:
        out.begin("pairs", "<i8", 2)
        for block in sorter.blocks():
            new = np.ones(len(block), bool)
            new[1:] = (block[1:] != block[:-1]).any(axis=1)
            new[0] = tuple(block[0].tolist()) != last
            last = tuple(block[-1].tolist())
            unique = block[new].astype(np.int64)
            facts["sharing_a_band"] += len(unique)
            for start in range(0, len(unique), _PAIRS_AT_ONCE):
                kept = _possible(unique[start : start + _PAIRS_AT_ONCE], corpus, numbering, least)
                compared[kept.ravel()] = 1
                out.append(kept)
        out.add("compared", "u1", compared)
        out.facts = facts


def _possible(pairs: Ids, corpus: Corpus, numbering: Numbering, least: float) -> Ids:
    """Return the pairs whose similarity may reach the limit, by the sizes of their sets and by their sketches."""
    if not corpus.settings.across_sources:  # keys of two sources may be the same by chance
        pairs = pairs[numbering.sources_of(pairs[:, 0]) == numbering.sources_of(pairs[:, 1])]
    if not len(pairs):
        return pairs
    ids, places = np.unique(pairs, return_inverse=True)
    places = places.reshape(pairs.shape)
    sizes = numbering.take("shingles", ids).astype(np.float64)[places]
    fits = sizes.min(axis=1) >= corpus.settings.similarity * sizes.max(axis=1) * (1 - 1e-9)
    pairs, places = pairs[fits], places[fits]
    sketches = numbering.take("sketch", ids)
    alike: list[npt.NDArray[np.bool_]] = [np.empty(0, bool)]
    for start in range(0, len(pairs), _PAIRS_IN_MEMORY):
        part = places[start : start + _PAIRS_IN_MEMORY]
        alike.append(sketch_similarity(sketches[part[:, 0]], sketches[part[:, 1]]) >= least)
    possible: Ids = pairs[np.concatenate(alike)]
    return possible


def _estimate_limits(corpus: Corpus) -> tuple[float, float]:
    """Return the estimate below which a pair is no candidate, and the one above which it is taken for similar."""
    settings = corpus.settings
    limit = settings.similarity
    hashes = settings.bands * settings.rows
    # Of the share of equal low bytes, at the limit: also the chance that different hashes have the same low byte.
    share = limit + (1 - limit) / 256
    deviation = float(np.sqrt(max(share * (1 - share), 1 / hashes) / hashes))
    return limit - _DEVIATIONS_BELOW * deviation, limit + _DEVIATIONS_ABOVE * deviation
