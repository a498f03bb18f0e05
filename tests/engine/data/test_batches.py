from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from scaletrain_cli.engine.data.batches import NOT_COUNTED, BatchReader, MicroBatch
from scaletrain_cli.engine.model.document_attention import segments_of
from scaletrain_cli.engine.parallel.mesh import Axis, Mesh
from tests.engine.data.token_sequences import TokenSequences
from tests.engine.plain_layout import plain_layout

LENGTH, VOCABULARY, GLOBAL_BATCH = 8, 50, 12
WHOLE = plain_layout(GLOBAL_BATCH)


def sequences(count: int = 40) -> TokenSequences:
    random = np.random.default_rng(5)
    tokens = random.integers(0, VOCABULARY, count * LENGTH + 1).astype(np.uint16)
    ends = np.flatnonzero(random.random(len(tokens)) < 0.15).astype(np.int64)
    return TokenSequences(tokens, LENGTH, ends)


def readers(
    data: int,
    sequence: int,
    micro_batch_size: int,
    mask: bool = False,
    packed: bool = False,
    context: int = 1,
    source: Any = None,
) -> list[BatchReader]:
    """Return the readers of all ranks, of ``source`` or the sequences above."""
    layout = replace(
        WHOLE,
        data_parallel=data,
        sequence_parallel=sequence,
        context_parallel=context,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=GLOBAL_BATCH // (micro_batch_size * data),
    )
    return [
        BatchReader(
            sequences() if source is None else source,
            layout,
            Mesh(
                data=Axis(data, d),
                context=Axis(context, c),
                sequence=Axis(sequence, s),
                replicas=Axis(data * context * sequence, (d * context + c) * sequence + s),
            ),
            seed=3,
            mask_document_starts=mask,
            within_documents=packed,
        )
        for d in range(data)
        for c in range(context)
        for s in range(sequence)
    ]


Triples = set[tuple[int, int, int, int]]


def triples(parts: list[MicroBatch]) -> Triples:
    """Return (sample, position, token, label) of every token."""
    return {
        (int(sample), int(position), int(token), int(label))
        for part in parts
        for row, sample in enumerate(part.samples)
        for position, token, label in zip(part.positions, part.tokens[row], part.labels[row], strict=True)
    }


def of_documents(readers: list[BatchReader], step: int) -> dict[int, tuple[list[list[int]], ...]]:
    """Return document, position, token and label of each token of each sample, parts of a sequence joined."""
    found: dict[int, tuple[list[list[int]], ...]] = {}
    for reader in readers:
        for part in reader.batch(step).micro_batches():
            assert segments_of(part.documents).longest <= part.segments.longest
            assert segments_of(part.documents).bounds.tolist() == sorted(set(part.segments.bounds.tolist()))
            for row, sample in enumerate(part.samples.tolist()):
                document = part.documents[row].tolist()
                mine = [values[row].tolist() for values in (part.positions, part.tokens, part.labels)]
                before = found.setdefault(sample, (document, [], [], []))
                assert before[0] == document  # of the whole sequence on every rank
                for joined, more in zip(before[1:], mine, strict=True):
                    joined.extend(more)
    return found


CUTS = [(1, 1, 12), (1, 1, 1), (2, 1, 3), (1, 2, 4), (3, 2, 2), (2, 4, 1)]
WITH_CONTEXT = [(2, 1, 3, 2), (1, 2, 4, 2), (1, 1, 12, 4)]


@pytest.mark.parametrize("mask", [False, True])
def test_every_layout_reads_the_same_tokens_under_the_same_names(mask: bool) -> None:
    for step in (1, 2, 9):
        read = [
            triples([micro for reader in made for micro in reader.batch(step).micro_batches()])
            for made in (
                *(readers(*cut, mask) for cut in CUTS),
                *(readers(*cut, mask, context=context) for *cut, context in WITH_CONTEXT),
            )
        ]
        assert len(read[0]) == GLOBAL_BATCH * LENGTH
        assert all(each == read[0] for each in read[1:])


