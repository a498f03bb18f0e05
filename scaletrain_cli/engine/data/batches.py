"""The batches of a rank: which sequences they hold, and reading them."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from scaletrain_cli.engine.data.dataset import JoinedSequences, TextSequences
from scaletrain_cli.engine.data.loader import map_tensors
from scaletrain_cli.engine.data.rows import NOT_COUNTED, JoinedRows, RowImages, RowSamples
from scaletrain_cli.engine.data.sample_order import SampleOrder, places_in_batch
from scaletrain_cli.engine.model.attention import TokenContext
from scaletrain_cli.engine.model.document_attention import Segments, segments_of
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.plan.result import Layout


class Pixels(Protocol):
    """Decodes images of rows."""

    def read(self, images: RowImages, numbers: Iterable[int]) -> Tensor:
        """Return the images with these numbers, [images, height, width, channels] uint8."""
        ...


class MicroBatch(NamedTuple):
    """The input of one forward pass, in the order of a model's arguments.

    tokens, labels: [rows, local length] int64, this rank's part of each sequence; label -100 is ignored. Rows are the
    micro_batch_size sequences; with preference pairs 2 * micro_batch_size, all chosen answers, then all rejected ones.
    positions: positions of these tokens in the whole sequence, int64 [local length], or [rows, local length] in packed
    rows, where they restart with each document. samples: [rows] int64, unique numbers of the sequences in the run.
    divisor: scalar fp32, the weights of the labels that count in the whole global batch over the number of its losses,
    so that the mean of all losses, each a sum over this, is the weighted mean over those labels; None if every label
    counts and each loss is a mean of its own.
    weights: [rows, local length] fp32, weight of each label in the loss; None: 1 where the label is not -100.
    documents: [rows, whole length] int64, number of the document that each position of the whole sequence belongs to,
    -1 for padding; attention stays within a document. None: one document per row, padded at its end.
    segments: the same documents; None if ``documents`` is.
    numbers: [micro_batch_size] int64, numbers of the rows or pairs in the split; None for text.
    reference: [rows] fp32, log-probabilities of the answers under the reference model; None unless they were computed.
    step_tokens: positions that all replicas compute in the step of this micro-batch, padding included; None for text.
    real: [rows, local length] bool, False for padding; None: every token is one of the data.
    sources: [rows] int64, number of the source of each sequence; None: there is only one.
    images: [images, channels, height, width] uint8, those of all rows in the order of their tokens, row by row, and
    not normalized; no image at all is [0, ...]. None: the rows of this model have none.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    samples: Tensor
    divisor: Tensor | None
    weights: Tensor | None = None
    documents: Tensor | None = None
    segments: Segments | None = None
    numbers: Tensor | None = None
    reference: Tensor | None = None
    step_tokens: int | None = None
    real: Tensor | None = None
    sources: Tensor | None = None
    images: Tensor | None = None

    @property
    def inputs(self) -> tuple[Tensor, Tensor, TokenContext]:
        return self.tokens, self.labels, self.context

    @property
    def context(self) -> TokenContext:
        """The positions, sample numbers and documents of the tokens, which blocks get beside the hidden states."""
        return TokenContext(self.positions, self.samples, self.documents, self.segments, real=self.real)

    def to(self, device: torch.device) -> "MicroBatch":
        return map_tensors(self, lambda tensor: tensor.to(device))


class StepBatch(NamedTuple):
    """All micro-batches of one step in few tensors.

    The first dimension counts them, except in ``divisor`` and in ``positions`` of one dimension, which are the same in
    all. The ``segments`` of a micro-batch with fewer documents than another one have empty ones at their end.
    ``lengths``: to how many tokens the rows of each micro-batch are padded, where that is less than the length of the
    tensors; None: all are as long.
    ``images``: [images of all micro-batches, height, width, channels] uint8, one micro-batch after another, of which
    each has as many as ``image_counts`` says; pixels lie as decoders write them, and micro-batches are views in the
    order of channels-last images.
    """

    tokens: Tensor
    labels: Tensor
    samples: Tensor
    positions: Tensor
    divisor: Tensor | None
    weights: Tensor | None = None
    documents: Tensor | None = None
    segments: Segments | None = None
    numbers: Tensor | None = None
    reference: Tensor | None = None
    lengths: tuple[int, ...] | None = None
    step_tokens: int | None = None
    real: Tensor | None = None
    sources: Tensor | None = None
    images: Tensor | None = None
    image_counts: tuple[int, ...] | None = None

    def micro_batches(self) -> list[MicroBatch]:
        """Return the micro-batches, in the order of accumulation."""

        images: Sequence[Tensor | None] = [None] * len(self.tokens)
        if self.images is not None:
            assert self.image_counts is not None
            images = torch.split(self.images.permute(0, 3, 1, 2), list(self.image_counts))

        def part(name: str, number: int) -> Any:
            values = getattr(self, name)
            if values is None or name in ("divisor", "step_tokens") or (name == "positions" and values.dim() == 1):
                return values
            if name == "images":
                return images[number]
            if name == "segments":
                return Segments(values.bounds[number], values.longest)
            if self.lengths is None or name in ("samples", "numbers", "reference", "sources"):
                return values[number]
            # The last dimension is the whole length, or this rank's part of it: beyond the same share is only padding.
            length = self.lengths[number] * values.shape[-1] // max(self.lengths)
            return values[number, ..., :length].contiguous()

        return [MicroBatch(*(part(name, i) for name in MicroBatch._fields)) for i in range(len(self.tokens))]


