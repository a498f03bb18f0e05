import logging

import pytest
import torch

from scaletrain_cli.engine.metrics.reporting import MetricsLog
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.rundir.evaluations import read_validations
from scaletrain_cli.rundir.journal import read_metrics
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
