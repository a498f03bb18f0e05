from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scaletrain_cli.rundir.documents import write_document
from scaletrain_cli.rundir.goodput import Ledger, write_ledger
from scaletrain_cli.rundir.journal import append_lines, record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.telemetry.run import node_file
from scaletrain_cli.telemetry.series import SeriesWriter
from scaletrain_cli.tracking.base import Spread
from scaletrain_cli.tracking.prometheus import exposition, families
from scaletrain_cli.worker.trackers import run_figures


def record_of(price: float | None = 2.0) -> Any:
    cost, layout = SimpleNamespace(price_per_gpu_hour=price), SimpleNamespace(world_size=4)
    plan = SimpleNamespace(cost=cost, layout=layout, time=SimpleNamespace(step=0.5), training_stages=())
    return SimpleNamespace(plan=plan, spec=SimpleNamespace(total_steps=100, allocated_devices=4), revision=0)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Return a run of two attempts of 100 s each, 50 s apart, the second with telemetry of four ranks on two nodes."""
    run = RunDir(tmp_path / "run")
    for number, started in ((1, 1000.0), (2, 1150.0)):
        run.attempt(number).mkdir(parents=True)
        write_document(run.attempt(number) / "attempt.json", {"started": started, "ended": started + 100.0})
        seconds: Any = {"step": 60.0, "save": 20.0, "restore": 20.0}
        write_ledger(run, Ledger(number, started, started + 100.0, True, 20, seconds))
    append_lines(run.metrics, [{"step": step, "step_seconds": 3.0, "loss": 5.0, "attempt": 1} for step in range(1, 41)])
    for severity, name, code in (
        ("warning", "finding", "diagnosis.slow-rank"),
        ("error", "finding", "diagnosis.loss-rising"),
        ("error", "finding-cleared", "diagnosis.loss-rising"),
    ):
        reason = {"code": code, "params": {}}
        record_event(run, name, severity=severity, subject="", attempt=2, step=9, seconds=1.0, text="", **reason)
    run.attempt(2).joinpath("telemetry").mkdir()
    for node in range(2):
        writer = SeriesWriter(node_file(run, 2, f"node-{node:04d}-gpu{node}"))
        for rank in (2 * node, 2 * node + 1):
            writer.add(f"rank {rank}", 1200.0, 40, {"own_seconds": 1.0 + rank, "communication_seconds": 4.0 - rank})
            writer.add(f"gpu {rank % 2}", 1200.0, 40, {"throttled_by_heat": rank / 4, "utilization": 1.0 - rank / 4})
        writer.add("node", 1200.0, 40, {"memory_available_bytes": 1e9 * (node + 1)})
        writer.close()
    return run


def test_the_figures_of_a_run(run: RunDir) -> None:
    found = run_figures(run, record_of())
    assert found.goodput == pytest.approx(120 / 250)
    assert found.remaining_seconds == pytest.approx(60 * (3.0 + 20 / 20))  # 60 steps, and a second of saving for each
    assert found.cost_usd == pytest.approx(2.0 * 4 * 200 / 3600)  # without the time between the attempts
    assert found.cost_to_come_usd == pytest.approx(2.0 * 4 * 240 / 3600)
    assert dict(found.findings) == {"warning": 1}
    assert found.spreads["rank", "own_seconds"] == Spread(1.0, 2.5, 4.0, "3")
    assert found.spreads["rank", "communication_seconds"] == Spread(1.0, 2.5, 4.0, "3")
    assert found.spreads["gpu", "throttled_by_heat_ratio"] == Spread(0.0, 0.375, 0.75, "gpu1/1")
    assert found.spreads["gpu", "utilization_ratio"].worst == "gpu1/1"
    assert found.spreads["node", "memory_available_bytes"] == Spread(1e9, 1.5e9, 2e9, "gpu0")
    text = exposition(families({"run": "r"}, {}, found, {}, training=True), openmetrics=True)
    assert 'scaletrain_gpu_throttled_by_heat_ratio{run="r",statistic="max"} 0.75' in text
    assert 'scaletrain_rank_own_seconds_worst{run="r",subject="3"} 1.0' in text


def test_what_is_not_known_is_absent(tmp_path: Path, run: RunDir) -> None:
    new = RunDir(tmp_path / "new")
    new.path.mkdir()
    found = run_figures(new, record_of())
    assert (found.goodput, found.remaining_seconds, found.cost_usd, found.spreads) == (None, None, 0.0, {})
    unpriced = run_figures(run, record_of(price=None))
    assert (unpriced.cost_usd, unpriced.cost_to_come_usd) == (None, None)
