from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scaletrain_cli.engine.deepspeed_engine import precision_config
from scaletrain_cli.engine.optim.deepspeed_optimizer import LossScaleAtFloorError, loss_scale, step_was_skipped
from scaletrain_cli.errors import ExitCode
from tests.engine.optim.small_engine import batch, run_spec, small_model, start, train, weights
from tests.engine.ranks import on_ranks

PLAIN_STEPS = {"optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 0.0}}


def spec_of(**scale: int) -> Any:
    return run_spec({"precision": "fp16", "loss_scale": scale, **PLAIN_STEPS})


def overflow(loss: Tensor) -> Tensor:
    """The loss stays finite; its gradient does not fit into fp16."""
    return loss * 1e30


def skips_and_goes_on(stage: int) -> dict[str, Any]:
    small = start(spec_of(initial=1024, hysteresis=1), stage, accumulation=2)
    train(small, 0)
    before, scales = weights(small), [loss_scale(small.engine)]
    train(small, 1, overflow if torch.distributed.get_rank() == 1 else None)  # one rank's overflow is everyone's
    skipped, kept = [step_was_skipped(small.engine)], torch.equal(weights(small), before)
    scales.append(loss_scale(small.engine))
    train(small, 2)
    skipped.append(step_was_skipped(small.engine))
    return {"skipped": skipped, "kept": kept, "scales": scales, "moved": not torch.equal(weights(small), before)}


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.long), 3])
def test_an_overflow_skips_the_step_and_halves_the_scale_and_training_continues(stage: int) -> None:
    reported = {"skipped": [True, False], "kept": True, "scales": [1024.0, 512.0], "moved": True}
    assert on_ranks(2, skips_and_goes_on, stage) == [reported, reported]


def grows(stage: int, clip: float) -> tuple[list[float], list[float], Tensor]:
    """Return scales and gradient norms of each step, and the final weights, if every other step doubles the scale."""
    small = start(spec_of(initial=256, window=2), stage, clip=clip)
    scales, norms = [], []
    for step in range(8):
        train(small, step)
        scales.append(loss_scale(small.engine))
        norms.append(float(small.engine.get_global_grad_norm()))
    return scales, norms, weights(small)


@pytest.mark.parametrize(("stage", "clip"), [(1, 0.0), pytest.param(2, 3.0, marks=pytest.mark.long), (3, 3.0)])
def test_a_growing_scale_changes_no_update(stage: int, clip: float) -> None:
    """DeepSpeed alone would divide the gradient of a step at which the scale grows by twice its scale."""
    model, expected = small_model(), []
    for step in range(8):
        inputs, targets = batch(step)
        model.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
        expected.append(norm.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    scales, norms, final = on_ranks(2, grows, stage, clip)[0]
    assert scales == [256.0, 256.0, 512.0, 512.0, 1024.0, 1024.0, 2048.0, 2048.0]
    assert norms == pytest.approx(expected, rel=5e-3)
    assert (final - torch.cat([p.detach().flatten() for p in model.parameters()])).abs().max() < 2e-3


def falls_to_the_floor(stage: int) -> tuple[list[float], str, int, bool]:
    small = start(spec_of(initial=16, minimum=4, hysteresis=2), stage)
    before, scales = weights(small), []
    try:
        for step in range(6):
            train(small, step, overflow)
            scales.append(loss_scale(small.engine))
    except LossScaleAtFloorError as error:
        return scales, str(error), error.exit_code, torch.equal(weights(small), before)
    raise AssertionError(f"went on at {scales}")


@pytest.mark.parametrize("stage", [1, 3])
def test_an_overflow_at_the_smallest_scale_ends_the_run(stage: int) -> None:
    """The first overflow only uses up the hysteresis."""
    scales, reported, code, kept = on_ranks(2, falls_to_the_floor, stage)[0]
    assert scales == [16.0, 8.0, 4.0]
    assert reported.startswith("the gradient is not finite at loss scale 4")
    assert code == ExitCode.DO_NOT_REQUEUE
    assert kept


def without_scale(precision: str, stage: int) -> tuple[float, bool]:
    small = start(run_spec({"precision": precision}), stage)
    train(small, 0)
    return loss_scale(small.engine), step_was_skipped(small.engine)


@pytest.mark.parametrize(("precision", "stage"), [("fp32", 0), ("bf16", 1), ("bf16", 3)])
def test_other_precisions_have_no_scale(precision: str, stage: int) -> None:
    assert on_ranks(1, without_scale, precision, stage) == [(1.0, False)]


def test_the_spec_sets_the_scale() -> None:
    scale = {"initial": 4096, "window": 7, "hysteresis": 3, "minimum": 2}
    assert precision_config(spec_of(**scale)) == {
        "data_types": {"grad_accum_dtype": "fp32"},
        "fp16": {
            **{"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 7, "hysteresis": 3},
            "min_loss_scale": 2,
        },
    }


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_fp8_products_have_bf16_weights(precision: str) -> None:
    assert precision_config(run_spec({"precision": precision}))["bf16"]["enabled"]


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_32_bits_need_no_settings(precision: str) -> None:
    assert precision_config(run_spec({"precision": precision})) == {}
