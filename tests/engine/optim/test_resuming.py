from pathlib import Path

import pytest
import torch
from torch import Tensor

from scaletrain_cli.engine.checkpoint.snapshot import counters, set_counters
from scaletrain_cli.engine.optim.averaging import WeightAverage
from scaletrain_cli.engine.optim.deepspeed_optimizer import loss_scale
from tests.engine.optim.small_engine import Small, load, run_spec, save, start, train, weights
from tests.engine.ranks import on_ranks


def resumed(optimizer: str, precision: str, stage: int, folder: Path) -> list[tuple[Tensor, float, Tensor]]:
    """Return weights, loss scale and averages after a checkpoint, without and with a restart in between."""
    spec = run_spec(
        {
            "precision": precision,
            "optimizer": {"name": optimizer, "lr": 1e-2},
            "loss_scale": {"initial": 256, "window": 2},
            "averaging": {"name": "ema"},
        }
    )

    def begin() -> tuple[Small, WeightAverage]:
        small = start(
            spec, stage, width=512 if optimizer == "adamw_8bit" else 32, clip=1.0 if stage else 0.0, scaled=True
        )
        return small, WeightAverage(small.engine, spec.training.averaging, 6)

    def go(small: Small, average: WeightAverage, steps: range) -> None:
        for step in steps:
            train(small, step)
            average.update(step)

    def end(small: Small, average: WeightAverage) -> tuple[Tensor, float, Tensor]:
        with average.in_use():
            lent = weights(small)
        return weights(small), loss_scale(small.engine), lent

    first, averaged = begin()
    go(first, averaged, range(1, 4))
    save(first, folder, averaged)
    kept, again_taken = counters(first.engine), averaged.taken
    go(first, averaged, range(4, 7))
    second, again = begin()
    again.taken = again_taken
    load(second, folder, again)
    set_counters(second.engine, kept)
    go(second, again, range(4, 7))
    return [end(first, averaged), end(second, again)]


@pytest.mark.parametrize(
    ("optimizer", "precision", "stage"),
    [
        ("adamw", "fp32", 0),
        ("momentum", "fp32", 2),
        pytest.param("adamw_8bit", "fp32", 1, marks=pytest.mark.long),
        ("adamw_8bit", "bf16", 3),
        pytest.param("lion", "bf16", 1, marks=pytest.mark.long),
        pytest.param("adamw", "fp16", 1, marks=pytest.mark.long),
        ("adamw", "fp16", 3),
    ],
)
def test_a_restart_changes_no_bit(optimizer: str, precision: str, stage: int, tmp_path: Path) -> None:
    if optimizer in ("adamw_8bit", "lion"):
        pytest.importorskip("bitsandbytes")
    for without, with_restart in on_ranks(2, resumed, optimizer, precision, stage, tmp_path):
        assert torch.equal(with_restart[0], without[0])
        assert with_restart[1] == without[1]
        assert torch.equal(with_restart[2], without[2])
