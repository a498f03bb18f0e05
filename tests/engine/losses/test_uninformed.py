"""The loss of a model that knows nothing is the least loss of equal outputs, and keeps the guard off small losses."""

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from scaletrain_cli.engine.health.guard import Guard
from scaletrain_cli.engine.losses import LOSSES, LossSettings, uninformed_loss
from scaletrain_cli.engine.parallel.mesh import Axis
from scaletrain_cli.spec.losses import LossSpec
from tests.diagnosis.histories import IMAGES, case

SAMPLES, CLASSES = 12, 4
ONE = torch.arange(SAMPLES) % CLASSES
HALF = torch.stack([(torch.arange(SAMPLES) // (1 + column) % 2).float() for column in (0, 1, 2, 5)], 1)
NUMBERS = torch.tensor([[0.0, 1.0], [2.0, 1.5], [0.5, 9.0], [7.0, 2.0], [3.0, 3.0]])
FEATURES = torch.tensor([[1.0, 0.0]])
CASES: dict[str, tuple[str, dict[str, Any], Tensor | None, bool]] = {
    "cross_entropy": ("cross_entropy", {}, ONE, True),
    "bce of one class": ("bce", {}, ONE, True),
    "bce of one class with a weight": ("bce", {"pos_weight": 3.0}, ONE, True),
    "bce of several labels": ("bce", {}, HALF, False),
    "bce of several labels with weights": ("bce", {"pos_weight": (1.0, 2.0, 5.0, 0.5)}, HALF, False),
    "mse": ("mse", {}, NUMBERS, True),
    "info_nce": ("info_nce", {}, None, True),
    "nt_xent": ("nt_xent", {}, None, True),
    "sigmoid": ("sigmoid", {}, None, True),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_least_loss_of_outputs_that_are_equal_for_all_samples(case: str) -> None:
    name, settings, targets, one_class = CASES[case]
    spec = LossSpec(name=name, **settings)
    outputs = CLASSES if targets is None or targets is ONE else targets.shape[1]
    free = torch.zeros(outputs, requires_grad=True)

    def loss() -> Tensor:
        made: Any = free.expand(SAMPLES if targets is None else len(targets), outputs)
        if name == "nt_xent":
            made = FEATURES.expand(2 * SAMPLES, 2) + 0 * free[0]
        elif targets is None:
            every = FEATURES.expand(SAMPLES, 2)
            made = SimpleNamespace(image=every, text=every, logit_scale=torch.zeros(()), logit_bias=free[0])
            made.logit_scale = made.logit_scale + 0 * free[0]
        return LOSSES[name](made, targets, LossSettings(spec), Axis())

    optimizer = torch.optim.LBFGS([free], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    found = uninformed_loss(name, spec, SAMPLES, outputs, one_class=one_class, targets=targets)
    assert found == pytest.approx(loss().item(), rel=1e-5)


@pytest.mark.parametrize(("name", "expected"), [("mae", (0.5 + 0 + 4.5) / 3), ("huber", (0.125 + 0 + 4.0) / 3)])
def test_absolute_and_huber_errors_are_those_of_the_median(name: Any, expected: float) -> None:
    def found(targets: list[list[float]]) -> float:
        return uninformed_loss(name, LossSpec(name=name), 4, 1, one_class=True, targets=torch.tensor(targets))

    assert found([[0.0], [0.5], [5.0]]) == pytest.approx(expected)
    assert found([[2.0]] * 3) == 0.0


def test_a_loss_that_falls_towards_zero_has_no_spikes_and_a_diverging_one_has() -> None:
    chance, steps = random.Random(1), 1500
    least = uninformed_loss("cross_entropy", LossSpec(), 16, 10, one_class=True, targets=None)
    assert least == pytest.approx(math.log(10))
    # A batch of 16 of which now and then several in a row have images that are not yet known, at 3 nats each.
    losses = [2.3 * math.exp(-step / 100) + 0.01 for step in range(steps)]
    for start in range(300, steps, 40):
        for step in range(start, start + 4):
            losses[step] += chance.randint(1, 3) * 3 / 16

    def found(least_loss: float, values: list[float]) -> set[str]:
        guard = Guard(factor=3.0, patience=3, fresh_warmup_steps=20, least_loss=least_loss)
        return {guard.observe(step, {"loss": loss})[0] for step, loss in enumerate(values, 1)}

    assert found(least, losses) == {"fine"}
    assert "spike" in found(0.0, losses), "the losses are what the limit is for"
    assert "spike" in found(least, [*losses, 7.0, 9.0, 12.0])


WITH_VIEWS = ("training.objective=contrastive", "training.loss=nt_xent", "evaluation.every=0")


@pytest.mark.parametrize("overrides", [(), WITH_VIEWS], ids=["classes", "views"])
def test_the_diagnosis_of_a_run_has_the_same_loss_of_equal_outputs(overrides: tuple[str, ...]) -> None:
    found = case(*overrides, text=IMAGES)
    name = "nt_xent" if overrides else "cross_entropy"
    batch = found.spec.training.global_batch_size
    expected = uninformed_loss(name, found.spec.training.loss, batch, 1000, one_class=True, targets=None)
    assert found.uninformed_loss == pytest.approx(expected)
