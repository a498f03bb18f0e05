"""A run that is killed, preempted and resumed is one run in each tracker: all steps once, in order."""

from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.engine.faults import VARIABLE
from scaletrain_cli.rundir.journal import read_metrics
from scaletrain_cli.rundir.record import read_record
from tests.drills.training_runs import STEPS, Drill, submit_drill
from tests.tracking.wandb_files import offline_rows

pytestmark = pytest.mark.drill


def tensorboard_scalars(drill: Drill) -> dict[str, list[tuple[int, float]]]:
    """Return steps and values by tag, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(drill.run.path / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def mlflow_runs(drill: Drill) -> list[tuple[Any, dict[str, list[tuple[int, float]]]]]:
    """Return each run in the store, with steps and values by metric, as MLflow's client reads them."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{drill.run.path / 'mlflow.db'}")
    found = []
    for run in client.search_runs([one.experiment_id for one in client.search_experiments()]):
        histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        found.append((run, {name: [(m.step, m.value) for m in history] for name, history in histories.items()}))
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*noload.*")
@pytest.mark.long
def test_a_killed_run_is_one_run_in_tensorboard_and_mlflow(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("mlflow")
    # Steps 11 to 14 are trained again.
    monkeypatch.setenv(VARIABLE, "sigkill rank=0 step=15 attempt=1; sigterm rank=0 step=25 attempt=2")
    drill = submit_drill(dataset, tracking="[tensorboard, mlflow]", checkpoint__async="false")
    drill.wait_for_end()
    assert drill.events("finished"), drill.log()
    assert len(drill.beginnings()) == 3
    # On a busy machine MLflow may not have started when the grace period ends; the next attempt sends what is missing.
    assert {event["code"] for event in drill.events("tracker-off")} <= {"tracking.finish-timeout"}

    lines = read_metrics(drill.run)
    steps = list(range(1, STEPS + 1))
    evaluated = [20, 40]
    losses = [line["loss"] for line in lines]
    scalars = tensorboard_scalars(drill)
    assert [step for step, _ in scalars["loss"]] == steps
    assert [value for _, value in scalars["loss"]] == pytest.approx(losses)
    assert [step for step, _ in scalars["validation_loss"]] == evaluated

    ((run, metrics),) = mlflow_runs(drill)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == drill.run.run_id
    assert run.data.tags["scaletrain.tracking_id"] == read_record(drill.run).wandb_run_id
    assert run.data.params["training.steps"] == str(STEPS)
    assert metrics["loss"] == list(zip(steps, losses, strict=True))
    assert [step for step, _ in metrics["validation_loss"]] == evaluated
    assert {"event.started", "event.resumed", "event.finished"} <= run.data.tags.keys()
    assert list((drill.run.path / "mlflow-artifacts").rglob("run.json"))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_preempted_run_is_one_run_in_wandb_offline(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv(VARIABLE, "sigterm rank=0 step=5 attempt=1")
    drill = submit_drill(dataset, tracking="{wandb: {mode: offline, project: drills}}", training__steps=12)
    drill.wait_for_end()
    assert drill.events("finished")
    folders = sorted(path for path in (drill.run.path / "wandb").glob("offline-run-*"))
    tracking_id = read_record(drill.run).wandb_run_id
    assert len(folders) == 2
    assert all(folder.name.endswith(f"-{tracking_id}") for folder in folders)
    files = [folder / f"run-{tracking_id}.wandb" for folder in folders]
    rows = [row for file in files for row in offline_rows(file) if "train/loss" in row]
    assert [row["train/step"] for row in rows] == list(range(1, 13))
