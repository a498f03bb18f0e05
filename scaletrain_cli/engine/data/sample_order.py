"""The order of samples in a run: the source and the sequence of each sample number.

Of one source it is epochs of pseudo-random permutations, computed for any position. The samples of a batch are a
pure function of the seed and the batch number, the same in every layout.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrain_cli.data.mixture import Mixture, Stage
from scaletrain_cli.data.stages import MIXTURE_EVENT, MixtureStage, planned_stages, recorded_changes, recorded_stages
from scaletrain_cli.engine.metrics.reporting import report_event
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.rundir.journal import read_events
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord

_MASK64 = (1 << 64) - 1
_ROUNDS = 4


def sample_at(position: int, *, seed: int, samples: int) -> int:
    """Return the sample at a position of an endless stream of epochs, each a new permutation of range(samples)."""
    epoch, index = divmod(position, samples)
    return permute(index, size=samples, key=_epoch_key(seed, epoch))


def permute(index: int, *, size: int, key: int) -> int:
    """Return the image of ``index`` under a pseudo-random permutation of range(size), by cycle walking."""
    half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask, keys = (1 << half_bits) - 1, _turn_keys(key)
    while True:  # the network permutes a power of four >= size; repeat until inside (< 4 rounds on average)
        left, right = index >> half_bits, index & mask
        for turn_key in keys:
            left, right = right, left ^ (_mix_bits(right ^ turn_key) & mask)
        index = left << half_bits | right
        if index < size:
            return index


def samples_at(first: int, count: int, *, seed: int, samples: int) -> npt.NDArray[np.int64]:
    """Return the samples at ``count`` positions from ``first`` on; see sample_at()."""
    parts, position = [np.empty(0, np.int64)], first
    while position < first + count:
        epoch, index = divmod(position, samples)
        stop = min(index + first + count - position, samples)
        key = _epoch_key(seed, epoch)
        parts.append(_permuted(np.arange(index, stop, dtype=np.uint64), size=samples, key=key))
        position += stop - index
    return np.concatenate(parts)


def _permuted(indices: npt.NDArray[np.uint64], *, size: int, key: int) -> npt.NDArray[np.int64]:
    """Return the images of indices; see permute()."""
    half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    half, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    keys = [np.uint64(number) for number in _turn_keys(key)]
    values: npt.NDArray[np.uint64] = indices.copy()
    waiting = np.arange(len(values))
    while len(waiting):
        left, right = values[waiting] >> half, values[waiting] & mask
        for turn_key in keys:
            # The finalizer of each value, see _mix_bits(); products of arrays are modulo 2^64.
            mixed: npt.NDArray[np.uint64] = (right ^ turn_key) + np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            mixed ^= mixed >> np.uint64(31)
            left, right = right, left ^ (mixed & mask)
        values[waiting] = (left << half) | right
        waiting = waiting[values[waiting] >= size]
    images: npt.NDArray[np.int64] = values.astype(np.int64)
    return images


@lru_cache(maxsize=1024)
def _epoch_key(seed: int, epoch: int) -> int:
    return _mix_bits(_mix_bits(seed) ^ epoch)


@lru_cache(maxsize=1024)
def _turn_keys(key: int) -> tuple[int, ...]:
    return tuple(_mix_bits(key + turn) for turn in range(_ROUNDS))


def _mix_bits(value: int) -> int:
    """Return SplitMix64's finalizer (Steele, Lea, Flood, OOPSLA 2014) of a 64-bit integer."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


