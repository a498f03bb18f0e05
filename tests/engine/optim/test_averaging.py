from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from scaletrain_cli.engine.evaluation.measures import Figures
from scaletrain_cli.engine.optim.averaging import WeightAverage
from scaletrain_cli.engine.validation import Validation
from scaletrain_cli.spec.training import AveragingSpec
from tests.engine.optim.small_engine import run_spec, small_model, start, train, weights
from tests.engine.ranks import on_ranks

STEPS = 8
WRAPPERS = [("fp32", 0), ("fp32", 1), ("fp32", 3), ("bf16", 1), ("bf16", 3)]
WRAPPERS += [pytest.param(precision, 2, marks=pytest.mark.long) for precision in ("fp32", "bf16")]


def averaged(precision: str, stage: int, averaging: dict[str, Any], offload: str = "none") -> dict[str, Any]:
    """Return all weights after each step, the average that the model uses at the end, and the weights after that."""
    spec = run_spec({"precision": precision, "optimizer": {"lr": 0.05}, "averaging": averaging}, offload=offload)
    small = start(spec, stage)
    average, seen = WeightAverage(small.engine, spec.training.averaging, STEPS), []
    for step in range(1, STEPS + 1):
        train(small, step)
        average.update(step)
        seen.append(weights(small))
    with average.in_use():
        lent = weights(small)
    after = weights(small)
    train(small, STEPS + 1)
    return {"seen": seen, "lent": lent, "after": after, "next": weights(small)}


@cache
def averaged_on_two(precision: str, stage: int) -> list[dict[str, Any]]:
    return on_ranks(2, averaged, precision, stage, {"name": "ema", "decay": 0.8})


def exponential(seen: list[Tensor], decay: float) -> Tensor:
    average = seen[0]
    for weight in seen[1:]:
        average = decay * average + (1 - decay) * weight
    return average


@pytest.mark.parametrize(("precision", "stage"), WRAPPERS)
def test_the_model_uses_the_exponential_average_within_the_context_only(precision: str, stage: int) -> None:
    both = averaged_on_two(precision, stage)
    for reported in both:
        # In 16 bits the average is of the fp32 weights, and what is seen of them and of it is rounded.
        closeness = 1e-6 if precision == "fp32" else 4e-3
        assert torch.allclose(reported["lent"], exponential(reported["seen"], 0.8), atol=closeness)
        assert not torch.allclose(reported["lent"], reported["after"], atol=5 * closeness)
        assert torch.equal(reported["after"], reported["seen"][-1])
    assert torch.equal(both[0]["lent"], both[1]["lent"])


@pytest.mark.parametrize(("precision", "stage"), [("fp32", 1), ("bf16", 1), ("fp32", 3)])
def test_using_the_averages_for_evaluation_does_not_change_training(precision: str, stage: int) -> None:
    plain = on_ranks(2, trained_alone, precision, stage)[0]
    assert torch.equal(averaged_on_two(precision, stage)[0]["next"], plain)


def trained_alone(precision: str, stage: int) -> Tensor:
    small = start(run_spec({"precision": precision, "optimizer": {"lr": 0.05}}), stage)
    for step in range(1, STEPS + 2):
        train(small, step)
    return weights(small)


@pytest.mark.parametrize(("stage", "offload"), [(1, "optimizer"), (3, "optimizer+params")])
def test_offloaded_weights_are_averaged_too(stage: int, offload: str) -> None:
    reported = on_ranks(2, averaged, "fp32", stage, {"name": "ema", "decay": 0.8}, offload)[0]
    assert torch.allclose(reported["lent"], exponential(reported["seen"], 0.8), atol=1e-6)
    assert torch.equal(reported["after"], reported["seen"][-1])


class PlainEngine:
    """The parts of DeepSpeed's engine that stage 0 in fp32 uses."""

    def __init__(self) -> None:
        self.module, self.optimizer = small_model(), object()

    def zero_optimization_stage(self) -> int:
        return 0

    def set_all(self, value: float) -> None:
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.fill_(value)

    @property
    def value(self) -> float:
        (value,) = {value for p in self.module.parameters() for value in p.flatten().tolist()}
        return round(value, 6)


def lent_after(engine: PlainEngine, average: WeightAverage) -> float:
    with average.in_use():
        return engine.value


def average_of(values: list[float], **averaging: Any) -> float:
    engine = PlainEngine()
    average = WeightAverage(engine, AveragingSpec.model_validate(averaging), len(values))
    for step, value in enumerate(values, 1):
        engine.set_all(value)
        average.update(step)
    return lent_after(engine, average)


def test_the_mean_of_checkpoints_takes_the_last_quarter_of_the_run() -> None:
    assert average_of([100.0] * 12 + [3.0, 1.0, 3.0, 1.0], name="checkpoints") == 2.0
    assert average_of([100.0] * 12 + [100.0, 3.0, 100.0, 1.0], name="checkpoints", every=2) == 2.0
    assert average_of([100.0, 2.0], name="checkpoints") == 2.0


def test_the_average_includes_every_n_th_step() -> None:
    assert average_of([9.0, 1.0, 9.0, 2.0], name="ema", decay=0.5, every=2) == 1.5


def test_before_there_is_an_average_the_weights_themselves_are_used() -> None:
    assert average_of([1.0, 2.0], name="ema", every=3) == 2.0


def test_it_goes_on_from_a_checkpoint() -> None:
    spec, engine = AveragingSpec(name="ema", decay=0.5), PlainEngine()
    first, second = WeightAverage(engine, spec, 3), WeightAverage(engine, spec, 3)
    engine.set_all(1.0)
    first.update(1)
    second.taken, second.averages = first.taken, first.averages
    engine.set_all(3.0)
    second.update(2)
    assert lent_after(engine, second) == 2.0


def test_the_averaged_loss_is_measured_once_there_is_an_average() -> None:
    average = WeightAverage(PlainEngine(), AveragingSpec.model_validate({"name": "ema", "every": 3}), STEPS)
    logged: list[set[str]] = []
    stand_in: Any = SimpleNamespace(
        context=SimpleNamespace(
            record=SimpleNamespace(
                plan=SimpleNamespace(layout=SimpleNamespace(micro_batch_size=1, data_parallel=1, global_batch_size=1)),
                spec=SimpleNamespace(evaluation=SimpleNamespace(batches=1)),
            )
        ),
        readers={"source": [0]},
        shares={"source": 1.0},
        average=average,
        zero_shot=None,
        answers=None,
        stepper=SimpleNamespace(take_measures=dict),
        composed=SimpleNamespace(
            objective=SimpleNamespace(
                masks_samples=False, begin_validation=lambda: None, end_validation=lambda: Figures({"top1": 0.5}, {})
            )
        ),
        _batches=lambda source, reader, count, ahead: iter(()),
        _mean_loss=lambda step, waiting: 1.0,
    )
    stand_in._losses = partial(Validation._losses, stand_in)
    stand_in._measured = partial(Validation._measured, stand_in)
    metrics: Any = SimpleNamespace(log_validation=lambda step, size, details, **losses: logged.append(set(losses)))
    ahead: Any = None
    for step in (2, 3):
        average.update(step)
        assert Validation.measure(stand_in, step, ahead, metrics)["validation_loss"] == 1.0
    trained = {"validation_loss", "validation_top1"}
    assert logged == [trained, trained | {f"averaged_{name}" for name in trained}]
