"""The step ``contamination``: remove texts that evaluation files have too.

The definition of GPT-3 (arXiv 2005.14165, appendix C): words are what is between whitespace, in lower case and without
punctuation; a sequence of ``ngram`` words that an item of the evaluation has too is a match. Matches are cut out with
their surroundings, or their documents are dropped. An n-gram of the evaluation is one number of 64 bits, a polynomial
over the hashes of its words, so that millions of n-grams take 8 bytes each and a document is one search among them.
"""

import functools
import hashlib
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from scaletrain_cli.data.steps.base import Document, Kept, Removed, Step
from scaletrain_cli.data.steps.evaluation_files import evaluation_items
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec.preparation import ContaminationSpec

_WORD = re.compile(r"\S+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying loses nothing
_CACHED_WORDS = 1_000_000
_Numbers = Any  # numpy array of uint64


class Contamination(Step):
    """The n-grams of the evaluation files, and what becomes of documents that have them."""

    changes_text = True

    def __init__(self, spec: ContaminationSpec) -> None:
        self.spec = spec
        self.hashes = _WordHashes()
        digest = hashlib.sha256()
        by_length: dict[int, list[_Numbers]] = {}  # number of words: n-grams of each item, each once
        for item in evaluation_items(spec.files, spec.fields):
            words = item.lower().translate(_punctuation()).split()
            length = min(len(words), spec.ngram)
            if length >= spec.min_item_words:
                ngrams = np.unique(next(_sequences(self.hashes.of(words), (length,)))[1])
                by_length.setdefault(length, []).append(ngrams)
                digest.update(ngrams.astype("<u8").tobytes())
        if not by_length:
            raise UsageError(Reason("document_steps.no-items", {"words": spec.min_item_words}))
        self.indexes = {length: _Index(items) for length, items in sorted(by_length.items())}
        self.depends_on = {"evaluation": digest.hexdigest()}

    def __call__(self, document: Document) -> Kept | Removed:
        """Return the document without the texts of the evaluation, or why it is removed."""
        spec, text = self.spec, document.text
        if not (starts := self._matches(text)):
            return Kept(text)
        if spec.action == "drop":
            if spec.min_matching_share is None:
                return Removed("contamination.ngram", len(starts), 0)
            shares = (self.indexes[length].largest_share(numbers) for length, numbers in self._numbers(text))
            share = max(shares, default=0.0)
            return (
                Removed("contamination.min_matching_share", share, spec.min_matching_share)
                if (share >= spec.min_matching_share)
                else Kept(text)
            )
        matches = 0
        while starts:  # pieces that are joined may have a match where they meet
            matches += len(starts)
            pieces = _pieces(text, _widened(text, starts, spec.margin))
            long = [piece for piece in pieces if len(piece) >= max(1, spec.min_piece)]
            if len(pieces) > spec.max_pieces:
                return Removed("contamination.max_pieces", len(pieces), spec.max_pieces)
            if not long:
                return Removed("contamination.min_piece", max(map(len, pieces), default=0), spec.min_piece)
            text = "\n".join(long)
            starts = self._matches(text)
        cut = len(document.text) - len(text)
        return Kept(text, {"contamination.cut": 1, "contamination.matches": matches, "contamination.characters": cut})

    def _matches(self, text: str) -> list[tuple[int, int]]:
        """Return (first word, number of words) of each match; words without a letter or a digit are not counted."""
        matches: list[tuple[int, int]] = []
        for length, numbers in self._numbers(text):
            matches += [(int(start), length) for start in np.flatnonzero(self.indexes[length].contains(numbers))]
        return sorted(matches)

    def _numbers(self, text: str) -> Iterator[tuple[int, _Numbers]]:
        """Yield each length of the evaluation's n-grams with the numbers of all sequences of the text."""
        return _sequences(self.hashes.of(text.lower().translate(_punctuation()).split()), self.indexes)


class _Index:
    """The n-grams of one length, and the items that each of them is in."""

    def __init__(self, items: list[_Numbers]) -> None:
        numbers = np.concatenate(items)
        owners = np.repeat(np.arange(len(items), dtype=np.uint32), [len(item) for item in items])
        order = np.argsort(numbers, kind="stable")
        self.owners = owners[order]
        self.numbers, self.first = np.unique(numbers[order], return_index=True)
        self.ends = np.append(self.first[1:], len(numbers))
        self.sizes = np.array([len(item) for item in items])

    def contains(self, numbers: _Numbers) -> Any:
        """Return for each number True if an item has it."""
        positions = np.minimum(np.searchsorted(self.numbers, numbers), len(self.numbers) - 1)
        return self.numbers[positions] == numbers

    def largest_share(self, numbers: _Numbers) -> float:
        """Return the largest share of the n-grams of one item that are among ``numbers``."""
        known = np.unique(numbers[self.contains(numbers)])
        if not len(known):
            return 0.0
        positions = np.searchsorted(self.numbers, known)
        owners = np.concatenate([self.owners[self.first[at] : self.ends[at]] for at in positions])
        items, counts = np.unique(owners, return_counts=True)
        return float(np.max(counts / self.sizes[items]))


class _WordHashes(dict[str, int]):
    """The 64-bit hash of each word, the same in every process and on every machine."""

    def __missing__(self, word: str) -> int:
        digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        number = self[word] = int.from_bytes(digest, "little")
        return number

    def of(self, words: list[str]) -> _Numbers:
        if len(self) > _CACHED_WORDS:
            self.clear()
        return np.fromiter(map(self.__getitem__, words), dtype=np.uint64, count=len(words))


def _sequences(hashes: _Numbers, lengths: Iterable[int]) -> Iterator[tuple[int, _Numbers]]:
    """Yield each length, in ascending order, with the numbers of all sequences of that many words.

    Lengths above the number of words are left out.
    """
    numbers, reached = hashes, 1
    for length in lengths:
        if length > len(hashes):
            return
        while reached < length:
            numbers = numbers[:-1] * _FACTOR + hashes[reached:]
            reached += 1
        yield length, numbers


@functools.cache
def _punctuation() -> dict[int, None]:
    """Return the table for ``str.translate`` that deletes punctuation and symbols (Unicode categories P and S)."""
    return {code: None for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code))[0] in "PS"}


def _widened(text: str, starts: list[tuple[int, int]], margin: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of characters to cut: each match with its margin, up to the next end of a word."""
    table = _punctuation()
    spans = [match.span() for match in _WORD.finditer(text)]
    counted = [span for span in spans if text[span[0] : span[1]].lower().translate(table)]
    for first, length in starts:
        start, end = counted[first][0] - margin, counted[first + length - 1][1] + margin
        start, end = max(0, start), min(len(text), end)
        while start > 0 and not text[start - 1].isspace():
            start -= 1
        while end < len(text) and not text[end].isspace():
            end += 1
        yield start, end


def _pieces(text: str, cuts: Iterable[tuple[int, int]]) -> list[str]:
    """Return what is left between cuts, without whitespace at its ends; nothing that is empty."""
    pieces, end = [], 0
    for start, stop in cuts:
        pieces.append(text[end : max(start, end)].strip())
        end = max(end, stop)
    pieces.append(text[end:].strip())
    return [piece for piece in pieces if piece]
