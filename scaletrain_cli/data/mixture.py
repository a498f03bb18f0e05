"""The source of each sample of a run: a pure function of the weights, the same for every number of ranks and workers.

A stage takes its samples from the sources by Webster's method (Balinski and Young, Fair Representation, 1982): slot j
of a source with weight w is due at time (j + 1/2) / w, and samples follow the slots in the order of time. Each
beginning of a stage has the shares of the weights up to about one sample per source; independent random choice is off
by 1 % of a share after 10,000 samples.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# The weights of a stage are rounded to whole parts of this number: a source is off by one sample after as many samples.
PARTS = 10**12
_BLOCK = 4096  # samples whose sources are found together
_DUE_BITS = 96  # two different times differ by more than 1 / (4 PARTS^2) > 2^-82


class Place(NamedTuple):
    """A sample's ``source``, by number, and its ``position`` among all samples of the run from that source."""

    source: int
    position: int


@dataclass(frozen=True)
class Stage:
    """The ``weights`` of the sources, by number, from sample ``first`` of the run on, counted from 0."""

    first: int
    weights: tuple[float, ...]


class Mixture:
    """The order of sources in a run. Each stage continues the sources where the stage before has left them."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        """``stages``: the first begins at sample 0, each later one after the one before; the same number of weights."""
        if not stages or stages[0].first != 0 or any(last.first >= stage.first for last, stage in pairwise(stages)):
            raise ValueError("stages must begin at sample 0 and at ascending samples")
        if len({len(stage.weights) for stage in stages}) != 1:
            raise ValueError("every stage must have a weight for each source")
        self._first = [stage.first for stage in stages]
        self._weights = [whole_weights(stage.weights) for stage in stages]
        taken = np.zeros(len(stages[0].weights), np.int64)
        self._taken = [taken]  # from each source before each stage
        for number, (stage, following) in enumerate(pairwise(stages)):
            taken = taken + _counts(self._weights[number], following.first - stage.first)
            self._taken.append(taken)

    def place(self, sample: int) -> Place:
        """Return the source of a sample of the run, and its position in that source; all counted from 0."""
        stage = bisect_right(self._first, sample) - 1
        block, within = divmod(sample - self._first[stage], _BLOCK)
        sources, positions = _block(self._weights[stage], block)
        source = int(sources[within])
        return Place(source, int(self._taken[stage][source]) + int(positions[within]))

    def counts(self, samples: int) -> npt.NDArray[np.int64]:
        """Return how many of the first ``samples`` samples of the run come from each source, [sources]."""
        stage = max(0, bisect_right(self._first, samples) - 1)
        return self._taken[stage] + _counts(self._weights[stage], samples - self._first[stage])


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the weights as whole numbers with the sum PARTS, rounded by largest remainders.

    A source with a weight above 0 has at least 1. Raises ValueError for negative or infinite weights, or if all are 0.
    """
    if not 0 < sum(weights) < float("inf") or min(weights) < 0:
        raise ValueError("weights must be finite, at least 0, and not all 0")
    whole_total = sum(map(Fraction, weights))
    exact = [Fraction(weight) / whole_total * PARTS for weight in weights]
    whole = [max(int(share), 1) if share else 0 for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda source: (whole[source] - exact[source], source))
    missing = PARTS - sum(whole)
    for turn in range(abs(missing)):
        candidates = by_remainder if missing > 0 else [index for index in reversed(by_remainder) if whole[index] > 1]
        whole[candidates[turn % len(candidates)]] += 1 if missing > 0 else -1
    return tuple(whole)


@lru_cache(maxsize=256)
def _block(weights: tuple[int, ...], number: int) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Return the source of each sample of a block, and its position among the samples of that source, [_BLOCK].

    Stages and revisions with equal weights share it.
    """
    first = _first_slots(weights, number * _BLOCK)
    slots = sorted(
        (_due(slot, weight), source, slot)
        for source, weight in enumerate(weights)
        if weight
        # a block spans at most (_BLOCK + sources) / PARTS
        for slot in range(first[source], first[source] + weight * (_BLOCK + len(weights)) // PARTS + 2)
    )[:_BLOCK]
    _, sources, positions = zip(*slots, strict=True)
    return np.array(sources, np.int16), np.array(positions, np.int64)


def _counts(weights: tuple[int, ...], samples: int) -> npt.NDArray[np.int64]:
    """Return how many of the first ``samples`` samples of a stage come from each source."""
    return np.array(_first_slots(weights, samples), np.int64)


def _first_slots(weights: tuple[int, ...], samples: int) -> list[int]:
    """Return the first slot of each source after ``samples`` samples.

    Until a time t, a source has floor(w t + 1/2) slots and all sources have at most t PARTS + sources / 2. So the slots
    until t = (samples - sources) / PARTS are not too many, and the few that are missing follow in their order.
    """
    counted = max(0, samples - len(weights))
    slots = [(2 * weight * counted + PARTS) // (2 * PARTS) for weight in weights]
    following = [
        (_due(slot, weight), source) for source, (slot, weight) in enumerate(zip(slots, weights, strict=True)) if weight
    ]
    heapify(following)
    for _ in range(samples - sum(slots)):
        source = following[0][1]
        slots[source] += 1
        heapreplace(following, (_due(slots[source], weights[source]), source))
    return slots


def _due(slot: int, weight: int) -> int:
    """Return the time of a slot in units so small that no two different times of two sources become equal."""
    return ((2 * slot + 1) << _DUE_BITS) // (2 * weight)
