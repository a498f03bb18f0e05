"""What a real Slurm does to runs, fast: the launcher, the agents and the scheduler are real, the engine is a stand-in.

The stand-in keeps the engine's contract and commits real checkpoints; what the real engine makes of the same is in
test_a_run_on_slurm.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.conftest import PROJECT
from tests.slurm_cluster.cluster import DevCluster

pytestmark = pytest.mark.slurm

FOREVER = {"steps": 100_000, "step_seconds": 0.05, "checkpoint_every": 5}


@pytest.fixture(scope="module")
def shared() -> Iterator[DevCluster]:
    with DevCluster.running(nodes=4, grace_seconds=20, kill_wait_seconds=10, slurmd_timeout_seconds=5) as cluster:
        yield cluster


class Site:
    """A user of the cluster, with runs of a stand-in on two nodes."""

    def __init__(self, cluster: DevCluster, runs: Path) -> None:
        self.cluster, self.runs = cluster, runs
        cluster.environment |= {"SCALETRAIN_RUNS": str(runs), "PYTHONPATH": str(PROJECT)}

    def scaletrain(self, *arguments: str, check: bool = True) -> Any:
        done = self.cluster.run(sys.executable, "-m", "scaletrain_cli", *arguments, check=check)
        return json.loads(done.stdout) if "--json" in arguments and check else done

    def submit(self, fake: dict[str, Any], *settings: str, run_id: str = "life", check: bool = True) -> Any:
        pairs = (
            *("cluster.scheduler=slurm", "cluster.nodes=2", "cluster.gpus_per_node=1", "cluster.grace_seconds=15"),
            *("training.micro_batch_size=1", "env.SCALETRAIN_ENGINE=tests.launch.fake_engine"),
            f"env.FAKE={json.dumps(json.dumps(fake))}",
            *settings,
        )
        sets = [word for pair in pairs for word in ("--set", pair)]
        spec = str(PROJECT / "tests" / "cli" / "small.yaml")
        done = self.scaletrain("submit", spec, "--run-id", run_id, "--yes", "--json", *sets, check=check)
        return done["run_id"] if check else done

    def status(self, run_id: str) -> dict[str, Any]:
        return dict(self.scaletrain("status", run_id, "--json"))

    def wait(
        self, run_id: str, reached: Callable[[dict[str, Any]], bool], what: str, seconds: float = 90
    ) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while not reached(now := self.status(run_id)):
            assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}; {now}"
            time.sleep(0.3)
        return now

    def trains(self, run_id: str, attempt: int = 1) -> dict[str, Any]:
        """Once the attempt has committed something of its own."""
        return self.wait(
            run_id,
            lambda now: now["attempt"] == attempt and (now["last_checkpoint_step"] or 0) > self.began_at(run_id),
            f"attempt {attempt} saves",
        )

    def began_at(self, run_id: str) -> int:
        """The newest checkpoint that the newest attempt found."""
        newest = max((self.runs / run_id / "attempts").glob("*/attempt.json"), default=None)
        return (json.loads(newest.read_text())["checkpoint_at_start"] or 0) if newest else 0

    def ends(self, run_id: str) -> list[tuple[int, str]]:
        lines = [json.loads(line) for line in (self.runs / run_id / "events.jsonl").read_text().splitlines()]
        return [(line["exit_code"], line["reason"]) for line in lines if line["event"] == "attempt-ended"]

    def committed(self, run_id: str) -> set[str]:
        return {path.name for path in (self.runs / run_id / "checkpoints").glob("step-????????")}

    def processes(self, run_id: str) -> list[str]:
        """Of the run, on all nodes: they are this machine's."""
        found = self.cluster.run("pgrep", "-f", "--", f"(node_agent|fake_engine) .*{run_id}", check=False)
        return str(found.stdout).split()

    def nothing_is_left(self, run_id: str) -> None:
        deadline = time.monotonic() + 30
        while self.processes(run_id):
            assert time.monotonic() < deadline, self.cluster.run("pgrep", "-fa", run_id, check=False).stdout
            time.sleep(0.2)


@pytest.fixture
def site(shared: DevCluster, tmp_path: Path) -> Iterator[Site]:
    yield Site(shared, tmp_path / "runs")
    shared.run("scancel", "--me")
    deadline = time.monotonic() + 60
    while shared.run("squeue", "-h", "--me").stdout:
        assert time.monotonic() < deadline
        time.sleep(0.3)


def test_a_controller_that_restarts_costs_nothing_and_the_end_is_told(site: Site) -> None:
    run_id = site.submit({"steps": 150, "step_seconds": 0.05, "checkpoint_every": 5})
    site.trains(run_id)
    site.cluster.control("controller-down")
    silent = site.status(run_id)
    assert silent["state"] in ("unknown", "running")
    assert silent["step"] > 0
    site.cluster.control("controller-up")
    done = site.wait(run_id, lambda now: now["state"] == "finished", "it finishes")
    assert (done["attempt"], site.ends(run_id)) == (1, [(0, "done")])
    site.nothing_is_left(run_id)


