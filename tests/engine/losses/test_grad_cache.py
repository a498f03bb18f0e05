import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from scaletrain_cli.engine.deepspeed_engine import precision_config, prepare_deepspeed
from scaletrain_cli.engine.losses import info_nce, nt_xent, sigmoid_loss
from scaletrain_cli.engine.losses.grad_cache import Outputs, cached_backward, joined
from scaletrain_cli.engine.optim.deepspeed_optimizer import allow_fp16_on_cpu
from scaletrain_cli.engine.parallel.mesh import Axis
from tests.engine.losses.test_contrastive import assert_same
from tests.engine.optim.small_engine import dtype, run_spec
from tests.engine.ranks import on_ranks

PAIRS, INPUTS, SIZE, RATE, STEPS = 24, 7, 6, 0.5, 2


class Pairs(NamedTuple):
    image: Tensor
    text: Tensor
    logit_scale: Tensor
    logit_bias: Tensor


class Towers(nn.Module):
    """Two towers with dropout, a logit scale and a bias, with the same weights each time."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.image, self.text = (
                nn.Sequential(nn.Linear(INPUTS, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, SIZE))
                for _ in range(2)
            )
        self.logit_scale = nn.Parameter(torch.tensor(math.log(10.0)))
        self.logit_bias = nn.Parameter(torch.tensor(-2.0))

    def forward(self, first: Tensor, second: Tensor) -> Pairs:
        x, y = (F.normalize(tower(rows).float()) for tower, rows in ((self.image, first), (self.text, second)))
        # Copies, because ZeRO-3 frees the parameters after the forward pass.
        return Pairs(x, y, self.logit_scale.clone(), self.logit_bias.clone())


def rows(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    first = torch.randn(PAIRS, INPUTS, generator=generator)
    return first, first + torch.randn(PAIRS, INPUTS, generator=generator)


def micro_batches(count: int, axis: Axis, step: int = 0) -> list[tuple[Tensor, Tensor]]:
    first, second = (part.chunk(axis.size)[axis.rank].chunk(count) for part in rows(step))
    return list(zip(first, second, strict=True))


def loss_of(name: str, outputs: Sequence[Outputs], axis: Axis) -> Tensor:
    pairs: Any = joined(outputs)
    assert isinstance(pairs, Pairs)
    if name == "sigmoid":
        return sigmoid_loss(*pairs, axis, chunk_size=5)
    return info_nce(*pairs[:3], axis, chunk_size=5)


def gradients(towers: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(value) if value.grad is None else value.grad.clone()
        for name, value in towers.named_parameters()
    }


def expected_of(name: str, dropout: float, count: int, ranks: int = 1) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of one graph over the micro-batches of all ranks, each rank with its own dropout."""
    towers, outputs = Towers(dropout), []
    for rank in range(ranks):
        torch.manual_seed(rank)
        outputs += [towers(*batch) for batch in micro_batches(count, Axis(ranks, rank))]
    loss = loss_of(name, outputs, Axis())
    torch.autograd.backward(loss)
    return loss.item(), gradients(towers)


def cached(name: str, dropout: float, count: int, axis: Axis) -> tuple[float, dict[str, Tensor]]:
    towers = Towers(dropout)
    torch.manual_seed(axis.rank)
    loss = cached_backward(
        lambda batch: towers(*batch),
        micro_batches(count, axis),
        lambda outputs: loss_of(name, outputs, axis),
        torch.autograd.backward,
    )
    assert not loss.requires_grad
    return loss.item(), gradients(towers)


@pytest.mark.parametrize("name", ["info_nce", "sigmoid"])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 24])
def test_micro_batches_have_the_gradients_of_one_big_batch(name: str, count: int) -> None:
    towers = Towers(0.0)
    loss = loss_of(name, [towers(*rows())], Axis())
    torch.autograd.backward(loss)
    assert_same(cached(name, 0.0, count, Axis()), (loss.item(), gradients(towers)))


@pytest.mark.parametrize("count", [1, 2, 8])
def test_dropout_is_the_same_in_both_forward_passes(count: int) -> None:
    expected = expected_of("info_nce", 0.5, count)
    after = torch.rand(1)
    assert_same(cached("info_nce", 0.5, count, Axis()), expected)
    assert torch.equal(torch.rand(1), after)  # as many random numbers as one pass draws
    other = cached("info_nce", 0.0, count, Axis())
    assert abs(other[0] - expected[0]) > 1e-2


def test_views_of_several_micro_batches_are_joined_view_by_view() -> None:
    def views(towers: Towers, batch: tuple[Tensor, Tensor]) -> Outputs:
        return (torch.cat([towers.image(half) for half in batch]),)

    plain, towers = Towers(0.0), Towers(0.0)
    whole = nt_xent(plain.image(torch.cat(rows())), 0.2, Axis(), 5)
    torch.autograd.backward(whole)

    def loss(outputs: Sequence[Outputs]) -> Tensor:
        (features,) = joined(outputs, views=2)
        return nt_xent(features, 0.2, Axis(), 5)

    found = cached_backward(lambda batch: views(towers, batch), micro_batches(3, Axis()), loss, torch.autograd.backward)
    assert_same((found.item(), gradients(towers)), (whole.item(), gradients(plain)))


