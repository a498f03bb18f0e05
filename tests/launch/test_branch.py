"""A new run from a checkpoint of another one: what it inherits, and what is refused before anything is created."""

import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

from scaletrain_cli.api import PreparedSubmission, prepare_branch
from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch import branch as branching
from scaletrain_cli.launch.branch import find_branch
from scaletrain_cli.launch.status import run_status
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.rundir.checkpoints import latest_valid
from scaletrain_cli.rundir.journal import has_committed, read_events, read_metrics, read_rollbacks, record_event
from scaletrain_cli.rundir.paths import RunDir, list_runs
from scaletrain_cli.rundir.record import BranchPoint, read_record
from scaletrain_cli.worker.checkpoint_commit import delete_checkpoint
from tests.launch.conftest import MadeRun
from tests.launch.test_resizing import ended_run
from tests.launch.test_resume import Cluster, commit, log_steps
from tests.launch.working_tree import WorkingTree


@pytest.fixture
def made() -> MadeRun:
    """A run with checkpoints of steps 10, 15, a rollback from 12 to 10 before the second one, and 18 steps."""
    made = ended_run("training.schedule.name=constant")
    log_steps(made, *range(1, 13))
    record_event(made.run, "rolled-back", from_step=12, to_step=10, skip=[11, 12], lost_steps=2, cause="nan")
    log_steps(made, *range(11, 16))
    commit(made, 15)
    log_steps(made, 16, 17, 18)
    record_event(made.run, "rolled-back", from_step=18, to_step=15, skip=[18, 20], lost_steps=3, cause="nan")
    return made


def branch(made: MadeRun, *overrides: str, step: int | None = None, run_id: str = "new") -> RunDir:
    prepared = prepare_branch(made.run.path, run_id, overrides, step=step)
    return create(prepared)


def create(prepared: PreparedSubmission) -> RunDir:
    return create_run(
        prepared.spec, prepared.plan, prepared.run_id, snapshot=prepared.snapshot, branch=prepared.branch
    ).run


def snapshot_of(run: RunDir) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def test_a_branch_has_the_checkpoint_and_the_history_up_to_it(made: MadeRun) -> None:
    before = snapshot_of(made.run)
    run = branch(made, "training.steps=30", step=15)
    checkpoint, passed_over = latest_valid(run.checkpoints)
    assert (checkpoint.step, passed_over) == (15, [])
    shard = checkpoint.path / "shard"
    assert shard.stat().st_ino == (made.run.checkpoints / "step-00000015" / "shard").stat().st_ino, "a hard link"
    assert [line["step"] for line in read_metrics(run)] == list(range(1, 16))
    assert [rollback.skip for rollback in read_rollbacks(run)] == [(11, 12)], "the later one is not part of it"
    assert has_committed(run), "an attempt that finds no checkpoint does not start over"
    record = read_record(run)
    assert record.branch_of == BranchPoint("mine", str(made.run.path), 15)
    assert (record.spec.total_steps, record.wandb_run_id != made.record.wandb_run_id) == (30, True)
    assert record.working_folder == made.record.working_folder
    (event,) = (event for event in read_events(run) if event["event"] == "branched")
    assert (event["from_run"], event["step"]) == ("mine", 15)
    status = run_status(run, Cluster()).to_json()
    assert (status["branch_of"]["step"], status["steps_lost_total"], status["restarts"]) == (15, 0, 0)
    assert snapshot_of(made.run) == before


def test_a_checkpoint_that_the_other_run_deletes_stays_in_the_branch(made: MadeRun) -> None:
    run = branch(made, step=10)
    delete_checkpoint(made.run.checkpoints / "step-00000010")
    checkpoint, _ = latest_valid(run.checkpoints)
    assert checkpoint.step == 10