def test_a_run_that_ends_while_the_controller_is_down_is_requeued_once_it_is_back(site: Site) -> None:
    fake = {"steps": 40, "step_seconds": 0.05, "checkpoint_every": 5, "die": {"1:1": 7}, "die_at": 12}
    run_id = site.submit(fake, "cluster.slurm.partition=main")
    site.trains(run_id)
    site.cluster.control("controller-down")
    deadline = time.monotonic() + 60
    while not site.ends(run_id):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    site.cluster.control("controller-up")
    done = site.wait(run_id, lambda now: now["state"] == "finished", "the second attempt finishes", 120)
    assert [reason for _, reason in site.ends(run_id)] == ["crash", "done"]
    assert done["attempt"] == 2
    site.nothing_is_left(run_id)


@pytest.mark.long
def test_a_controller_that_is_down_at_submission_is_said_so_and_nothing_is_left(site: Site) -> None:
    site.cluster.control("controller-down")
    refused = site.submit(FOREVER, run_id="refused", check=False)
    site.cluster.control("controller-up")
    assert refused.returncode == 4, refused.stderr
    assert "slurm" in refused.stderr.lower()
    assert not list(site.runs.glob("*/run.json"))
    # By name: a controller that was killed may bring back jobs that had ended just before.
    assert "refused" not in site.cluster.run("squeue", "-h", "--me", "-o", "%j").stdout


def test_a_node_whose_network_is_cut_cannot_touch_the_checkpoints_of_the_next_attempt(site: Site) -> None:
    run_id = site.submit(FOREVER)
    before = site.trains(run_id)
    cut = before["nodes"][-1]
    first = set(site.processes(run_id))
    site.cluster.cut_node(cut)
    after = site.trains(run_id, attempt=2)
    lost = first & set(site.processes(run_id))  # goes on behind the cut, as on a machine that lost its network
    assert cut not in after["nodes"]
    assert site.ends(run_id)[0] == (1, "node")
    folders = {path.name for path in (site.runs / run_id / "checkpoints").glob("attempt-*")}
    assert "attempt-0001.tmp" not in folders
    kept = site.committed(run_id)
    site.cluster.node_up(cut)
    assert kept  # what the second attempt has committed stays while the first one's leftovers go
    site.scaletrain("cancel", run_id, "--yes")
    cancelled = site.wait(run_id, lambda now: now["state"] == "cancelled", "it is cancelled")
    assert cancelled["last_checkpoint_step"] == cancelled["step"]
    site.nothing_is_left(run_id)
    assert not lost & set(site.processes(run_id))


def test_a_run_that_is_cancelled_during_a_save_commits_it_and_leaves_nothing(site: Site) -> None:
    run_id = site.submit({**FOREVER, "save_seconds": 2})
    site.trains(run_id)
    site.scaletrain("cancel", run_id, "--yes")
    site.scaletrain("cancel", run_id, "--yes")  # and once more, in the midst of it
    ended = site.wait(run_id, lambda now: now["state"] == "cancelled", "it is cancelled")
    assert ended["last_checkpoint_step"] == ended["step"]
    assert site.ends(run_id) == [(75, "cancelled")]
    site.nothing_is_left(run_id)


def test_a_run_that_is_preempted_by_its_partition_goes_on_elsewhere_with_no_step_lost(site: Site) -> None:
    run_id = site.submit(FOREVER, "cluster.slurm.partition=spot")
    job_id = site.trains(run_id)["job_id"]
    urgent = site.cluster.submit("sleep 300", "-p", "high", "-N", "4", "--exclusive")
    site.cluster.wait_for(job_id, lambda job: job["Restarts"] == "1", 90)
    site.cluster.run("scancel", urgent)
    again = site.trains(run_id, attempt=2)
    assert site.ends(run_id) == [(75, "preempted")]
    assert again["job_id"] == job_id
    assert again["steps_lost_total"] == 0


@pytest.mark.long
def test_a_node_that_is_powered_off_is_left_out_and_the_run_goes_on(site: Site) -> None:
    run_id = site.submit(FOREVER)
    off = site.trains(run_id)["nodes"][-1]
    site.cluster.node_down(off)
    again = site.trains(run_id, attempt=2)
    site.cluster.node_up(off)
    assert off not in again["nodes"]
    assert site.ends(run_id)[0] == (1, "node")
    assert [node["node"] for node in site.scaletrain("nodes", "list", "--json")["nodes"]] == [off]
    site.scaletrain("nodes", "clear")