@dataclass(frozen=True)
class SampleOrder:
    """Returns the sequence that is a sample of the run: a pure function of its fields, both counted from 0.

    ``sizes``: sequences of each source, which follow one another (``sources.JoinedSequences``). The mixture gives the
    source of a sample and its position among the samples of that source; the order within a source is that of a run
    with this source alone, with a seed of its own for every source but the first.
    """

    seed: int
    sizes: tuple[int, ...]
    stages: tuple[Stage, ...]

    @classmethod
    def of_one(cls, seed: int, size: int) -> "SampleOrder":
        """Return the order of a run with one source, of ``size`` sequences."""
        return cls(seed, (size,), (Stage(0, (1.0,)),))

    def __call__(self, sample: int) -> int:
        source, position = self.mixture.place(sample)
        start = self._starts[source]
        return start + sample_at(position, seed=source_seed(self.seed, source), samples=self.sizes[source])

    def sequences_of(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Return the sequences that are ``count`` samples from ``first`` on: those of the first source, and so on."""
        before, after = self.mixture.counts(first).tolist(), self.mixture.counts(first + count).tolist()
        parts = []
        for source, (start, stop) in enumerate(zip(before, after, strict=True)):
            seed, size = source_seed(self.seed, source), self.sizes[source]
            parts.append(self._starts[source] + samples_at(start, stop - start, seed=seed, samples=size))
        return np.concatenate(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleOrder, (self.seed, self.sizes, self.stages)  # without tables of several MB

    @cached_property
    def mixture(self) -> Mixture:
        return Mixture(self.stages)

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(self.sizes)]


def places_in_batch(layout: Layout, replica: int) -> list[list[int]]:
    """Return which samples of a global batch each micro-batch of a data-parallel rank has, counted from 0.

    The union over the ranks is the same in every layout.
    """
    size = layout.micro_batch_size
    return [
        [(micro * layout.data_parallel + replica) * size + offset for offset in range(size)]
        for micro in range(layout.gradient_accumulation_steps)
    ]


def source_seed(seed: int, source: int) -> int:
    """Return the seed of the order within a source, by its number: that of the run for the first one.

    So a run with one source keeps its order when others are added. Numbers are spread by SplitMix64's increment.
    """
    return seed if source == 0 else (seed + source * 0x9E3779B97F4A7C15) & _MASK64


@dataclass(frozen=True)
class RunMixture:
    """``stages``: those of the run with all of its changes. ``planned``: those that the run was first planned with."""

    stages: list[MixtureStage]
    planned: list[MixtureStage]
    samples: int  # of the whole run, as it was first planned

    def validation_shares(self, names: Iterable[str]) -> dict[str, float]:
        """Return the share of each source in the validation loss: in the whole run as it was first planned.

        So the validation losses of a run can be compared with each other before and after a stage or a change. The sum
        is 1; a source that was added later has 0.
        """
        ends = [*(stage.first for stage in self.planned[1:]), max(self.samples, self.planned[-1].first + 1)]
        total = dict.fromkeys(names, 0.0)
        for stage, end in zip(self.planned, ends, strict=True):
            for name, share in stage.shares.items():
                total[name] += share * (end - stage.first) / ends[-1]
        return total


def mixture_of_run(run: RunDir, record: RunRecord, sequences: Mapping[str, int], first_batch: int) -> RunMixture:
    """Return the mixture of a run that continues with batch ``first_batch``, counted from 1. Call it on rank 0.

    ``sequences``: training sequences of each source. Where the spec has another mixture than the run so far, it counts
    from this batch on, and an event records it: the samples before it stay as they are in every later attempt, and so
    do those after it until the next change, whichever checkpoint an attempt starts from. Raises InfeasibleError.
    """
    spec = record.spec
    batch_size = spec.training.global_batch_size
    planned = planned_stages(spec.data, sequences, spec.total_steps, batch_size)
    events, samples = read_events(run), spec.total_steps * batch_size
    changes = recorded_changes(events)
    recorded_from = changes[0][0] if changes else (first_batch - 1) * batch_size
    if recorded_from > 0:  # before the first event there was one source
        changes.insert(0, (0, [MixtureStage(0, {next(iter(sequences)): 1.0})]))
    if not changes or changes[-1][1] != planned:
        first = (first_batch - 1) * batch_size if changes else 0
        if changes or len(sequences) > 1:
            places = {"batch": 1 + first // batch_size, "first_sample": first, "revision": record.revision}
            stages = [{"first_sample": stage.first, "shares": stage.shares} for stage in planned]
            report_event(run, 0, MIXTURE_EVENT, **places, samples=samples, stages=stages)
        changes.append((first, planned))
    # A resume before the first step may have planned other sources.
    first_planned = [stages for first, stages in changes if first == 0][-1]
    of_start = [event for event in events if event["event"] == MIXTURE_EVENT and event["first_sample"] == 0]
    return RunMixture(recorded_stages(changes), first_planned, (of_start or [{}])[-1].get("samples", samples))


def sample_order(seed: int, sizes: Mapping[str, int], stages: Sequence[MixtureStage]) -> SampleOrder:
    """Return the order of a run. ``sizes``: training sequences of each source by its name."""
    weights = [Stage(stage.first, tuple(stage.shares.get(name, 0.0) for name in sizes)) for stage in stages]
    return SampleOrder(seed, tuple(sizes.values()), tuple(weights))
