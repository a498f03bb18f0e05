"""The steps of one source in order: which decisions exist, and the documents that are left after a number of steps.

The documents of a source that is already tokenized: whole, with ids of the vocabulary, each with its end.

A Megatron-LM set says where documents end. In an array each document ends with the end-of-text token, and belongs to
the part that it begins in, although it may reach into the next ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrain_cli.data.duplicates import Corpus, read_removed
from scaletrain_cli.data.pipeline.decisions import Decisions, chained, read_decisions
from scaletrain_cli.data.pipeline.shards import Encoded
from scaletrain_cli.data.pipeline.tasks import Place, Source, Task, place_text
from scaletrain_cli.data.sources.formats import reader_of
from scaletrain_cli.data.sources.records import BadRecord, Part, Record, TokenRecord, require_unchanged
from scaletrain_cli.data.steps import identity, step_of
from scaletrain_cli.data.steps.base import Document, DocumentError, Kept, Removed, Step
from scaletrain_cli.data.tokenizers.files import parsed_tokenizer
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.spec.corpus_files import ENDS_OF_TEXT
from scaletrain_cli.spec.preparation import PreparationStep


@dataclass(frozen=True)
class TokenizerSettings:
    """``digest``: SHA-256 of tokenizer.json. ``end_of_text``: the token that ends documents.

    ``vocab_size``: the largest id and 1, as ids may have gaps. ``dtype``: of the files with tokens. ``unknown``: the
    token for text that the tokenizer has no tokens for; None if there is none.
    """

    digest: str
    end_of_text: int
    vocab_size: int
    dtype: str
    unknown: int | None


@lru_cache(maxsize=2)
def loaded_tokenizer(content: str) -> tuple[TokenizerSettings, Any]:
    """Return a tokenizer.json as a Tokenizer, once per process. Raises UsageError, also if no token ends documents."""
    tokenizer = parsed_tokenizer(content.encode(), "")
    known = (tokenizer.token_to_id(name) for name in ENDS_OF_TEXT)
    if (end := next((token for token in known if token is not None), None)) is None:
        raise UsageError(Reason("engine.tokenizer-without-end-of-text", {"path": "", "tokens": list(ENDS_OF_TEXT)}))
    size = max(tokenizer.get_vocab().values()) + 1
    digest = hashlib.sha256(content.encode()).hexdigest()
    model = json.loads(content)["model"]
    name, unknown = model.get("unk_token"), model.get("unk_id")  # Unigram has the id
    unknown = tokenizer.token_to_id(name) if unknown is None and name is not None else unknown
    return TokenizerSettings(digest, end, size, "uint16" if size <= 1 << 16 else "uint32", unknown), tokenizer


# No document may be longer: one is held in memory. A longer one is a file whose end-of-text token is another one.
MAX_DOCUMENT_TOKENS = 1 << 24
_NO_END = 1 << 62


def token_documents(part: Part, tokenizer: TokenizerSettings) -> Iterator[TokenRecord | BadRecord]:
    """Yield the documents that begin in a part. A document without tokens is left out. Raises OSError."""
    with_ends = part.file.kind == "megatron"
    records = reader_of(part.file).records(part) if with_ends else _from_array(part, tokenizer.end_of_text)
    for record in records:
        if isinstance(record, BadRecord):
            yield record
        elif isinstance(record, TokenRecord) and record.tokens[:2].tolist() not in ([], [tokenizer.end_of_text]):
            low, high = int(record.tokens.min()), int(record.tokens.max())
            if low < 0 or high >= tokenizer.vocab_size:
                params = {"id": high if low >= 0 else low, "size": tokenizer.vocab_size}
                yield BadRecord(record.place, Reason("sources.id-outside-vocabulary", params))
            else:
                yield record


def _from_array(part: Part, end_of_text: int) -> Iterator[TokenRecord | BadRecord]:
    """Yield the documents of an array that begin in a part: at its start, or after an end-of-text token."""
    # The token before the part says if a document begins with the part.
    wider = replace(part, start=max(0, part.start - 1), stop=_NO_END)
    held: list[npt.NDArray[Any]] | None = [] if part.start == 0 else None  # None: no document has begun
    begins, length = 0, 0
    for record in reader_of(part.file).records(wider):
        if not isinstance(record, TokenRecord):
            yield from (record,) if isinstance(record, BadRecord) else ()
            return
        start = 0
        for end in np.flatnonzero(record.tokens == end_of_text).tolist():
            if held is not None:
                yield TokenRecord(begins, np.concatenate([*held, record.tokens[start : end + 1]]), True)
            start, held, length = end + 1, [], 0
            begins = record.place + start
            if begins >= part.stop:
                return
        if held is None:
            if record.place + len(record.tokens) >= part.stop:
                return
            continue
        held.append(record.tokens[start:])
        length += len(record.tokens) - start
        if length > MAX_DOCUMENT_TOKENS:
            params = {"tokens": MAX_DOCUMENT_TOKENS, "end_of_text": end_of_text}
            yield BadRecord(begins, Reason("sources.no-end-of-text", params))
            held = None
    if held:
        yield TokenRecord(begins, np.concatenate(held), True)


def encoded_before(records: Iterable[TokenRecord], tokenizer: TokenizerSettings) -> Iterator[Encoded]:
    """Yield the documents with the end-of-text token as their last one. Their tokens decide on their split."""
    end = tokenizer.end_of_text
    for record in records:
        tokens = record.tokens if record.tokens[-1] == end else np.append(record.tokens, end)
        yield Encoded(tokens.astype("<u4").tobytes(), tokens.astype(tokenizer.dtype), None)


# Raised with every change of what readers yield, text and tokens, of the tasks, and of the files of decisions.
_READING, _READING_TOKENS = "reading/v4", "reading-tokens/v3"


@dataclass(frozen=True)
class Duplicates:
    """The documents that deduplication has removed from a source; ``first``: the number of its first task there."""

    corpus: Corpus
    first: int

    def removed(self, task: Task) -> dict[int, Removed]:
        """Return the removed documents of a task, by number in the task."""
        removed = {}
        for duplicate in read_removed(self.corpus, self.number_of(task)):
            rule, limit = ("near", self.corpus.settings.similarity) if duplicate.near else ("exact", 1.0)
            removed[duplicate.index] = Removed(f"duplicates.{rule}", duplicate.similarity, limit)
        return removed

    def number_of(self, task: Task) -> int:
        """Return the number of a task among those of all sources."""
        return self.first + task.number

    def shown(self, task: Task) -> frozenset[int]:
        """Return the numbers of the documents of a task that the report names."""
        report, number = self.corpus.read_report(), self.number_of(task)
        places = [example[name] for example in report.get("examples", ()) for name in ("first", "second")]
        places += [cluster["kept"] for cluster in report["largest_clusters"]]
        return frozenset(place["index"] for place in places if place["task"] == number)


@dataclass(frozen=True)
class ChainStep:
    """A step with the key of its results. ``duplicates``: what a deduplication has removed."""

    key: str
    name: str = "reading"  # for people
    section: PreparationStep | None = None  # None: reading, or deduplication
    duplicates: Duplicates | None = None


@dataclass(frozen=True)
class Chain:
    """``steps``: reading, then those of the spec that apply to the source. ``folder``: of the results of all steps.

    ``skips_bad``: documents that cannot be read are removed; else the first one is an error.
    """

    folder: Path
    steps: tuple[ChainStep, ...]
    skips_bad: bool = False

    def decisions(self, step: int, task: Task) -> Path:
        return self.folder / self.steps[step].key / f"{task.number:06d}.json"

    def documents(self, task: Task) -> Iterator[tuple[int, str]]:
        """Yield (number in the task, text) of each document that is left after all steps; write missing decisions.

        The decisions are written when the last document was taken. Raises UsageError for a bad document, unless bad
        ones are skipped, and OSError.
        """
        running = [_Running(self, number, task) for number in range(len(self.steps))]
        yield from self._run(task, running)
        for step in running:
            step.write()

    def _run(self, task: Task, running: Sequence[_Running]) -> Iterator[tuple[int, str]]:
        reading, *others = running
        for number, (part, record) in enumerate(task.records()):
            place = Place(task, part, record.place)
            if isinstance(record, BadRecord):
                reading.was_not_read(number, place, record.reason, skip=self.skips_bad)
                continue
            assert isinstance(record, Record)
            reading.was_read(record.text)
            document = Document(record.text, task.source, "", record.columns)
            for step in others:
                result = step.apply(number, document, place, skip_bad=self.skips_bad)
                if result is None:
                    break
                document = result
            else:
                yield number, document.text

    def token_documents(self, task: Task, tokenizer: TokenizerSettings) -> Iterator[TokenRecord]:
        """Yield the documents of a task of tokens; write missing decisions, as ``documents`` does.

        Raises UsageError for a bad document, unless bad ones are skipped, and OSError.
        """
        reading, number = _Running(self, 0, task), 0
        for part in task.parts:
            require_unchanged(part.file)
            for record in token_documents(part, tokenizer):
                if isinstance(record, BadRecord):
                    reading.was_not_read(number, Place(task, part, record.place), record.reason, skip=self.skips_bad)
                else:
                    reading.was_read("")
                    yield record
                number += 1
            require_unchanged(part.file)
        reading.write()


class _Running:
    """One step while a task is read: decisions that are known, or are made."""

    def __init__(self, chain: Chain, number: int, task: Task) -> None:
        self._step = chain.steps[number]
        self._path = chain.decisions(number, task)
        known = read_decisions(self._path)
        self._known = None if known is None else frozenset[int]().union(*known.removed.values())
        self._made = Decisions()
        self._by_number: dict[int, Removed] | None = None
        self._shown: Collection[int] = ()
        if self._known is None and self._step.duplicates is not None:
            self._by_number = self._step.duplicates.removed(task)
            self._shown = self._step.duplicates.shown(task)

    def was_read(self, text: str) -> None:
        """Count a document that was read; ``text`` is empty for tokens."""
        self._made.take(text)
        self._made.keep(text, {})

    def was_not_read(self, number: int, place: Place, reason: Reason, *, skip: bool) -> None:
        """Count a document that could not be read. Raises UsageError unless bad ones are skipped."""
        self._made.documents += 1
        self._bad(number, reason, place, "", skip=skip)

    def _bad(self, number: int, reason: Reason, place: Place, text: str, *, skip: bool) -> None:
        """Record a bad document. Raises UsageError unless bad ones are skipped."""
        if not skip:
            raise UsageError(
                Reason("data.bad-document", {"where": place_text(place.part, place.at), "problem": reason})
            )
        self._made.remove_bad(number, reason, place, text)

    def apply(self, number: int, document: Document, place: Place, *, skip_bad: bool) -> Document | None:
        """Return the document after the step; None if it was removed. Raises UsageError for a bad document."""
        if self._known is not None:
            return self._repeated(number, document)
        self._made.take(document.text)
        if number in self._shown:
            self._made.show(number, place, document.text)
        try:
            result = self._result(number, document)
        except DocumentError as error:
            self._bad(number, error.reason or recorded(str(error)), place, document.text, skip=skip_bad)
            return None
        if isinstance(result, Removed):
            self._made.remove(number, result, place, document.text)
            return None
        self._made.keep(result.text, result.counts)
        return document._replace(text=result.text)

    def _repeated(self, number: int, document: Document) -> Document | None:
        """Return what a step that has decided before makes of a document."""
        assert self._known is not None
        if number in self._known:
            return None
        section = self._step.section
        if section is None or not _step(section).changes_text:
            return document
        result = _step(section)(document)
        return document._replace(text=result.text) if isinstance(result, Kept) else None

    def _result(self, number: int, document: Document) -> Kept | Removed:
        if self._by_number is not None:
            return self._by_number.get(number, Kept(document.text))
        assert self._step.section is not None
        return _step(self._step.section)(document)

    def write(self) -> None:
        if self._known is None:
            self._made.write(self._path)


@dataclass(frozen=True)
class Work:
    """A source with its tasks and its steps so far. ``dataset``: the folder of its tokens, once it is known."""

    source: Source
    tasks: tuple[Task, ...]
    chain: Chain
    dataset: Path = Path()

    @property
    def name(self) -> str:
        return self.source.name


@lru_cache(maxsize=64)
def _step(section: PreparationStep) -> Step:
    """Return the step of a section, built once in each process."""
    return step_of(section)


def forget_steps() -> None:
    """Build steps anew in this process, as their files may have changed."""
    _step.cache_clear()


def chain_of(
    folder: Path,
    source: Source,
    sections: Sequence[PreparationStep],
    *,
    skips_bad: bool,
    tokenizer: TokenizerSettings | None = None,
) -> Chain:
    """Return the chain of a source with steps that look at one document at a time. Raises UsageError.

    ``tokenizer``: of the ids of a source of tokens, whose documents depend on it.
    """
    key = chained(_READING, source.content, source.columns.text, source.columns.others)
    if tokenizer is not None and source.is_tokenized:
        key = chained(_READING_TOKENS, source.content, tokenizer.end_of_text, tokenizer.vocab_size)
    return extended(Chain(folder, (ChainStep(key),), skips_bad), source, sections)


def extended(chain: Chain, source: Source, sections: Sequence[PreparationStep]) -> Chain:
    """Return a chain with further steps that look at one document at a time. Raises UsageError."""
    steps = list(chain.steps)
    for section in sections:
        if applies(section, source):
            key = chained(steps[-1].key, identity(section, _step(section)))
            steps.append(ChainStep(key, step_name(section), section))
    return replace(chain, steps=tuple(steps))


def step_name(section: PreparationStep) -> str:
    """Return the name of a step for people: its key, with the rules that it applies."""
    settings = section.model_dump(mode="json")
    return f"{settings['step']} ({settings['rules']})" if "rules" in settings else str(settings["step"])


def applies(section: PreparationStep, source: Source) -> bool:
    """Return whether a step applies to a source. Raises UsageError if it does, and the source has tokens."""
    chosen = section.only is None or source.name in section.only
    if chosen and source.is_tokenized:
        raise UsageError(Reason("data.step-on-tokens", {"step": step_name(section), "source": source.name}))
    return chosen
