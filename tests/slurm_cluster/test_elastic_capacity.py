"""A run of the real engine whose number of nodes follows the capacity of a real Slurm, without a person."""

import os
import signal
from pathlib import Path

import pytest

from scaletrain_cli.launch.attempts import read_attempts
from scaletrain_cli.launch.node.record import read_node_records
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_record, revisions
from tests.slurm_cluster.cluster import DevCluster
from tests.slurm_cluster.site import FOREVER, Site
from tests.slurm_cluster.test_a_run_on_slurm import HOSTILE, TINY, Login, curves, ends, events

pytestmark = [pytest.mark.slurm, pytest.mark.long]
SAVED_EVERY = 10
LOSS_TOLERANCE = 1e-5  # of sums in another order, as for a resized run
RUN = (
    *TINY,
    f"checkpoint.every={SAVED_EVERY}",
    "training.optimizer.lr=1e-4",  # lower than in the recipe: differences of sums do not grow within the test
    "training.schedule={name: constant, warmup_steps: 0}",
    *("training.global_batch_size=12", "training.micro_batch_size=1"),
)
ELASTIC = (
    *("cluster.scheduler=slurm", "cluster.gpus_per_node=1"),
    "cluster.nodes={min: 2, max: 4, check_every: 2s, grow_every: 1s}",
    "cluster.slurm={partition: main, time: 30m, memory_per_node: 2GB}",
)
# Slow enough that the steps of a run last as long as its restarts.
SLOW = "env.SCALETRAIN_FAULT=slow-rank rank=0 seconds=0.3"


@pytest.fixture
def login(slurm: DevCluster, tmp_path: Path) -> Login:
    return Login(slurm, tmp_path / HOSTILE)


def sizes(run_dir: str) -> list[tuple[int, int]]:
    return [(event["before"], event["nodes"]) for event in events(run_dir, "resized")]


def losses(run_dir: str) -> dict[int, float]:
    return {step: value for (step, name), value in curves(run_dir).items() if name == "loss"}


def test_nodes_that_no_size_uses_are_returned_to_slurm(site: Site) -> None:
    """Three nodes are free, and the run can use 1, 4 or 8: it trains on one and returns the others.

    Eight nodes are more than the partition has. The engine is a stand-in.
    """
    site.cluster.run("scontrol", "update", "nodename=n4", "state=drain", "reason=test")
    nodes = "cluster.nodes={min: 1, max: 8, grow: false}"
    run_id = site.submit(FOREVER, nodes, "cluster.slurm.partition=main")
    now = site.trains(run_id)
    assert (now["nodes"], now["planned_nodes"], now["sizes"]) == (["n1"], 1, [1, 4, 8])
    states = site.cluster.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N %t").stdout.splitlines()
    assert {"n2 idle", "n3 idle"} <= set(states)
    assert [(event["before"], event["nodes"]) for event in site.events(run_id, "resized")] == [(8, 1)]
    site.cluster.run("scontrol", "update", "nodename=n4", "state=resume")
    site.cluster.run("scontrol", "requeue", now["job_id"])
    again = site.trains(run_id, attempt=2)
    assert again["nodes"] == ["n1", "n2", "n3", "n4"], "the request of the job is still the whole range"
    site.cancel(run_id)


def test_a_run_continues_on_the_nodes_that_are_left_and_returns_to_all_when_they_are_back(login: Login) -> None:
    """4 nodes, one of which is drained; a rank dies: 3 nodes; all 4 again, in the same job without a requeue."""
    cluster = login.cluster
    run_id = login.submit(*RUN, *ELASTIC, SLOW)
    before = login.wait(run_id, lambda now: bool(now["last_checkpoint_step"]))
    run = RunDir(Path(before["run_dir"]))
    assert before["nodes"] == ["n1", "n2", "n3", "n4"]
    cluster.run("scontrol", "update", "nodename=n4", "state=drain", "reason=test")
    os.kill(read_node_records(run, 1)[1].ranks[0].pid, signal.SIGKILL)
    fewer = login.wait_for_steps(run_id, 2, more=5)
    assert [attempt.nodes for attempt in read_attempts(run)][1] == ("n1", "n2", "n3")
    assert cluster.job(fewer["job_id"])["Restarts"] == "0"
    assert sizes(fewer["run_dir"]) == [(4, 3)]
    assert read_record(run).plan.layout.world_size == 3

    cluster.run("scontrol", "update", "nodename=n4", "state=resume")
    again = login.wait_for_steps(run_id, 3, more=SAVED_EVERY + 5)
    assert again["nodes"] == ["n1", "n2", "n3", "n4"]
    assert cluster.job(again["job_id"])["Restarts"] == "0"
    assert sizes(again["run_dir"]) == [(4, 3), (3, 4)]
    assert revisions(run) == [1, 2]
    assert ends(again["run_dir"])[1] == (75, "resize")
    assert [event["requeue"] for event in events(again["run_dir"], "attempt-ended")][1]
    login.scaletrain("cancel", run_id, "--yes")
    login.wait(run_id, lambda now: now["state"] == "cancelled", "cancelled")

    disturbed = losses(again["run_dir"])
    undisturbed = login.submit(*RUN, "cluster.gpus_per_node=2")  # of this machine
    whole = login.wait(undisturbed, lambda now: (now["step"] or 0) >= max(disturbed))
    login.scaletrain("cancel", undisturbed, "--yes")
    login.wait(undisturbed, lambda now: now["state"] == "cancelled", "cancelled")
    expected = losses(whole["run_dir"])
    assert sorted(disturbed) == list(range(1, max(disturbed) + 1))
    assert disturbed == pytest.approx({step: expected[step] for step in disturbed}, rel=LOSS_TOLERANCE)
