import math

import pytest
import torch

from scaletrain_cli.engine.model import materialization, outline
from scaletrain_cli.engine.parallel.mesh import ShardSpec
from tests.plan.specs import model_of

CPU = torch.device("cpu")
MODEL = outline(model_of("llama-7b", num_hidden_layers=8))
SOURCE = MODEL.first_weights(1, CPU)
SHAPES = [(600, 24), (12, 60, 24), (12, 6, 12, 18)]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(materialization, "_CHUNK_NUMEL", 24 * 7)


@pytest.mark.parametrize(("ranks", "parts"), [(2, 1), (3, 1), (2, 3)])
@pytest.mark.parametrize(("shape", "dim"), [(shape, dim) for shape in SHAPES for dim in range(len(shape))])
def test_the_slices_of_all_ranks_are_the_whole(shape: tuple[int, ...], dim: int, ranks: int, parts: int) -> None:
    whole = SOURCE.read("a.weight", shape, None)
    for spec in (ShardSpec(dim, ranks, rank, parts) for rank in range(ranks)):
        assert torch.equal(SOURCE.read("a.weight", shape, spec), spec.take(whole))


def test_a_shard_of_rows_draws_only_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    seed_of = materialization._chunk_seed
    monkeypatch.setattr(materialization, "_chunk_seed", lambda s, n, chunk: drawn.append(chunk) or seed_of(s, n, chunk))
    SOURCE.read("a.weight", (70, 24), ShardSpec(0, 2, 1))
    assert drawn == [5, 6, 7, 8, 9]


def test_weights_depend_on_seed_name_and_position_alone() -> None:
    one = SOURCE.read("a.weight", (14, 24), None)
    other_seed = MODEL.first_weights(2, CPU).read("a.weight", (14, 24), None)
    assert torch.equal(one, SOURCE.read("a.weight", (14, 24), None))
    assert not torch.equal(one, other_seed)
    assert not torch.equal(one, SOURCE.read("b.weight", (14, 24), None))
    assert not torch.equal(one[:7], one[7:])


def test_matrices_are_normal_with_the_requested_deviation() -> None:
    drawn = SOURCE.read("a.weight", (1024, 256), None).double() / 0.02
    count = drawn.numel()
    assert abs(drawn.mean()) < 5 / math.sqrt(count)
    assert abs(drawn.var() - 1) < 5 * math.sqrt(2 / count)
    assert abs((drawn.abs() > 2).double().mean() - math.erfc(2 / math.sqrt(2))) < 0.002
    chunks = drawn.view(-1, 256)[: 7 * 146].view(146, -1)
    assert torch.corrcoef(chunks).fill_diagonal_(0).abs().max() < 6 / math.sqrt(chunks.shape[1])


def test_projections_into_the_residual_stream_start_smaller_and_vectors_are_constant() -> None:
    residual, plain = (
        SOURCE.read("h.0.o_proj.weight", (600, 240), None),
        SOURCE.read("h.0.q_proj.weight", (600, 240), None),
    )
    assert (plain.std() / residual.std()).item() == pytest.approx(4, rel=0.02)  # sqrt(2 * 8 layers)
    assert torch.equal(SOURCE.read("norm.weight", (6,), None), torch.ones(6))
    assert torch.equal(SOURCE.read("q_proj.bias", (6,), ShardSpec(0, 3, 1)), torch.zeros(2))