def test_outputs_without_a_gradient_are_an_error() -> None:
    def forward(batch: Tensor) -> Outputs:
        return (batch.detach(), None)

    with pytest.raises(ValueError, match="no output of the forward pass has a gradient"):
        cached_backward(forward, [torch.ones(2, 2)] * 2, lambda outputs: joined(outputs)[0].sum(), lambda _: None)  # type: ignore[union-attr]


def averaged_on_rank(cases: list[tuple[str, float, int]]) -> list[tuple[float, dict[str, Tensor]]]:
    axis, results = Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD), []
    for case in cases:
        loss, found = cached(*case, axis)
        mean = torch.tensor(loss, dtype=torch.float64)
        for value in (mean, *found.values()):
            dist.all_reduce(value)
            value /= axis.size
        results.append((mean.item(), found))
    return results


def test_the_average_over_ranks_is_the_gradient_of_one_big_batch() -> None:
    cases = [(name, dropout, count) for name in ("info_nce", "sigmoid") for dropout in (0.0, 0.5) for count in (1, 3)]
    expected = [expected_of(name, dropout, count, ranks=2) for name, dropout, count in cases]
    for reported in on_ranks(2, averaged_on_rank, cases):
        for found, wanted in zip(reported, expected, strict=True):
            assert_same(found, wanted)


def trained_by_deepspeed(cases: list[tuple[str, int, int]]) -> list[tuple[list[float], Tensor]]:
    """Return the mean loss of each step and all weights at the end, for precision, ZeRO stage and micro-batches."""
    prepare_deepspeed(torch.device("cpu"))
    allow_fp16_on_cpu()
    import deepspeed

    axis, results = Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD), []
    for precision, stage, count in cases:
        towers = Towers(0.5)
        config = {
            "train_batch_size": PAIRS,
            "gradient_accumulation_steps": count,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            **precision_config(run_spec({"precision": precision, "loss_scale": {"initial": 1024}})),
        }
        optimizer = torch.optim.SGD(towers.parameters(), lr=RATE)
        engine, *_ = deepspeed.initialize(model=towers, optimizer=optimizer, config=config)

        def backward(scalar: Tensor, engine: Any = engine) -> None:
            engine.backward(scalar, scale_wrt_gas=False)
            engine.step()

        torch.manual_seed(axis.rank)
        losses = []
        for step in range(STEPS):
            batches = [tuple(part.to(dtype(engine)) for part in batch) for batch in micro_batches(count, axis, step)]
            loss = cached_backward(
                lambda batch, engine=engine: engine(*batch),  # type: ignore[misc]
                batches,
                lambda outputs: loss_of("info_nce", outputs, axis),
                backward,
            )
            dist.all_reduce(loss)
            losses.append(loss.item() / axis.size)
        parameters = list(engine.module.parameters())
        with deepspeed.zero.GatheredParameters(parameters):
            results.append((losses, torch.cat([value.detach().float().flatten() for value in parameters])))
    return results


def trained_in_one_graph(count: int, ranks: int) -> tuple[list[float], Tensor]:
    """Return the same, of plain steps of gradient descent over the micro-batches of all ranks."""
    towers, losses = Towers(0.5), []
    optimizer = torch.optim.SGD(towers.parameters(), lr=RATE)
    states = []
    for rank in range(ranks):
        torch.manual_seed(rank)
        states.append(torch.get_rng_state())
    for step in range(STEPS):
        outputs = []
        for rank in range(ranks):
            torch.set_rng_state(states[rank])
            outputs += [towers(*batch) for batch in micro_batches(count, Axis(ranks, rank), step)]
            states[rank] = torch.get_rng_state()
        loss = loss_of("info_nce", outputs, Axis())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([value.detach().flatten() for value in towers.parameters()])


@pytest.mark.parametrize(
    "cases",
    [
        [("fp32", stage, 3) for stage in (0, 1, 2, 3)],
        pytest.param(
            [("fp32", 0, 1), ("fp32", 3, 1), ("fp32", 2, 4), ("bf16", 1, 3), ("bf16", 3, 3), ("fp16", 2, 3)],
            marks=pytest.mark.long,
        ),
    ],
    ids=["stages", "counts and precisions"],
)
def test_deepspeed_trains_as_with_one_big_batch_in_each_zero_stage(cases: list[tuple[str, int, int]]) -> None:
    before = torch.cat([value.detach().flatten() for value in Towers(0.0).parameters()])
    expected = {count: trained_in_one_graph(count, 2) for _, _, count in cases}
    for reported in on_ranks(2, trained_by_deepspeed, cases):
        for (precision, stage, count), (losses, weights) in zip(cases, reported, strict=True):
            wanted, trained = expected[count]
            assert (trained - before).abs().max() > 0.1
            allowed = 1e-6 if precision == "fp32" else 2e-2
            assert losses == pytest.approx(wanted, rel=allowed), (precision, stage, count)
            assert (weights - trained).abs().max() <= allowed * trained.abs().max(), (precision, stage, count)
