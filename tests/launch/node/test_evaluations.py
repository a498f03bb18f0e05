"""The agent of the first node has evaluations submitted, and does not keep its nodes for them."""

import os
from pathlib import Path

import pytest

from tests.launch.conftest import MadeRun, MakeRun, StartAgent
from tests.launch.test_evaluate import TASKS
from tests.launch.test_resume import commit


@pytest.fixture
def made(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeRun:
    """A run with the checkpoint 20, on a site whose sbatch does what the file ``sbatch`` says."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    made = make_run(TASKS, "cluster.scheduler=slurm", steps=3)
    commit(made, 20)
    return made


def site(tmp_path: Path, name: str, script: str) -> None:
    program = tmp_path / "bin" / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


@pytest.mark.long
def test_the_last_checkpoint_is_evaluated_at_the_end(made: MadeRun, start_agent: StartAgent, tmp_path: Path) -> None:
    for name in ("squeue", "sacct", "scontrol", "sinfo"):
        site(tmp_path, name, "exit 0")
    site(tmp_path, "sbatch", "echo 4711")
    agent = start_agent(made, module=("tests.launch.node.patient_agent",))
    assert agent.wait() == 0, agent.errors
    (submitted,) = made.events("evaluation-submitted")
    assert (submitted["step"], submitted["job_id"]) == (20, "4711")
    assert not made.events("evaluation-not-submitted")


def test_a_silent_scheduler_does_not_keep_the_nodes(made: MadeRun, start_agent: StartAgent, tmp_path: Path) -> None:
    for name in ("squeue", "sacct", "scontrol", "sinfo", "sbatch"):
        site(tmp_path, name, "exec sleep 100000")
    agent = start_agent(made)
    assert agent.wait() == 0, agent.errors
    # The process may have noted before that a command of Slurm did not answer.
    (left,) = [event for event in made.events("evaluation-not-submitted") if event["code"] == "runs.evaluations-left"]
    assert left["params"] == {"run": made.run.run_id, "steps": [20]}
    assert f"`scaletrain evaluation submit {made.run.run_id}`" in left["message"]
