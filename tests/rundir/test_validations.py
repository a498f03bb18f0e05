"""Figures of validations beside the loss: their names, their text, and the files of a step.

Which checkpoint is the best, and which ones an evaluation still needs.
"""

import math
from pathlib import Path

import pytest

from scaletrain_cli.rundir.evaluations import (
    Evaluation,
    State,
    awaited_steps,
    best_step,
    evaluation_path,
    forget_newer,
    log_evaluation,
    measures_in,
    read_evaluation,
    read_evaluations,
    read_validations,
    steps_to_keep,
    validation_path,
    write_evaluation,
    write_validation,
)
from scaletrain_cli.rundir.journal import Rollback, append_line, record_rollback
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.text import measures_text
from tests.cli.command_line import scaletrain

CLASSES = [{"class": "cat", "samples": 4, "top1": 0.25}, {"class": "dog", "samples": 0, "top1": None}]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def test_figures_beside_the_loss_are_told_from_losses_and_counts() -> None:
    line = {"step": 1, "loss": 2.0, "validation_loss": 2.1, "validation_loss/a": 2.0, "validation_images": 64}
    assert measures_in(line | {"validation_top1": 0.5, "validation_recall_at_1/image_to_text": 0.25}) == {
        "top1": 0.5,
        "recall_at_1/image_to_text": 0.25,
    }


@pytest.mark.parametrize(
    ("measures", "text"),
    [
        ({}, ""),
        ({"rewards/chosen": 1.0, "top5": 0.9}, ""),
        ({"top1": 0.71234, "top5": 0.9}, "top-1 71.2 %"),
        ({"mean_average_precision": 0.5, "mae": 12.3456, "rmse": 2.0}, "mAP 50.0 %, MAE 12.35"),
        (
            {"recall_at_1/image_to_text": 0.301, "recall_at_1/text_to_image": 0.25, "zero_shot_top1": math.nan},
            "recall@1 image to text 30.1 %, text to image 25.0 %",
        ),
    ],
)
def test_the_text_has_the_main_figures_by_their_labels(measures: dict[str, float], text: str) -> None:
    assert measures_text(measures) == text


def test_a_validation_is_read_back_with_null_for_figures_that_are_not_finite(run: RunDir) -> None:
    write_validation(run, 20, {"mae": math.nan, "top1": 0.5}, {"outputs": [{"mae": math.inf}], "samples": 4})
    (found,) = read_validations(run)
    assert (found.step, found.metrics) == (20, {"mae": None, "top1": 0.5})
    assert found.details == {"outputs": [{"mae": None}], "samples": 4}


def test_files_of_validations_and_of_evaluations_are_told_apart(run: RunDir) -> None:
    write_evaluation(run, Evaluation(10, "e", "done", 0.0))
    write_validation(run, 20, {"top1": 0.5}, {})
    assert [one.step for one in read_evaluations(run)] == [10]
    assert [one.step for one in read_validations(run)] == [20]


def test_damaged_files_are_passed_over_and_undone_steps_forgotten(run: RunDir) -> None:
    for step in (10, 20, 30):
        write_validation(run, step, {"top1": 0.5}, {})
    validation_path(run, 10).write_text('{"schema": "scaletrain.validation/v1", "step": "ten"}', encoding="utf-8")
    assert [one.step for one in read_validations(run)] == [20, 30]
    forget_newer(run, 20)
    assert [one.step for one in read_validations(run)] == [20]


def test_the_greatest_accuracy_and_the_least_error_are_the_best(run: RunDir) -> None:
    for step, top1, rmse in ((10, 0.1, 3.0), (20, 0.9, 5.0), (30, 0.9, 3.5)):
        append_line(run.metrics, {"step": step, "validation_top1": top1, "validation_rmse": rmse})
    assert best_step(run, "validation_top1", {10, 20, 30}) == 20
    assert best_step(run, "validation_rmse", {20, 30}) == 30
    assert best_step(run, "validation_rmse", {10, 20, 30}) == 10


