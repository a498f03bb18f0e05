"""The next batch is read and copied to the device while the present one is trained on. Knows no data format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scaletrain_cli.engine.data.dataset import TokenSequences
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.plan.result import Layout

# This rank's part of each batch, read from the token file: a pure function of its number.


# Which sequences make up which batch: a pure function of (seed, batch number), independent of how the job is cut.


_MASK64 = (1 << 64) - 1
_ROUNDS = 4


def batch_indices(
    *, seed: int, batch: int, global_batch_size: int, samples: int, rank: int, data_parallel: int, micro_batch_size: int
) -> list[list[int]]:
    """Sample indices of one data-parallel rank in batch ``batch`` (0-based): one list per micro-batch.

    The union over the ranks is the same set for every (data_parallel, micro_batch_size) that makes up
    ``global_batch_size``.
    """
    micro_steps = global_batch_size // (micro_batch_size * data_parallel)
    first = batch * global_batch_size
    return [
        [
            sample_at(first + (micro * data_parallel + rank) * micro_batch_size + offset, seed=seed, samples=samples)
            for offset in range(micro_batch_size)
        ]
        for micro in range(micro_steps)
    ]


def sample_at(position: int, *, seed: int, samples: int) -> int:
    """The sample at a position of the endless stream of epochs, each a fresh permutation of range(samples)."""
    epoch, index = divmod(position, samples)
    return permute(index, size=samples, key=_mix_bits(_mix_bits(seed) ^ epoch))


def permute(index: int, *, size: int, key: int) -> int:
    """The image of ``index`` under a pseudo-random permutation of range(size)."""
    half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:  # the network permutes a power of four >= size; walk until back inside (< 4 turns on average)
        left, right = index >> half_bits, index & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_mix_bits(right ^ _mix_bits(key + turn)) & mask)
        index = left << half_bits | right
        if index < size:
            return index


def _mix_bits(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood, OOPSLA 2014): 64 bits in, 64 well-mixed bits out."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


# Which batch a step trains on where windows of the data are left out: pure arithmetic.


SkipRange = tuple[int, int]


def merged_skip_ranges(windows: Iterable[SkipRange]) -> tuple[SkipRange, ...]:
    """The same batches as few windows in ascending order, none of which touch."""
    found: list[SkipRange] = []
    for first, last in sorted(windows):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return tuple(found)


def batch_number(step: int, windows: Iterable[SkipRange]) -> int:
    """The ``step``-th batch (1-based) that is in no window; ``windows`` as merged() leaves them."""
    number = step
    for first, last in windows:
        if first > number:
            break
        number += last - first + 1
    return number


NOT_COUNTED = -100  # torch.nn.functional.cross_entropy's ignore_index


class MicroBatch(NamedTuple):
    """What one forward pass reads, in the order that a model takes it.

    tokens, labels: [micro_batch_size, local length] int64, this rank's part of each sequence; a label of -100 does not
    count. positions: [local length] int64, of these tokens in the whole sequence. samples: [micro_batch_size] int64,
    the sequences' places in the run, no two alike. divisor: scalar fp32, the tokens that count in the whole global
    batch over its losses, so that the mean of all losses, each a sum over this, is the mean over those tokens; None
    where every token counts and each loss may be a mean of its own.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    samples: Tensor
    divisor: Tensor | None

    def to(self, device: torch.device) -> MicroBatch:
        """On another device."""
        return MicroBatch._make(None if part is None else part.to(device) for part in self)


class StepBatch(NamedTuple):
    """All micro-batches of one step in as few tensors as possible; the first dimension of three of them counts them."""

    tokens: Tensor
    labels: Tensor
    samples: Tensor
    positions: Tensor
    divisor: Tensor | None

    def micro_batches(self) -> list[MicroBatch]:
        """Views, in the order of accumulation."""
        parts = zip(self.tokens, self.labels, self.samples, strict=True)
        return [MicroBatch(tokens, labels, self.positions, samples, self.divisor) for tokens, labels, samples in parts]


