"""The rules of C4 (JMLR 21/140, section 2.2) and those that FineWeb adds (arXiv 2406.17557, section 3.6).

Words and lines are those of ``gopher``. A sentence ends at the end of a line, or with ``.``, ``!``, ``?`` or ``…`` and
closing quotes or brackets before whitespace that no small letter follows; no model finds sentences, so that
abbreviations before a capital letter (``Dr. Smith``) end one too.
"""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from scaletrain_cli.data.steps.base import NOTHING, Document, Kept, Removed, Step
from scaletrain_cli.data.steps.gopher import ELLIPSES, lines_of, repeated, share
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec.preparation import C4Spec, FineWebSpec

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
        found = self.by_first.keys() & set(words)
        if not found:
            return 0
        text = f" {' '.join(words)} "
        return sum(phrase in text for word in found for phrase in self.by_first[word])


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
