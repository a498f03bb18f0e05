"""Which checkpoints are due for an evaluation, and that each gets one job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.errors import SchedulerError, UsageError
from scaletrain_cli.launch.backends.local.backend import LocalBackend
from scaletrain_cli.launch.evaluate import due_steps, evaluation_run_id, submit_due_evaluations, submit_evaluation
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.plan import make_plan
from scaletrain_cli.rundir.evaluations import awaited_steps, read_evaluation
from scaletrain_cli.rundir.journal import Rollback, read_events, record_rollback
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_record
from scaletrain_cli.spec import load_spec
from scaletrain_cli.worker.checkpoint_commit import commit_checkpoint, open_attempt, stage_checkpoint
from tests.cli.command_line import SMALL

TASKS = "evaluation={every: 0, tasks: [{kind: generation, name: a, prompts: [b]}], job: {every: 20}}"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run with the checkpoints 20, 30 and 40, of which the job evaluates every 20th."""
    monkeypatch.setenv("SCALETRAIN_RUNS", str(tmp_path))
    spec = load_spec(SMALL, [TASKS])
    made = create_run(spec, make_plan(spec), "r1").run
    open_attempt(made.checkpoints, 1)
    for step in (20, 30, 40):
        stage_checkpoint(made.checkpoints, 1, step)
        commit_checkpoint(made.checkpoints, step, {}, world_size=1, clean=True, attempt=1)
    return made


def refuse(*arguments: Any) -> str:
    raise SchedulerError("the queue is full.")


def test_each_selected_checkpoint_gets_one_job(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalBackend, "submit", lambda self, run, record: f"job of {run.run_id}")
    assert due_steps(run, read_record(run)) == [20, 40]
    assert [one.run_id for one in submit_due_evaluations(run)] == [evaluation_run_id(run, step) for step in (20, 40)]
    assert submit_due_evaluations(run) == []
    assert submit_evaluation(run, 20).job_id == f"job of {evaluation_run_id(run, 20)}"
    assert [event["step"] for event in read_events(run) if event["event"] == "evaluation-submitted"] == [20, 40]
    spec = read_record(RunDir(run.path.parent / evaluation_run_id(run, 40))).spec
    assert (spec.world_size, spec.evaluation.tasks, spec.env["SCALETRAIN_EVALUATED_STEP"]) == (1, (), "40")
    with pytest.raises(UsageError, match="has no checkpoint of step 25; it has the steps 20, 30, 40"):
        submit_evaluation(run, 25)


def test_a_submission_that_failed_is_tried_again(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalBackend, "submit", refuse)
    with pytest.raises(SchedulerError, match="the queue is full"):
        submit_due_evaluations(run)
    assert awaited_steps(run) == [20]
    monkeypatch.setattr(LocalBackend, "submit", lambda self, run, record: "7")
    assert [one.step for one in submit_due_evaluations(run)] == [20, 40]


def test_a_step_that_was_rolled_back_and_trained_again_is_evaluated_again(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalBackend, "submit", lambda self, run, record: "7")
    first = {one.step: one.run_id for one in submit_due_evaluations(run)}
    record_rollback(run, Rollback(from_step=45, to_step=30, skip=(31, 45)))
    assert evaluation_run_id(run, 20) == first[20]
    assert evaluation_run_id(run, 40) != first[40]
    evaluation = read_evaluation(run, 40)
    assert evaluation is not None
    assert evaluation.run_id == first[40]