@dataclass(frozen=True)
class BatchReader:
    """Batches of one rank. Tensor and pipeline ranks of one replica get the same; sequence ranks a slice of the length.

    ``mask_document_starts``: the first token of a document is not predicted from the document before it.
    """

    sequences: TokenSequences
    layout: Layout
    mesh: Mesh
    seed: int
    mask_document_starts: bool

    def batch(self, number: int) -> StepBatch:
        """This rank's part of the global batch with this number (1-based)."""
        layout, size = self.layout, self.layout.micro_batch_size
        indices = self._indices(number, self.mesh.data.rank)
        first = (number - 1) * layout.global_batch_size
        places = [
            first + (micro * layout.data_parallel + self.mesh.data.rank) * size + offset
            for micro in range(len(indices))
            for offset in range(size)
        ]
        return self._batch(indices, places, self._counted_in(number))

    def in_order(self, rounds: int) -> Iterator[MicroBatch]:
        """The first sequences in the order of the file: per round one micro-batch for each data-parallel rank."""
        size = self.layout.micro_batch_size
        width = size * self.layout.data_parallel
        counted = self._counted(0, rounds * width) / rounds
        for turn in range(rounds):
            first = turn * width + self.mesh.data.rank * size
            indices = list(range(first, first + size))
            yield from self._batch([indices], indices, counted).micro_batches()

    def _indices(self, number: int, data_rank: int) -> list[list[int]]:
        layout = self.layout
        return batch_indices(
            seed=self.seed,
            batch=number - 1,
            global_batch_size=layout.global_batch_size,
            samples=len(self.sequences),
            rank=data_rank,
            data_parallel=layout.data_parallel,
            micro_batch_size=layout.micro_batch_size,
        )

    def _counted_in(self, number: int) -> float:
        """Tokens that count in a global micro-batch, mean over those of the batch.

        Every rank looks up where documents end in every sequence of the batch, which spares them a collective.
        """
        if not self.mask_document_starts:
            return 0.0
        layout = self.layout
        ranks = (self._indices(number, rank) for rank in range(layout.data_parallel))
        counted = sum(self._counted(i, i + 1) for batches in ranks for batch in batches for i in batch)
        return counted / layout.gradient_accumulation_steps

    def _counted(self, first: int, last: int) -> int:
        tokens = (last - first) * self.sequences.seq_len
        return tokens - len(self.sequences.document_ends_within(first, last))

    def _batch(self, indices: list[list[int]], places: list[int], counted: float) -> StepBatch:
        """``counted``: of a global micro-batch, which as many losses share as there are replicas."""
        micro_batches, size = len(indices), self.layout.micro_batch_size
        flat = [index for batch in indices for index in batch]
        rows, part = self.sequences.rows(flat), self._part_of_length()
        tokens, labels, divisor = rows[:, :-1], rows[:, 1:], None
        if self.mask_document_starts:
            labels = self._masked(labels, flat)
            divisor = torch.tensor(counted / self.mesh.replicas.size, dtype=torch.float32)
        shape = (micro_batches, size, part.stop - part.start)
        return StepBatch(
            tokens=_tensor(tokens[:, part]).view(shape),
            labels=_tensor(labels[:, part]).view(shape),
            samples=torch.tensor(places).view(micro_batches, size),
            positions=torch.arange(part.start, part.stop),
            divisor=divisor,
        )

    def _part_of_length(self) -> slice:
        axis = self.mesh.sequence
        length = self.sequences.seq_len // axis.size
        return slice(axis.rank * length, (axis.rank + 1) * length)

    def _masked(self, labels: npt.NDArray[np.int64], indices: list[int]) -> npt.NDArray[np.int64]:
        """A copy, since tokens and labels are two views of the same rows."""
        masked: npt.NDArray[np.int64] = labels.copy()
        for row, index in zip(masked, indices, strict=True):
            row[self.sequences.document_ends_within(index, index + 1)] = NOT_COUNTED
        return masked


def _tensor(rows: npt.NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows))


class _Prefetched(NamedTuple):
    batch: StepBatch
    copied: torch.cuda.Event | None  # on the copying stream, behind the copies; None without a GPU


class Prefetcher:
    """Batches by number, one ahead. ``read`` is called in a thread and must be a pure function of the number.

    On a GPU the copies leave pinned memory on a stream of their own, beside the computation.
    """

    def __init__(self, read: Callable[[int], StepBatch], device: torch.device) -> None:
        self._read, self._device = read, device
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        # The current GPU is a setting of each thread.
        choose_gpu = partial(torch.cuda.set_device, device) if on_gpu else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed", initializer=choose_gpu)
        self._ahead: tuple[int, Future[_Prefetched]] | None = None

    def take(self, number: int) -> list[MicroBatch]:
        """The micro-batches of a batch; begins to fetch the next one. Raises what reading it raised.

        What was fetched and then not asked for, because the data between are left out, is dropped.
        """
        if self._ahead is None or self._ahead[0] != number:
            self._begin(number)
        assert self._ahead is not None
        arrival = self._ahead[1].result()
        self._begin(number + 1)
        if arrival.copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(arrival.copied)
            for part in arrival.batch:
                if part is not None:
                    part.record_stream(stream)  # or the copying stream would reuse the memory too early
        return arrival.batch.micro_batches()

    def close(self) -> None:
        """Wait for what is under way, and drop it."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _begin(self, number: int) -> None:
        self._ahead = (number, self._thread.submit(self._fetch, number))

    def _fetch(self, number: int) -> _Prefetched:
        batch = self._read(number)
        if self._stream is None:
            return _Prefetched(batch, None)
        with torch.cuda.stream(self._stream):
            on_device = StepBatch._make(
                None if part is None else part.pin_memory().to(self._device, non_blocking=True) for part in batch
            )
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        return _Prefetched(on_device, copied)
