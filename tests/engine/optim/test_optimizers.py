"""Each optimizer equals its reference, in one process and sharded by ZeRO on two ranks."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scaletrain_cli.engine.optim.deepspeed_optimizer import counter_names
from scaletrain_cli.engine.optim.optimizers import build_optimizer, parameter_groups
from scaletrain_cli.errors import UsageError
from scaletrain_cli.spec.training import OptimizerSpec
from tests.engine.optim.small_engine import batch, layout_of, run_spec, small_model, start, train, weights
from tests.engine.ranks import on_ranks

STEPS = 8
WIDE = 512  # so that every piece of a matrix has the 4096 elements from which bitsandbytes uses 8 bits
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.9}
CPU = torch.device("cpu")


class PlainLion(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            slow, fast = group["betas"]
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                direction = torch.sign(slow * momentum + (1 - slow) * weight.grad)
                weight -= group["lr"] * (direction + group["weight_decay"] * weight)
                momentum.mul_(fast).add_(weight.grad, alpha=1 - fast)


def plain(name: str, model: nn.Module) -> torch.optim.Optimizer:
    groups: Any = parameter_groups(model, OptimizerSpec(weight_decay=0.1))
    lr, betas = 1e-2, (0.9, 0.95)
    return {
        "adamw": lambda: torch.optim.AdamW(groups, lr, betas),
        "adamw_8bit": lambda: torch.optim.AdamW(groups, lr, betas),
        "adam": lambda: torch.optim.Adam(groups, lr, betas),
        "sgd": lambda: torch.optim.SGD(groups, lr),
        "momentum": lambda: torch.optim.SGD(groups, lr, momentum=0.9),
        "lion": lambda: PlainLion(groups, lr, betas),
    }[name]()


def plainly_trained(name: str, width: int) -> tuple[list[float], Tensor]:
    """Return the losses and final weights of one process with the whole batch."""
    model = small_model(width)
    optimizer, losses = plain(name, model), []
    for step in range(STEPS):
        inputs, targets = batch(step)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def trained(name: str, stages: list[int], width: int, offload: str = "none") -> list[tuple[list[float], Tensor]]:
    """Return the losses and final weights of two ranks, for each ZeRO stage."""
    spec = run_spec({"optimizer": {"name": name, **SETTINGS}}, offload=offload)
    results = []
    for stage in stages:
        small = start(spec, stage, accumulation=2, width=width)
        results.append(([train(small, step) for step in range(STEPS)], weights(small)))
    return results


def trained_with_each(cases: list[tuple[str, int]]) -> dict[str, list[tuple[list[float], Tensor]]]:
    """Return what each optimizer has trained in its ZeRO stages, with a model of its width."""
    return {name: trained(name, stages_of(name), width) for name, width in cases}


def stages_of(name: str) -> list[int]:
    """Return the stages to try: all for one optimizer of each library."""
    return [0, 1, 2, 3] if name in ("adamw", "adamw_8bit") else [0, 3]


# The largest difference of a weight after 8 steps of 0.01. Lion's steps all have one size and only a sign, which a
# rounding error may turn round; 8 bits hold a moment to one part in a hundred or so.
CASES = {
    "adamw": (32, 1e-6),
    "adam": (32, 1e-6),
    "sgd": (32, 1e-6),
    "momentum": (32, 1e-6),
    "adamw_8bit": (WIDE, 4e-3),
    "lion": (32, 1e-6),
}
FROM_BITSANDBYTES = ("adamw_8bit", "lion")
HAS_BITSANDBYTES = find_spec("bitsandbytes") is not None


@pytest.fixture(scope="module")
def sharded() -> dict[str, list[tuple[list[float], Tensor]]]:
    cases = [(name, width) for name, (width, _) in CASES.items() if name not in FROM_BITSANDBYTES or HAS_BITSANDBYTES]
    found: dict[str, list[tuple[list[float], Tensor]]] = on_ranks(2, trained_with_each, cases)[0]
    return found


@pytest.mark.parametrize("name", CASES)
def test_zero_updates_as_the_plain_optimizer(name: str, sharded: dict[str, list[tuple[list[float], Tensor]]]) -> None:
    if name not in sharded:
        pytest.skip("needs bitsandbytes")
    assert len(sharded[name]) == len(stages_of(name))
    assert_plainly_trained(name, sharded[name])


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in CASES if stages_of(name) == [0, 3]])
def test_an_optimizer_under_zero_1_and_2_equals_the_plain_optimizer(name: str) -> None:
    if name in FROM_BITSANDBYTES:
        pytest.importorskip("bitsandbytes")
    assert_plainly_trained(name, on_ranks(2, trained, name, [1, 2], CASES[name][0])[0])


def assert_plainly_trained(name: str, results: list[tuple[list[float], Tensor]]) -> None:
    width, closeness = CASES[name]
    losses, final = plainly_trained(name, width)
    for found, found_final in results:
        assert found == pytest.approx(losses, abs=max(1e-5, 2 * closeness))
        assert (found_final - final).abs().max() < closeness


@pytest.mark.parametrize("name", ["adamw", pytest.param("momentum", marks=pytest.mark.long)])
def test_an_optimizer_offloaded_to_the_host_equals_the_plain_optimizer(name: str) -> None:
    losses, final = plainly_trained(name, 32)
    for found, found_final in on_ranks(2, trained, name, [1, 2, 3], 32, "optimizer")[0]:
        assert found == pytest.approx(losses, abs=1e-5)
        assert (found_final - final).abs().max() < 1e-6


def test_an_optimizer_with_offloaded_weights_equals_the_plain_optimizer() -> None:
    losses, final = plainly_trained("adamw", 32)
    ((found, found_final),) = on_ranks(2, trained, "adamw", [3], 32, "optimizer+params")[0]
    assert found == pytest.approx(losses, abs=1e-5)
    assert (found_final - final).abs().max() < 1e-6


def test_states_of_an_8_bit_optimizer_have_one_byte_per_weight() -> None:
    pytest.importorskip("bitsandbytes")
    model = small_model(WIDE)
    spec = run_spec({"optimizer": {"name": "adamw_8bit"}})
    optimizer = build_optimizer(spec, model, layout_of(spec, 1), CPU)
    nn.functional.mse_loss(model(batch(0)[0]), batch(0)[1]).backward()
    optimizer.step()
    moments = optimizer.state[model[0].weight]
    assert moments["state1"].dtype == moments["state2"].dtype == torch.uint8


def test_muon_on_a_pipeline_stage_without_a_matrix_that_trains_is_adamw() -> None:
    spec = run_spec({"optimizer": {"name": "muon"}})
    weights = []
    for each in (spec, run_spec({})):
        model = small_model()
        optimizer = build_optimizer(each, model, layout_of(each, 1), CPU)
        nn.functional.mse_loss(model(batch(0)[0]), batch(0)[1]).backward()
        optimizer.step()
        weights.append(model[0].weight.detach())
    assert torch.equal(*weights)


def test_a_missing_optimizer_library_is_reported_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes.optim", None)
    spec = run_spec({"optimizer": {"name": "lion"}})
    with pytest.raises(UsageError, match=r"needs bitsandbytes.*'\.\[optimizers\]'"):
        build_optimizer(spec, small_model(), layout_of(spec, 1), CPU)


def test_a_matrix_that_zero_3_has_partitioned_has_weight_decay() -> None:
    """ZeRO-3 replaces a weight by an empty vector."""
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        parameter.ds_shape, parameter.data = parameter.shape, torch.empty(0)  # type: ignore[attr-defined]
    decayed, others = parameter_groups(model, OptimizerSpec(weight_decay=0.1))
    assert decayed["params"][0] is model.weight
    assert others["params"][0] is model.bias


@pytest.mark.parametrize("sizes", [[(3, 2), ()], [()]])
def test_counters_are_told_from_the_states_of_a_weight_without_dimensions(sizes: list[tuple[int, ...]]) -> None:
    weights = [nn.Parameter(torch.ones(size)) for size in sizes]
    for optimizer, expected in (
        (torch.optim.AdamW(weights, amsgrad=True), {"step"}),
        (torch.optim.NAdam(weights), {"step", "mu_product"} if len(sizes) > 1 else {"step"}),
        (torch.optim.SGD(weights, lr=0.1, momentum=0.9), {"step"}),
    ):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert counter_names(optimizer) == expected