PADDING_MULTIPLE = 64  # few shapes, and none that a kernel does not take
PaddedTo = Literal["seq_len", "step", "micro_batch"]


def padded_to(layout: Layout) -> PaddedTo:
    """Return what the rows of a micro-batch are padded to: ``seq_len``, or the longest row of a step or micro-batch.

    DeepSpeed's pipeline needs one shape per step. The shape never changes if blocks are compiled.
    """
    if layout.compile:
        return "seq_len"
    return "micro_batch" if layout.pipeline_parallel == 1 else "step"


@dataclass(frozen=True)
class BatchReader:
    """Reads the batches of one rank.

    Tensor and pipeline ranks of a replica get the same batch, sequence and context ranks a part of each sequence.
    ``padded_to``: see the function; with "step" the rows of evaluations are padded to seq_len. Text has no padding.
    ``padding_multiple``: the tokens of a row on one rank are a multiple of it, or as many as of seq_len.
    ``mask_document_starts``: the label of the first token of a document in text is ignored.
    ``within_documents``: so it is, and attention and positions stay within each document of a sequence of text. The
    part of a document that an earlier sequence ended with is not there: positions begin at 0 in each sequence.
    ``reference``: [pairs of the split, 2] fp32, log-probabilities of the chosen and of the rejected answer.
    ``order``: None for that of one source.
    ``pixels``: decodes the images of rows that have some; None: batches have no images.
    """

    sequences: TextSequences | RowSamples
    layout: Layout
    mesh: Mesh
    seed: int
    mask_document_starts: bool
    reference: npt.NDArray[np.float32] | None = None
    padded_to: PaddedTo = "seq_len"
    padding_multiple: int = PADDING_MULTIPLE
    within_documents: bool = False
    order: SampleOrder | None = None
    pixels: Pixels | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    def batch(self, number: int) -> StepBatch:
        """Return this rank's part of the global batch with this number (1-based)."""
        indices = self._indices(number, self.mesh.data.rank)
        places = self._places(number, self.mesh.data.rank)
        return self._batch(indices, places, self._counted_in(number), of_training=number)

    def without_groups(self) -> "BatchReader":
        """Return a reader of the same batches without process groups, which another process can get as a pickle."""
        return replace(self, mesh=self.mesh.without_groups())

    def in_order(self, count: int) -> Iterator[MicroBatch]:
        """Yield the first ``count`` sequences in file order: per round, one micro-batch for each data-parallel rank.

        In a last round that is not full, other rows stand in for those that are missing, and none of their labels
        counts: the mean of the losses is that over the labels of ``count`` sequences. Pairs fill all rounds.
        """
        size = self.layout.micro_batch_size
        width = size * self.layout.data_parallel
        rounds = -(-count // width)
        is_partial = count % width > 0
        assert not (is_partial and isinstance(self.sequences, RowSamples) and self.sequences.pairs), "pairs fill rounds"
        counted = self._counted(range(count)) / rounds if is_partial or self._is_divided else None
        for turn in range(rounds):
            first = turn * width + self.mesh.data.rank * size
            places = list(range(first, first + size))
            batch = self._batch([[min(place, count - 1) for place in places]], [places], counted)
            if is_partial:
                missing = batch.samples >= count
                batch = batch._replace(labels=batch.labels.masked_fill(missing.unsqueeze(-1), NOT_COUNTED))
            yield from batch.micro_batches()

    def read(self, indices: list[list[int]]) -> list[MicroBatch]:
        """Return micro-batches of the sequences or pairs with these indices, whose losses have no common divisor."""
        return self._batch(indices, indices, 0.0 if self._is_divided else None).micro_batches()

    def _places(self, number: int, data_rank: int) -> list[list[int]]:
        """Return the numbers in the run of the sequences of a rank's micro-batches, from 0 on."""
        first = (number - 1) * self.layout.global_batch_size
        return [[first + place for place in micro] for micro in places_in_batch(self.layout, data_rank)]

    def _indices(self, number: int, data_rank: int) -> list[list[int]]:
        return [[self._order(sample) for sample in micro] for micro in self._places(number, data_rank)]

    @cached_property
    def _order(self) -> SampleOrder:
        return self.order or SampleOrder.of_one(self.seed, len(self.sequences))

    @property
    def _is_divided(self) -> bool:
        """True if some labels do not count, or count with a weight of their own."""
        return self._masks_labels or isinstance(self.sequences, RowSamples)

    @property
    def _masks_labels(self) -> bool:
        return self.mask_document_starts or self.within_documents

    def _counted_in(self, number: int) -> float | None:
        """Return the weights of the labels in a global micro-batch, as the mean over those of the batch.

        None if all labels count alike, so that each micro-batch is divided by its own labels.

        Every rank looks up every sequence of the batch in an index, so that no collective is needed.
        """
        if not self._is_divided:
            return None
        layout, first = self.layout, (number - 1) * self.layout.global_batch_size
        whole = self._order.sequences_of(first, layout.global_batch_size)
        return self._counted(whole.tolist()) / layout.gradient_accumulation_steps

    def _counted(self, indices: Sequence[int]) -> float:
        """Return the sum of the weights of the labels in these sequences."""
        if isinstance(self.sequences, RowSamples):
            return self.sequences.total_weight(indices)
        masked = 0
        if self._masks_labels:
            masked = self.sequences.document_ends_in(np.asarray(indices, np.int64))
        return len(indices) * self.sequences.seq_len - masked

    def _batch(
        self,
        indices: list[list[int]],
        places: list[list[int]],
        counted: float | None,
        *,
        of_training: int | None = None,
    ) -> StepBatch:
        """``counted``: weights of the labels in a global micro-batch, whose loss is the mean of the replicas' losses.

        None: the mean over the labels.

        ``places``: numbers of the sequences in the run. ``of_training``: number of the batch; None for one of
        an evaluation or of the reference.
        """
        divisor = None if counted is None else torch.tensor(counted / self.mesh.replicas.size, dtype=torch.float32)
        if isinstance(self.sequences, RowSamples):
            return self._rows(self.sequences, indices, places, divisor, of_training)
        part, length = self.mesh.part, self.sequences.seq_len
        flat = [index for batch in indices for index in batch]
        rows = self.sequences.rows(flat)
        tokens, labels = rows[:, :-1], rows[:, 1:]
        ends: list[npt.NDArray[np.int64]] = []
        if self._masks_labels:
            ends = [self.sequences.document_ends_within(index, index + 1) for index in flat]
            labels = labels.copy()  # tokens and labels are views of the same rows
            for row, places_of_ends in zip(labels, ends, strict=True):
                row[places_of_ends] = NOT_COUNTED
        shape = (len(indices), self.layout.micro_batch_size, -1)
        batch = StepBatch(
            tokens=_tensor(part.take(tokens)).view(shape),
            labels=_tensor(part.take(labels)).view(shape),
            samples=torch.tensor(places),
            positions=part.places(length),
            divisor=divisor,
            sources=self._sources(indices),
        )
        if not self.within_documents:
            return batch
        numbers, positions = _documents(ends, length)
        documents = _tensor(numbers).view(shape)
        segments = _joined([segments_of(micro) for micro in documents])
        return batch._replace(
            documents=documents, segments=segments, positions=_tensor(part.take(positions)).view(shape)
        )

    def _sources(self, indices: list[list[int]]) -> Tensor | None:
        if not isinstance(self.sequences, JoinedSequences | JoinedRows):
            return None
        return torch.tensor([[self.sequences.located(index)[0] for index in micro] for micro in indices])

    def _rows(
        self,
        sequences: RowSamples,
        indices: list[list[int]],
        places: list[list[int]],
        divisor: Tensor | None,
        of_training: int | None,
    ) -> StepBatch:
        lengths = self._lengths(sequences, indices, in_training=of_training is not None)
        read = [sequences.read(batch, length) for batch, length in zip(indices, lengths, strict=True)]
        weights = [rows.weights for rows in read if rows.weights is not None]
        documents = [rows.documents for rows in read if rows.documents is not None]
        positions = [rows.positions for rows in read if rows.positions is not None]
        samples = torch.tensor(places)
        numbers = torch.tensor(indices) + sequences.first
        reference = None
        if sequences.pairs:
            samples = torch.cat([2 * samples, 2 * samples + 1], dim=1)
            if self.reference is not None:
                of_pairs = torch.from_numpy(self.reference)[numbers]  # [micro-batches, pairs, 2]
                reference = of_pairs.transpose(1, 2).flatten(1)
        images, counts = None, None
        if sequences.images is not None and self.pixels is not None:
            image_numbers = [rows.images for rows in read if rows.images is not None]
            images = self.pixels.read(sequences.images, np.concatenate(image_numbers))
            counts = tuple(map(len, image_numbers))
        step_tokens = None
        if of_training is not None:  # the positions that all replicas compute
            every = [self._indices(of_training, rank) for rank in range(self.layout.data_parallel)]
            padded = sum(sum(self._lengths(sequences, of_rank, in_training=True)) for of_rank in every)
            step_tokens = len(samples[0]) * padded
        alike = len(set(lengths)) == 1
        if not positions and alike:
            places_in_row = self.mesh.part.places(lengths[0])
        else:
            places_in_row = self._stacked(positions or [np.arange(length) for length in lengths])
        return StepBatch(
            tokens=self._stacked([rows.tokens for rows in read]),
            labels=self._stacked([rows.labels for rows in read]),
            samples=samples,
            positions=places_in_row,
            divisor=divisor,
            weights=self._stacked(weights) if weights else None,
            documents=_joined_rows(documents) if documents else None,
            segments=_joined([segments_of(torch.from_numpy(micro)) for micro in documents]) if documents else None,
            numbers=numbers,
            reference=reference,
            lengths=None if alike else tuple(lengths),
            step_tokens=step_tokens,
            real=self._stacked([rows.real for rows in read]),
            sources=self._sources(indices),
            images=images,
            image_counts=counts,
        )

    def _lengths(self, sequences: RowSamples, indices: list[list[int]], *, in_training: bool) -> list[int]:
        """Return the tokens that the rows of each micro-batch are padded to, the same on all ranks of a replica."""
        if self.padded_to == "seq_len" or (self.padded_to == "step" and not in_training):
            return [sequences.seq_len] * len(indices)
        part = self.mesh.part
        multiple = math.lcm(self.padding_multiple * part.ranks, part.multiple)
        padded = [-(-sequences.longest(batch) // multiple) * multiple for batch in indices]
        lengths = [min(length, sequences.seq_len) for length in padded]
        return [max(lengths)] * len(lengths) if self.padded_to == "step" else lengths

    def _stacked(self, arrays: list[npt.NDArray[Any]]) -> Tensor:
        """Return this rank's part of the values of all positions of each micro-batch, in one tensor."""
        return _joined_rows([self.mesh.part.take(array) for array in arrays])


def _documents(ends: list[npt.NDArray[np.int64]], length: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the document of each token of sequences, and the token's position in it: [sequences, length].

    ``ends``: positions of the last tokens of documents in each sequence. Documents are counted from 0 in each.
    """
    documents, starts = np.zeros((2, len(ends), length), np.int64)
    for row, row_ends in enumerate(ends):
        firsts = row_ends[row_ends < length - 1] + 1
        documents[row, firsts] = 1
        starts[row, firsts] = firsts
    return documents.cumsum(1), np.arange(length) - np.maximum.accumulate(starts, axis=1)


def _joined_rows(arrays: list[npt.NDArray[Any]]) -> Tensor:
    """Return the arrays in one tensor, with zeros after the shorter ones."""
    longest = max(array.shape[-1] for array in arrays)
    padded = [np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, longest - array.shape[-1])]) for array in arrays]
    return _tensor(np.stack(padded))


def _joined(segments: list[Segments]) -> Segments:
    """Return the segments of several micro-batches, with bounds [micro-batches, documents + 1]."""
    most = max(len(micro.bounds) for micro in segments)
    bounds = [F.pad(micro.bounds, (0, most - len(micro.bounds)), value=int(micro.bounds[-1])) for micro in segments]
    return Segments(torch.stack(bounds), max(micro.longest for micro in segments))


def _tensor(values: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))
