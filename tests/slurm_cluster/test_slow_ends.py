"""Nodes that take longer to end than Slurm waits: what was recorded decides, and no node is blamed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm_cluster.cluster import HASTY, DevCluster
from tests.slurm_cluster.site import FOREVER, Site
from tests.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.long]
SRUN_WAITS_SECONDS = 30  # --wait of the job script


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Site]:
    with DevCluster.running(nodes=4, **HASTY) as cluster:
        yield Site(cluster, tmp_path / "runs")


def test_a_run_whose_first_node_ends_long_after_the_others_has_finished(hasty: Site) -> None:
    run_id = hasty.submit({"steps": 20, "checkpoint_every": 5, "linger": True})
    folder = hasty.runs / run_id / "attempts" / "0001" / "nodes"
    ended = '"ended": null'
    wait_until(lambda: any(ended not in path.read_text() for path in folder.glob("[!.]*.json")), "a node has ended")
    later = hasty.cluster.submit(f"sleep {SRUN_WAITS_SECONDS + 15}", "-N", "1", "-o/dev/null")
    hasty.cluster.wait_for(later, lambda job: job["JobState"] == "COMPLETED")
    hasty.go(run_id)
    done = hasty.wait(run_id, lambda now: now["state"] == "finished", "it finishes")
    assert (done["attempt"], hasty.ends(run_id)) == (1, [(0, "done")])
    assert hasty.scaletrain("nodes", "list", "--json")["nodes"] == []
    hasty.nothing_is_lost(run_id)


def test_a_save_that_a_preemption_without_grace_time_interrupts_is_no_lost_node(hasty: Site) -> None:
    run_id = hasty.submit({**FOREVER, "save_seconds": 300}, "cluster.slurm.partition=spot0", "restarts.node=0")
    before = hasty.trains(run_id)
    held = ("-N", "2", "-w", ",".join(before["nodes"]), "--exclusive", "-o/dev/null")
    urgent = hasty.cluster.submit("sleep 300", "-p", "high", *held)
    after = hasty.trains(run_id, attempt=2)
    assert (after["job_id"], hasty.ends(run_id)) == (before["job_id"], [(1, "out-of-grace")])
    assert hasty.scaletrain("nodes", "list", "--json")["nodes"] == []
    first, second = hasty.attempts(run_id)
    assert first["ended"] < second["started"]
    hasty.cluster.run("scancel", urgent)
    hasty.cluster.run("scancel", after["job_id"])
    hasty.wait(run_id, lambda now: now["state"] in ("cancelled", "failed", "preempted"), "it has ended")
