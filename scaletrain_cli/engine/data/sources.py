"""Sequences of prepared text: from one source of any number of shards, and from several sources side by side."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from scaletrain_cli.data.token_files import Split
from scaletrain_cli.engine.data.joined import Joined


class TextSequences(ABC):
    """Sequences of ``seq_len`` tokens and their successors, by number; only the successors overlap."""

    seq_len: int

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of sequences."""

    @abstractmethod
    def part(self, first: int, count: int) -> TextSequences:
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

    def part(self, first: int, count: int) -> SourceSequences:
        return replace(self, first=self.first + first, count=count)

    def rows(self, indices: list[int]) -> npt.NDArray[np.int64]:
        starts = [(self.first + index) * self.seq_len for index in indices]
        found = np.empty((len(indices), self.seq_len + 1), np.int64)
        for row, start in zip(found, starts, strict=True):
            row[:] = self.split.tokens.read(start, start + self.seq_len + 1)
        return found

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
        number = self.source_of(first)
        start = self.starts[number]
        assert last <= self.starts[number + 1], "sequences of one source"
        return self.sources[number].document_ends_within(first - start, last - start)

    def document_ends_in(self, indices: npt.NDArray[np.int64]) -> int:
        return sum(source.document_ends_in(np.array(own)) for source, _, own in self.by_source(indices.tolist()))
