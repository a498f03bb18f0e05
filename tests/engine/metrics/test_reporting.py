import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from scaletrain_cli.engine.metrics import reporting
from scaletrain_cli.engine.metrics.reporting import MetricsLog, report_event
from scaletrain_cli.event_texts import event_sentence
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.rundir.evaluations import Evaluation, read_validations, write_evaluation
from scaletrain_cli.rundir.journal import read_events, read_metrics
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.tracking.guard import Trackers
from scaletrain_cli.worker.progress import read_progress
from tests.launch.conftest import make_plan, make_spec

VISION = "model={family: resnet, embedding_size: 8, hidden_sizes: [8], depths: [1], layer_type: basic}"


def test_a_run_on_images_logs_images_and_accuracy(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    spec = make_spec(VISION, "data={source: images}", "tracking.tensorboard=null")
    made = create_run(spec, make_plan(spec), "r")
    with MetricsLog(made.run, made.record, 0, 1, torch.device("cpu")) as metrics:
        metrics.log(1, units=4, step_seconds=0.5, loss=2.25, grad_norm=1.0, learning_rate=0.1)
        classes = {"classes": [{"class": 0, "samples": 4, "top1": 0.5}]}
        metrics.log_validation(1, 64, classes, validation_loss=2.5, validation_top1=0.5)
    with MetricsLog(made.run, made.record, 1, 1, torch.device("cpu")) as other_rank:
        other_rank.log_validation(2, 64, classes, validation_loss=9.0)
    (line,) = read_metrics(made.run)
    assert (line["samples_per_second"], line["validation_images"], line["validation_top1"]) == (8.0, 64, 0.5)
    assert not {"tokens_per_second", "validation_sequences"} & line.keys()
    (validation,) = read_validations(made.run)
    assert (validation.metrics, validation.details) == ({"top1": 0.5}, classes)
    progress = read_progress(capsys.readouterr().out.splitlines()[0])
    assert progress == {"step": 1, "total_steps": 20, "loss": 2.25, "samples_per_second": 8.0}
    said = [record.getMessage() for record in caplog.records]
    assert any("8 images/s" in message for message in said)
    assert "step 1/20  validation loss 2.5000  top-1 50.0 %" in said


def test_a_validation_loss_that_is_not_finite_is_null_in_the_file_and_ends_no_run() -> None:
    spec = make_spec("tracking.tensorboard=null")
    made = create_run(spec, make_plan(spec), "r")
    with MetricsLog(made.run, made.record, 0, 1, torch.device("cpu")) as metrics:
        metrics.log_validation(1, 64, None, **{"validation_loss": 2.5, "validation_loss/code": math.nan})
        metrics.log_validation(2, 64, None, validation_loss=math.inf)
    first, second = read_metrics(made.run)
    assert (first["validation_loss"], first["validation_loss/code"], second["validation_loss"]) == (2.5, None, None)


def test_evaluations_that_end_during_an_attempt_go_to_the_trackers_each_with_those_of_later_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = make_spec("tracking.tensorboard=null", "evaluation.tasks=[{kind: loss, name: a, source: python-stdlib}]")
    made = create_run(spec, make_plan(spec), "r")
    logged: list[tuple[int, float]] = []

    def ends(step: int, run_id: str, value: float) -> None:
        write_evaluation(made.run, Evaluation(step, run_id, "done", 0.0, {"a/loss": value}))

    class Recording(Trackers):
        def log(self, line: Mapping[str, Any]) -> None:
            logged.append((line["step"], line["a/loss"]))

    def start_slowly(*_: Any) -> Trackers:
        ends(40, "at-the-start", 4.0)  # after the tracker has read metrics.jsonl
        return Recording()

    monkeypatch.setattr(reporting, "start_trackers", start_slowly)
    ends(20, "before", 2.0)
    with MetricsLog(made.run, made.record, 0, 1, torch.device("cpu")) as metrics:
        metrics._pass_on_evaluations()
        ends(30, "late", 3.0)
        metrics._pass_on_evaluations()
        ends(40, "at-the-start-1", 4.5)  # of a step that was trained again
        metrics._pass_on_evaluations()
    assert logged == [(40, 4.0), (30, 3.0), (40, 4.0), (40, 4.5)]


def test_an_event_with_a_value_that_is_not_finite_is_recorded(tmp_path: Path) -> None:
    report_event(RunDir(tmp_path), 0, "stopped-early", step=4, metric="validation_loss", values=[2.5, math.nan])
    (event,) = read_events(RunDir(tmp_path))
    assert event["values"] == [2.5, None]
    assert event_sentence(event).endswith("its last values are 2.5000, NaN")
