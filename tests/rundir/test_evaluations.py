"""Which checkpoint is the best, and which ones an evaluation still needs."""

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
    read_evaluation,
    read_evaluations,
    steps_to_keep,
    write_evaluation,
)
from scaletrain_cli.rundir.journal import Rollback, append_line, record_rollback
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.spec.run import CheckpointSpec


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


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
    assert steps_to_keep(run, CheckpointSpec(), folder) == {20}
    assert steps_to_keep(run, CheckpointSpec(keep_best="code/loss"), folder) == {10, 20}


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
