"""Prepared text, opened as sequences of tokens, and what it has in common with prepared rows.

Sequences are of one source of any number of shards, or of several sources side by side.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrain_cli.data.block_cache import BlockCache
from scaletrain_cli.data.chunk_hashes import CorruptDataError
from scaletrain_cli.data.token_files import Split, open_source
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason


class Joined:
    """The samples of the first source, then those of the second one, and so on: a base of dataclasses."""

    sources: tuple[Any, ...]

    @cached_property
    def starts(self) -> list[int]:
        """The number of the first sample of each source, and the number of all samples."""
        return [0, *accumulate(len(source) for source in self.sources)]

    def __len__(self) -> int:
        return self.starts[-1]

    def part(self, first: int, count: int) -> Any:
        parts = []
        for source, start in zip(self.sources, self.starts, strict=False):
            low, high = (min(max(place - start, 0), len(source)) for place in (first, first + count))
            parts.append(source.part(low, high - low))
        return type(self)(tuple(parts))  # type: ignore[call-arg]

    def located(self, index: int) -> tuple[int, int]:
        """Return the number of the source of a sample, and the number of the sample in it."""
        source = bisect_right(self.starts, index) - 1
        return source, index - self.starts[source]

    def by_source(self, indices: Sequence[int]) -> Iterator[tuple[Any, npt.NDArray[np.int64], list[int]]]:
        """Yield each source that has some of these samples, their places in ``indices``, and their numbers in it."""
        numbers = np.asarray(indices, np.int64)
        sources = np.searchsorted(self.starts, numbers, side="right") - 1
        for source in np.unique(sources).tolist():
            (places,) = np.nonzero(sources == source)
            yield self.sources[source], places, (numbers[places] - self.starts[source]).tolist()


class TextSequences(ABC):
    """Sequences of ``seq_len`` tokens and their successors, by number; only the successors overlap."""

    seq_len: int

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of sequences."""

    @abstractmethod
    def part(self, first: int, count: int) -> "TextSequences":
        """Return ``count`` of these sequences from ``first`` on."""

    @abstractmethod
    def rows(self, indices: list[int]) -> npt.NDArray[np.int64]:
        """Return sequences as [len(indices), seq_len + 1]: inputs are [:, :-1], labels [:, 1:].

        Raises CorruptDataError if a file has changed since it was written.
        """

    @abstractmethod
    def document_ends_within(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Return document ends among the inputs of sequences ``first`` to ``last - 1``, counted from the first of them.

        The label of such a token is the first token of another document.
        """

    def document_ends_in(self, indices: npt.NDArray[np.int64]) -> int:
        """Return the number of document ends among the inputs of these sequences. Raises CorruptDataError."""
        return sum(len(self.document_ends_within(index, index + 1)) for index in indices.tolist())


@dataclass(frozen=True)
class SourceSequences(TextSequences):
    """The sequences of one split of a prepared source, over the boundaries of its shards.

    Pickled, they carry paths and no open files: another process reads them through files of its own. ``first``,
    ``count``: the sequences among those of the split; ``count`` None: all from ``first`` on.
    """

    split: Split
    seq_len: int
    first: int = 0
    count: int | None = None

    def __len__(self) -> int:
        whole = max(0, (len(self.split.tokens) - 1) // self.seq_len - self.first)
        return whole if self.count is None else self.count

    def part(self, first: int, count: int) -> "SourceSequences":
        return replace(self, first=self.first + first, count=count)

    def rows(self, indices: list[int]) -> npt.NDArray[np.int64]:
        starts = [(self.first + index) * self.seq_len for index in indices]
        rows = np.empty((len(indices), self.seq_len + 1), np.int64)
        for row, start in zip(rows, starts, strict=True):
            row[:] = self.split.tokens.read(start, start + self.seq_len + 1)
        return rows

    def document_ends_within(self, first: int, last: int) -> npt.NDArray[np.int64]:
        start, stop = ((self.first + index) * self.seq_len for index in (first, last))
        return self.split.ends_between(start, stop) - start

    def document_ends_in(self, indices: npt.NDArray[np.int64]) -> int:
        starts = (self.first + indices) * self.seq_len
        return int((self.split.ends_before(starts + self.seq_len) - self.split.ends_before(starts)).sum())


@dataclass(frozen=True)
class JoinedSequences(Joined, TextSequences):
    """The sequences of several sources of text, in the order of Joined."""

    sources: tuple[TextSequences, ...]

    @property
    def seq_len(self) -> int:  # type: ignore[override]
        """The tokens of a sequence, the same in all sources."""
        return self.sources[0].seq_len

    def rows(self, indices: list[int]) -> npt.NDArray[np.int64]:
        rows = np.empty((len(indices), self.seq_len + 1), np.int64)
        for source, places, own in self.by_source(indices):
            rows[places] = source.rows(own)
        return rows

    def document_ends_within(self, first: int, last: int) -> npt.NDArray[np.int64]:
        number, own = self.located(first)
        assert last <= self.starts[number + 1], "sequences of one source"
        return self.sources[number].document_ends_within(own, own + last - first)

    def document_ends_in(self, indices: npt.NDArray[np.int64]) -> int:
        return sum(source.document_ends_in(np.array(own)) for source, _, own in self.by_source(indices.tolist()))


SPLITS = ("train", "validation")


@dataclass(frozen=True)
class DatasetInfo:
    """The contents of dataset.json of text and of rows.

    ``fingerprint``: SHA-256 of all tokens; ``seal``: of the hashes of all files and of the other fields.
    """

    schema: str
    fingerprint: str
    dtype: str
    vocab_size: int
    documents: int
    train_tokens: int
    validation_tokens: int
    train_documents: int
    validation_documents: int
    replaced: int = 0  # bytes of the text that are not UTF-8, each replaced by U+FFFD
    seal: str = ""


def open_source_dataset(
    folder: Path, seq_len: int, rank: int = 0, ranks: int = 1, cache: BlockCache | None = None
) -> tuple[DatasetInfo, SourceSequences, SourceSequences]:
    """Return info, training sequences and validation sequences of a source that was prepared in shards.

    Compares this rank's share of the shards with dataset.json; tokens and document ends are compared with their hashes
    when they are first read. Those of a remote dataset are read through ``cache``; None: one of the default size.

    Raises UsageError, and CorruptDataError if a file has changed since it was written.
    """
    document, splits = open_source(folder, rank, ranks, cache)
    try:
        info = DatasetInfo(
            schema=document["schema"],
            fingerprint=document["fingerprint"],
            dtype=document["tokenizer"]["dtype"],
            vocab_size=document["tokenizer"]["vocab_size"],
            documents=sum(document[f"{split}_documents"] for split in SPLITS),
            **{name: document[name] for split in SPLITS for name in (f"{split}_tokens", f"{split}_documents")},
            seal=document.get("seal", ""),
        )
    except (KeyError, TypeError) as error:
        raise CorruptDataError(folder / "dataset.json", f"it lacks a value: {error}") from error
    train, validation = (SourceSequences(splits[split], seq_len) for split in SPLITS)
    if not len(train):
        sizes = {"tokens": info.train_tokens, "length": train.seq_len}
        raise UsageError(Reason("engine.dataset-too-small", {"folder": str(folder), **sizes}))
    return info, train, validation


def seal_of(info: DatasetInfo, hashes: list[bytes]) -> str:
    """Return the SHA-256 of the other fields and of the ``hashes`` of the data files, those of train.bin first."""
    stated = {name: value for name, value in asdict(info).items() if name != "seal"}
    digest = hashlib.sha256(json.dumps(stated, sort_keys=True).encode())
    for file_hash in hashes:
        digest.update(hashlib.sha256(file_hash).digest())
    return digest.hexdigest()


def map_numbers(path: Path, dtype: str, count: int) -> npt.NDArray[Any]:
    """Return the numbers in a file, memory-mapped unless it is empty. Raises CorruptDataError."""
    expected = count * np.dtype(dtype).itemsize
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CorruptDataError(path, str(error.strerror)) from error
    if size != expected:
        raise CorruptDataError(path, f"{size} bytes instead of the {expected} that dataset.json states")
    return np.memmap(path, dtype=dtype, mode="r") if count else np.empty(0, dtype=dtype)
