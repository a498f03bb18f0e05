"""Evaluations of checkpoints on a real Slurm: jobs of their own that the training job submits and never waits for."""

import json
from pathlib import Path

import pytest

from scaletrain_cli.rundir.evaluations import Evaluation, read_evaluations
from scaletrain_cli.rundir.paths import RunDir
from tests.slurm_cluster.cluster import DevCluster
from tests.slurm_cluster.test_a_run_on_slurm import ON_SLURM, SAVED_EVERY, TINY, Login
from tests.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.long]


def test_the_job_submits_evaluations_and_trains_while_they_run(slurm: DevCluster, tmp_path: Path) -> None:
    text = tmp_path / "held-out.txt"
    text.write_text("def main():\n    return 0\n" * 50)
    login = Login(slurm, tmp_path / "runs")
    every = 2 * SAVED_EVERY
    run_id = login.submit(
        *ON_SLURM,
        *TINY,
        f"evaluation.tasks=[{{kind: loss, name: code, source: {text}}}]",
        f"evaluation.job={{every: {every}, cluster: {{slurm: {{partition: main, exclude: n1}}}}}}",
        "checkpoint.keep=2",
        "checkpoint.keep_best=code/loss",
    )
    run = tmp_path / "runs" / run_id
    # Steps may be faster than evaluations, and only the latest two checkpoints wait for theirs: which one is open.
    wait_until(lambda: done(run), "a checkpoint is evaluated")

    evaluated = done(run)[0]
    assert evaluated.step % every == 0
    assert evaluated.run_id == f"{run_id}-evaluation-{evaluated.step:08d}"
    status = login.status(run_id)
    assert status["state"] == "running"
    assert len(status["attempts"]) == 1
    assert status["step"] > evaluated.step
    login.wait(evaluated.run_id, lambda now: now["state"] == "finished", "finished")
    assert losses_by_step(run)[evaluated.step] == evaluated.metrics["code/loss"]
    wait_until(lambda: len(losses_by_step(run)) >= 2, "so is a later one")
    login.scaletrain("cancel", run_id, "--yes")
    login.wait(run_id, lambda now: now["state"] == "cancelled", "cancelled")
    kept = {int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*")}
    losses = losses_by_step(run)
    assert min(losses, key=losses.__getitem__) in kept, (kept, losses)


def done(run: Path) -> list[Evaluation]:
    return [one for one in read_evaluations(RunDir(run)) if one.state == "done"]


def losses_by_step(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["code/loss"] for line in lines if "code/loss" in line}
