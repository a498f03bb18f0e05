"""The main job on a real Slurm of four nodes: submitted, preempted, requeued, resumed elsewhere, finished, cancelled."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm_cluster.cluster import DevCluster

pytestmark = pytest.mark.slurm
RECIPE = Path(__file__).parents[2] / "recipes" / "llama-10m-cpu.yaml"
ON_SLURM = (
    "cluster.scheduler=slurm",
    "cluster.nodes=2",
    "cluster.gpus_per_node=1",
    "cluster.slurm={partition: spot, time: 30m, memory_per_node: 2GB}",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with DevCluster.running(nodes=4, grace_seconds=60) as cluster:
        yield cluster


class Login:
    """A user on the login node: the command line with this cluster's Slurm."""

    def __init__(self, cluster: DevCluster, runs: Path) -> None:
        self.cluster = cluster
        cluster.environment |= {"SCALETRAIN_RUNS": str(runs), "PYTHONPATH": os.getcwd()}

    def scaletrain(self, *arguments: str, sets: tuple[str, ...] = (), check: bool = True) -> Any:
        overrides = [word for override in sets for word in ("--set", override)]
        done = self.cluster.run(sys.executable, "-m", "scaletrain_cli", *arguments, *overrides, check=check)
        return json.loads(done.stdout) if "--json" in arguments else done

    def submit(self, *sets: str) -> str:
        return str(self.scaletrain("submit", str(RECIPE), "--yes", "--json", sets=sets)["run_id"])

    def status(self, run_id: str) -> dict[str, Any]:
        return dict(self.scaletrain("status", run_id, "--json"))

    def wait(self, run_id: str, reached: Callable[[dict[str, Any]], bool], seconds: float = 240) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while not reached(now := self.status(run_id)):
            assert time.monotonic() < deadline, now
            assert now["state"] not in ("failed", "cancelled", "finished"), now
            time.sleep(0.5)
        return now


@pytest.fixture
def login(cluster: DevCluster, tmp_path: Path) -> Login:
    return Login(cluster, tmp_path / "the runs")


def losses(run_dir: str) -> list[float]:
    lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in sorted(lines, key=lambda line: line["step"])]


def test_a_preempted_run_goes_on_elsewhere_and_equals_the_local_run(login: Login) -> None:
    """Preempted by a job of higher priority that keeps the nodes; no step lost, not a bit different."""
    short = ("training.steps=24", "evaluation.every=12", "checkpoint.every=10")
    run_id = login.submit(*ON_SLURM, *short)
    before = login.wait(run_id, lambda now: now["step"] >= 6)
    assert len(before["nodes"]) == 2
    urgent = login.cluster.submit("sleep 600", "-p", "high", "-N", "2", "--exclusive", "-w", ",".join(before["nodes"]))
    after = login.wait(run_id, lambda now: now["attempt"] == 2 and now["step"] >= 12)
    assert not set(after["nodes"]) & set(before["nodes"])
    done = login.wait(run_id, lambda now: now["state"] == "finished")
    login.cluster.run("scancel", urgent)
    assert done["steps_lost_total"] == 0
    assert done["restarts"] == 1

    local = login.submit("cluster.gpus_per_node=2", *short)
    undisturbed = login.wait(local, lambda now: now["state"] == "finished")
    assert losses(done["run_dir"]) == losses(undisturbed["run_dir"])
    assert done["validation_loss"] == undisturbed["validation_loss"]


def test_a_cancelled_run_saves_its_state_and_can_be_resumed(login: Login) -> None:
    run_id = login.submit(*ON_SLURM, "training.steps=16", "evaluation.every=0", "checkpoint.every=100")
    login.wait(run_id, lambda now: now["step"] >= 3)
    login.scaletrain("cancel", run_id)
    deadline = time.monotonic() + 60
    while (now := login.status(run_id))["state"] != "cancelled":
        assert time.monotonic() < deadline, now
        time.sleep(0.5)
    assert now["last_checkpoint_step"] == now["step"] >= 3
    login.scaletrain("resume", run_id, "--yes")
    done = login.wait(run_id, lambda now: now["state"] == "finished")
    assert done["steps_lost_total"] == 0


def test_a_rank_killed_on_one_node_ends_the_other_and_the_run_restarts(login: Login) -> None:
    run_id = login.submit(
        *ON_SLURM,
        "training.steps=14",
        "evaluation.every=0",
        "checkpoint.every=5",
        "env.SCALETRAIN_FAULT=sigkill rank=1 step=8 attempt=1",
    )
    done = login.wait(run_id, lambda now: now["state"] == "finished")
    events = [json.loads(line) for line in (Path(done["run_dir"]) / "events.jsonl").read_text().splitlines()]
    ended = [(event["exit_code"], event["reason"]) for event in events if event["event"] == "attempt-ended"]
    assert ended == [(1, "killed"), (0, "done")]
    assert done["steps_lost_total"] == 2


def test_what_the_cluster_cannot_give_is_refused_before_anything_is_queued(login: Login, tmp_path: Path) -> None:
    sets = (*ON_SLURM, "cluster.slurm.partition=nowhere")
    refused = login.scaletrain("submit", str(RECIPE), "--yes", sets=sets, check=False)
    assert refused.returncode == 4
    assert "nowhere" in refused.stderr or "partition" in refused.stderr
    assert not list((tmp_path / "the runs").glob("*/run.json"))
