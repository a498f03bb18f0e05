"""Rows for fine-tuning: labels, weights, documents and positions of packed rows and of preference pairs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from scaletrain_cli.engine.data.batches import BatchReader, MicroBatch, PaddedTo, padded_to
from scaletrain_cli.engine.data.rows import NOT_COUNTED, PADDING_DOCUMENT, RowSequences
from scaletrain_cli.engine.model.document_attention import segments_of
from scaletrain_cli.engine.objectives.base import NextToken
from scaletrain_cli.plan import make_plan
from scaletrain_cli.spec.rope import RopeScalingSpec
from tests.engine.data.test_batches import CUTS, WITH_CONTEXT
from tests.engine.data.test_batches import readers as readers_of
from tests.engine.fresh_model import build_model
from tests.engine.model.test_models import LLAMA
from tests.engine.model.test_models import spec as model_spec
from tests.engine.objectives.rows import spec_of

LENGTH = 8


def rows(documents: list[list[tuple[int, float]]], sizes: list[int], **more: bool) -> RowSequences:
    """Return rows of ``sizes`` documents each; a document is a list of (token, weight)."""
    weights = [0.0 if i == 0 else weight for each in documents for i, (_, weight) in enumerate(each)]
    ends = np.cumsum([len(each) for each in documents])
    row_ends = np.cumsum(sizes)
    bounds = [0, *(ends[row_ends - 1])]
    return RowSequences(
        np.array([token for each in documents for token, _ in each], np.uint16),
        np.array(weights, np.float32),
        ends,
        row_ends,
        np.array([sum(weights[a:b]) for a, b in pairwise(bounds)]),
        LENGTH,
        **more,
    )


def random_rows(count: int, **more: bool) -> RowSequences:
    random = np.random.default_rng(1)
    documents, sizes, scale = [], [], 0.5 if more.get("weighted") else 0.0
    for _ in range(count):
        cuts = sorted({1, *random.integers(1, LENGTH, 2).tolist()}) if more.get("packed") else [LENGTH - 1]
        lengths = np.diff([0, *cuts])
        for length in lengths:
            documents.append([(int(random.integers(1, 50)), scale * random.integers(0, 3)) for _ in range(length)])
        documents[-1][len(documents[-1]) // 2] = (7, 1.0)
        sizes.append(len(lengths))
    return rows(documents, sizes, **more)


def test_a_packed_row_restarts_positions_and_ignores_the_first_token_of_each_document() -> None:
    first, second, third = [(5, 0), (6, 1), (7, 1)], [(8, 1), (9, 0.5)], [(4, 1), (3, 1)]
    read = rows([first, second, third], [2, 1], packed=True, weighted=True).read([0, 1])
    assert read.weights is not None
    assert read.documents is not None
    assert read.positions is not None
    assert read.tokens.tolist() == [[5, 6, 7, 8, 9, 0, 0, 0], [4, 3, 0, 0, 0, 0, 0, 0]]
    assert read.labels[0].tolist() == [6, 7, NOT_COUNTED, 9, *[NOT_COUNTED] * 4]
    assert read.weights[0].tolist() == [1, 1, 0, 0.5, 0, 0, 0, 0]
    assert read.documents[0].tolist() == [0, 0, 0, 1, 1, *[PADDING_DOCUMENT] * 3]
    assert read.real.sum(1).tolist() == [5, 2]
    assert read.positions[0].tolist() == [0, 1, 2, 0, 1, 0, 0, 0]  # padding does not lengthen the longest position


def test_a_token_with_the_number_of_the_padding_still_counts() -> None:
    read = rows([[(5, 0), (0, 1), (0, 1)]], [1]).read([0])
    assert read.labels[0].tolist() == [0, 0, *[NOT_COUNTED] * 6]


def test_pairs_are_all_chosen_answers_then_all_rejected_ones() -> None:
    pairs = rows([[(n, 1), (n + 10, 1)] for n in (1, 2, 3, 4, 5, 6)], [1] * 6, pairs=True)
    assert len(pairs) == 3
    assert pairs.read([0, 2]).tokens[:, 0].tolist() == [1, 5, 2, 6]
    assert pairs.part(1, 2).read([1]).tokens[:, 0].tolist() == [5, 6]
    assert pairs.total_weight([1]) == 2


def readers(sequences: RowSequences, *cut: int) -> list[BatchReader]:
    """Return the readers of all ranks; ``cut``: data, sequence, micro_batch_size, and context."""
    data, sequence, micro_batch_size, context = (*cut, 1)[:4]
    return readers_of(data, sequence, micro_batch_size, context=context, source=sequences)


def labels(parts: list[MicroBatch]) -> set[tuple[int, ...]]:
    """Return (sample, token, label, position, weight * 2) of every token."""
    found = set()
    for part in parts:
        positions = part.positions.expand_as(part.tokens)
        weights = (part.labels != NOT_COUNTED).float() if part.weights is None else part.weights
        for row, sample in enumerate(part.samples.tolist()):
            values = (part.tokens[row], part.labels[row], positions[row], 2 * weights[row])
            found |= {(sample, *map(int, each)) for each in zip(*values, strict=True)}
    return found


@pytest.mark.parametrize("kind", [{}, {"packed": True, "weighted": True}, {"pairs": True}], ids=str)
@pytest.mark.parametrize("cut", [*CUTS, *WITH_CONTEXT])
def test_every_layout_reads_the_same_rows_and_divides_by_the_weights_of_the_global_batch(
    kind: dict[str, bool], cut: tuple[int, ...]
) -> None:
    sequences = random_rows(40, **kind)
    whole = [micro for reader in readers(sequences, 1, 1, 12) for micro in reader.batch(3).micro_batches()]
    parts = [micro for reader in readers(sequences, *cut) for micro in reader.batch(3).micro_batches()]
    assert labels(parts) == labels(whole)
    sums = [((p.labels != NOT_COUNTED).float() if p.weights is None else p.weights).sum() for p in parts]
    assert all(part.divisor is not None for part in parts)
    assert np.mean([float(s / p.divisor) for s, p in zip(sums, parts, strict=True)]) == pytest.approx(1.0)
    for part in parts:
        assert part.documents is None or part.documents.shape == (len(part.tokens), LENGTH)
        assert (part.segments is None) == (part.documents is None)
        if part.segments is not None and part.documents is not None:
            bounds, longest = segments_of(part.documents)
            assert part.segments.bounds.unique().tolist() == bounds.tolist()
            assert part.segments.longest >= longest
        assert len(part.tokens) == cut[2] * (2 if "pairs" in kind else 1)


SHORT = 3 * 8  # seq_len of rows of at most LENGTH - 1 tokens
SHORT_KINDS = pytest.mark.parametrize("kind", [{}, {"packed": True, "weighted": True}, {"pairs": True}], ids=str)


def short_readers(kind: dict[str, bool], padded_to: PaddedTo, *cut: int) -> list[BatchReader]:
    sequences = replace(random_rows(40, **kind), seq_len=SHORT)
    made = readers(sequences, *cut)
    return [replace(reader, padded_to=padded_to, padding_multiple=2) for reader in made]


@SHORT_KINDS
@pytest.mark.parametrize("cut", CUTS)
def test_rows_padded_to_the_longest_one_have_the_same_labels_and_parts_of_equal_length(
    kind: dict[str, bool], cut: tuple[int, int, int]
) -> None:
    for number in (1, 2, 7):
        whole = short_readers(kind, "seq_len", 1, 1, 12)[0].batch(number).micro_batches()
        made = short_readers(kind, "micro_batch", *cut)
        batches = [reader.batch(number).micro_batches() for reader in made]
        counted = {each for each in labels(whole) if each[2] != NOT_COUNTED}
        assert counted
        assert {each for micro in batches for each in labels(micro) if each[2] != NOT_COUNTED} == counted
        for same in zip(*[iter(batches)] * cut[1], strict=True):  # the sequence ranks of a replica
            for parts in zip(*same, strict=True):
                (width,) = {part.tokens.shape[1] for part in parts}
                assert width % 2 == 0
                longest = max(int(row.nonzero().max()) + 1 for row in torch.cat([part.tokens for part in parts], 1))
                assert longest <= width * cut[1] < longest + 2 * cut[1]
                for part in parts:
                    assert part.positions.shape[-1] == width
                    assert part.documents is None or part.documents.shape[1] == width * cut[1]
                    assert part.segments is None or part.segments.bounds[-1] == width * cut[1] * len(part.tokens)
        computed = sum(micro.tokens.numel() for each in batches for micro in each)
        assert {micro.step_tokens for each in batches for micro in each} == {computed}


@SHORT_KINDS
def test_a_step_of_a_pipeline_has_one_shape_and_its_evaluations_that_of_seq_len(kind: dict[str, bool]) -> None:
    widths = set()
    for number in range(1, 9):
        (reader,) = short_readers(kind, "step", 1, 1, 1)
        (shape,) = {micro.tokens.shape for micro in reader.batch(number).micro_batches()}
        widths.add(shape[1])
    assert max(widths) <= 8
    assert {micro.tokens.shape[1] for micro in reader.in_order(2)} == {SHORT}


EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "capacity_factor": 0.8},
    **{"router_aux_loss_coef": 0.3, "router_z_loss_coef": 0.1},
}
STRETCHED = {"rope_scaling": RopeScalingSpec(rope_type="dynamic", factor=4.0), "max_position_embeddings": 4}


@SHORT_KINDS
@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param(EXPERTS, marks=pytest.mark.long),  # the next ones have them, too
        pytest.param(EXPERTS | STRETCHED),
    ],
    ids=["dense", "experts", "dynamic experts"],
)
def test_rows_padded_to_the_longest_one_have_the_same_loss_and_gradients(
    kind: dict[str, bool], settings: dict[str, Any]
) -> None:
    model = build_model(model_spec(LLAMA).model_copy(update=settings), seed=0)
    found = []
    without_sources: Any = SimpleNamespace(row_losses=None)
    padding: tuple[PaddedTo, PaddedTo] = ("seq_len", "micro_batch")
    for each in padding:
        model.zero_grad()
        (reader,) = short_readers(kind, each, 1, 1, 2)
        total = torch.zeros(())
        for micro in reader.batch(3).micro_batches():
            output = partial(NextToken.loss, without_sources, batch=micro)
            total = total + model(micro.tokens, micro.labels, micro.context, output=output)
        total.backward()
        found.append([total.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_rows_are_padded_to_seq_len_where_shapes_matter() -> None:
    def chosen(*settings: str) -> str:
        spec = spec_of(*settings)
        return padded_to(make_plan(spec).layout)

    assert chosen() == "micro_batch"
    assert chosen("layout.pipeline_parallel=2", "cluster.gpus_per_node=2") == "step"
    assert chosen("training.compile=true") == "seq_len"
    assert chosen("model.num_experts=4", "model.num_experts_per_tok=2") == "micro_batch"


def test_reference_log_probabilities_follow_their_pairs() -> None:
    sequences = random_rows(40, pairs=True)
    reference = np.arange(40, dtype=np.float32).reshape(20, 2)
    (reader,) = readers(sequences, 1, 1, 4)
    micros = replace(reader, reference=reference).batch(2).micro_batches()
    assert micros
    for micro in micros:
        assert micro.numbers is not None
        assert micro.reference is not None
        expected = [*(2 * micro.numbers).tolist(), *(2 * micro.numbers + 1).tolist()]
        assert micro.reference.tolist() == expected
        assert torch.equal(micro.tokens, torch.from_numpy(sequences.read(micro.numbers.tolist()).tokens))