def test_where_files_cannot_have_two_names_they_are_copied(made: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    checkpoint, _ = latest_valid(branch(made, step=10).checkpoints)
    assert (checkpoint.path / "shard").stat().st_nlink == 1


def test_a_step_without_a_checkpoint_is_refused_with_those_that_are_there(made: MadeRun) -> None:
    with pytest.raises(UsageError, match=r"no checkpoint of step 12; there are those of steps 10, 15"):
        branch(made, step=12)
    assert [run.run_id for run in list_runs()] == ["mine"]


def test_the_latest_valid_checkpoint_is_the_default(made: MadeRun) -> None:
    (made.run.checkpoints / "step-00000015" / "shard").write_bytes(b"y" * 100)
    found = find_branch(made.run, made.record, None)
    assert found.point.step == 10
    assert found.passed_over == ("step-00000015/shard: content does not match the recorded hash",)
    with pytest.raises(UsageError, match="step 15 is not valid: shard: content does not match"):
        branch(made, step=15)


def test_a_branch_of_a_complete_run_needs_more_steps(made: MadeRun) -> None:
    commit(made, 20)
    with pytest.raises(UsageError, match=r"step 20 of mine is the last of 20 steps\. Add --set training\.steps="):
        branch(made)
    assert read_record(branch(made, "training.steps=24")).spec.total_steps == 24


def test_fewer_steps_than_the_other_run_has_trained_are_enough_for_an_earlier_checkpoint(made: MadeRun) -> None:
    assert read_record(branch(made, "training.steps=12", "name=short", step=10)).spec.name == "short"
    with pytest.raises(UsageError):
        branch(made, "training.steps=10", step=10, run_id="none-left")
    with pytest.raises(UsageError):
        branch(made, "training.seed=1", step=10, run_id="another-seed")


def test_a_branch_that_fails_leaves_nothing(made: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare_branch(made.run.path, "new", step=10)
    delete_checkpoint(made.run.checkpoints / "step-00000010")  # by the retention of the other run
    before = sorted(made.run.path.parent.iterdir())
    with pytest.raises(UsageError, match="has deleted its checkpoint of step 10 meanwhile"):
        create(prepared)
    prepared = prepare_branch(made.run.path, "new", step=15)
    monkeypatch.setattr(branching, "record_event", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        create(prepared)
    assert sorted(made.run.path.parent.iterdir()) == before


def test_the_same_branch_is_created_once_and_another_one_needs_another_id(made: MadeRun) -> None:
    first = create_run_of(made, step=10)
    assert (first, create_run_of(made, step=10)) == (True, False)
    with pytest.raises(UsageError, match="new exists and began in another way, or from another checkpoint"):
        create_run_of(made, step=15)


def create_run_of(made: MadeRun, step: int) -> bool:
    prepared = prepare_branch(made.run.path, "new", step=step)
    return create_run(prepared.spec, prepared.plan, "new", branch=prepared.branch).created


def test_checkpoints_outside_the_run_directory_are_found_by_the_branch(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    made = ended_run(f"checkpoint.dir={folder}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    made.run.checkpoints.rename(folder / "mine")
    run = branch(made, step=10)
    assert not run.checkpoints.exists()
    assert [path.name for path in (folder / "new").iterdir()] == ["step-00000010"]
    run.path.rename(tmp_path / "killed before it was made")
    assert branch(made, step=10) == run, "of the same checkpoint"
    run.path.rename(tmp_path / "removed")
    commit(MadeRun(RunDir(tmp_path), made.record), 11)
    (tmp_path / "checkpoints" / "step-00000011").rename(folder / "new" / "step-00000011")
    with pytest.raises(UsageError, match="of the new run has checkpoints already"):
        branch(made, step=10)


def test_a_branch_has_the_code_of_the_other_run_unless_it_is_to_have_newer(tree: WorkingTree) -> None:
    made = ended_run(f"code={{path: {tree.folder}, engine: train}}")
    tree.write("train.py", "print('two')\n")
    kept, newer = branch(made), create(prepare_branch(made.run.path, "newer", new_code=True))
    assert read_record(kept).code == made.record.code
    assert read_record(newer).code != made.record.code
    for run in (kept, newer):
        code = read_record(run).code
        assert (run.path / "code" / f"{code.name}.tar.gz").is_file()


def test_a_run_that_stopped_early_at_the_checkpoint_needs_more_patience() -> None:
    made = ended_run("training.early_stopping.patience=2", "evaluation.every=5")
    record_event(made.run, "stopped-early", step=10)
    with pytest.raises(UsageError, match="stopped early"):
        branch(made, "training.steps=40")
    patient = branch(made, "training.steps=40", "training.early_stopping.patience=0")
    assert read_record(patient).spec.training.early_stopping.patience == 0