def test_evaluation_list_and_show_have_validations_with_their_worst_classes(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "r")
    run.path.mkdir(parents=True)
    run.record.write_text("{}", encoding="utf-8")
    answers = [{"sample": "a.jpg", "prompt": "What is it?", "answer": "A cat.", "expected": "A dog."}]
    write_validation(run, 20, {"top1": 0.25, "top5": None}, {"classes": CLASSES, "answers": answers})
    listed = scaletrain("evaluation", "list", str(run.path))
    assert listed.out.split() == ["step", "top1", "top5", "20", "0.2500"]
    shown = scaletrain("evaluation", "show", str(run.path)).out
    assert "classes; 1 without a sample" in shown
    assert shown.split("without a sample")[1].split()[:6] == ["class", "samples", "top1", "cat", "4", "0.2500"]
    assert "What is it?" in shown
    answer = scaletrain("evaluation", "show", str(run.path), "--json").data
    assert answer["validation"]["details"]["classes"] == CLASSES
    assert (answer["step"], answer["run_id"]) == (20, "r")
    missing = scaletrain("evaluation", "show", str(run.path), "--step", "30")
    assert (missing.code, "Available steps: 20" in missing.err) == (2, True)


def log(run: RunDir, metric: str, values: dict[int, float]) -> None:
    for step, value in values.items():
        append_line(run.metrics, {"step": step, metric: value, "time": 0.0})


def test_the_best_step_is_among_the_given_ones_and_the_earlier_of_equal_ones(run: RunDir) -> None:
    log(run, "validation_loss", {10: 3.0, 20: 1.0, 30: 2.0, 40: 2.0})
    assert best_step(run, "validation_loss", {10, 20, 30, 40}) == 20
    assert best_step(run, "validation_loss", {10, 30, 40}) == 30
    assert best_step(run, "validation_loss", {50}) is None
    assert best_step(run, "other/loss", {10, 20}) is None


def test_the_direction_of_a_metric_follows_its_name_or_the_evaluation(run: RunDir) -> None:
    log(run, "h/a/acc", {10: 0.1, 20: 0.9})
    log(run, "h/a/brier", {10: 0.1, 20: 0.9})
    assert best_step(run, "h/a/acc", {10, 20}) == 20
    assert best_step(run, "h/a/brier", {10, 20}) == 20
    write_evaluation(run, Evaluation(10, "e", "done", 0.0, lower_is_better=["h/a/brier"]))
    assert best_step(run, "h/a/brier", {10, 20}) == 10


def test_a_step_that_was_rolled_back_is_not_the_best(run: RunDir) -> None:
    log(run, "validation_loss", {10: 3.0, 20: 1.0})
    record_rollback(run, Rollback(from_step=20, to_step=10, skip=(11, 20)))
    assert best_step(run, "validation_loss", {10, 20}) == 10


def test_the_latest_checkpoints_whose_evaluation_has_not_begun_are_awaited(run: RunDir) -> None:
    states: dict[int, State] = {10: "requested", 20: "done", 30: "requested", 40: "running", 50: "requested"}
    for step, state in states.items():
        write_evaluation(run, Evaluation(step, f"e{step}", state, 0.0))
    assert awaited_steps(run) == [30, 50]
    assert [one.state for one in read_evaluations(run)] == list(states.values())


def test_a_checkpoint_under_evaluation_is_kept_where_it_may_be_the_best(run: RunDir) -> None:
    write_evaluation(run, Evaluation(10, "e10", "running", 0.0))
    write_evaluation(run, Evaluation(20, "e20", "requested", 0.0))
    folder = run.path / "checkpoints"
    assert steps_to_keep(run, folder, keep_best=None, mirror_to=None) == {20}
    assert steps_to_keep(run, folder, keep_best="code/loss", mirror_to=None) == {10, 20}


def test_metrics_of_an_evaluation_are_logged_at_its_step(run: RunDir) -> None:
    evaluation = Evaluation(20, "e", "done", 0.0, metrics={"code/loss": 1.5}, generations=[{"task": "g"}])
    write_evaluation(run, evaluation)
    log_evaluation(run, evaluation)
    assert best_step(run, "code/loss", {20}) == 20
    found = read_evaluation(run, 20)
    assert found is not None
    assert found.finished_tasks() == {"code", "g"}


def test_an_unreadable_evaluation_is_passed_over_and_those_of_undone_steps_are_removed(run: RunDir) -> None:
    for step in (10, 20, 30):
        write_evaluation(run, Evaluation(step, "e", "done", 0.0))
    evaluation_path(run, 20).write_text('{"step": 20, "a field of a later version": 1}')
    assert [one.step for one in read_evaluations(run)] == [10, 30]
    forget_newer(run, 10)
    assert [one.step for one in read_evaluations(run)] == [10]
