"""Packing documents of different lengths into rows (best-fit decreasing; Ding et al., arXiv:2404.10830)."""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Piece(NamedTuple):
    """Tokens ``start`` to ``stop - 1`` of a document."""

    document: int
    start: int
    stop: int


def pack(lengths: Sequence[int], capacity: int, *, split: bool) -> list[list[Piece]]:
    """Return rows of at most ``capacity`` tokens, each a list of pieces; every token is in exactly one of them.

    The rows are in the order of their first documents, so that the end of a data set is not its shortest rows. Without
    ``split`` every document is one piece; raises ValueError if one is longer than ``capacity``.
    """
    pieces = [
        Piece(document, start, min(start + capacity, length))
        for document, length in enumerate(lengths)
        for start in range(0, length, capacity)
    ]
    if not split and any(piece.start for piece in pieces):
        raise ValueError(f"a document is longer than {capacity} tokens")
    found = best_fit([piece.stop - piece.start for piece in pieces], capacity)
    return sorted([[pieces[number] for number in row] for row in found], key=min)


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return rows of indices: the longest item first, each into the fullest row that has space for it.

    Items of the same length keep their order, and of rows with the same space the oldest is chosen.
    """
    rows: list[list[int]] = []
    with_space: defaultdict[int, deque[int]] = defaultdict(deque)
    spaces = 0  # bit n is set if some row has space for exactly n more tokens
    for index in np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist():
        length = lengths[index]
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            row = with_space[space].popleft()
            if not with_space[space]:
                spaces ^= 1 << space
        else:
            space, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        if space > length:
            with_space[space - length].append(row)
            spaces |= 1 << (space - length)
    return rows