def test_only_the_first_token_of_each_document_is_not_counted() -> None:
    reader = readers(1, 1, GLOBAL_BATCH, mask=True)[0]
    plain = readers(1, 1, GLOBAL_BATCH)[0].batch(2)
    batch = reader.batch(2)
    source = reader.sequences
    ends = set(source.document_ends.tolist())
    (indices,) = reader._indices(2, 0)
    masked = [[index * LENGTH + place in ends for place in range(LENGTH)] for index in indices]
    assert torch.equal(batch.labels[0] == NOT_COUNTED, torch.tensor(masked))
    assert torch.equal(torch.where(torch.tensor(masked), plain.labels[0], batch.labels[0]), plain.labels[0])


def test_packed_documents_restart_positions_and_are_the_same_in_every_layout() -> None:
    source = sequences()
    ends = set(source.document_ends.tolist())
    for step in (1, 9):
        expected = {}
        (reader,) = readers(1, 1, GLOBAL_BATCH, packed=True)
        for place, index in enumerate(reader._indices(step, 0)[0]):
            rows: tuple[list[int], ...] = ([], [], [], [])
            document = position = 0
            for at in range(index * LENGTH, (index + 1) * LENGTH):
                label = NOT_COUNTED if at in ends else int(source.tokens[at + 1])
                for values, value in zip(rows, (document, position, int(source.tokens[at]), label), strict=True):
                    values.append(value)
                document, position = (document + 1, 0) if at in ends else (document, position + 1)
            expected[(step - 1) * GLOBAL_BATCH + place] = rows
        for cut in CUTS:
            assert of_documents(readers(*cut, packed=True), step) == expected


def weighted_loss(part: MicroBatch, weights: torch.Tensor) -> float:
    losses = F.cross_entropy(weights[part.tokens].flatten(0, 1), part.labels.flatten(), reduction="sum")
    return float(losses / part.divisor)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_the_mean_of_all_losses_is_the_mean_over_the_tokens_that_count(cut: tuple[int, int, int], packed: bool) -> None:
    weights = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = readers(1, 1, GLOBAL_BATCH, mask=True)[0].batch(3).micro_batches()[0]
    expected = F.cross_entropy(weights[whole.tokens].flatten(0, 1), whole.labels.flatten())
    read = readers(*cut, mask=not packed, packed=packed)
    parts = [micro for reader in read for micro in reader.batch(3).micro_batches()]
    assert np.mean([weighted_loss(part, weights) for part in parts]) == pytest.approx(float(expected), rel=1e-6)


def test_rounds_in_order_read_the_beginning_of_the_file_once() -> None:
    parts = [part for reader in readers(3, 2, 2, mask=True) for part in reader.in_order(30)]
    read = sorted((sample, position, token) for sample, position, token, _ in triples(parts))
    flat = sequences().tokens[: 30 * LENGTH]
    assert [token for _, _, token in read] == flat.tolist()
    weights = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.cat([part.labels.flatten() for part in parts])
    tokens = torch.cat([part.tokens.flatten() for part in parts])
    expected = F.cross_entropy(weights[tokens], labels)
    assert np.mean([weighted_loss(part, weights) for part in parts]) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize(("mask", "packed"), [(False, False), (True, False), (False, True)])
def test_a_last_round_that_is_not_full_counts_each_sequence_once_in_every_layout(mask: bool, packed: bool) -> None:
    weights = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for count in (1, 5, 12, 17):
        (whole,) = readers(1, 1, count, mask, packed)
        (together,) = whole.in_order(count)
        expected = F.cross_entropy(weights[together.tokens].flatten(0, 1), together.labels.flatten())
        for cut in CUTS:
            parts = [list(reader.in_order(count)) for reader in readers(*cut, mask, packed)]
            assert {len(each) for each in parts} == {-(-count // (cut[0] * cut[2]))}  # ranks take part in every round
            if count % (cut[0] * cut[2]):
                losses = [weighted_loss(part, weights) for each in parts for part in each]
                assert np.mean(losses) == pytest.approx(float(expected), rel=1e-6)


def test_without_a_mask_there_is_no_divisor() -> None:
    assert readers(2, 1, 3)[1].batch(1).divisor is None
