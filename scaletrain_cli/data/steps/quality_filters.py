"""The quality and repetition rules of Gopher (Rae et al. 2021, arXiv 2112.11446, appendix A.1.1 and table A1).

A word is a run of characters other than whitespace, so that punctuation is a part of the word that it touches. A line
is a line with text: empty lines are no lines. A share of an empty document is 0. The rules fit prose of languages that
put spaces between words; code, tables and verse need ``only``, which leaves their sources out.

The rules of C4 (JMLR 21/140, section 2.2) and those that FineWeb adds (arXiv 2406.17557, section 3.6) have the same
words and lines. A sentence ends at the end of a line, or with ``.``, ``!``, ``?`` or ``…`` and closing quotes or
brackets before whitespace that no small letter follows; no model finds sentences, so that abbreviations before a
capital letter (``Dr. Smith``) end one too.
"""

import hashlib
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from scaletrain_cli.data.steps.base import NOTHING, Document, Kept, Removed, Step
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec.preparation import C4Spec, FineWebSpec, GopherQualitySpec, GopherRepetitionSpec

ELLIPSES = ("...", "…")
_ASCII_LETTER = re.compile("[A-Za-z]").search
_PARAGRAPH_END = re.compile(r"\n[^\S\n]*(?:\n[^\S\n]*)+")


def share(part: float, whole: float) -> float:
    """Return the quotient of two counts; 0 if there is nothing to count."""
    return part / whole if whole else 0.0


def lines_of(text: str) -> list[str]:
    """Return the lines with text, without the whitespace around them."""
    return [line for line in map(str.strip, text.split("\n")) if line]


def repeated(parts: Sequence[str]) -> tuple[int, int]:
    """Return the number of parts that are equal to an earlier one, and their characters."""
    different = set(parts)
    return len(parts) - len(different), sum(map(len, parts)) - sum(map(len, different))


class GopherRules(Step):
    """Keeps a document within all limits of its section, each the value of a key ``min_...`` or ``max_...``."""

    spec: GopherQualitySpec | GopherRepetitionSpec

    def __call__(self, document: Document) -> Kept | Removed:
        """Return the first rule that the document breaks, in the order of the paper."""
        for key, measured in self._measures(document.text):
            limit = getattr(self.spec, key)
            if limit is not None and (measured < limit if key.startswith("min_") else measured > limit):
                return Removed(f"{self.spec.rules}.{key}", measured, limit)
        return Kept(document.text)

    @abstractmethod
    def _measures(self, text: str) -> Iterator[tuple[str, float]]:
        """Yield each key of the spec with the value of the text; what costs time is computed when it is needed."""


class GopherQuality(GopherRules):
    """Length, word length, symbols, bullets, ellipses, letters and stop words."""

    spec: GopherQualitySpec

    def __init__(self, spec: GopherQualitySpec) -> None:
        self.spec = spec
        words = sorted({re.escape(word.lower()) for word in spec.stop_words}, key=len, reverse=True)
        self.stop_word = re.compile(rf"(?<!\w)(?:{'|'.join(words)})(?!\w)").finditer

    def _measures(self, text: str) -> Iterator[tuple[str, float]]:
        words = text.split()
        without_ascii_letter = [word for word in words if not _ASCII_LETTER(word)]
        without_letter = [word for word in without_ascii_letter if not any(map(str.isalpha, word))]
        symbols = [word for word in without_letter if not any(map(str.isalnum, word))]
        count = len(words) - len(symbols)
        yield "min_words", count
        yield "max_words", count
        length = share(sum(map(len, words)) - sum(map(len, symbols)), count)
        yield "min_mean_word_length", length
        yield "max_mean_word_length", length
        yield "max_hashes_per_word", share(text.count("#"), len(words))
        yield "max_ellipses_per_word", share(sum(map(text.count, ELLIPSES)), len(words))
        lines = lines_of(text)
        yield "max_bullet_lines", share(sum(line.startswith(self.spec.bullets) for line in lines), len(lines))
        yield "max_ellipsis_lines", share(sum(line.endswith(ELLIPSES) for line in lines), len(lines))
        yield "min_alphabetic_words", share(len(words) - len(without_letter), len(words))
        # counted up to the number that is needed
        stop_words: set[str] = set()
        for match in self.stop_word(text.lower()):
            stop_words.add(match[0])
            if len(stop_words) >= (self.spec.min_stop_words or 0):
                break
        yield "min_stop_words", len(stop_words)


