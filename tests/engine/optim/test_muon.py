"""Muon's iteration and factors are those of torch; matrices are divided evenly and travel in rounds."""

import dataclasses

import pytest
import torch
from torch.optim import _muon as of_torch
from torch.utils.flop_counter import FlopCounterMode

from scaletrain_cli.engine.model.materialization import Matrix
from scaletrain_cli.engine.optim import muon
from scaletrain_cli.engine.optim.muon import _Holders, _Piece, _Whole, newton_schulz, rate_factor
from scaletrain_cli.engine.parallel.mesh import ShardSpec
from scaletrain_cli.plan.muon import newton_schulz_flops

COEFFICIENTS = (of_torch.DEFAULT_A, of_torch.DEFAULT_B, of_torch.DEFAULT_C)


@pytest.mark.parametrize(("rows", "columns"), [(24, 64), (64, 24), (32, 32)])
@pytest.mark.parametrize("iterations", [1, 5])
def test_the_iteration_is_that_of_torch_to_the_bit(rows: int, columns: int, iterations: int) -> None:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    expected = of_torch._zeropower_via_newtonschulz(matrix, COEFFICIENTS, iterations, of_torch.EPS)
    assert torch.equal(newton_schulz(matrix.bfloat16(), iterations), expected)


def test_singular_values_come_near_one() -> None:
    matrix = torch.randn(48, 96, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(newton_schulz(matrix, 5))
    assert 0.6 < values.min() <= values.max() < 1.3


@pytest.mark.parametrize("shape", [(24, 64), (64, 24)])
def test_the_planned_flops_are_those_that_torch_counts(shape: tuple[int, int]) -> None:
    with FlopCounterMode(display=False) as counted:
        newton_schulz(torch.ones(shape), 3)
    assert counted.get_total_flops() == newton_schulz_flops(*shape, 3)


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(24, 64), (64, 24)])
def test_the_factor_of_the_learning_rate_is_that_of_torch(rule: str, shape: tuple[int, int]) -> None:
    assert rate_factor(*shape, rule) == pytest.approx(of_torch._adjust_lr(1.0, rule, torch.Size(shape)))


def whole(name: str, rows: int, columns: int, flops: int, spec: ShardSpec | None = None) -> _Whole:
    return _Whole(Matrix(name, (rows, columns), spec, (rows, columns), 0), (rows,), 0, flops)


def test_a_fused_matrix_is_orthogonalized_in_its_parts_with_a_factor_each() -> None:
    fused = dataclasses.replace(whole("qkv", 12, 6, 0), widths=(8, 2, 2))
    matrix = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
    expected = torch.cat([newton_schulz(part, 5) for part in matrix.split((8, 2, 2))])
    assert torch.equal(fused.orthogonalized(matrix, 5), expected)
    factors = fused.factor("original", _Piece(0, 42, 60, 0, 0), 0)
    assert isinstance(factors, torch.Tensor)
    assert factors.tolist() == pytest.approx([(8 / 6) ** 0.5] * 6 + [1.0] * 12)


def test_the_costliest_matrices_go_to_the_ranks_with_the_least_work() -> None:
    wholes = [whole(f"m{number}", 4, 4, flops) for number, flops in enumerate((2, 9, 5, 4, 1))]
    holders = _Holders(wholes, [_Piece(n, 0, 16, 0, 16 * n) for n in range(5)], (0, 0), None, sharded=True)
    holders.ranks = 2
    assert holders._owners([0, 1, 2, 3, 4]) == {1: 0, 2: 1, 3: 1, 0: 0, 4: 1}


def test_rounds_of_few_elements_give_the_same_as_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    wholes = [whole(f"m{number}", 4, 6, 1) for number in range(4)]
    values = torch.randn(100, generator=torch.Generator().manual_seed(2))
    pieces = [_Piece(number, 0, 24, 0, 25 * number) for number in range(4)]

    def run() -> tuple[int, list[torch.Tensor]]:
        holders = _Holders(wholes, pieces, (0, 0), None, sharded=True)
        found = list(holders.run({0: values}, torch.float32, torch.device("cpu"), 5))
        assert [piece for piece, _ in found] == pieces
        return len(holders.rounds({0})), [part for _, part in found]

    once = run()
    monkeypatch.setattr(muon, "ROUND_ELEMENTS", 50)
    often = run()
    assert (once[0], often[0]) == (1, 2)
    expected = [newton_schulz(values[25 * n : 25 * n + 24].view(4, 6), 5).flatten() for n in range(4)]
    for one, other, right in zip(once[1], often[1], expected, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, right)
