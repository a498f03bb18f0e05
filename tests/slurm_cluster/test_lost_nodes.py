"""Nodes that a run of a stand-in for the engine loses on a real Slurm, until Slurm itself finds out that they are lost.

They are switched off, or cut off and still at work. A cluster of its own, which gives up its nodes sooner.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm_cluster.cluster import HASTY, SharedCluster
from tests.slurm_cluster.site import FOREVER, Site

pytestmark = [pytest.mark.slurm, pytest.mark.long]


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedCluster]:
    with contextlib.closing(SharedCluster(nodes=4, **HASTY)) as shared:
        yield shared


@pytest.fixture
def site(shared: SharedCluster, tmp_path: Path) -> Iterator[Site]:
    with shared.lent() as cluster:
        yield Site(cluster, tmp_path / "runs")


def test_a_node_without_network_cannot_write_to_the_checkpoints_of_the_next_attempt(site: Site) -> None:
    run_id = site.submit(FOREVER)
    before = site.trains(run_id)
    cut = before["nodes"][-1]
    first = set(site.processes(run_id))
    site.cluster.cut_node(cut)
    after = site.trains(run_id, attempt=2)
    lost = first & set(site.processes(run_id))  # still runs there, as on a machine that lost its network
    assert cut not in after["nodes"]
    assert site.ends(run_id)[0] == (1, "node")
    folders = {path.name for path in (site.runs / run_id / "checkpoints").glob("attempt-*")}
    assert "attempt-0001.tmp" not in folders
    site.cluster.node_up(cut)
    site.cancel(run_id)
    assert not lost & set(site.processes(run_id))


def test_a_node_that_is_powered_off_is_excluded_and_the_run_continues(site: Site) -> None:
    run_id = site.submit(FOREVER)
    off = site.trains(run_id)["nodes"][-1]
    site.cluster.node_down(off)
    again = site.trains(run_id, attempt=2)
    site.cluster.node_up(off)
    assert off not in again["nodes"]
    assert site.ends(run_id)[0] == (1, "node")
    assert [node["node"] for node in site.scaletrain("nodes", "list", "--json")["nodes"]] == [off]
    site.cancel(run_id)


def test_recover_resumes_a_job_lost_with_its_node_and_none_that_its_user_deletes(site: Site) -> None:
    run_id = site.submit(FOREVER, "restarts.lost=2")
    before = site.trains(run_id)
    site.cluster.run("scontrol", "update", f"jobid={before['job_id']}", "requeue=0")
    off = before["nodes"][0]  # on which the batch script runs
    site.cluster.node_down(off)
    site.cluster.wait_for_state(before["job_id"], "NODE_FAIL")
    site.wait(run_id, lambda now: now["job"]["state"] == "ended", "it is lost")
    (waiting,) = site.scaletrain("recover", "--json")["runs"]
    assert (waiting["run_id"], waiting["state"], waiting["number"], waiting["allowed"]) == (run_id, "waiting", 1, 2)
    waited = site.scaletrain("status", run_id, "--wait", "150s", "--resume", check=False)
    assert waited.returncode == 124, "it was resumed and trains"
    after = site.trains(run_id, attempt=2)
    assert after["job_id"] != before["job_id"]
    assert [event.get("automatic", 0) for event in site.events(run_id, "submitted")] == [0, 1]
    assert site.attempts(run_id)[1]["checkpoint_at_start"] >= before["last_checkpoint_step"]
    assert site.scaletrain("recover", "--json")["runs"] == []
    site.cluster.node_up(off)
    site.cluster.run("scancel", after["job_id"])
    site.wait(run_id, lambda now: now["job"]["state"] == "ended", "its user has deleted it")
    assert site.scaletrain("recover", "--json")["runs"] == []
    assert len(site.events(run_id, "submitted")) == 2


@pytest.mark.parametrize("cut", [True, False], ids=["without network", "powered off"])
def test_a_spare_node_replaces_a_lost_one_in_the_same_job_before_slurm_knows(site: Site, *, cut: bool) -> None:
    run_id = site.submit(FOREVER, "cluster.spare_nodes=1")
    before = site.trains(run_id)
    lost = site.attempts(run_id)[0]["nodes"][-1]
    (site.cluster.cut_node if cut else site.cluster.node_down)(lost)
    after = site.trains(run_id, attempt=2)
    assert after["job_id"] == before["job_id"]
    now = site.attempts(run_id)[1]["nodes"]
    assert (len(now), lost in now) == (2, False)
    assert site.ends(run_id)[0] == (1, "node")
    (event,) = site.events(run_id, "nodes-replaced")
    assert event["nodes"] == [lost]
    shown = site.cluster.run("scontrol", "show", "job", after["job_id"]).stdout
    assert "Restarts=0" in shown
    site.cluster.node_up(lost)
    site.cancel(run_id)


def test_a_job_with_spare_nodes_that_loses_its_first_node_is_requeued_by_another(site: Site) -> None:
    """Slurm keeps such a job as running, without its batch script."""
    run_id = site.submit(FOREVER, "cluster.spare_nodes=1")
    before = site.trains(run_id)
    first = before["nodes"][0]
    site.cluster.node_down(first)
    after = site.trains(run_id, attempt=2)
    site.cluster.node_up(first)
    assert (after["job_id"], first in after["nodes"]) == (before["job_id"], False)
    site.cancel(run_id)


def test_a_run_with_a_range_of_nodes_goes_on_in_its_job_without_a_lost_one(site: Site) -> None:
    """It can use 1 or 4 nodes."""
    run_id = site.submit(FOREVER, "cluster.nodes={min: 1, max: 4, grow: false}")
    before = site.trains(run_id)
    nodes = site.attempts(run_id)[0]["nodes"]
    assert len(nodes) == 4
    site.cluster.node_down(nodes[-1])
    after = site.trains(run_id, attempt=2)
    site.cluster.node_up(nodes[-1])
    assert (after["job_id"], site.attempts(run_id)[1]["nodes"]) == (before["job_id"], nodes[:1])
    assert site.ends(run_id)[0] == (1, "node")
    assert "Restarts=0" in site.cluster.run("scontrol", "show", "job", after["job_id"]).stdout
    site.cancel(run_id)
