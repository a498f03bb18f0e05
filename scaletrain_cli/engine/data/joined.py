"""The samples of several sources side by side."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt


class Joined:
    """The samples of the first source, then those of the second one, and so on: a base of dataclasses."""

    sources: tuple[Any, ...]

    @cached_property
    def starts(self) -> list[int]:
        """The number of the first sample of each source, and the number of all samples."""
        return [0, *accumulate(len(each) for each in self.sources)]

    def __len__(self) -> int:
        return self.starts[-1]

    def part(self, first: int, count: int) -> Any:
        """Return ``count`` of these samples from ``first`` on."""
        parts = []
        for each, start in zip(self.sources, self.starts, strict=False):
            low, high = (min(max(place - start, 0), len(each)) for place in (first, first + count))
            parts.append(each.part(low, high - low))
        return type(self)(tuple(parts))  # type: ignore[call-arg]

    def source_of(self, index: int) -> int:
        """Return the number of the source that has a sample."""
        return bisect_right(self.starts, index) - 1

    def by_source(self, indices: Sequence[int]) -> Iterator[tuple[Any, npt.NDArray[np.int64], list[int]]]:
        """Yield each source that has some of these samples, their places in ``indices``, and their numbers in it."""
        numbers = np.asarray(indices, np.int64)
        sources = np.searchsorted(self.starts, numbers, side="right") - 1
        for source in np.unique(sources).tolist():
            (places,) = np.nonzero(sources == source)
            yield self.sources[source], places, (numbers[places] - self.starts[source]).tolist()
