"""Sequences of tokens in memory, for tests of what reads sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from scaletrain_cli.engine.data.dataset import TextSequences


@dataclass(frozen=True)
class TokenSequences(TextSequences):
    """Non-overlapping sequences of ``seq_len`` tokens and their successors, from one array.

    ``document_ends``: ascending indices into ``tokens`` of the last token of each document.
    """

    tokens: npt.NDArray[np.unsignedinteger]
    seq_len: int
    document_ends: npt.NDArray[np.int64]
    first: int = 0
    count: int | None = None  # number of sequences from ``first`` on; None for all

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq_len - self.first) if self.count is None else self.count

    def part(self, first: int, count: int) -> TokenSequences:
        return replace(self, first=self.first + first, count=count)

    def rows(self, indices: list[int]) -> npt.NDArray[np.int64]:
        starts = [(self.first + index) * self.seq_len for index in indices]
        return np.stack([self.tokens[start : start + self.seq_len + 1] for start in starts]).astype(np.int64)

    def document_ends_within(self, first: int, last: int) -> npt.NDArray[np.int64]:
        start, stop = ((self.first + index) * self.seq_len for index in (first, last))
        low, high = np.searchsorted(self.document_ends, (start, stop))
        return self.document_ends[low:high] - start
