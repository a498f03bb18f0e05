"""The example of your own training program loses no steps and runs the submitted code."""

import shutil
from pathlib import Path

import pytest

from scaletrain_cli.launch.backends.local.backend import LocalBackend
from scaletrain_cli.rundir.checkpoints import list_checkpoints, verify
from scaletrain_cli.rundir.paths import find_run
from tests.cli.command_line import PROJECT, scaletrain
from tests.drills.training_runs import Drill
from tests.launch.working_tree import WorkingTree

pytestmark = pytest.mark.drill
SHORT = ("--set", "training.steps=60", "--set", "checkpoint.every=20", "--yes")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkingTree:
    """Create a repository with the example, and make it the current folder."""
    shutil.copytree(PROJECT / "recipes/own-engine", tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    return WorkingTree(tmp_path / "mine")


def submitted(name: str) -> Drill:
    scaletrain("submit", "run.yaml", "--run-id", name, *SHORT, code=0)
    return Drill(find_run(name), LocalBackend())


@pytest.mark.long
def test_a_preempted_run_resumes_from_its_checkpoint_with_the_submitted_code(
    repository: WorkingTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    undisturbed = submitted("undisturbed")
    undisturbed.wait_for_end()
    assert undisturbed.events("finished"), undisturbed.log()

    beat = 'rank.heartbeat.beat(step, "step")'
    held = f"while step == 26 and not rank.preemption.raised:\n            time.sleep(0.01)\n        {beat}"
    program = Path("train.py").read_text().replace("import json", "import json, time").replace(beat, held)
    repository.write("train.py", program)
    drill = submitted("mine")
    drill.wait_for_step(25)
    repository.write("train.py", "raise SystemExit('not what was submitted')")
    drill.preempt()
    drill.wait_for_end()  # the supervisor brings it back by itself
    assert [event["step"] for event in drill.beginnings()] == [0, 26]
    assert drill.events("finished"), drill.log()
    assert drill.losses() == undisturbed.losses()
    assert len(drill.losses()) == 60
    assert all(verify(checkpoint) == [] for checkpoint in list_checkpoints(drill.run.checkpoints))
    left_behind = [path for path in (tmp_path / "scratch").iterdir() if "-compiled-" not in path.name]
    assert not left_behind, "only torch.compile's cache, which later runs use"
