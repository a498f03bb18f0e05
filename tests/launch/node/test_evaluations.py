"""The agent of the first node has evaluations submitted, and does not keep its nodes for them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.launch.conftest import MadeRun, MakeRun, StartAgent
from tests.launch.test_evaluate import TASKS
from tests.launch.test_resume import commit

MOST_SECONDS = 15.0  # the agent waits 5 s for the process that submits


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
def test_the_last_checkpoint_is_evaluated_although_training_has_ended(
    made: MadeRun, start_agent: StartAgent, tmp_path: Path
) -> None:
    for name in ("squeue", "sacct", "scontrol", "sinfo"):
        site(tmp_path, name, "exit 0")
    site(tmp_path, "sbatch", "echo 4711")
    agent = start_agent(made)
    assert agent.wait() == 0, agent.errors
    (submitted,) = made.events("evaluation-submitted")
    assert (submitted["step"], submitted["job_id"]) == (20, "4711")
    assert not made.events("evaluation-not-submitted")


def test_a_scheduler_that_does_not_answer_keeps_the_nodes_for_a_few_seconds_only(
    made: MadeRun, start_agent: StartAgent, tmp_path: Path
) -> None:
    for name in ("squeue", "sacct", "scontrol", "sinfo", "sbatch"):
        site(tmp_path, name, "sleep 120")
    agent = start_agent(made)
    agent.wait_until_up()
    begun = time.monotonic()
    assert agent.wait() == 0, agent.errors
    assert time.monotonic() - begun < MOST_SECONDS
    (left,) = made.events("evaluation-not-submitted")
    assert left["params"] == {"run": made.run.run_id, "steps": [20]}
    assert f"`scaletrain evaluation submit {made.run.run_id}`" in left["message"]
