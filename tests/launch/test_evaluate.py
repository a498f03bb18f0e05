"""Which checkpoints are due for an evaluation, and that each gets one job."""

import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.cli.evaluation import _asked_for_last as asked_for_last
from scaletrain_cli.errors import SchedulerError, UsageError
from scaletrain_cli.launch import drill, evaluate, short_jobs
from scaletrain_cli.launch.backends.local.backend import LocalBackend
from scaletrain_cli.launch.evaluate import due_steps, evaluation_run_id, submit_due_evaluations, submit_evaluation
from scaletrain_cli.launch.node.options import LAST_LOOK_SIGNAL
from scaletrain_cli.launch.submit import LONGEST_RUN_ID, create_run
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


@pytest.mark.parametrize("is_drill", [False, True], ids=["preflight", "drill"])
def test_a_short_run_has_no_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_drill: bool) -> None:
    monkeypatch.setenv("SCALETRAIN_RUNS", str(tmp_path))
    task = "{kind: loss, name: a, source: python-stdlib}"
    spec = load_spec(SMALL, [f"evaluation={{every: 0, tasks: [{task}]}}", "checkpoint.keep_best=a/loss"])
    followed: list[RunDir] = []
    monkeypatch.setattr(LocalBackend, "start_following_evaluations", lambda self, run: followed.append(run))
    monkeypatch.setattr(LocalBackend, "submit", lambda self, run, record: "7")
    for module in (short_jobs, drill):
        monkeypatch.setattr(module, "wait_for_end", refuse)
    if is_drill:
        small = drill.drill_spec(spec, 12)
        setup = drill.DrillSetup(tmp_path, small, make_plan(small), LocalBackend(), 0.0)
        with pytest.raises(SchedulerError):
            drill.run_drill(setup, drill.UNDISTURBED, lambda status: None)
    else:
        with pytest.raises(SchedulerError):
            short_jobs.run_preflight(spec, make_plan(spec), LocalBackend(), 0.0, lambda status: None)
    assert not followed


def test_an_evaluation_of_the_longest_id_has_a_valid_id(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalBackend, "submit", lambda self, run, record: "7")
    names = [f"{'r' * 127}{last}" for last in "ab"]
    for name in names:
        made = create_run(read_record(run).spec, read_record(run).plan, name).run
        shutil.copytree(run.checkpoints, made.checkpoints)
        (one, other) = submit_due_evaluations(made)
        assert len(one.run_id) == len(other.run_id) == LONGEST_RUN_ID
        assert one.run_id.endswith("-evaluation-00000020")
        assert evaluation_run_id(made, 20) == one.run_id
    assert len(list(run.path.parent.glob("*-evaluation-00000020"))) == 2
    assert evaluation_run_id(RunDir(run.path.with_name("r" * 108)), 20) == f"{'r' * 108}-evaluation-00000020"


def test_a_submission_that_failed_is_tried_again(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalBackend, "submit", refuse)
    with pytest.raises(SchedulerError, match="the queue is full"):
        submit_due_evaluations(run)
    assert awaited_steps(run) == [20]
    monkeypatch.setattr(LocalBackend, "submit", lambda self, run, record: "7")
    assert [one.step for one in submit_due_evaluations(run)] == [20, 40]


def test_a_step_trained_again_after_a_rollback_is_evaluated_again(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalBackend, "submit", lambda self, run, record: "7")
    first = {one.step: one.run_id for one in submit_due_evaluations(run)}
    record_rollback(run, Rollback(from_step=45, to_step=30, skip=(31, 45)))
    assert evaluation_run_id(run, 20) == first[20]
    assert evaluation_run_id(run, 40) != first[40]
    evaluation = read_evaluation(run, 40)
    assert evaluation.run_id == first[40]


def test_the_request_for_a_last_evaluation_is_kept_until_it_is_waited_for() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [LAST_LOOK_SIGNAL])
    try:
        assert not asked_for_last(0.0)
        signal.pthread_kill(threading.get_ident(), LAST_LOOK_SIGNAL)  # other threads do not block it
        assert asked_for_last(60.0)
        assert not asked_for_last(0.0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_request_for_a_last_evaluation_ends_it_after_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    looks: list[int] = []
    answers = iter([False, False, True])
    monkeypatch.setattr(evaluate, "read_record", lambda run: None)
    monkeypatch.setattr(evaluate, "require_tasks", lambda run, record: None)
    monkeypatch.setattr(evaluate, "is_over", lambda run, status: False)
    monkeypatch.setattr(evaluate, "run_status", lambda run: None)
    monkeypatch.setattr(evaluate, "submit_due_evaluations", lambda run: looks.append(1) or [])  # type: ignore[func-returns-value]
    assert not list(evaluate.follow_evaluations(RunDir(tmp_path), lambda seconds: next(answers)))
    assert len(looks) == 2
