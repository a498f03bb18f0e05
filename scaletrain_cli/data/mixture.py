"""The source of each sample of a run: a pure function of the weights, the same for every number of ranks and workers.

A stage takes its samples from the sources by Webster's method (Balinski and Young, Fair Representation, 1982): slot j
of a source with weight w is due at time (j + 1/2) / w, and samples follow the slots in the order of time. Each
beginning of a stage has the shares of the weights up to about one sample per source; independent random choice is off
by 1 % of a share after 10,000 samples.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# The weights of a stage are rounded to whole parts of this many samples, after which the order of sources repeats.
PERIOD = 1_000_000


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
        if not stages or stages[0].first != 0 or any(last.first >= each.first for last, each in pairwise(stages)):
            raise ValueError("stages must begin at sample 0 and at ascending samples")
        if len({len(stage.weights) for stage in stages}) != 1:
            raise ValueError("every stage must have a weight for each source")
        self._first = [stage.first for stage in stages]
        self._periods = [_period(whole_weights(stage.weights)) for stage in stages]
        taken = np.zeros(len(stages[0].weights), np.int64)
        self._taken = [taken]  # from each source before each stage
        for number, (stage, following) in enumerate(pairwise(stages)):
            taken = taken + self._periods[number].counts(following.first - stage.first)
            self._taken.append(taken)

    def place(self, sample: int) -> Place:
        """Return the source of a sample of the run, and its position in that source; all counted from 0."""
        stage = bisect_right(self._first, sample) - 1
        source, position = self._periods[stage].place(sample - self._first[stage])
        return Place(source, int(self._taken[stage][source]) + position)

    def counts(self, samples: int) -> npt.NDArray[np.int64]:
        """Return how many of the first ``samples`` samples of the run come from each source, [sources]."""
        stage = max(0, bisect_right(self._first, samples) - 1)
        return self._taken[stage] + self._periods[stage].counts(samples - self._first[stage])


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the weights as whole numbers with the sum PERIOD, rounded by largest remainders.

    A source with a weight above 0 has at least 1. Raises ValueError for negative or infinite weights, or if all are 0.
    """
    total = sum(weights)
    if not 0 < total < float("inf") or min(weights) < 0:
        raise ValueError("weights must be finite, at least 0, and not all 0")
    exact = [weight / total * PERIOD for weight in weights]
    whole = [max(int(share), 1) if share else 0 for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda source: (whole[source] - exact[source], source))
    missing = PERIOD - sum(whole)
    for turn in range(abs(missing)):
        candidates = by_remainder if missing > 0 else [each for each in reversed(by_remainder) if whole[each] > 1]
        whole[candidates[turn % len(candidates)]] += 1 if missing > 0 else -1
    return tuple(whole)


@dataclass(frozen=True)
class _Period:
    """The order of sources in PERIOD samples, which then repeats."""

    weights: tuple[int, ...]

    @cached_property
    def sources(self) -> npt.NDArray[np.int16]:
        """The source of each sample, [PERIOD]."""
        # Two slots are due at the same time only if these quotients are equal, and then the rounded ones are equal too.
        due = np.concatenate([(2 * np.arange(weight) + 1) / (2 * weight) for weight in self.weights if weight])
        owner = np.repeat(np.arange(len(self.weights), dtype=np.int16), self.weights)
        return owner[np.argsort(due, kind="stable")]

    @cached_property
    def earlier(self) -> npt.NDArray[np.int32]:
        """The number of samples of the same source before each sample, [PERIOD]."""
        order = np.argsort(self.sources, kind="stable")
        numbers = np.concatenate([np.arange(weight, dtype=np.int32) for weight in self.weights])
        earlier = np.empty_like(numbers)
        earlier[order] = numbers
        return earlier

    def place(self, sample: int) -> Place:
        periods, within = divmod(sample, PERIOD)
        source = int(self.sources[within])
        return Place(source, periods * self.weights[source] + int(self.earlier[within]))

    def counts(self, samples: int) -> npt.NDArray[np.int64]:
        periods, within = divmod(samples, PERIOD)
        part = np.bincount(self.sources[:within], minlength=len(self.weights))
        return periods * np.array(self.weights, np.int64) + part


@lru_cache(maxsize=32)
def _period(weights: tuple[int, ...]) -> _Period:
    """Stages and revisions with equal weights share the 6 MB of a period."""
    return _Period(weights)
