"""Runs of a fake engine on a real Slurm with accounting: preempted by a QOS, refused by a quota, waiting for one."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm_cluster.cluster import DevCluster, SharedCluster
from tests.slurm_cluster.site import FOREVER, Site

pytestmark = pytest.mark.slurm
CAPPED = "cluster.slurm.qos=two"


@pytest.fixture
def site(accounting: DevCluster, tmp_path: Path) -> Site:
    return Site(accounting, tmp_path / "runs")


def test_a_quota_in_use_is_a_note_and_the_run_starts_once_it_is_free(site: Site) -> None:
    holder = site.cluster.submit("sleep 300", "-A", "lab", "-q", "two", "-N", "1", "-o/dev/null")
    site.cluster.wait_for_state(holder, "RUNNING")
    waits = site.try_to_submit({"steps": 20, "checkpoint_every": 5}, CAPPED)
    assert waits.returncode == 0, waits.stderr
    assert "QOS two has 1 of its 2 CPUs in use (GrpTRES): the job waits for 2." in waits.stderr
    assert site.status("life")["state"] == "queued"
    assert not site.processes("life")
    site.cluster.run("scancel", holder)
    done = site.wait("life", lambda now: now["state"] == "finished", "it finishes")
    assert (done["attempt"], done["last_checkpoint_step"], site.ends("life")) == (1, 20, [(0, "done")])
    site.nothing_is_lost("life")


@pytest.fixture(scope="module")
def preempting_by_qos() -> Iterator[SharedCluster]:
    def prepare(cluster: DevCluster) -> None:
        for words in (
            "add qos scavenger Priority=0 PreemptMode=requeue GraceTime=60",
            "add qos prod Priority=1000 Preempt=scavenger",
            "modify account lab set QOS+=scavenger,prod",
        ):
            cluster.run("sacctmgr", "-i", *words.split())

    conf = ["PreemptType=preempt/qos", "PriorityWeightQOS=1000"]
    with contextlib.closing(SharedCluster("--accounting", nodes=4, conf=conf, prepare=prepare)) as shared:
        yield shared


@pytest.mark.long
def test_a_run_preempted_by_a_higher_qos_loses_no_step(preempting_by_qos: SharedCluster, tmp_path: Path) -> None:
    with preempting_by_qos.lent() as cluster:
        site = Site(cluster, tmp_path / "runs")
        run_id = site.submit(FOREVER, "cluster.slurm.qos=scavenger")
        before = site.trains(run_id)
        script = (site.runs / run_id / "job.sh").read_text()
        said = "# Preemption: by QOS. Jobs of scavenger are preempted by prod: PreemptMode=REQUEUE. SIGTERM to"
        assert said in script
        urgent = cluster.submit("sleep 300", "-q", "prod", "-A", "lab", "-N", "4", "--exclusive", "-o/dev/null")
        cluster.wait_for_state(urgent, "RUNNING")
        cluster.run("scancel", urgent)
        after = site.trains(run_id, attempt=2)
        assert after["job_id"] == before["job_id"]
        site.cancel(run_id)
        assert site.ends(run_id) == [(75, "preempted"), (75, "cancelled")]


@pytest.mark.long
def test_a_grace_period_beyond_the_qos_is_reported(preempting_by_qos: SharedCluster, tmp_path: Path) -> None:
    with preempting_by_qos.lent() as cluster:
        held = ("cluster.grace_seconds=300", "cluster.slurm.time=1h", "cluster.slurm.extra={hold: true}")
        submitted = Site(cluster, tmp_path / "runs").try_to_submit(FOREVER, "cluster.slurm.qos=scavenger", *held)
        assert submitted.returncode == 0, submitted.stderr
        said = "cluster.grace_seconds = 300, but QOS scavenger gives a preempted job 60 s (GraceTime)"
        assert said in submitted.stderr