class GopherRepetition(GopherRules):
    """Repeated lines, paragraphs and sequences of words.

    A part is repeated if an equal one comes before it, so that the first of several equal parts does not count. A
    character in several repeated sequences counts once. The most frequent sequence of n words counts with all its
    occurrences, if there is more than one. Shares of lines are of the characters of all lines, shares of sequences of
    the characters of all words.
    """

    def __init__(self, spec: GopherRepetitionSpec) -> None:
        self.spec = spec
        self.limits = {
            n: (key, getattr(spec, key))
            for n in range(2, 11)
            for key in (f"max_top_{n}gram" if n < 5 else f"max_duplicate_{n}grams",)
        }
        self.longest = max((n for n, (_, limit) in self.limits.items() if limit is not None), default=0)

    def _measures(self, text: str) -> Iterator[tuple[str, float]]:
        for name, parts_of in (("line", lines_of), ("paragraph", _paragraphs_of)):
            parts = parts_of(text)
            count, characters = repeated(parts)
            yield f"max_duplicate_{name}s", share(count, len(parts))
            yield f"max_duplicate_{name}_characters", share(characters, sum(map(len, parts)))
        yield from self._sequences(text.split())

    def _sequences(self, words: list[str]) -> Iterator[tuple[str, float]]:
        """Yield the share of the top or of the repeated sequences of 2, 3, ... words.

        A sequence of n words occurs twice only if its first n - 1 words and its last n - 1 words do, so that each
        length looks only at the few positions that the one before has left.
        """
        lengths = [len(word) for word in words]
        total = sum(lengths)
        starts: Sequence[int] = range(len(words) - 1)
        names: dict[int, int] = {}  # start of a repeated sequence of n - 1 words: the number of that sequence
        for n in range(2, self.longest + 1):
            if n == 2:
                grams: list[tuple[object, object]] = list(pairwise(words))
            else:
                starts = [start for start in starts if start + 1 in names and start + n <= len(words)]
                grams = [(names[start], names[start + 1]) for start in starts]
            counts = Counter(grams)
            frequent = {gram: number for number, (gram, count) in enumerate(counts.items()) if count > 1}
            key, limit = self.limits[n]
            if limit is not None:
                if n < 5:
                    covered = _top(starts, grams, counts, n, lengths) if frequent else 0
                else:
                    seen: set[tuple[object, object]] = set()  # of the sequences, those equal to an earlier one count
                    again = [start for start, gram in zip(starts, grams, strict=True) if gram in seen or seen.add(gram)]  # type: ignore[func-returns-value]
                    covered = _covered(again, n, lengths)
                yield key, share(covered, total)
            names = {start: frequent[gram] for start, gram in zip(starts, grams, strict=True) if gram in frequent}
            starts = sorted(names)
            if not names:
                break


def _paragraphs_of(text: str) -> list[str]:
    return [part for part in map(str.strip, _PARAGRAPH_END.split(text)) if part]


def _top(
    starts: Sequence[int],
    grams: list[tuple[object, object]],
    counts: Counter[tuple[object, object]],
    n: int,
    lengths: list[int],
) -> int:
    """Return the characters in the most frequent sequence; of several that are equally frequent in the longest."""
    most = max(counts.values())
    positions: dict[tuple[object, object], list[int]] = {}
    for start, gram in zip(starts, grams, strict=True):
        if counts[gram] == most:
            positions.setdefault(gram, []).append(start)
    return max(_covered(places, n, lengths) for places in positions.values())


def _covered(starts: list[int], n: int, lengths: list[int]) -> int:
    """Return the characters of the words in sequences of n words at ascending starts, each word once."""
    total, end = 0, 0
    for start in starts:
        total += sum(lengths[max(start, end) : start + n])
        end = start + n
    return total


_CITATION = re.compile(r"\[(?:\d{1,9}|edit|citation needed)\]")
_WORD = re.compile(r"[^\W_]+")
_SENTENCE_END = re.compile(r"""[.!?…]["'”’)\]]{0,3}\s+(?=\S)""")
# Sentence marks, with the closing quotes that C4 accepts, and those of scripts that have marks of their own.
_END_MARKS = (".", "!", "?", "…", '"', "'", "”", "’", "。", "！", "？", "．", "।", "॥", "؟", "۔", "։", "።", "។", "။")


def sentences_in(line: str) -> int:
    """Return the number of sentences of a line with text."""
    return 1 + sum(not line[match.end()].islower() for match in _SENTENCE_END.finditer(line))


