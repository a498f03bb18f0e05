"""Pieces of matrices and where two of them overlap: what lets a state that one layout saved be loaded by another.

Pure index arithmetic on names and shapes. Knows no tensor and no file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scaletrain_cli.engine.parallel.shard_spec import ShardSpec


@dataclass(frozen=True)
class Slice:
    """Elements ``start`` to ``stop`` of what one rank has of a matrix, laid flat.

    ``name`` and ``whole_shape`` are those of the matrix in a Hugging Face file; ``cut`` says which part of it the rank
    has, None where it has the whole. So two pieces of one matrix can be compared however it was shared out.
    """

    name: str
    whole_shape: tuple[int, ...]
    cut: ShardSpec | None
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def contains(self, other: Slice) -> bool:
        """Whether all of another piece of the same matrix lies in this one, for certain."""
        return self.cut == other.cut and self.start <= other.start and other.stop <= self.stop

    def to_json(self) -> dict[str, Any]:
        """Of plain numbers, for a file's header."""
        cut = None if self.cut is None else [self.cut.dim, self.cut.ranks, self.cut.rank, self.cut.parts]
        return {"shape": list(self.whole_shape), "cut": cut, "start": self.start, "stop": self.stop}

    @classmethod
    def from_json(cls, name: str, data: dict[str, Any]) -> Slice:
        """The piece that ``to_json`` was called on."""
        cut = None if data["cut"] is None else ShardSpec(*data["cut"])
        return cls(name, tuple(data["shape"]), cut, data["start"], data["stop"])


class Overlap(NamedTuple):
    """``length`` elements that two pieces share, counted from the first element of each."""

    at_first: int
    at_second: int
    length: int


def overlaps(first: Slice, second: Slice) -> Iterator[Overlap]:
    """What two pieces of one matrix share, in runs of elements that lie side by side in both."""
    if first.cut == second.cut:
        start, stop = max(first.start, second.start), min(first.stop, second.stop)
        if start < stop:
            yield Overlap(start - first.start, start - second.start, stop - start)
        return
    ours, theirs = _runs(first), _runs(second)
    # Runs of one piece are in order and apart, so those that meet a run of the other are neighbours.
    begin = np.searchsorted(theirs[:, 0] + theirs[:, 2], ours[:, 0], side="right")
    end = np.searchsorted(theirs[:, 0], ours[:, 0] + ours[:, 2], side="left")
    for (whole, here, length), low, high in zip(ours.tolist(), begin.tolist(), end.tolist(), strict=True):
        for other, there, other_length in theirs[low:high].tolist():
            start, stop = max(whole, other), min(whole + length, other + other_length)
            if start < stop:
                yield Overlap(here + start - whole, there + start - other, stop - start)


def _runs(piece: Slice) -> npt.NDArray[np.int64]:
    """[n, 3]: place in the whole matrix laid flat, place in the piece, length; in the order of the whole."""
    if piece.cut is None:
        return np.array([[piece.start, 0, piece.numel]], dtype=np.int64)
    cut, shape = piece.cut, piece.whole_shape
    inner, outer = math.prod(shape[cut.dim + 1 :]), math.prod(shape[: cut.dim])
    part = shape[cut.dim] // cut.parts * inner
    length = part // cut.ranks
    number = np.arange(outer * cut.parts, dtype=np.int64)
    whole, local = number * part + cut.rank * length, number * length
    start, stop = np.maximum(local, piece.start), np.minimum(local + length, piece.stop)
    runs = np.stack([whole + start - local, start - piece.start, stop - start], axis=1)
    kept: npt.NDArray[np.int64] = runs[runs[:, 2] > 0]
    return kept
