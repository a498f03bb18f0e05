from types import SimpleNamespace

import pytest
import torch

from scaletrain_cli.engine.metrics import step_measures
from scaletrain_cli.engine.metrics.step_measures import DeferredMetrics, StepMeasures


def late(lag: int = 0) -> DeferredMetrics:
    metrics = DeferredMetrics(torch.device("cpu"))
    metrics._lag = lag  # as on a GPU
    return metrics


def run_step(metrics: DeferredMetrics, step: int) -> None:
    metrics.begin()
    metrics.end(step, {"rate": 0.5, "loss": torch.tensor(1.1) + step, "grad_norm": torch.tensor(2.0)})


def test_on_a_cpu_a_step_is_due_as_soon_as_it_ended_and_its_values_are_exact() -> None:
    metrics = late()
    run_step(metrics, 7)
    (measures,) = metrics.due(7)
    assert measures.step == 7
    assert list(measures.values.items()) == [("rate", 0.5), ("loss", float(torch.tensor(1.1) + 7)), ("grad_norm", 2.0)]
    assert metrics.remaining() == []


def test_with_a_lag_a_step_is_due_after_the_next_step() -> None:
    metrics, seen = late(lag=1), []
    for step in (4, 5, 6):
        run_step(metrics, step)
        seen.append([measures.step for measures in metrics.due(step)])
    assert seen == [[], [4], [5]]
    assert [measures.step for measures in metrics.remaining()] == [6]
    assert metrics.remaining() == []


def test_seconds_are_those_between_begin_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, now = late(), [100.0]
    monkeypatch.setattr(step_measures, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    metrics.begin()
    now[0] = 103.5
    metrics.end(1, {})
    now[0] = 200.0
    assert metrics.due(1) == [StepMeasures(1, 3.5, {})]