class C4(Step):
    """Drops lines; removes a document with a forbidden phrase, or with too little left."""

    changes_text = True

    def __init__(self, spec: C4Spec) -> None:
        self.spec = spec
        self.bad_words = None if spec.bad_words is None else _BadWords(spec.bad_words)
        self.depends_on = NOTHING if self.bad_words is None else {"bad_words": self.bad_words.digest}
        self.document_phrases = tuple(phrase.lower() for phrase in spec.document_phrases)
        self.line_phrases = tuple(phrase.lower() for phrase in spec.line_phrases)

    def __call__(self, document: Document) -> Kept | Removed:
        """Return the lines that are left, joined, or why the document is removed."""
        spec, lower = self.spec, document.text.lower()
        for phrase in self.document_phrases:
            if phrase in lower:
                return Removed("c4.document_phrases", phrase, "none")
        if self.bad_words is not None and (bad := self.bad_words.number_in(lower)):
            return Removed("c4.bad_words", bad, 0)
        counts: dict[str, int] = {}
        kept: list[str] = []
        for line in lines_of(document.text):
            if spec.remove_citations and "[" in line:
                line = _CITATION.sub("", line).strip()
            if (rule := self._broken_by(line)) is None:
                kept.append(line)
            else:
                counts[f"c4.{rule}"] = counts.get(f"c4.{rule}", 0) + 1
        if spec.min_sentences is not None:
            sentences = sum(map(sentences_in, kept))
            if sentences < spec.min_sentences:
                return Removed("c4.min_sentences", sentences, spec.min_sentences)
        if spec.min_paragraphs is not None:
            paragraphs = sum(len(line) >= spec.min_paragraph_length for line in kept)
            if paragraphs < spec.min_paragraphs:
                return Removed("c4.min_paragraphs", paragraphs, spec.min_paragraphs)
        text = "\n".join(kept)
        return Kept(document.text if text == document.text else text, counts)

    def _broken_by(self, line: str) -> str | None:
        """Return the key of the first rule by which a line is dropped, None if it stays."""
        spec = self.spec
        if spec.end_marks is not None and (not line.endswith(spec.end_marks) or line.endswith(ELLIPSES)):
            return "end_marks"
        words = line.split()
        if spec.min_words_per_line is not None and len(words) < spec.min_words_per_line:
            return "min_words_per_line"
        longest = spec.max_word_length
        if longest is not None and len(line) > longest and max(map(len, words)) > longest:
            return "max_word_length"
        lower = line.lower()
        return "line_phrases" if any(phrase in lower for phrase in self.line_phrases) else None


class _BadWords:
    """Words and phrases of a file, found where neither a letter nor a digit touches them."""

    def __init__(self, path: str) -> None:
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            params = {"file": path, "error": str(error)}
            raise UsageError(Reason("document_steps.file-unreadable", params), file=path) from error
        if not (phrases := sorted({words for words in map(_words, lines) if words})):
            raise UsageError(Reason("document_steps.no-bad-words", {"file": path}), file=path)
        self.digest = hashlib.sha256(repr(phrases).encode("utf-8", "backslashreplace")).hexdigest()
        self.by_first: dict[str, list[str]] = {}
        for words in phrases:
            self.by_first.setdefault(words[0], []).append(f" {' '.join(words)} ")

    def number_in(self, lower: str) -> int:
        """Return the number of different phrases in a text in lower case."""
        words = _words(lower)
        first_words = self.by_first.keys() & set(words)
        if not first_words:
            return 0
        text = f" {' '.join(words)} "
        return sum(phrase in text for word in first_words for phrase in self.by_first[word])


def _words(text: str) -> tuple[str, ...]:
    return tuple(_WORD.findall(text.lower()))


class FineWeb(Step):
    """Lines that end with punctuation, repeated lines, short lines."""

    def __init__(self, spec: FineWebSpec) -> None:
        self.spec = spec

    def __call__(self, document: Document) -> Kept | Removed:
        """Return the first rule that the document breaks, in the order of the paper."""
        for key, measured, breaks in self._measures(document.text):
            limit = getattr(self.spec, key)
            if breaks:
                return Removed(f"fineweb.{key}", measured, limit)
        return Kept(document.text)

    def _measures(self, text: str) -> Iterator[tuple[str, float, bool]]:
        """Yield each key with the value of the text, and True if the document is removed by it."""
        spec, lines = self.spec, lines_of(text)
        limit = spec.min_punctuated_lines
        punctuated = share(sum(line.endswith(_END_MARKS) for line in lines), len(lines))
        yield "min_punctuated_lines", punctuated, limit is not None and punctuated <= limit
        limit = spec.max_duplicate_line_characters
        duplicate = share(repeated(lines)[1], sum(map(len, lines)))
        yield "max_duplicate_line_characters", duplicate, limit is not None and duplicate >= limit
        limit = spec.max_short_lines
        short = share(sum(len(line) < spec.short_line_length for line in lines), len(lines))
        yield "max_short_lines", short, limit is not None and short >= limit
        limit = spec.max_newlines_per_word
        if limit is not None:
            newlines = share(text.count("\n"), len(text.split()))
            yield "max_newlines_per_word", newlines, newlines > limit
